"""Answers to whole requests: the corpus' own, or the base model's, with those that cannot be used dropped by reason."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.batch import BatchDecoder
from headstart.prompt import Renderer
from headstart.request import Request


@dataclass(frozen=True)
class Answered:
    """An answer's text; `dropped` is None or the reason why no pair is made of it."""

    id: str
    text: str
    dropped: str | None = None


def corpus_answers(requests: Sequence[Request]) -> list[Answered]:
    """The references that came with the requests."""
    return [_checked(request.id, request.reference or "", ended=True) for request in requests]


def self_answers(
    requests: Sequence[Request], decoder: BatchDecoder, renderer: Renderer, progress: Path
) -> list[Answered]:
    """The model's own greedy answers to the whole requests, without the system message for incomplete requests.

    So the adapter learns to give, under the message, the answer that the plain model gives to the whole request. An
    answer that reaches the token limit before its end of turn is dropped: it would teach the model not to stop.
    Answers are appended to `progress` batch by batch; a killed run continues after the last whole batch.
    """
    done = _read(progress)
    order = [request.id for request in requests]
    if [answered.id for answered in done] != order[: len(done)]:
        done = []
        progress.unlink(missing_ok=True)
    for begin in range(len(done), len(requests), decoder.batch_size):
        part = requests[begin : begin + decoder.batch_size]
        advances = decoder.advance([renderer.prompt(request.text, request.history) for request in part])
        fresh = [
            _checked(request.id, renderer.text(advance.answer.written), advance.answer.stop == "end")
            for request, advance in zip(part, advances, strict=True)
        ]
        done += fresh
        with progress.open("a") as file:
            file.write("".join(json.dumps(answered.__dict__) + "\n" for answered in fresh))
        kept = sum(answered.dropped is None for answered in done)
        print(f"answers: {len(done)}/{len(requests)}, {kept} usable", flush=True)
    return done


def _checked(request_id: str, text: str, ended: bool) -> Answered:
    if not text.strip():
        return Answered(request_id, text, "empty answer")
    return Answered(request_id, text, None if ended else "answer reached the token limit")


def _read(progress: Path) -> list[Answered]:
    """Whole lines only; a line that a kill cut short is cut off the file."""
    if not progress.exists():
        return []
    *whole, _ = progress.read_text().split("\n")
    progress.write_text("".join(f"{line}\n" for line in whole))
    return [Answered(**json.loads(line)) for line in whole]
