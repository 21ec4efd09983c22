"""Work in several processes, a bounded number of pieces at a time; in this process where one is enough."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from recipes.errors import UserError

_state: Any = None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(function: Callable[..., None], state: Any, tasks: Iterable[tuple[Any, ...]], workers: int) -> Iterator[int]:
    """`function(state, *task)` for each task, in any order; yields how many are done, after each.

    `state` is sent to each process once. Processes are started anew and not forked: a library that has threads (a
    tokenizer, Arrow) does not survive a fork. Raises UserError where a process is killed.
    """
    if workers <= 1:
        for done, task in enumerate(tasks, 1):
            function(state, *task)
            yield done
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(function, state, os.getpid())) as pool:
        waiting: set[Future[None]] = set()
        done = 0
        try:
            for task in tasks:
                waiting.add(pool.submit(_work, task))
                while len(waiting) >= 2 * workers:
                    finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
                        yield (done := done + 1)
            for future in waiting:
                future.result()
                yield (done := done + 1)
        except BrokenProcessPool:
            raise UserError(
                "a worker was killed, maybe for want of memory; the same command goes on, with fewer at a time: "
                "data.workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(function: Callable[..., None], state: Any, parent: int) -> None:
    global _state
    _state = function, state
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    gc.freeze()  # the index of the benchmarks is large and stays: no collection need go through it


def _watch(parent: int) -> None:
    """End this process once its parent has been killed: nobody waits for its work, and a resumed build does it anew."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(task: tuple[Any, ...]) -> None:
    function, state = _state
    function(state, *task)
