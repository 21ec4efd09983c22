"""pass@1 for benchmarks whose answers are programs: extract, run in the sandbox, count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval import sandbox
from eval.sandbox import Limits, SandboxError, Verdict
from headstart.request import Request

METRIC = "pass@1"


@dataclass(frozen=True)
class Program:
    """An answer made executable: `code` runs as a module, then `tests` with its names."""

    code: str
    tests: str


@dataclass(frozen=True)
class Score:
    """1, 0, or None where the harness failed and nothing is known; `note` gives the reason ("passed" for 1)."""

    value: int | None
    note: str


def score(
    requests: Sequence[Request],
    answers: Sequence[str],
    program: Callable[[Request, str], Program | str],
    limits: Limits,
    *,
    workers: int = 2,
    stop_on_fault: bool = True,
) -> list[Score]:
    """One score a request, in order. `program` gives the program, or a note when the answer holds none.

    Call `sandbox.check` first. A harness fault raises SandboxError with the request's id, or with
    `stop_on_fault=False` becomes a score without value; it is never a wrong answer.
    """
    programs = [program(request, answer) for request, answer in zip(requests, answers, strict=True)]
    jobs = [(p.code, p.tests) for p in programs if isinstance(p, Program)]
    outcomes = iter(sandbox.run_many(jobs, limits, workers=workers))
    scores = [Score(0, p) if isinstance(p, str) else _score(next(outcomes)) for p in programs]
    for request, given in zip(requests, scores, strict=True):
        if stop_on_fault and given.value is None:
            raise SandboxError(f"{request.id}: {given.note}; nothing was scored, run the scoring again")
    return scores


def _score(outcome: Verdict | SandboxError) -> Score:
    if isinstance(outcome, SandboxError):
        return Score(None, f"harness error: {outcome}")
    return Score(int(outcome.passed), outcome.note)
