"""Sends a finished report to wandb: its tables as tables, its folder as an artifact.

Whether that goes over the network is wandb's own switch (WANDB_MODE; `offline` leaves a folder for `wandb sync`), and
so is the key (`wandb login` or WANDB_API_KEY): neither is read here. Of this machine nothing is sent along: no
environment, no command line, no source, no list of packages; the report has its own provenance.
"""

import csv
import os
import re
from pathlib import Path
from typing import Any

from eval.report_format import NOT_THERE
from recipes import run_folder
from recipes.errors import UserError

QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


def upload(report: Path, project: str, name: str, folder: Path) -> str:
    """Send the report; returns where it went, in words.

    Args:
        report: a finished report's folder.
        project: the wandb project.
        name: what the run and, made fit, the artifact are called.
        folder: where wandb keeps its own files, under `wandb/`.

    Raises:
        UserError: where wandb refuses or cannot be reached; the line holds its reason and no key.
    """
    import wandb  # a second of start-up that no other report pays

    made_by = {"recipe": name, "report": run_folder.read_step(report)["content"]}
    try:
        with wandb.init(
            project=project, name=name, job_type="report", dir=folder, config=made_by, settings=wandb.Settings(**QUIET)
        ) as run:
            tables = {path.stem: _rows(path) for path in sorted(report.glob("*.csv"))}
            run.log({stem: wandb.Table(columns=head, data=rows) for stem, (head, rows) in tables.items()})
            artifact = wandb.Artifact(f"{_fit(name)}-report", type="report", metadata=made_by)
            artifact.add_dir(str(report))
            run.log_artifact(artifact)
            place, offline = run.url, run.settings.sync_dir
    except (wandb.Error, OSError, ValueError) as error:
        raise UserError(f"report.wandb={project}: {_without_key(error)}; the report itself is in {report}") from None
    finally:
        wandb.teardown()  # its own process writes the end of an offline run's file only when it is told to end
    return place or f"not sent; to send it: wandb sync {offline}"


def _rows(path: Path) -> tuple[list[str | int], list[list[Any]]]:
    """A CSV file's columns and rows; columns of numbers as numbers, with None where there is none."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    columns = [[row[place] for row in rows] for place in range(len(header))]
    typed = [_numbers(column) for column in columns]
    return [*header], [list(row) for row in zip(*typed, strict=True)]


def _numbers(column: list[str]) -> list[Any]:
    try:
        return [None if cell == NOT_THERE else float(cell) for cell in column]
    except ValueError:
        return list(column)


def _fit(name: str) -> str:
    """A name as wandb takes it for an artifact."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "run"


def _without_key(error: Exception) -> str:
    """The error in one line, without the key should wandb name it."""
    said, key = " ".join(str(error).split()), os.environ.get("WANDB_API_KEY")
    return said.replace(key, "***") if key else said
