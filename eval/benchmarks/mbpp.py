"""MBPP: 500 short Python functions to write from a sentence and three assertions (https://arxiv.org/abs/2108.07732).

The rows are those with ids 11 to 510, which the benchmark's authors call its test part. A split's label is not trusted:
all splits of the hub are read, and the ids decide. Rows load in both spellings of the task, `text` (config "full") and
`prompt` (config "sanitized"). Line ends become line feeds.

The task alone does not name the function. The request is therefore the task, cut into sentences, then one line that
asks for the tests to pass, then every assertion as a piece of its own. A row with set-up code (of those evaluated only
367) shows that too, as one piece before the assertions, because it names a class that the answer has to define.

A program is the answer's code; then come the imports of the tests (config "sanitized"), the set-up code, and the three
assertions. `challenge_test_list`, which 11 of all rows have, is not used.
"""

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, Field

from eval.benchmarks import rows, scoring
from eval.benchmarks.protocol import Known, Metric, Score
from eval.benchmarks.scoring import Program
from eval.extract import defines, extract
from eval.sandbox import Limits
from headstart.request import Request
from headstart.sentences import split
from recipes.errors import UserError

NAME = "mbpp"
METRIC: Metric = "pass@1"
IDS = range(11, 511)
HUB_ID = "google-research-datasets/mbpp"
HUBS = tuple(rows.Hub(HUB_ID, label, "full") for label in ("prompt", "test", "validation", "train"))
ASK = "The function must pass these tests:"

_BUILTINS = frozenset(dir(builtins))


class _Row(rows.Row):
    task_id: int
    task: str = Field(validation_alias=AliasChoices("text", "prompt"))
    code: str
    test_list: list[str] = Field(min_length=1)
    test_setup_code: str = ""
    test_imports: list[str] = Field(default_factory=list)


def load(path: str | None) -> list[Request]:
    """Rows 11 to 510 in their order, from the hub or from a local file or folder.

    `extra` has "entry_point" and "tests". Raises UserError for rows that cannot be read, that have another schema or
    come twice, for assertions without a call, and where no row has such an id.
    """
    requests: dict[int, Request] = {}
    for row in _rows(path):
        if row.task_id not in IDS:
            continue
        if row.task_id in requests:
            raise UserError(f"{path or HUB_ID}: task_id {row.task_id} is there twice; give one copy of the rows")
        requests[row.task_id] = _request(row)
    if not requests:
        raise UserError(f"{path or HUB_ID}: no task_id from {IDS[0]} to {IDS[-1]}; give the rows of the test part")
    return list(requests.values())


def _rows(path: str | None) -> Iterator[_Row]:
    if path:
        yield from rows.read_local(_Row, path)
        return
    for hub in HUBS:
        yield from rows.read(_Row, hub, None)


def request(row: Mapping[str, Any]) -> Request:
    """A row of whatever part as this benchmark shows it. Raises ValidationError, and UserError as `load` does."""
    return _request(_Row.model_validate(row))


def _request(row: _Row) -> Request:
    code, setup = _unix(row.code), _unix(row.test_setup_code).strip()
    tests = [_unix(test).strip() for test in row.test_list]
    name = _entry_point(row.task_id, tests, code)
    # The sandbox hides an answer's names from the tests where they are a builtin's, but this one is what is tested.
    lead = [f"from answer import {name}"] if name in _BUILTINS else []
    shown = [*split(_unix(row.task).strip()), f"\n\n{ASK}", *(f"\n{piece}" for piece in (setup, *tests) if piece)]
    return Request(
        id=f"{NAME}/{row.task_id}",
        source=NAME,
        sentences=tuple(shown),
        reference=f"```python\n{code}\n```",
        extra={"entry_point": name, "tests": "\n".join([*lead, *row.test_imports, setup, *tests]) + "\n"},
    )


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _entry_point(task_id: int, tests: Sequence[str], code: str) -> str:
    """The function under test: the outermost called name that `code` defines, else the first one that is no builtin."""
    try:
        trees = [ast.parse(test) for test in tests]
    except SyntaxError as error:
        raise UserError(f"{NAME}/{task_id}: an assertion does not parse ({error.msg}); mend the row") from None
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))  # outermost first
    names = [function.id for function in calls if isinstance(function, ast.Name)]
    found = [name for name in names if defines(code, name)] or [name for name in names if name not in _BUILTINS]
    if not found:
        raise UserError(f"{NAME}/{task_id}: the assertions call no function; mend the row")
    return found[0]


def unfit(request: Request) -> str | None:
    """None: the standard library is all that MBPP needs."""
    return None


def known(request: Request) -> list[Known]:
    """The row's own solution."""
    return [Known(request.reference)] if request.reference is not None else []


def program(request: Request, answer: str) -> Program | str:
    """The program to run and its tests, or the note "extraction"."""
    found = extract(answer, "", request.extra["entry_point"])
    if found.code is None:
        return found.note or "extraction"
    return Program(found.code, request.extra["tests"])


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
    """pass@1, one score a request; see `scoring.score`."""
    return scoring.score(requests, answers, program, limits)
