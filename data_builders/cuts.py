"""Where a request is cut: the prefixes that a model is trained to answer from."""

import random
from dataclasses import dataclass
from typing import Literal

from headstart.request import Request


@dataclass(frozen=True)
class Cut:
    """A prefix of a request: its text, and how many whole sentences it holds (the last one may be begun)."""

    prefix: str
    sentences: int


def cuts(request: Request, count: int, kind: Literal["sentence", "inside"], seed: int) -> list[Cut]:
    """Up to `count` distinct cuts, shortest first; something is always held back.

    "sentence": after a random sentence but the last. "inside": after a random character inside a sentence. The draw
    depends on the seed and the request's id alone, so that no other row of the corpus changes it.
    """
    draw = random.Random(f"{seed}:{request.id}")
    if kind == "sentence":
        ends = range(1, len(request.sentences))
        return [Cut(request.prefix(i), i) for i in sorted(draw.sample(ends, min(count, len(ends))))]
    inside = _inside(request)
    positions = sorted(draw.sample(inside, min(count, len(inside))))
    return [Cut(request.text[:position], _whole(request, position)) for position in positions]


def _inside(request: Request) -> list[int]:
    """Character positions at which a prefix ends inside a sentence and holds a word character."""
    boundaries, position = set(), 0
    for sentence in request.sentences:
        position += len(sentence)
        boundaries.add(position)
    first = next((i for i, char in enumerate(request.text) if char.isalnum()), len(request.text))
    return [i for i in range(first + 1, len(request.text)) if i not in boundaries]


def _whole(request: Request, position: int) -> int:
    count = 0
    for sentence in request.sentences:
        position -= len(sentence)
        if position < 0:
            break
        count += 1
    return count
