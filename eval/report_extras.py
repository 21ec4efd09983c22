"""What only some evaluations measure: the frontier over tau, recycled drafts, the time to draft."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.definitions import BY_NAME, Unit
from eval.evidence import Arm
from eval.metrics import included
from eval.report_absent import NO_SUCH, NOT_RECYCLED, why
from eval.report_change import scopes_of
from eval.report_grid import Cell, Column, Grid, Line, estimate, missing, text
from eval.report_paper import benchmark_name

NOT_SWEPT = "no thresholds were swept (eval.sweep)"
NO_TYPING = "this evidence has no time to draft"
_FRONTIER = (
    ("quality_stream", "quality, stream"), ("speedup_passes_mean", "speedup in passes, mean"),
    ("speedup_passes_median", "speedup in passes, median"), ("kept_share", "kept share, mean"),
    ("one_pass_share", "done in one pass"),
)  # fmt: skip
_RECYCLE = (
    ("speedup_passes_median", "no look-up on either side"),
    ("speedup_passes_lookup_median", "base with look-up, stream without"),
    ("speedup_passes_recycle_median", "look-up on both sides, the rejected rest of the draft offered again"),
    ("lookup_gain_median", "what look-up gains base"),
)
_NAMES = tuple(Column(key, key) for key in ("model", "benchmark"))
_TYPING: tuple[tuple[str, str, Unit], ...] = (
    ("drafts_finished_share", "drafts finished in time", "share"),
    ("last_draft_finished_share", "requests whose last draft is finished", "share"),
    ("speedup_passes_mean", "speedup in passes, mean, unfinished drafts cut", "times"),
    ("speedup_passes_median", "speedup in passes, median, unfinished drafts cut", "times"),
)
_TYPED = (
    "A draft has until the next sentence is typed. “In time” counts the drafts that are done by then; the speedup is "
    "what is left of it when the others are cut there. Seconds are of the machine that timed them.",
)


def frontier(arms: Sequence[Arm]) -> Grid:
    """Quality against speedup for each swept tau."""
    columns = (*_NAMES, *(Column(key, key) for key in ("tau", "n")), *_columns(_FRONTIER))
    lines = [line for arm in arms for line in _frontier_lines(arm)]
    notes = ("Under acceptance=threshold a draft token is kept where its probability is at least tau.",)
    return Grid("frontier", "Quality against speedup, over tau", columns, tuple(lines), notes)


def points(arm: Arm) -> dict[str, list[tuple[float, float, float]]]:
    """The frontier as (tau, median speedup in passes, streamed quality), by benchmark; points without a value left
    out."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for entry in arm.summary.get("frontier") or ():
        for name, part in entry["benchmarks"].items():
            speed, quality = (part[key]["value"] for key in ("speedup_passes_median", "quality_stream"))
            if speed is not None and quality is not None:
                found.setdefault(name, []).append((entry["tau"], speed, quality))
    return found


def recycle(arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]]) -> Grid:
    """What offering the rejected rest of a draft again is worth, in medians of the speedup in passes."""
    columns = (
        *_NAMES,
        Column("n", "n"),
        *_columns(_RECYCLE),
        Column("answers_differ", "requests with an answer that look-up changed"),
    )
    lines = [
        _recycle_line(arm, scope, part)
        for arm in arms
        for scope, part in scopes_of(summaries[arm.label]).items()
        if scope != "average"
    ]
    title = "Recycled drafts: median speedup in passes"
    notes = ("Under greedy acceptance neither look-up changes an answer in exact arithmetic.",)
    return Grid("recycle", title, columns, tuple(lines), notes)


def typing(arms: Sequence[Arm]) -> Grid:
    """Which drafts are finished before the next sentence is typed, over a range of typing speeds."""
    columns = (
        *_NAMES,
        Column("words_a_minute", "words a minute"),
        Column("n", "n"),
        *(Column(key, label, unit) for key, label, unit in _TYPING),
    )
    lines = [line for arm in arms for line in _typing_lines(arm)]
    return Grid("typing", "Time to draft", columns, tuple(lines), _TYPED)


