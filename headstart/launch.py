"""The processes of one launch (`accelerate launch SCRIPT ...`): who they are, and how they share a step's work.

The launcher ends all processes of a machine as soon as one of them fails, and does not mind one that ends early and
well. So whoever finds a fault raises it, and the others learn of it at the next `wait`, on other machines too.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from headstart import model as loading
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation
from recipes.schema import Model

PATIENCE = timedelta(days=1)  # of a wait; one that waits for a process that has died is broken off at once
LAG = 60.0  # seconds after which a network file system shows every machine what another one has written


def processes(model: Model, apart: bool = False) -> PartialState:
    """The launch's processes; from here on "cuda" means this one's own GPU.

    With `apart` they work each on its own and only wait for one another. They then meet over the network and not
    through their GPUs: waiting takes no device, has no ten-minute limit, and several of them may share a GPU.
    Raises UserError where they cannot join, or fewer joined than were asked for.
    """
    launcher = os.environ
    if "ACCELERATE_MIXED_PRECISION" in launcher and "MASTER_ADDR" in launcher and "WORLD_SIZE" not in launcher:
        # `accelerate launch --cpu --num_processes 2` starts one process, which would believe itself alone.
        raise UserError("several processes were asked for, one was started; use --config_file configs/accelerate/...")
    backend = {"backend": "gloo"} if apart and int(launcher.get("LOCAL_RANK", "-1")) >= 0 else {}
    try:
        state = PartialState(cpu=loading.device(model).type == "cpu", **backend)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of this launch cannot join: {' '.join(str(error).split())}") from error
    launched = int(launcher.get("WORLD_SIZE", "1"))
    if state.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched but {state.num_processes} joined; use a file of configs/accelerate"
        )
    return state


def wait(state: PartialState) -> None:
    """Until every process has come here. Raises UserError where one of them has ended instead."""
    try:
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
            torch.distributed.barrier(timeout=PATIENCE)
        else:
            state.wait_for_everyone()
    except RuntimeError as error:
        raise UserError(
            f"process {state.process_index} of this launch waited in vain for another one, which has ended (its own "
            "last line says why) or hangs; the same command resumes"
        ) from error


@contextmanager
def main_first(state: PartialState) -> Iterator[None]:
    """The main process does it first, then the others: so a download is made, and what is wrong is said, once."""
    if not state.is_main_process:
        wait(state)
    yield
    if state.is_main_process:
        wait(state)


@contextmanager
def main_prints(state: PartialState) -> Iterator[None]:
    """Only the main process writes to stdout; stderr, where errors go, stays open to all."""
    if state.is_main_process:
        yield
    else:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield


@contextmanager
def shared_step(
    state: PartialState, invocation: Invocation, folder: Path, settings: Mapping[str, Any], dear: str = ""
) -> Iterator[run_folder.Step | None]:
    """`run_folder.step` for several processes: the main one opens it, the others work in the same folder.

    Raises UserError as `run_folder.step` does, and on a machine that does not see the main process' folder.
    """
    if state.is_main_process:
        with run_folder.step(invocation, folder, settings, dear) as step:
            wait(state)
            yield step
        return
    wait(state)
    partial = folder.with_name(f".{folder.name}.partial")
    done = run_folder.is_complete(folder, settings)
    if not done and not partial.is_dir():
        raise UserError(f"{partial}: not seen by process {state.process_index}; run.dir has to lie on a shared disk")
    yield None if done else run_folder.Step(folder, partial, settings, invocation)


class Parts:
    """What the processes of a step have finished of its work, part by part, known by number.

    Each process appends to a file of its own in the step's partial folder, and any later launch, of however many
    processes, takes over what it finds there. A part that a kill cut short is no part: it has to be done again.
    """

    def __init__(self, folder: Path, rank: int, what: str) -> None:
        """`what` names the work in the names of the files, `.<what>-<rank>.jsonl`."""
        self.what = what
        self.folder = folder
        self.rank = rank
        self.done: dict[int, Any] = {}
        self._seen: dict[Path, int] = {}  # bytes of each file that were read

    def add(self, number: int, part: Any) -> None:
        """Write down a finished part, which is JSON; `done` shows it after the next `refresh`."""
        line = json.dumps([number, part], ensure_ascii=False)
        with (self.folder / f".{self.what}-{self.rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # the first line feed ends what a kill may have cut: nothing is ever taken away

    def refresh(self) -> None:
        """Read what all processes have added since the last time."""
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self._seen.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._seen[path] = self._seen.get(path, 0) + len(whole) + len(end)
            for line in whole.split(b"\n"):
                with suppress(ValueError):  # an empty line, or one that was cut, maybe inside a character
                    number, part = json.loads(line)
                    self.done.setdefault(number, part)

    def gather(self, count: int) -> list[Any]:
        """Parts 0 to `count` - 1, once all processes have added theirs. Raises UserError where one cannot be seen."""
        deadline = time.monotonic() + LAG
        self.refresh()
        while (missing := set(range(count)) - self.done.keys()) and time.monotonic() < deadline:
            time.sleep(1)
            self.refresh()
        if missing:
            raise UserError(
                f"{self.folder}: {len(missing)} of {count} parts were done but cannot be seen; run.dir has to lie on a "
                "shared disk; the same command does what is missing"
            )
        return [self.done[number] for number in range(count)]

    def remove(self) -> None:
        """Remove the files of all processes."""
        for path in self._files():
            path.unlink()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f".{self.what}-*.jsonl"))
