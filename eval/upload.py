"""Sends a finished report to wandb: its tables as tables, its folder as an artifact (see `headstart.tracking`)."""

import csv
import re
from pathlib import Path
from typing import Any

from eval.report_format import NOT_THERE
from headstart.tracking import place, wandb_run, without_key
from recipes import run_folder
from recipes.errors import UserError


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
    asked_by = f"report.wandb={project}"
    try:
        with wandb_run(asked_by, project, name, "report", folder, made_by) as run:
            tables = {path.stem: _rows(path) for path in sorted(report.glob("*.csv"))}
            run.log({stem: wandb.Table(columns=head, data=rows) for stem, (head, rows) in tables.items()})
            artifact = wandb.Artifact(f"{_fit(name)}-report", type="report", metadata=made_by)
            artifact.add_dir(str(report))
            run.log_artifact(artifact)
            return place(run)
    except UserError as error:
        raise UserError(f"{error}; the report itself is in {report}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{asked_by}: {without_key(error)}; the report itself is in {report}") from None


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
