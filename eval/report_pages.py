"""Writes the report: report.html, report.md, report.json, a CSV file for each table, and figures/."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval import report_extras, report_figures
from eval.compare import against_before, compare
from eval.evidence import Arm
from eval.metrics import summarise, table
from eval.pairing import paired
from eval.report_change import arm_grid, change_grid
from eval.report_grid import Grid, as_csv
from eval.report_paper import benchmark_name, paper, table1, table2, table3
from eval.report_provenance import excluded_grid, provenance
from eval.report_render import Found, html, legend, markdown, page_context, shown_requests
from eval.report_runs import Place, Run, overview, read, together
from eval.report_themes import themes
from eval.verdict import verdicts
from recipes.schema import Report

_TYPED = (
    ("typing", "drafts_finished_share", "% of drafts finished in time"),
    ("typing-speedup", "speedup_passes_mean", "mean speedup in passes"),
)


def build_report(places: Sequence[Place], out_dir: Path, settings: Report, seed: int) -> Path:
    """Reads the runs and writes the report into `out_dir`; returns the path of report.html.

    Raises:
        UserError: where a folder is incomplete or broken, or arms or runs do not belong together and
            `settings.force` is false.
    """
    found = findings(places, settings, seed)
    out_dir.mkdir(parents=True, exist_ok=True)
    grids = tables(found, settings.confidence)
    numbered = enumerate(found.evidence.runs)
    charts = {run.name: drawn(run, settings.force, out_dir / "figures", place) for place, run in numbered}
    for grid in grids.values():
        _write(out_dir / f"{grid.name}.csv", as_csv(grid))
    _write(out_dir / "report.json", json.dumps(contents(found), indent=1, allow_nan=False) + "\n")
    context = page_context(found, grids, charts, settings)
    _write(out_dir / "report.md", markdown(context))
    _write(out_dir / "report.html", html(context, shown_requests(found, settings.replays)))
    return out_dir / "report.html"


def findings(places: Sequence[Place], settings: Report, seed: int) -> Found:
    """Reads, checks and compares."""
    evidence = read(places)
    forced = together(evidence.runs, settings.force)
    how = (settings.confidence, settings.bootstrap, seed, settings.force)
    changes = {run.name: compare(run.before, run.after, run.quality_before, *how) for run in evidence.runs}
    summaries = {arm.label: _summary(arm, settings, seed) for arm in evidence.arms}
    said = {name: _verdicts(change) for name, change in changes.items()}
    forced += [what for change in changes.values() for what in change["forced"]]
    return Found(evidence, changes, said, summaries, list(dict.fromkeys(forced)))


def tables(found: Found, confidence: float) -> dict[str, Grid]:
    """Every table, by its name; each is a CSV file too."""
    arms, summaries = found.evidence.arms, found.summaries
    grids = [
        *([overview(found.evidence.runs, found.changes)] if len(found.evidence.runs) > 1 else []),
        table1(arms, summaries),
        table2(arms, summaries),
        table3(found.changes),
        change_grid(found.changes),
        arm_grid(summaries),
        *themes(arms, summaries, confidence).values(),
        report_extras.frontier(arms),
        report_extras.recycle(arms, summaries),
        report_extras.typing(arms),
        excluded_grid(arms, summaries),
        provenance(arms),
    ]
    return {grid.name: grid for grid in grids}


def drawn(run: Run, force: bool, folder: Path, place: int) -> dict[str, dict[str, report_figures.Panel]]:
    """A run's charts, saved under `folder`; those of the runs after the first begin with the run's number."""
    stem = f"run{place + 1}-" if place else ""
    names = legend(run)
    found = {}
    for name, pairs in paired(run.before, run.after, force).items():
        earlier = table([b for b, _ in pairs], run.before.timings)
        later = table([a for _, a in pairs], run.after.timings)
        found[benchmark_name(name)] = earlier, later, against_before(earlier, later)
    swept = {arm.label: report_extras.points(arm) for arm in (run.before, run.after)}
    names_swept = dict.fromkeys(name for points in swept.values() for name in points)
    curves = {benchmark_name(n): {label: points.get(n, []) for label, points in swept.items()} for n in names_swept}
    spread = report_figures.distributions
    typed = {
        name: report_figures.over_typing(_typed(run, figure), ylabel, folder, f"{stem}{name}")
        for name, figure, ylabel in _TYPED
    }
    return {
        "speedup": spread(found, "speedup_passes_paper", names, folder, f"{stem}speedup"),
        "seconds": spread(found, "speedup_seconds", names, folder, f"{stem}seconds"),
        "kept": report_figures.kept(found, legend(run, bases=False), folder, f"{stem}kept"),
        "frontier": report_figures.frontier(curves, folder, f"{stem}frontier"),
        **typed,
    }


def _typed(run: Run, figure: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Benchmark -> arm -> the figure over the typing speed."""
    points = {arm.label: report_extras.typing_points(arm, figure) for arm in (run.before, run.after)}
    names = dict.fromkeys(name for found in points.values() for name in found)
    return {benchmark_name(n): {label: found.get(n, []) for label, found in points.items()} for n in names}


def contents(found: Found) -> dict[str, Any]:
    """report.json: `arms` (their summaries), `change` and `verdicts` (of several runs: `runs` with both of each),
    `forced`, `shared`, `paper`."""
    runs = [
        {"recipe": run.name, "change": found.changes[run.name], "verdicts": found.verdicts[run.name]}
        for run in found.evidence.runs
    ]
    compared = runs[0] if len(runs) == 1 else {"runs": runs}
    rest = {"forced": found.forced, "shared": list(found.evidence.shared), "paper": paper()}
    return {**compared, "arms": found.summaries, **rest}


def _summary(arm: Arm, settings: Report, seed: int) -> dict[str, Any]:
    """The arm's summary.json with its figures computed anew from its requests, at the report's confidence."""
    fresh = summarise(arm.by_benchmark(), arm.timings, settings.confidence, settings.bootstrap, seed)
    return dict(arm.summary) | fresh


def _verdicts(change: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """By benchmark; of several, first the mean over them ("macro")."""
    scopes: dict[str, str | None] = {"macro": None} if len(change["benchmarks"]) > 1 else {}
    scopes |= {name: name for name in change["benchmarks"]}
    return {title: [asdict(v) for v in verdicts(change, scope)] for title, scope in scopes.items()}


def _write(path: Path, text: str) -> None:
    """UTF-8; half a surrogate pair, which a model can write, becomes a question mark."""
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