def typing_points(arm: Arm, figure: str) -> dict[str, list[tuple[float, float]]]:
    """A figure of the time to draft as (words a minute, value), shares in percent, by benchmark; those without one left
    out."""
    unit = {key: unit for key, _, unit in _TYPING}[figure]
    found = {}
    for name, part in ((arm.summary.get("typing") or {}).get("benchmarks") or {}).items():
        values = [(speed["words_a_minute"], speed[figure]["value"]) for speed in part["speeds"] or ()]
        if values:
            found[name] = [(x, 100 * y if unit == "share" else y) for x, y in values]
    return found


def _columns(figures: Sequence[tuple[str, str]]) -> list[Column]:
    return [Column(key, label, BY_NAME[key].unit) for key, label in figures]


def _frontier_lines(arm: Arm) -> list[Line]:
    entries = arm.summary.get("frontier")
    if not entries:
        return [Line((text(arm.label), *[missing(NOT_SWEPT)] * (3 + len(_FRONTIER))))]
    parts = [
        (name, entry["tau"], part)
        for entry in entries
        for name, part in (entry["benchmarks"] | ({"pooled": entry} if len(entry["benchmarks"]) > 1 else {})).items()
    ]
    names = dict.fromkeys(name for name, _, _ in parts)
    return [_frontier_line(arm.label, *part) for name in names for part in parts if part[0] == name]


def _frontier_line(label: str, name: str, tau: float, part: Mapping[str, Any]) -> Line:
    cells = [_cell(part[key], key, why(key, {"n": part["n"], "n_timed": 0})) for key, _ in _FRONTIER]
    return Line((*map(text, (label, benchmark_name(name), f"{tau:g}", part["n"])), *cells))


def _recycle_line(arm: Arm, scope: str, part: Mapping[str, Any]) -> Line:
    n = part["n_by_figure"]["speedup_passes_recycle_median"]
    cells = [_cell(part[key], key, why(key, part)) for key, _ in _RECYCLE]
    names = text(arm.label), text(benchmark_name(scope)), text(n) if n else missing(NOT_RECYCLED)
    return Line((*names, *cells, _differing(arm, scope)))


def _differing(arm: Arm, scope: str) -> Cell:
    found = [r.get("recycle_differs") for r in included(arm.records) if scope in (r["benchmark"], "pooled")]
    known = [sides for sides in found if sides is not None]
    return text(f"{sum(map(bool, known))} of {len(known)}") if known else missing(NOT_RECYCLED)


def _typing_lines(arm: Arm) -> list[Line]:
    found = arm.summary.get("typing")
    if found is None:
        return [Line((text(arm.label), *[missing(NO_TYPING)] * (3 + len(_TYPING))))]
    parts = found["benchmarks"] | ({"pooled": found["pooled"]} if len(found["benchmarks"]) > 1 else {})
    return [line for name, part in parts.items() for line in _typed(arm.label, name, part)]


def _typed(label: str, name: str, part: Mapping[str, Any]) -> list[Line]:
    names = text(label), text(benchmark_name(name))
    if part["speeds"] is None:
        return [Line((*names, *[missing(part["reason"])] * (2 + len(_TYPING))))]
    speeds = [
        (f"{s['words_a_minute']:g}" + (" (eval.chars_per_second)" if s["own"] else ""), s) for s in part["speeds"]
    ]
    return [
        Line((*names, text(shown), text(part["n"]), *(estimate(s[key], unit, NO_SUCH) for key, _, unit in _TYPING)))
        for shown, s in [*speeds, ("every draft is waited for", part["measured"])]
    ]


def _cell(found: Mapping[str, Any], key: str, reason: str) -> Cell:
    return estimate(found, BY_NAME[key].unit, reason)
