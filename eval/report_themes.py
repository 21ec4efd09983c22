"""What a mean hides, a table a question: kept, risk, ceiling, cost, changed answers, unseen, noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import binomtest

from eval.definitions import BY_NAME, UNSEEN
from eval.evidence import Arm
from eval.report_absent import NO_SUCH, NOT_SCORED, NOT_TIMED, why
from eval.report_change import scopes_of
from eval.report_grid import Cell, Column, Grid, Line, estimate, missing, printed, text
from eval.report_paper import benchmark_name, footnotes, model_name, paper

Summaries = Mapping[str, Mapping[str, Any]]

_NAMES = tuple(Column(key, key) for key in ("source", "model", "benchmark", "n"))
_TIMED = Column("n_timed", "n timed")
_NOT_GIVEN = "not given in the paper"
# Each figure with its label and, where several share one, the head above it.
Shown = tuple[str, str, str]
_KEPT: tuple[Shown, ...] = (
    ("no_draft_share", "no draft", ""), ("keeps_nothing_share", "none", "of the draft is kept"),
    ("keeps_some_share", "some", "of the draft is kept"), ("keeps_all_share", "all", "of the draft is kept"),
    ("one_pass_share_paper", "paper’s count", "done in one pass"), ("one_pass_share", "our count", "done in one pass"),
    ("kept_share", "mean of shares", "kept share"), ("kept_share_pooled", "pooled", "kept share"),
)  # fmt: skip
_RISK: tuple[Shown, ...] = (
    ("below_1x_share", "below 1×", "in seconds"), ("below_09x_share", "below 0.9×", "in seconds"),
    ("below_08x_share", "below 0.8×", "in seconds"), ("losers_median", "median of those below 1×", "in seconds"),
    ("below_1x_share_paper", "below 1×", "in passes, paper’s count"),
    ("below_09x_share_paper", "below 0.9×", "in passes, paper’s count"),
    ("below_08x_share_paper", "below 0.8×", "in passes, paper’s count"),
    ("losers_median_paper", "median of those below 1×", "in passes, paper’s count"),
)  # fmt: skip
_CEILING: tuple[Shown, ...] = (
    ("base_passes_median", "base passes, median", ""), ("ceiling_median", "ceiling: base passes over the least", ""),
    ("speedup_passes_median", "speedup in passes, median", ""), ("ceiling_reached", "ceiling reached", ""),
)  # fmt: skip
_COST: tuple[Shown, ...] = (
    ("total_over_base_mean", "mean", "all passes / base passes"),
    ("total_passes_over_base", "ratio of sums", "all passes / base passes"),
)
_POOLED: tuple[Shown, ...] = (
    ("speedup_passes_paper_mean", "mean", "speedup in passes, paper’s count"),
    ("speedup_passes_paper_median", "median", "speedup in passes, paper’s count"),
    ("speedup_passes_mean", "mean", "speedup in passes, our count"),
    ("speedup_passes_median", "median", "speedup in passes, our count"),
    ("speedup_passes_pooled", "ratio of sums", "speedup in passes, our count"),
    ("passes_removed_share", "passes removed", ""), ("speedup_seconds_pooled", "seconds, ratio of sums", ""),
)  # fmt: skip
_ANSWERS: tuple[Shown, ...] = (
    ("quality_base", "base", "quality"), ("quality_stream", "stream", "quality"),
    ("turned_wrong_share", "wrong", "turned by streaming"), ("turned_right_share", "right", "turned by streaming"),
    ("fast_but_wrong_share", "of all scored", "at least 2× and turned wrong"),
    ("wrong_among_fast_share", "of those at least 2×", "at least 2× and turned wrong"),
)  # fmt: skip
_UNSEEN: tuple[Shown, ...] = tuple((figure.name, figure.label, "") for figure in UNSEEN)
# The paper's rows: which key of its row stands in which column.
_KEPT_THERE = {
    "none": "keeps_nothing_share", "some": "keeps_some_share", "all": "keeps_all_share",
    "one_pass": "one_pass_share_paper", "kept_share": "kept_share",
}  # fmt: skip
_RISK_THERE = {
    "below_1x": "below_1x_share_paper", "below_09x": "below_09x_share_paper", "below_08x": "below_08x_share_paper",
    "losers_median": "losers_median_paper",
}  # fmt: skip
_CEILING_THERE = {
    "base_passes": "base_passes_median", "ceiling": "ceiling_median", "median": "speedup_passes_median",
    "reached": "ceiling_reached",
}  # fmt: skip
_POOLED_THERE = {
    "mean": "speedup_passes_paper_mean", "median": "speedup_passes_paper_median", "removed": "passes_removed_share",
}  # fmt: skip
_F1 = "For pass/fail benchmarks “turned” means right on one side only; for F1 a change of at least 0.1."


def themes(arms: Sequence[Arm], summaries: Summaries, confidence: float) -> dict[str, Grid]:
    """The tables by name; our rows are every arm on each benchmark and on all requests."""
    labels = [arm.label for arm in arms]
    remarks = paper()["remarks"]
    return {
        "kept": _theme("kept", "None, some, all kept of the last draft", _KEPT, labels, summaries,
                       _theirs("kept", _KEPT, _KEPT_THERE), (remarks["kept"],)),
        "by_kept": _by_kept(labels, summaries),
        "risk": _theme("risk", "Requests that lose, and how much", _RISK, labels, summaries,
                       _theirs("risk", _RISK, _RISK_THERE), (remarks["risk"], *footnotes("risk"))),
        "ceiling": _theme("ceiling", "The ceiling, and how much of it is reached", _CEILING, labels, summaries,
                          _theirs("ceiling", _CEILING, _CEILING_THERE), (remarks["ceiling"],)),
        "pooled": _theme("pooled", "All requests as one set", _POOLED, labels, summaries,
                         _theirs("pooled", _POOLED, _POOLED_THERE), ()),
        "cost": _theme("cost", "What the latency was bought with", _COST, labels, summaries, [], (remarks["cost"],)),
        "answers": _theme("answers", "Answers that streaming changed", _ANSWERS, labels, summaries, [],
                          (_F1, remarks["answers"])),
        "unseen": _theme("unseen", "The part of the request that was unseen when the last draft was made",
                         _UNSEEN, labels, summaries, [], ()),
        "noise": _noise(arms, confidence),
    }  # fmt: skip


def _theme(
    name: str,
    title: str,
    figures: Sequence[Shown],
    labels: Sequence[str],
    summaries: Summaries,
    theirs: Sequence[Line],
    notes: tuple[str, ...],
) -> Grid:
    clock = (_TIMED,) if _in_seconds(figures) else ()
    columns = (*_NAMES, *clock, *(Column(key, label, BY_NAME[key].unit, group) for key, label, group in figures))
    counts = ("n", *(column.key for column in clock))
    lines = [
        Line(
            (
                *map(text, ("measured", label, benchmark_name(scope), *(part[key] for key in counts))),
                *_cells(figures, part),
            )
        )
        for label in labels
        for scope, part in scopes_of(summaries[label]).items()
        if scope != "average"
    ]
    return Grid(name, title, columns, (*lines, *theirs), notes)


def _in_seconds(figures: Sequence[Shown]) -> bool:
    """Whether some of these rest on the timed requests alone."""
    return any("seconds" in BY_NAME[key].definition or "seconds" in key for key, _, _ in figures)


def _cells(figures: Sequence[Shown], part: Mapping[str, Any]) -> list[Cell]:
    return [estimate(part[key], BY_NAME[key].unit, why(key, part)) for key, _, _ in figures]


def _theirs(table: str, figures: Sequence[Shown], places: Mapping[str, str]) -> list[Line]:
    """The paper's rows of this question, its values in the columns that they belong to."""
    lines = []
    for row in paper()[table]:
        there = {places[key]: value for key, value in row.items() if key in places}
        cells = [printed(there.get(key), BY_NAME[key].unit) for key, _, _ in figures]
        names = map(text, ("paper", model_name(row["model"], row.get("variant")), benchmark_name(row["scope"])))
        n = text(row["n"]) if "n" in row else missing(_NOT_GIVEN)
        timed = [missing(_NOT_GIVEN)] if _in_seconds(figures) else []
        lines.append(Line((*names, n, *timed, *cells), "paper"))
    return lines


