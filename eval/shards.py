"""An arm's requests shared out over the processes of a launch, in the batches that one process would make.

A batch has the same requests whatever the number of processes, so its shapes, and in bfloat16 its near-ties too, do not
depend on it; nor do the bytes of the files, which the main process writes when all are through.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from eval import suite
from eval.arms import Arm
from eval.lines import write_lines
from eval.replay import replay
from eval.sweep import sweep
from headstart import launch
from headstart.request import Request

Requests = Mapping[str, Sequence[Request]]
Line = dict[str, Any]
BAR = 20  # characters


@dataclass(frozen=True)
class Batch:
    """Requests of one benchmark that are replayed together. `number` runs over all benchmarks."""

    number: int
    benchmark: str
    requests: Sequence[Request]


Work = Callable[[Arm, Batch], list[Line]]


def replayed(arm: Arm, batch: Batch) -> list[Line]:
    """The lines of requests.jsonl for a batch, scored."""
    lines = replay(arm, batch.requests, suite.unfit(batch.benchmark))
    suite.score(batch.benchmark, batch.requests, lines, arm.recipe.eval)
    return [{**line, "benchmark": batch.benchmark} for line in lines]


def swept(arm: Arm, batch: Batch) -> list[Line]:
    """The lines of sweep.jsonl for a batch, scored: those of each tau in turn."""
    taus = arm.recipe.eval.sweep
    by_tau = sweep(arm, batch.requests, taus, suite.unfit(batch.benchmark))
    lines = [line for tau in taus for line in by_tau[tau]]
    suite.score(batch.benchmark, [*batch.requests] * len(taus), lines, arm.recipe.eval)  # equal answers run once
    return [{"tau": tau, **line, "benchmark": batch.benchmark} for tau in taus for line in by_tau[tau]]


def share(work: Work, arm: Arm, requests: Requests, path: Path, state: PartialState) -> None:
    """Do the work on every batch; the main process leaves its lines in `path` when all processes are through."""
    parts = launch.Parts(path.parent, state.process_index, path.stem)
    further = path.exists()  # where a killed run was already further
    launch.wait(state)  # all have looked, before the main process can be through and rename the folder
    if not further:
        plan = batches(requests, arm.recipe.eval.batch_size)
        work_on(work, arm, plan, parts, state.process_index, state.num_processes)
        if len(parts.done) < len(plan):
            print(f"waiting for the other processes: {len(plan) - len(parts.done)} of {len(plan)} batches", flush=True)
        launch.wait(state)
        if state.is_main_process:
            write_lines(path, [line for part in parts.gather(len(plan)) for line in part])
    if state.is_main_process:
        parts.remove()


def batches(requests: Requests, size: int) -> list[Batch]:
    """Up to `size` requests at a time. They depend on the list of requests alone, not on the number of processes."""
    cut = [(name, rows[i : i + size]) for name, rows in requests.items() for i in range(0, len(rows), size)]
    return [Batch(number, *one) for number, one in enumerate(cut)]


def work_on(work: Work, arm: Arm, plan: Sequence[Batch], parts: launch.Parts, rank: int, world: int) -> None:
    """Do the work on every `world`-th batch, from the one with number `rank` on, but for those in `parts`."""
    began = time.monotonic()
    parts.refresh()
    for batch in plan[rank::world]:
        if batch.number in parts.done:
            continue
        parts.add(batch.number, work(arm, batch))
        if rank == 0:  # it speaks for all; the others have no need of each other's lines
            parts.refresh()
            print(progress(batch.benchmark, plan, parts, began), flush=True)


def progress(name: str, plan: Sequence[Batch], parts: launch.Parts, began: float) -> str:
    """A bar of how far all processes are with a benchmark, with the running median speedup in passes."""
    mine = [batch for batch in plan if batch.benchmark == name]
    done = [batch for batch in mine if batch.number in parts.done]
    lines = [line for batch in done for line in parts.done[batch.number]]
    speedups = [
        line["base_passes"] / line["stream_passes"] for line in lines if line["excluded"] is None and "tau" not in line
    ]
    median = f", median speedup {statistics.median(speedups):.2f}x in passes" if speedups else ""
    count, total = (sum(len(batch.requests) for batch in some) for some in (done, mine))
    bar = "█" * (BAR * count // total)
    return f"{parts.what} {name} {bar:░<{BAR}} {count}/{total}{median}, {time.monotonic() - began:.0f} s"
