"""The benchmarks of a recipe: which requests, in which order, and who scores them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Suite:
    """The requests of each benchmark, in order, and a hash of the whole benchmarks they were taken from."""

    requests: dict[str, list[Request]]
    data_hash: str


def load(invocation: Invocation) -> Suite:
    """`eval.limit` requests of each benchmark, in the benchmark's order.

    A name is `humaneval`, `heldout` (the run's data/heldout.jsonl), or the path of a .jsonl file of heldout's schema.
    The draw depends on `run.seed` and the requests' ids alone: the same settings select the same requests anywhere.
    Raises UserError for anything else, for a file with a broken line, and for an id that is in two benchmarks.
    """
    whole = {name: _load(name, invocation) for name in invocation.recipe.eval.benchmarks}
    owners: dict[str, str] = {}
    for name, requests in whole.items():
        for request in requests:
            if owners.setdefault(request.id, name) != name:
                raise UserError(f"eval.benchmarks: {request.id} is in {owners[request.id]} and in {name}; take one out")
    rows = [[name, r.id, r.sentences, r.reference, dict(r.extra)] for name, requests in whole.items() for r in requests]
    limit, seed = invocation.recipe.eval.limit, invocation.recipe.run.seed
    return Suite({name: draw(found, limit, seed) for name, found in whole.items()}, run_folder.digest(rows))


def draw(requests: Sequence[Request], limit: int | None, seed: int) -> list[Request]:
    """The `limit` requests with the smallest hashes of seed and id, in the given order; all where it is None.

    A smaller limit draws a subset of what a larger one draws.
    """
    ranked = sorted(requests, key=lambda request: hashlib.sha256(f"{seed}:{request.id}".encode()).digest())
    kept = {request.id for request in ranked[:limit]}
    return [request for request in requests if request.id in kept]


def _load(name: str, invocation: Invocation) -> list[Request]:
    if name == humaneval.NAME:
        return humaneval.load()
    if name == heldout.NAME:
        run_folder.need(invocation.run_dir / "data", f"python data_builders/build.py recipe={invocation.name}")
        return heldout.load(invocation.run_dir / "data" / "heldout.jsonl")
    if name.endswith(".jsonl"):
        return heldout.load(Path(name))
    raise UserError(f"eval.benchmarks: no benchmark {name!r}; there are humaneval, heldout, or a .jsonl file's path")


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
        raise UserError(str(error)) from error
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
