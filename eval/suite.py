"""The benchmarks of a recipe: which requests, in which order, and who scores them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval import sandbox
from eval.benchmarks import canitedit, chat, coedit, ds1000, heldout, humaneval, mbpp, mtbench, own
from eval.benchmarks.protocol import Benchmark, Score
from headstart.request import Request
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation
from recipes.schema import Eval

MODULES: tuple[Benchmark, ...] = (humaneval, mbpp, canitedit, ds1000, coedit, chat, mtbench, heldout)
BENCHMARKS: Mapping[str, Benchmark] = {module.NAME: module for module in MODULES}


@dataclass(frozen=True)
class Suite:
    """The requests of each benchmark, in order, and a hash of the whole benchmarks they were taken from."""

    requests: dict[str, list[Request]]
    data_hash: str


def benchmark(name: str) -> Benchmark:
    """The module behind a name of `eval.benchmarks`. Raises UserError for a name that is none."""
    if name.endswith(".jsonl"):
        return own
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    raise UserError(f"eval.benchmarks: no benchmark {name!r}; there are {', '.join(BENCHMARKS)}, or a .jsonl file")


def load(invocation: Invocation) -> Suite:
    """`eval.limit` requests of each benchmark, in the benchmark's order.

    A name is one of BENCHMARKS, or the path of a .jsonl file with requests of your own. The draw depends on
    `run.seed` and the requests' ids alone: so the same settings select the same requests on every machine.
    Raises UserError for anything else, for rows that cannot be read, and for an id that stands there twice.
    """
    settings = invocation.recipe.eval
    for name in settings.paths:
        if name not in settings.benchmarks:
            raise UserError(f"eval.paths.{name}: {name!r} is not among eval.benchmarks={list(settings.benchmarks)}")
        if benchmark(name) is own:
            raise UserError(f"eval.paths.{name}: a file of your own is its own path; take it out")
    limits = settings.limit if isinstance(settings.limit, dict) else {}
    for key, names in (("eval.limit", limits), ("slots.benchmarks", invocation.recipe.slots.benchmarks)):
        for name in names:
            if name not in settings.benchmarks and name not in BENCHMARKS:
                raise UserError(f"{key}.{name}: no benchmark {name!r}; there are {', '.join(settings.benchmarks)}")
    whole = {name: _load(name, invocation) for name in settings.benchmarks}
    owners: dict[str, str] = {}
    for name, requests in whole.items():
        for request in requests:
            if request.id in owners:
                where = f"twice in {name}" if owners[request.id] == name else f"in {owners[request.id]} and in {name}"
                raise UserError(f"eval.benchmarks: the id {request.id!r} stands {where}; ids have to be unique")
            owners[request.id] = name
    rows = [[name, *_content(request)] for name, requests in whole.items() for request in requests]
    seed = invocation.recipe.run.seed
    chosen = {name: draw(requests, settings.limit_of(name), seed) for name, requests in whole.items()}
    return Suite(chosen, run_folder.digest(rows))


def _content(request: Request) -> list[Any]:
    history = [[message.role, message.content] for message in request.history]
    return [request.id, history, request.sentences, request.reference, dict(request.extra)]


def draw(requests: Sequence[Request], limit: int | None, seed: int) -> list[Request]:
    """The `limit` requests with the smallest hashes of seed and id, in the given order; all where it is None.

    A smaller limit draws a subset of what a larger one draws.
    """
    if limit is None:
        return list(requests)
    ranked = sorted(requests, key=lambda request: hashlib.sha256(f"{seed}:{request.id}".encode()).digest())
    kept = {request.id for request in ranked[:limit]}
    return [request for request in requests if request.id in kept]


def _load(name: str, invocation: Invocation) -> list[Request]:
    module, path = benchmark(name), invocation.recipe.eval.paths.get(name)
    if module is own:
        path = name
    if module is heldout and path is None:
        run_folder.need(invocation.run_dir / "data", f"python data_builders/build.py {invocation.named}")
        path = str(invocation.run_dir / "data" / "heldout.jsonl")
    return module.load(path)


def check_scoring(settings: Eval) -> str:
    """Make sure that answers may be run and that the sandbox judges rightly; returns the sandbox in words.

    Raises UserError where code execution is needed and not allowed, or where a known answer gets the wrong verdict.
    """
    running = [name for name in settings.benchmarks if benchmark(name).METRIC == "pass@1"]
    if not running:
        return "no code is run"
    if not settings.allow_code_execution:
        raise UserError(
            f"eval.benchmarks={running} run code that the model wrote; "
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


def unfit(name: str) -> Callable[[Request], str | None]:
    """Why a request of this benchmark cannot be scored on this machine, or None."""
    return benchmark(name).unfit


def score(name: str, requests: Sequence[Request], lines: list[dict[str, Any]], settings: Eval) -> None:
    """Fill in `base_score`, `stream_score` and `score_note` of each line that is not excluded."""
    jobs: dict[tuple[str, str], Request] = {}
    for request, line in zip(requests, lines, strict=True):
        if line["excluded"] is None:
            jobs |= {(line["id"], line[side]["text"]): request for side in ("base", "stream")}
    try:
        found = benchmark(name).score(list(jobs.values()), [text for _, text in jobs], limits(settings))
    except sandbox.SandboxError as error:
        raise UserError(f"scoring stopped, the sandbox failed ({error}); the same command resumes") from error
    scores: dict[tuple[str, str], Score] = dict(zip(jobs, found, strict=True))
    for line in lines:
        if line["excluded"] is None:
            base, stream = (scores[line["id"], line[side]["text"]] for side in ("base", "stream"))
            line |= {"base_score": base.value, "stream_score": stream.value}
            line["score_note"] = f"base: {base.note}; stream: {stream.note}"
