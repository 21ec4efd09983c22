"""Compare two arms, before and after, on the same requests.

    python eval/report.py recipe=smollm2

Writes <run>/report: report.html (open it), report.md, report.json, table3.csv, figures/.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.report_pages import build_report
from eval.report_tables import Row, before_after, quality_rows
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, report)


def report(invocation: Invocation) -> None:
    recipe = invocation.recipe
    arms = [
        arm_folder(invocation, arm) for arm in (recipe.report.before, recipe.report.after, recipe.report.quality_before)
    ]
    settings = {
        "report": recipe.report.model_dump(),
        "seed": recipe.run.seed,
        "arms": [record["content"] for _, record in arms],
    }
    out = invocation.run_dir / "report"
    before, after, quality = (folder for folder, _ in arms)
    if invocation.dry_run:
        run_folder.say_plan(out, settings, f"would compare {before} with {after} and write {out}")
        return
    with run_folder.step(invocation, out, settings) as step:
        if step is not None:
            build_report(before, after, quality, step.partial, recipe.report, recipe.run.seed, invocation.name)
            run_folder.finish(step)
    show(json.loads((out / "report.json").read_text()))
    print(f"report: {out / 'report.html'}")


def arm_folder(invocation: Invocation, arm: str) -> tuple[Path, dict[str, Any]]:
    """An arm's evaluation folder, by the arm's name or by path, and its step record."""
    folder = Path(arm) if "/" in arm else invocation.run_dir / "eval" / arm
    if folder.is_file():
        raise UserError(
            f"{folder}: a file; set report.before, report.after, report.quality_before to an arm or a folder"
        )
    return folder, run_folder.need(folder, f"python eval/run.py recipe={invocation.name} eval.arm={folder.name}")


def show(found: Mapping[str, Any]) -> None:
    """The before/after table and the verdicts of each benchmark, on the screen."""
    change = found["change"]
    console = Console(width=118, markup=False, emoji=False)
    for name, section in change["benchmarks"].items():
        table = Table(
            title=f"{name}: {change['before']} -> {change['after']}, n = {section['n']}", title_justify="left"
        )
        for column in ("figure", "before", "after", "change", "p", "n"):
            table.add_column(column, overflow="fold")
        for group in before_after(section, short=True) + quality_rows(change, name):
            table.add_section()
            table.add_row(group.title, style="bold")
            for row in group.rows:
                table.add_row(*cells(row))
        console.print(table)
        for verdict in found["verdicts"][name]:
            console.print(f"- {verdict['sentence']}")
        console.print()


def cells(row: Row) -> tuple[str, ...]:
    """One figure as strings; the stricter of two forms is marked."""
    label = f"{row.label} (stricter form)" if row.headline else row.label
    return label, row.before[0], row.after[0], " ".join(row.change), row.p, str(row.n)


if __name__ == "__main__":
    sys.exit(main())
