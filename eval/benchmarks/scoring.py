"""pass@1 for benchmarks whose answers are programs: extract, run in the sandbox, count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval import sandbox
from eval.benchmarks.protocol import Score
from eval.sandbox import Limits, SandboxError, Verdict
from headstart.request import Request


@dataclass(frozen=True)
class Program:
    """An answer made executable: `code` runs as a module, then `tests` with its names."""

    code: str
    tests: str


def score(
    requests: Sequence[Request],
    answers: Sequence[str],
    program: Callable[[Request, str], Program | str],
    limits: Limits,
) -> list[Score]:
    """One score a request, in order. `program` gives the program, or a note when the answer holds none.

    Call `sandbox.check` first. A harness fault raises SandboxError with the request's id; it is never a wrong answer.
    """
    programs = [program(request, answer) for request, answer in zip(requests, answers, strict=True)]
    jobs = [(p.code, p.tests) for p in programs if isinstance(p, Program)]
    outcomes = iter(sandbox.run_many(jobs, limits))
    return [
        Score(0, p) if isinstance(p, str) else _score(request.id, next(outcomes))
        for request, p in zip(requests, programs, strict=True)
    ]


def _score(request_id: str, outcome: Verdict | SandboxError) -> Score:
    if isinstance(outcome, SandboxError):
        raise SandboxError(f"{request_id}: harness error: {outcome}; nothing was scored, run the scoring again")
    return Score(int(outcome.passed), outcome.note)
