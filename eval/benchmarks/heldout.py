"""Held-out tasks of our own seed corpus: prose requests for a Python function, never trained on.

A file of JSON objects, one a line: {"id", "sentences": [str], "reference": str, "extra": {"entry_point", "tests",
"task", "preamble" (optional)}}. `tests` is plain code, a string of asserts; `preamble` is code that has to stand in
front of the answer. The sentences joined are the request, byte for byte.
"""

import builtins
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks import scoring
from eval.benchmarks.scoring import Program, Score
from eval.extract import extract
from eval.sandbox import Limits
from headstart.request import Request
from recipes.errors import UserError

__all__ = ["NAME", "Program", "Score", "load", "program", "score"]

NAME = "heldout"
ROW_KEYS = ("id", "sentences", "reference", "extra")
EXTRA_KEYS = ("entry_point", "tests", "task", "preamble")


def load(path: Path) -> list[Request]:
    """All rows in the file's order.

    Raises UserError for a file that is missing or holds no row, and, with the line, for a broken row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` would also cut at U+2028 inside a string
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); data_builders/build.py writes this file") from None
    requests: dict[str, Request] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(json.loads(line))
            if request.id in requests:
                raise ValueError(f"id {request.id!r} stands there twice")
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; mend the row or build the file again") from None
        requests[request.id] = request
    if not requests:
        raise UserError(f"{path}: holds no request; give another file, or build it with data.heldout_tasks above 0")
    return list(requests.values())


def _request(row: Any) -> Request:
    """Raises ValueError that names the key."""
    _expect(isinstance(row, dict), "the row is not a JSON object")
    _expect_known(row, ROW_KEYS, "the row")
    _expect(isinstance(row.get("id"), str) and row["id"], '"id" must be a string')
    pieces, extra = row.get("sentences"), row.get("extra")
    _expect(isinstance(pieces, list) and pieces, '"sentences" must be a list of strings')
    _expect(all(isinstance(piece, str) and piece for piece in pieces), '"sentences" holds something else than text')
    _expect(isinstance(row.get("reference"), str | None), '"reference" must be a string')
    _expect(isinstance(extra, dict), '"extra" must be an object')
    _expect_known(extra, EXTRA_KEYS, '"extra"')
    for key in ("entry_point", "tests", "task"):
        _expect(isinstance(extra.get(key), str) and extra[key], f'"extra" needs the string "{key}"')
    _expect(isinstance(extra.get("preamble", ""), str), '"preamble" in "extra" must be a string')
    name = extra["entry_point"]
    _expect(name.isidentifier() and name not in dir(builtins), f'"entry_point" {name!r} is no free name')
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair, which is no text") from None
    for key in ("preamble", "tests"):
        try:
            compile(extra.get(key, ""), f"<{key}>", "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ValueError(f'"{key}" does not compile ({error.msg}, line {error.lineno} of it)') from None
    return Request(row["id"], NAME, tuple(pieces), reference=row.get("reference"), extra=extra)


def _expect(good: Any, fault: str) -> None:
    if not good:
        raise ValueError(fault)


def _expect_known(found: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in found:
        _expect(key in keys, f"{where} has the unknown key {key!r}; known are {', '.join(keys)}")


def program(request: Request, answer: str) -> Program | str:
    """The program to run and its tests, or the note "extraction"."""
    found = extract(answer, request.extra.get("preamble", ""), request.extra["entry_point"])
    if found.code is None:
        return found.note or "extraction"
    return Program(found.code, request.extra["tests"])


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits, *, workers: int = 2) -> list[Score]:
    """pass@1, one score a request; see `scoring.score`."""
    return scoring.score(requests, answers, program, limits, workers=workers)