def _by_kept(labels: Sequence[str], summaries: Summaries) -> Grid:
    columns = (
        *(Column(key, key) for key in ("model", "benchmark", "kept", "n")),
        Column("quality_base", "quality, base", "share"),
        Column("quality_stream", "quality, stream", "share"),
        Column("speedup_passes_median", "speedup in passes, median", "times"),
    )
    lines = [
        _kept_line(label, scope, kept, found)
        for label in labels
        for scope, part in scopes_of(summaries[label]).items()
        if scope != "average"
        for kept, found in part["by_kept"].items()
    ]
    return Grid("by_kept", "Quality and speed where none, some or all was kept", columns, tuple(lines))


def _kept_line(label: str, scope: str, kept: str, found: Mapping[str, Any]) -> Line:
    unscored = NOT_SCORED if found["n"] else NO_SUCH
    cells = [
        estimate(found["quality_base"], "share", unscored),
        estimate(found["quality_stream"], "share", unscored),
        estimate(found["speedup_passes_median"], "times", NO_SUCH),
    ]
    return Line((*map(text, (label, benchmark_name(scope), kept.replace("_", " "), found["n"])), *cells))


def _noise(arms: Sequence[Arm], confidence: float) -> Grid:
    """How often numerics alone change an answer, with exact binomial intervals."""
    columns = (
        *(Column(key, key) for key in ("model", "dtype")),
        Column("streamed_answer_differs_from_base", "streamed answer differs from base", "share"),
        Column("n", "n"),
        Column("alone_differs_from_batched", "decoded alone, differs from batched", "share"),
        Column("n_alone", "n alone"),
    )
    notes = (
        "Under greedy acceptance the two answers are the same in exact arithmetic: what differs is numerics, the floor "
        "below which no difference in quality or speed means anything. Under another rule the first column holds "
        "the rule’s own changes too.",
    )
    lines = tuple(_noise_line(arm, confidence) for arm in arms)
    return Grid("noise", "The noise floor", columns, lines, notes)


def _noise_line(arm: Arm, confidence: float) -> Line:
    found = arm.summary.get("noise_floor")
    if found is None:
        return Line((text(arm.label), *[missing("not recorded in this evidence")] * 5))
    differs = _share(found["streamed_answer_differs_from_base"], found["n"], confidence, NO_SUCH)
    alone = _share(found["alone_differs_from_batched"], found["n_alone"], confidence, NOT_TIMED)
    return Line((text(arm.label), text(found["dtype"]), differs, text(found["n"]), alone, text(found["n_alone"])))


def _share(value: float | None, n: int, confidence: float, reason: str) -> Cell:
    if value is None:
        return missing(reason)
    exact = binomtest(round(value * n), n).proportion_ci(confidence)
    return estimate({"value": value, "low": exact.low, "high": exact.high}, "share", reason)
