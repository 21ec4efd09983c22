"""The benchmarks of a recipe: which requests, in which order, and who scores them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from eval import sandbox
from eval.benchmarks import heldout, humaneval
from eval.benchmarks.scoring import Score
from headstart.request import Request
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation
from recipes.schema import Eval


def load(invocation: Invocation) -> dict[str, list[Request]]:
    """The requests of each benchmark, the first `eval.limit` of them.

    A name is `humaneval`, `heldout` (the run's data/heldout.jsonl), or the path of a .jsonl file of heldout's schema.
    Raises UserError for anything else, and for a file with a broken line.
    """
    return {name: _load(name, invocation)[: invocation.recipe.eval.limit] for name in invocation.recipe.eval.benchmarks}


def _load(name: str, invocation: Invocation) -> list[Request]:
    if name == humaneval.NAME:
        return humaneval.load()
    if name == heldout.NAME:
        run_folder.need(invocation.run_dir / "data", f"python data_builders/build.py recipe={invocation.name}")
        return heldout.load(invocation.run_dir / "data" / "heldout.jsonl")
    if name.endswith(".jsonl"):
        return heldout.load(Path(name))
    raise UserError(
        f"eval.benchmarks: no benchmark {name!r}; there are humaneval, heldout, or the path of a .jsonl file"
    )


def data_hash(requests: Mapping[str, Sequence[Request]]) -> str:
    """A hash of the requests themselves, in their order."""
    rows = [[r.id, r.sentences, r.reference, dict(r.extra)] for name in requests for r in requests[name]]
    return run_folder.digest(rows)


def check_scoring(settings: Eval) -> str:
    """Make sure that answers may be run and that the sandbox judges rightly; returns the sandbox in words.

    Raises UserError where code execution is not allowed, or where a known answer gets the wrong verdict.
    """
    if not settings.allow_code_execution:
        raise UserError(
            f"eval.benchmarks={list(settings.benchmarks)} run code that the model wrote; "
            "read eval/sandbox.py and set eval.allow_code_execution=true"
        )
    try:
        sandbox.check(limits(settings))
    except sandbox.SandboxError as error:
        raise UserError(f"the sandbox is not fit to score: {error}") from error
    return sandbox.describe()


def limits(settings: Eval) -> sandbox.Limits:
    """The sandbox' limits of a recipe."""
    return sandbox.Limits(seconds=settings.time_limit, memory_mb=settings.memory_limit)


def score(name: str, requests: Sequence[Request], lines: list[dict[str, Any]], settings: Eval) -> None:
    """Fill in `base_score`, `stream_score` and `score_note` of each line that is not excluded."""
    benchmark: ModuleType = humaneval if name == humaneval.NAME else heldout
    jobs: dict[tuple[str, str], Request] = {}
    for request, line in zip(requests, lines, strict=True):
        if line["excluded"] is None:
            jobs |= {(line["id"], line[side]["text"]): request for side in ("base", "stream")}
    try:
        found = benchmark.score(list(jobs.values()), [text for _, text in jobs], limits(settings))
    except sandbox.SandboxError as error:
        raise UserError(f"scoring stopped, the sandbox failed ({error}); the same command resumes") from error
    scores: dict[tuple[str, str], Score] = dict(zip(jobs, found, strict=True))
    for line in lines:
        if line["excluded"] is None:
            base, stream = (scores[line["id"], line[side]["text"]] for side in ("base", "stream"))
            line |= {"base_score": base.value, "stream_score": stream.value}
            line["score_note"] = f"base: {base.note}; stream: {stream.note}"
