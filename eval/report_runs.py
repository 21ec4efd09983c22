"""The runs of a report: their arms read once, what they share, whether they belong together, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.evidence import Arm, one_of_each, read_arms
from eval.pairing import check_together
from eval.report_absent import why_paired
from eval.report_change import scopes_of
from eval.report_grid import Column, Grid, Line, estimate, missing, text
from eval.report_paper import benchmark_name
from eval.verdict import plain

_NO_QUALITY = "no request was scored in both arms"


@dataclass(frozen=True)
class Place:
    """Where a run's arms lie: folders of eval/run.py. `quality_before` is None where `before` stands for it."""

    name: str
    before: Path
    after: Path
    quality_before: Path | None


@dataclass(frozen=True)
class Run:
    """A run's arms, read."""

    name: str
    before: Arm
    after: Arm
    quality_before: Arm


@dataclass(frozen=True)
class Evidence:
    """All runs, and their arms: each once, in the order of the runs. `shared` says which arm stands for which."""

    runs: tuple[Run, ...]
    arms: tuple[Arm, ...]
    shared: tuple[str, ...]


def read(places: Sequence[Place]) -> Evidence:
    """Read every arm. A before-arm with the hashes, settings and device of an earlier run's is that one.

    Raises:
        UserError: where a folder is incomplete or broken.
    """
    names = [place.name for place in places]
    earlier = one_of_each(f.resolve() for p in places for f in (p.before, p.quality_before or p.before))
    wanted = [[*(earlier[f.resolve()] for f in (p.before, p.quality_before or p.before)), p.after] for p in places]
    folders = list(dict.fromkeys(folder.resolve() for b, q, a in wanted for folder in (b, a, q)))
    arms = dict(zip(folders, read_arms(*folders), strict=True))
    runs = [Run(name, arms[b], arms[a.resolve()], arms[q]) for name, (b, q, a) in zip(names, wanted, strict=True)]
    shared = [
        f"{place.name}: its {arms[one].summary['arm']} arm ({own.name}) has the hashes, settings and device of "
        f"{arms[one].label}, which stands for both"
        for place in places
        for own in dict.fromkeys((place.before, place.quality_before or place.before))
        if (one := earlier[own.resolve()]) != own.resolve()
    ]
    return Evidence(tuple(runs), tuple(arms.values()), tuple(shared))


def together(runs: Sequence[Run], force: bool) -> list[str]:
    """What the runs differ in that one report must not mix: nothing, unless forced. Raises UserError otherwise."""
    first, *others = runs
    return [what for run in others for what in check_together(first.after, run.after, force)]


def overview(runs: Sequence[Run], changes: Mapping[str, Mapping[str, Any]]) -> Grid:
    """The runs of each base model side by side: what each adaptation bought, in the stricter form."""
    columns = (
        *(Column(key, key.replace("_", " ")) for key in ("base_model", "run", "benchmark", "n")),
        Column("median_speedup_before", "median speedup before", "times"),
        Column("median_speedup_after", "median speedup after, stricter form", "times"),
        Column("quality_before", "streamed quality before", "share"),
        Column("quality_after", "streamed quality after", "share"),
        Column("verdict", "verdict"),
    )
    models = dict.fromkeys(_base_model(run) for run in runs)
    lines = [
        _overview_line(model, run.name, changes[run.name], scope)
        for model in models
        for run in runs
        if _base_model(run) == model
        for scope in scopes_of(changes[run.name])
        if scope != "pooled"
    ]
    notes = ("Runs of different base models are not compared with each other: each has its own before and after.",)
    return Grid("overview", "What each run bought", columns, tuple(lines), notes)


def _overview_line(model: str, run: str, change: Mapping[str, Any], scope: str) -> Line:
    whole = scope == "average"
    section = change["macro"] if whole else change["benchmarks"][scope]
    graded = change["quality"]["macro"] if whole else change["quality"]["benchmarks"].get(scope)
    speed = section["figures"][section["headline"]["speedup_passes_median"]]
    quality = graded["figures"]["quality_stream"] if graded else None
    words = plain(change, None if whole else scope).sentence
    return Line(
        (
            *map(text, (model, run, benchmark_name(scope), speed["n"])),
            *(estimate(speed[side], "times", why_paired("speedup_passes_median")) for side in ("before", "after")),
            *(
                estimate(quality[side], "share", _NO_QUALITY) if quality else missing(_NO_QUALITY)
                for side in ("before", "after")
            ),
            text(words),
        )
    )


def _base_model(run: Run) -> str:
    """Name and weights of the before model: what two runs must share to be compared."""
    weights = run.before.summary["hashes"].get("weights", "weights not recorded")
    return f"{run.before.setting('name') or 'model not recorded'} ({weights})"
