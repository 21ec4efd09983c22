"""What a killed run resumes from, and the log of a run that may have been killed and resumed."""

import errno
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from recipes import run_folder
from recipes.errors import UserError
from train.base import zero_stage

WHOLE = "whole"  # a file in each checkpoint that all processes have finished writing: their layout, each file's size
WRITING = ("PytorchStreamWriter", "iostream error", "os error 28", "os error 27")  # what a failed write is known by
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOGGED = ("loss", "grad_norm", "learning_rate")


class Checkpoints(TrainerCallback):
    """Marks each checkpoint once it is whole: a run killed while it saves leaves one that is not."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        processes = PartialState()
        processes.wait_for_everyone()
        if processes.is_main_process:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            run_folder.write_atomically(
                checkpoint / WHOLE, json.dumps({"layout": layout(), "sizes": _sizes(checkpoint)})
            )


def layout() -> str:
    """How the launch shares the work; the optimizer's and the random states in a checkpoint are cut to it."""
    processes = PartialState()
    stage = zero_stage()
    zero = f" ZeRO-{stage}" if stage else ""
    return f"{processes.num_processes} process(es), {processes.distributed_type.value}{zero}"


def last_whole(folder: Path) -> str | None:
    """The last whole checkpoint in `folder`; what is half-written there, or has lost something since, is removed.

    Raises UserError where a launch of another layout wrote it.
    """
    processes = PartialState()
    if processes.is_main_process:
        for checkpoint in folder.glob("checkpoint-*"):
            if lost := _lost(checkpoint):
                print(f"{checkpoint}: {lost}; removed, the one before it serves")
                shutil.rmtree(checkpoint)
    processes.wait_for_everyone()
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    written = json.loads((Path(last) / WHOLE).read_text())["layout"] if last else layout()
    if written != layout():
        raise UserError(
            f"{last}: written under {written}, this launch has {layout()}; "
            f"launch as before, or remove {folder.parent} to start anew"
        )
    return last


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Bytes of every file of a checkpoint, but of the marker."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != WHOLE]
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in sorted(files)}


def _lost(checkpoint: Path) -> str | None:
    """What a checkpoint has lost, in words; None for one that is whole."""
    try:
        sizes = json.loads((checkpoint / WHOLE).read_text())["sizes"]
    except (OSError, ValueError, TypeError, KeyError):
        return "half-written"
    found = _sizes(checkpoint)
    return next((f"{name} is missing or cut" for name, size in sizes.items() if found.get(name) != size), None)


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """The trained weights by name, whole. Called on every process, of which each has a part under ZeRO-3 and FSDP."""
    if trainer.is_deepspeed_enabled and trainer.accelerator.deepspeed_plugin.zero_stage == 3:
        import deepspeed  # slow to import, and needed here alone

        trained = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
        with deepspeed.zero.GatheredParameters(list(trained.values())):
            return {name: each.detach().cpu().clone() for name, each in trained.items()}
    weights: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return weights


@contextmanager
def plain_errors(folder: Path) -> Iterator[None]:
    """Turn a write that finds no room into a UserError: torch and safetensors raise errors of their own there."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        if not full and not any(word in said for word in WRITING):
            raise
        raise UserError(
            f"{folder}: cannot be written ({said[:200]}); make room there, then the same command resumes"
        ) from error


class Log(TrainerCallback):
    """One line a logging step, on the screen and in a file; a resumed run drops the lines that it will write again."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self.steps = steps
        self.began, self.first = time.monotonic(), 0

    @property
    def seconds(self) -> float:
        """Since this launch began to train, after `first` steps of earlier ones."""
        return time.monotonic() - self.began

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began, self.first = time.monotonic(), state.global_step
        if state.is_world_process_zero and self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
            run_folder.write_atomically(self.path, "".join(kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Raises UserError, on every process, where the loss is not finite."""
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not torch.isfinite(torch.tensor(loss)):
            raise UserError(f"step {state.global_step}: the loss is not finite; lower train.learning_rate")
        if state.is_world_process_zero:
            record = {"step": state.global_step, **{name: float(logs[name]) for name in LOGGED if name in logs}}
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"step {state.global_step}/{self.steps}  loss {loss:.4f}  {self.seconds:.0f} s", flush=True)
