"""Held-out tasks of our own seed corpus: prose requests for a Python function, never trained on.

A file of JSON objects, one a line: {"id", "sentences": [str], "reference": str, "extra": {"entry_point", "tests",
"task", "preamble" (optional)}}. `tests` is plain code, a string of asserts; `preamble` is code that has to stand in
front of the answer. The sentences joined are the request, byte for byte.
"""

import builtins
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, field_validator

from eval.benchmarks import rows, scoring
from eval.benchmarks.protocol import Known, Metric, Score
from eval.benchmarks.scoring import Program
from eval.extract import extract
from eval.sandbox import Limits
from headstart.request import Request
from recipes.errors import UserError

NAME = "heldout"
METRIC: Metric = "pass@1"
Text = Annotated[str, Field(min_length=1)]


class Extra(rows.Row, extra="forbid"):
    """What scoring needs."""

    entry_point: Text
    tests: Text
    task: Text
    preamble: str = ""

    @field_validator("entry_point")
    @classmethod
    def _free(cls, name: str) -> str:
        if not name.isidentifier() or name in dir(builtins):
            raise ValueError(f"{name!r} is no free name")
        return name

    @field_validator("tests", "preamble")
    @classmethod
    def _compiles(cls, code: str) -> str:
        try:
            compile(code, "<row>", "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f"does not compile ({error.msg}, line {error.lineno} of it)") from None
        return code


class Row(rows.Row, extra="forbid"):
    """One request; a key that is not declared is an error, since a user may write this file by hand."""

    id: Text
    sentences: Annotated[list[Text], Field(min_length=1)]
    reference: str | None = None
    extra: Extra


def load(path: str | None) -> list[Request]:
    """All rows in the file's order; there is no such file on the hub.

    Raises UserError for a file that is missing or holds no row, and, with the line, for a broken row.
    """
    if path is None:
        raise UserError("heldout: which file? data_builders/build.py writes data/heldout.jsonl into the run's folder")
    requests = [
        Request(row.id, NAME, tuple(row.sentences), reference=row.reference, extra=row.extra.model_dump())
        for row in rows.read_local(Row, path)
    ]
    if not requests:
        raise UserError(f"{path}: holds no request; give another file, or build it with data.heldout above 0")
    return requests


def unfit(request: Request) -> str | None:
    """None: the tasks need the standard library only."""
    return None


def known(request: Request) -> list[Known]:
    """The reference, where the row has one."""
    return [Known(request.reference)] if request.reference else []


def program(request: Request, answer: str) -> Program | str:
    """The program to run and its tests, or the note "extraction"."""
    found = extract(answer, request.extra["preamble"], request.extra["entry_point"])
    if found.code is None:
        return found.note or "extraction"
    return Program(found.code, request.extra["tests"])


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
    """pass@1, one score a request; see `scoring.score`."""
    return scoring.score(requests, answers, program, limits)
