"""CoEdIT: edit a text by an instruction (Raheja et al. 2023, arXiv 2305.09857). Validation split, scored by F1.

A row's `src` is the request, "instruction: text", and its `tgt` the reference. The cut is a rule of its own: at the
first ": ", so that the instruction is a piece, and then each side into sentences; the blank starts the next piece, as
everywhere. Later colons belong to the text.
"""

from pydantic import Field

from eval.benchmarks import rows
from eval.benchmarks.f1 import known, score, unfit
from eval.benchmarks.protocol import Metric
from eval.benchmarks.rows import Hub, Row
from headstart.request import Request
from headstart.sentences import split
from recipes.errors import UserError

__all__ = ["METRIC", "NAME", "known", "load", "score", "unfit"]

NAME = "coedit"
METRIC: Metric = "F1"
HUB = Hub("grammarly/coedit", "validation")


class Edit(Row):
    """A row. `_id` is a number on the hub and text in derived copies; it is unique within a split only."""

    id: int | str = Field(validation_alias="_id")
    src: str = Field(min_length=1)
    tgt: str = Field(min_length=1)


def load(path: str | None) -> list[Request]:
    """All rows in their order, one request each. Raises UserError as `rows.read` does, and for an `_id` met twice."""
    requests: dict[str, Request] = {}
    for row in rows.read(Edit, HUB, path):
        request = Request(f"{NAME}/{row.id}", NAME, pieces(row.src), reference=row.tgt)
        if request.id in requests:
            raise UserError(f"{path or HUB.id}: _id {row.id} stands there twice; give the rows of one split")
        requests[request.id] = request
    return list(requests.values())


def pieces(src: str) -> tuple[str, ...]:
    """The module's cut; joined, the pieces are `src`."""
    instruction, _, text = src.partition(": ")
    if not text.strip():
        return tuple(split(src))
    return (*split(f"{instruction}:"), *split(f" {text}"))
