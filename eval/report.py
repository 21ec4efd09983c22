"""Compare two arms, before and after, on the same requests.

    python eval/report.py recipe=smollm2
    python eval/report.py recipe=qwen3 report.runs=[runs/qwen3,runs/llama3]   # several runs in one report

Writes <run>/report: report.html (open it), report.md, report.json, a CSV file for each table, figures/. With
report.wandb=PROJECT it is also sent there, as tables and as an artifact.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.report_change import Row, before_after, quality_rows
from eval.report_pages import build_report
from eval.report_runs import Place
from eval.upload import upload
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Report


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, report)


def report(invocation: Invocation) -> None:
    recipe, out = invocation.recipe, invocation.run_dir / "report"
    found = places(invocation)
    settings = {
        "report": recipe.report.model_dump(mode="json", exclude={"wandb"}),
        "seed": recipe.run.seed,
        "arms": [_content(place, invocation.named) for place in found],
    }
    if invocation.dry_run:
        pairs = ", ".join(f"{place.before} with {place.after}" for place in found)
        run_folder.say_plan(out, settings, f"would compare {pairs} and write {out}")
        return
    with run_folder.step(invocation, out, settings) as step:
        if step is not None:
            build_report(found, step.partial, recipe.report, recipe.run.seed)
            run_folder.finish(step)
    show(json.loads((out / "report.json").read_text()))
    print(f"report: {out / 'report.html'}")
    if recipe.report.wandb is not None:
        print(f"wandb: {upload(out, recipe.report.wandb, invocation.name, invocation.run_dir)}")


def places(invocation: Invocation) -> list[Place]:
    """The runs of the report: `report.runs`, or the recipe's own. Raises UserError where two are one."""
    chosen = invocation.recipe.report
    if not chosen.runs:
        return [_place(invocation.name, invocation.run_dir, chosen)]
    folders = [Path(run) for run in chosen.runs]
    for place, folder in enumerate(folders):
        if folder.resolve() in [earlier.resolve() for earlier in folders[:place]]:
            raise UserError(f"report.runs: {folder} is there twice; take one out")
    short = [folder.resolve().name for folder in folders]
    names = [name if short.count(name) == 1 else str(f) for name, f in zip(short, folders, strict=True)]
    return [_place(name, folder, chosen) for name, folder in zip(names, folders, strict=True)]


def _place(name: str, run: Path, chosen: Report) -> Place:
    return Place(name, *(arm_folder(run, arm) for arm in (chosen.before, chosen.after, chosen.quality_before)))


def arm_folder(run: Path, arm: str) -> Path:
    """An arm's evaluation folder, by the arm's name in its run's folder, or by path."""
    folder = Path(arm) if "/" in arm else run / "eval" / arm
    if folder.is_file():
        raise UserError(
            f"{folder}: a file; set report.before, report.after, report.quality_before to an arm or a folder"
        )
    return folder


def _content(place: Place, named: str) -> list[str]:
    """The hashes of a run's arms. Raises UserError where one is missing, unfinished or changed since."""
    folders = [f for f in (place.before, place.after, place.quality_before) if f is not None]
    command = f"python eval/run.py {named} eval.arm="
    return [run_folder.need(folder, f"{command}{folder.name}")["content"] for folder in folders]


def show(found: Mapping[str, Any]) -> None:
    """The before/after table and the verdicts of each run and benchmark, on the screen."""
    for line in found["forced"]:
        print(f"forced: {line}")
    for run in found.get("runs", [found]):
        _show_run(run["recipe"], run["change"], run["verdicts"])


def _show_run(run: str, change: Mapping[str, Any], verdicts: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    console = Console(width=118, markup=False, emoji=False)
    for name, section in change["benchmarks"].items():
        title = f"{run}, {name}: {change['before']} -> {change['after']}, n = {section['n']}"
        table = Table(title=title, title_justify="left")
        for column in ("figure", "before", "after", "change", "p", "n"):
            table.add_column(column, overflow="fold")
        for group in before_after(section, short=True) + quality_rows(change, name):
            table.add_section()
            table.add_row(group.title, style="bold")
            for row in group.rows:
                table.add_row(*cells(row))
        console.print(table)
        for verdict in verdicts[name]:
            console.print(f"- {verdict['sentence']}")
        console.print()


def cells(row: Row) -> tuple[str, ...]:
    """One figure as strings; the stricter of two forms is marked."""
    label = f"{row.label} (stricter form)" if row.stricter and not row.reason else row.label
    change = row.reason or " ".join(row.change)
    return label, row.before[0], row.after[0], change, row.p, str(row.n)


if __name__ == "__main__":
    sys.exit(main())
