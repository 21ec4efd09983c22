"""Where training's figures go besides the screen and log.jsonl: `run.report_to`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from headstart.tracking import place, wandb_run
from recipes.errors import UserError
from recipes.loader import Invocation

PROJECT = "headstart"  # on wandb, where report.wandb names none

Send = Callable[[Mapping[str, float], int], None]


class Report(TrainerCallback):
    """Hands every figure that is logged (loss, gradient norm, rate, what is watched) on, with its step."""

    def __init__(self, send: Send) -> None:
        self.send = send

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        figures = {_named(name): float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        if figures:
            self.send(figures, state.global_step)


@contextmanager
def reporting(invocation: Invocation, main_process: bool) -> Iterator[list[Report]]:
    """The callbacks that report, none where nothing is asked for or on another process than the main one.

    Raises UserError where wandb or TensorBoard cannot be had.
    """
    recipe, folder = invocation.recipe, invocation.run_dir
    if not main_process or recipe.run.report_to == "none":
        yield []
    elif recipe.run.report_to == "wandb":
        config = recipe.model_dump(mode="json", exclude={"run": {"dir"}})
        project = recipe.report.wandb or PROJECT
        with wandb_run("run.report_to=wandb", project, invocation.name, "train", folder, config) as run:
            print(f"wandb: {place(run)}")
            yield [Report(lambda figures, step: run.log({**figures, "step": step}))]
    else:
        yield from _tensorboard(folder / "tensorboard")


def _tensorboard(folder: Path) -> Iterator[list[Report]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("run.report_to=tensorboard: it is not installed; pip install tensorboard") from None

    def send(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(str(folder)) as writer:
        print(f"tensorboard: {folder}")
        yield [Report(send)]


def _named(name: str) -> str:
    """The trainer's own figures stand under train/, beside watch/."""
    return name if "/" in name else f"train/{name}"
