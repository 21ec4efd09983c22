"""The callback that looks at the adapter while it is trained (see `watch`), and keeps the best one."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from recipes.run_folder import write_atomically
from recipes.schema import Train
from train.adapter import WEIGHTS
from train.watch import Watched, Watcher, best, line

LOG = "watch.jsonl"


class Watch(TrainerCallback):
    """Looks at the adapter while it is trained, writes watch.jsonl, and saves the best one under `train.keep=best`.

    `kept` is the folder with each adapter that was the best one so far, by step: a run that resumes from an earlier
    step drops the lines that it will write again, and finds the best of the others there.
    """

    def __init__(self, watcher: Watcher, settings: Train, folder: Path) -> None:
        self.watcher, self.settings = watcher, settings
        self.path, self.kept = folder / LOG, folder / ".best"
        self.looks: list[Watched] = []
        self.seconds = 0.0  # what the looks of this launch took
        self.trainer: Any = None  # set once it is there: it logs, and saves

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.path.is_file():
            lines = [line for line in self.path.read_text().split("\n")[:-1] if line]
            self.looks = [look for line in lines if (look := Watched(**json.loads(line))).step <= state.global_step]
        if not self.looks:
            self._look(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.settings.watch_every == 0:
            self._look(state, control)

    def keep(self, folder: Path) -> int:
        """Put the adapter that is to be kept into `folder`, which holds the last one; returns its step."""
        chosen, last = best(self.looks, self.settings), self.settings.steps
        if self.settings.keep == "last":
            return last
        if chosen is None:
            print(f"no watched step is within train.max_drift={self.settings.max_drift}; the last is kept")
            return last
        shutil.copyfile(self.kept / str(chosen.step) / WEIGHTS, folder / WEIGHTS)
        print(f"kept the adapter of step {chosen.step}")
        return chosen.step

    def _look(self, state: Any, control: Any) -> None:
        adapted = self.trainer.accelerator.unwrap_model(self.trainer.model)
        look = self.watcher.look(adapted, state.global_step)
        self.looks.append(look)
        self.seconds += look.seconds
        if state.is_world_process_zero:
            if self.settings.keep == "best" and best(self.looks, self.settings) is look:
                adapted.save_pretrained(self.kept / str(look.step), save_embedding_layers=False)
            write_atomically(self.path, "".join(json.dumps(asdict(one)) + "\n" for one in self.looks))
            print(line(look), flush=True)
        figures = {f"watch/{name}": value for name, value in asdict(look).items() if value is not None}
        due = control.should_log
        self.trainer.log(figures)
        control.should_log = due  # else the trainer takes this for the log of the step's loss
