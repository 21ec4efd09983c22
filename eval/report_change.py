"""Before against after, as rows of text; and each arm by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval.compare import QUALITY_SERVED
from eval.definitions import (
    AGAINST_BEFORE,
    ANSWERS,
    CEILING,
    COST,
    FIGURES,
    QUALITY,
    RECYCLE,
    REUSE,
    RISK,
    SPEED,
    Figure,
)
from eval.report_absent import why, why_paired
from eval.report_format import bounds, number, p_value, signed, signed_bounds
from eval.report_grid import Cell, Column, Grid, Line, estimate, missing, text
from eval.verdict import stricter

_SHORT = (
    "speedup_passes_mean", "speedup_passes_median", "speedup_seconds_mean", "speedup_seconds_median", "below_1x_share",
    "stream_passes_mean", "stream_passes_median", "stream_seconds_cold_median", "kept_share", "kept_share_pooled",
    "one_pass_share", "keeps_nothing_share", "no_draft_share", "ends_by_itself_share", "answer_tokens_mean",
)  # fmt: skip
_BRIEF = ("speedup_passes_median", "speedup_passes_mean", "speedup_seconds_median", "kept_share", "one_pass_share")


@dataclass(frozen=True)
class Row:
    """One figure, before and after.

    `headline` marks the form that is quoted where there are two, `stricter` that it flatters less than the other;
    `reason` says why nothing is there.
    """

    name: str
    label: str
    before: tuple[str, str]
    after: tuple[str, str]
    change: tuple[str, str]
    p: str
    test: str
    n: int
    headline: bool
    stricter: bool
    reason: str


class _Forms(NamedTuple):
    """Full names of the forms that are quoted, and of those among them that flatter less than the other form."""

    headline: set[str]
    stricter: set[str]


@dataclass(frozen=True)
class Group:
    """Rows under one heading."""

    title: str
    rows: tuple[Row, ...]


def before_after(section: Mapping[str, Any], short: bool = False) -> list[Group]:
    """The groups of one part of `compare`'s result that has `figures` and `headline`; `short` leaves details out."""
    entries, strict = section["figures"], _Forms(set(section["headline"].values()), stricter(section))
    speed, risk = ([f for f in figures if f.crossed] for figures in (SPEED, RISK))
    groups = [
        _group("Speed, against the after model's own base", SPEED, entries, strict),
        _group("Speed, against the before model's base on the same request", speed, entries, strict, AGAINST_BEFORE),
        _group("The ceiling", CEILING, entries, strict),
        _group("Risk, against the after model's own base", RISK, entries, strict),
        _group("Risk, against the before model's base on the same request", risk, entries, strict, AGAINST_BEFORE),
        _group("What is left to wait for", COST, entries, strict),
        _group("What is kept of the draft", REUSE, entries, strict),
        _group("The answers", ANSWERS, entries, strict),
        _group("With look-up", RECYCLE, entries, strict),
    ]
    if short:
        groups = [Group(g.title, tuple(row for row in g.rows if row.name in _SHORT)) for g in groups]
    return [group for group in groups if group.rows]


def quality_rows(change: Mapping[str, Any], scope: str) -> list[Group]:
    """Quality: `quality_before` against `after`; nothing where the two share no request."""
    quality = change["quality"]
    section = quality[scope] if scope in ("macro", "pooled") else quality["benchmarks"].get(scope)
    if section is None or not section["n"]:
        return []
    title = f"Quality, {change['quality_before']} against {change['after']}"
    return [_group(title, (*QUALITY, QUALITY_SERVED), section["figures"], _Forms(set(), set()))]


def brief(section: Mapping[str, Any], quality: Sequence[Group]) -> list[Row]:
    """The few rows of a short report: speed in its stricter form, what is kept, the streamed answers' quality."""
    rows = [row for group in before_after(section) for row in group.rows if row.name in _BRIEF]
    two_forms = set(section["headline"])
    graded = [row for group in quality for row in group.rows if row.name == "quality_stream"]
    return [row for row in rows if row.headline or row.name not in two_forms] + graded


