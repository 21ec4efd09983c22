"""Where a request is cut: the prefixes that a model is trained to answer from."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from headstart.request import Request

Place = Literal["sentence", "word", "anywhere"]
Kind = Literal[Place, "whole"]
_WORD_END = re.compile(r"\w\b")


@dataclass(frozen=True)
class Cut:
    """A prefix of a request: its text, and how many whole sentences it holds (the next one may be begun)."""

    prefix: str
    sentences: int
    kind: Kind


def cuts(request: Request, count: int, shares: Mapping[Place, float], seed: int) -> list[Cut]:
    """Up to `count` distinct cuts, shortest first; the last sentence is always held back, whole.

    Each is of a kind drawn by `shares` (which sum to 1): "sentence", after a sentence; "word", after a word inside a
    sentence; "anywhere", after any other character inside one. A kind that has no place left yields none. The draw
    depends on the seed and the request's id alone, so that no other row of the corpus changes it.
    """
    draw = random.Random(f"{seed}:{request.id}")
    ends = list(accumulate(map(len, request.sentences)))[:-1]
    places: dict[str, list[int]] = {}
    found: dict[int, Kind] = {}
    kinds: list[Place] = ["sentence", "word", "anywhere"]
    for kind in draw.choices(kinds, [shares.get(kind, 0.0) for kind in kinds], k=count):
        if kind not in places:
            places[kind] = _places(request.text, ends, kind)
        free = [place for place in places[kind] if place not in found]
        if free:
            found[draw.choice(free)] = kind
    text = request.text
    return [Cut(text[:place], sum(end <= place for end in ends), kind) for place, kind in sorted(found.items())]


def whole(request: Request) -> Cut:
    """The request itself, nothing held back."""
    return Cut(request.text, len(request.sentences), "whole")


def _places(text: str, ends: list[int], kind: str) -> list[int]:
    """Character positions, in order, that a prefix may end at."""
    if kind == "sentence" or not ends:
        return ends
    boundaries, last = set(ends), ends[-1]
    words = {match.end() for match in _WORD_END.finditer(text, 0, last)} - boundaries
    if kind == "word":
        return sorted(words)
    first = next((i for i, char in enumerate(text) if char.isalnum()), len(text))
    return [i for i in range(first + 1, last) if i not in boundaries and i not in words]
