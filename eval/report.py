"""Compare two arms, before and after, on the same requests.

    python eval/report.py recipe=smollm2

Writes <run>/report: report.html (open it), report.md, report.json, table3.csv, figures/.
"""

import sys
from pathlib import Path

from eval.report_pages import build_report
from recipes import run_folder
from recipes.loader import Invocation, run_script


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, report)


def report(invocation: Invocation) -> None:
    recipe = invocation.recipe
    before, after, quality = (
        arm_folder(invocation, arm) for arm in (recipe.report.before, recipe.report.after, recipe.report.quality_before)
    )
    settings = {
        "report": recipe.report.model_dump(),
        "seed": recipe.run.seed,
        "arms": [record["content"] for record in (before[1], after[1], quality[1])],
    }
    out = invocation.run_dir / "report"
    if invocation.dry_run:
        print(f"would compare {before[0]} with {after[0]} and write {out}")
        return
    with run_folder.step(invocation, out, settings) as step:
        if step is not None:
            build_report(before[0], after[0], quality[0], step.partial, recipe.report, recipe.run.seed, invocation.name)
            run_folder.finish(step)
    print((out / "report.md").read_text())
    print(f"report: {out / 'report.html'}")


def arm_folder(invocation: Invocation, arm: str) -> tuple[Path, dict]:
    """An arm's evaluation folder, by the arm's name or by path, and its step record."""
    folder = Path(arm) if "/" in arm else invocation.run_dir / "eval" / arm
    return folder, run_folder.need(folder, f"python eval/run.py recipe={invocation.name} eval.arm={folder.name}")


if __name__ == "__main__":
    sys.exit(main())