def change_grid(runs: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Every paired figure of every run and benchmark: change.csv."""
    columns = (
        *(Column(key, key) for key in ("run", "benchmark", "before_arm", "after_arm", "figure", "n")),
        Column("before", "before", "tokens"),
        Column("after", "after", "tokens"),
        Column("change", "change", "tokens"),
        *(Column(key, key) for key in ("p", "test", "stricter_form")),
    )
    lines = [line for name, change in runs.items() for line in _change_lines(name, change)]
    return Grid("change", "Before against after", columns, tuple(lines))


def arm_grid(summaries: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Every figure of each arm by itself, on all of its own requests: arms.csv."""
    columns = (
        *(Column(key, key) for key in ("arm", "benchmark", "figure", "definition", "unit", "n")),
        Column("value", "value", "tokens"),
    )
    lines = [
        Line((*map(text, (label, scope, f.name, f.definition, _unit(f), _n(figures, f))), _plain(figures, f)))
        for label, summary in summaries.items()
        for scope, figures in scopes_of(summary).items()
        for f in FIGURES
    ]
    return Grid("arms", "Every figure of each arm", columns, tuple(lines))


def scopes_of(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The benchmarks of a summary, and where there are several their mean ("average") and all requests ("pooled")."""
    benchmarks = dict(summary["benchmarks"])
    return benchmarks if len(benchmarks) == 1 else benchmarks | {k: summary[v] for k, v in _WHOLE.items()}


_WHOLE = {"average": "macro", "pooled": "pooled"}


def arm_rows(labels: Sequence[str], summaries: Mapping[str, Mapping[str, Any]], scope: str) -> list[dict[str, Any]]:
    """One benchmark's figures, a row a figure and a cell an arm."""
    found = [summaries[label]["benchmarks"].get(scope) for label in labels]
    return [{"label": f.label, "cells": [_arm_cell(figures, f) for figures in found]} for f in FIGURES]


def _arm_cell(figures: Mapping[str, Any] | None, figure: Figure) -> Cell:
    if figures is None:
        return missing("this arm has no such benchmark")
    cell = estimate(figures[figure.name], figure.unit, why(figure.name, figures))
    return Cell(cell.text, f"{cell.range} n = {_n(figures, figure)}".strip(), cell.reason)


def _group(title: str, figures: Sequence[Figure], entries: Mapping[str, Any], forms: _Forms, suffix: str = "") -> Group:
    return Group(title, tuple(_row(f, entries[f.name + suffix], f.name + suffix, forms) for f in figures))


def _row(figure: Figure, entry: Mapping[str, Any], name: str, forms: _Forms) -> Row:
    unit = figure.unit
    return Row(
        name=figure.name,
        label=figure.label,
        before=(number(entry["before"]["value"], unit), bounds(entry["before"], unit)),
        after=(number(entry["after"]["value"], unit), bounds(entry["after"], unit)),
        change=(signed(entry["change"]["value"], unit), signed_bounds(entry["change"], unit)),
        p=p_value(entry["p"]),
        test=entry["test"] or "",
        n=entry["n"],
        headline=name in forms.headline,
        stricter=name in forms.stricter,
        reason="" if entry["change"]["value"] is not None else why_paired(figure.name),
    )


def _change_lines(run: str, change: Mapping[str, Any]) -> list[Line]:
    lines = []
    for scope, section in scopes_of(change).items():
        graded = change["quality"]["benchmarks"].get(scope) or change["quality"].get(_WHOLE.get(scope, ""), {})
        for name, entry in section["figures"].items():
            if not name.startswith("quality"):
                lines.append(_change_line(run, scope, change["before"], change["after"], name, entry, section))
        for name, entry in graded.get("figures", {}).items():
            lines.append(_change_line(run, scope, change["quality_before"], change["after"], name, entry, section))
    return lines


def _change_line(
    run: str, scope: str, before: str, after: str, name: str, entry: Mapping[str, Any], section: Mapping[str, Any]
) -> Line:
    reason = why_paired(name)
    values = [estimate(entry[key], "tokens", reason) for key in ("before", "after", "change")]
    p = missing(reason) if entry["p"] is None else text(entry["p"])
    strict = "yes" if name in stricter(section) else "no"
    names = map(text, (run, scope, before, after, name, entry["n"]))
    return Line((*names, *values, p, text(entry["test"] or "none"), text(strict)))


def _n(figures: Mapping[str, Any], figure: Figure) -> int:
    return figures["n_by_figure"][figure.name]


def _unit(figure: Figure) -> str:
    return "share of 1" if figure.unit == "share" else figure.unit


def _plain(figures: Mapping[str, Any], figure: Figure) -> Cell:
    """Unscaled, so that figures of all units can stand in one column."""
    return estimate(figures[figure.name], "tokens", why(figure.name, figures))
