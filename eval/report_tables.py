"""The report's tables, as rows of text."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.compare import QUALITY_SERVED
from eval.definitions import AGAINST_BEFORE, ANSWERS, COST, FIGURES, QUALITY, REUSE, SPEED, UNSEEN, Figure
from eval.evidence import Arm
from eval.report_format import bounds, number, p_value, signed, signed_bounds

_INTERVALS = ("quality_before", "quality_after", "quality_after_base", "median_speedup_before", "median_speedup_after")
TABLE3_COLUMNS = (
    "source", "model", "benchmark", "n", "n_quality", "quality_arm_before", "speed_arm_before", "count", "base_of",
    *(f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")),
)  # fmt: skip
_SHORT = (
    "speedup_passes_mean", "speedup_passes_median", "speedup_seconds_mean", "speedup_seconds_median", "below_1x_share",
    "stream_passes_mean", "stream_passes_median", "stream_seconds_cold_median", "kept_share", "kept_share_pooled",
    "one_pass_share", "keeps_nothing_share", "no_draft_share", "ends_by_itself_share", "answer_tokens_mean",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure, before and after. `headline` marks the stricter of two forms."""

    name: str
    label: str
    before: tuple[str, str]
    after: tuple[str, str]
    change: tuple[str, str]
    p: str
    test: str
    n: int
    headline: bool


@dataclass(frozen=True)
class Group:
    """Rows under one heading."""

    title: str
    rows: tuple[Row, ...]


def before_after(section: Mapping[str, Any], short: bool = False) -> list[Group]:
    """The groups of one part of `compare`'s result that has `figures` and `headline`; `short` leaves details out."""
    entries, strict = section["figures"], set(section["headline"].values())
    crossed = [f for f in SPEED if f.crossed]
    groups = [
        _group("Speed, against the after model's own base", SPEED, entries, strict),
        _group("Speed, against the before model's base on the same request", crossed, entries, strict, AGAINST_BEFORE),
        _group("What is left to wait for", COST, entries, strict),
        _group("What is kept of the draft", REUSE, entries, strict),
        _group("The answers", ANSWERS, entries, strict),
    ]
    if short:
        groups = [Group(g.title, tuple(row for row in g.rows if row.name in _SHORT)) for g in groups]
    return [group for group in groups if group.rows]


def quality_rows(change: Mapping[str, Any], scope: str) -> list[Group]:
    """Quality: `quality_before` against `after`."""
    quality = change["quality"]
    section = quality[scope] if scope in ("macro", "pooled") else quality["benchmarks"].get(scope)
    if section is None:
        return []
    title = f"Quality, {change['quality_before']} against {change['after']}"
    group = _group(title, (*QUALITY, QUALITY_SERVED), section["figures"], set())
    return [group] if group.rows else []


def unseen_rows(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """What was unseen when the last draft was made, a row a benchmark."""
    return [
        {"benchmark": name, "n": str(figures["n"])} | {f.name: _cell(figures[f.name], f) for f in UNSEEN}
        for name, figures in summary["benchmarks"].items()
    ]


def arm_rows(summaries: Mapping[str, Mapping[str, Any]], scope: str) -> list[dict[str, Any]]:
    """Every figure of each arm by itself, on all of its own requests."""
    found = [s["benchmarks"].get(scope) or s["pooled"] for s in summaries.values()]
    return [
        {
            "label": f.label,
            "cells": [_cell(figures[f.name], f) + f" (n = {figures['n_by_figure'][f.name]})" for figures in found],
        }
        for f in FIGURES
    ]


def paper() -> dict[str, Any]:
    """The paper's published rows."""
    return yaml.safe_load(Path(__file__).with_name("paper_table3.yaml").read_text(encoding="utf-8"))


def table3(change: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    """The paper's Table 3 layout: measured rows first, the paper's own rows after them.

    `count` says how residual passes are counted, `base_of` whose base passes the after-speedup is taken against,
    `quality_arm_before` and `speed_arm_before` which arms the before-columns are of. Quality in percent, speedups as
    medians in passes.
    """
    scopes = dict(change["benchmarks"]) | ({"average": change["macro"]} if len(change["benchmarks"]) > 1 else {})
    rows = [
        _measured(change, model, scope, section, stem, count, suffix)
        for scope, section in scopes.items()
        for stem, count in (("speedup_passes_median", "max(1, N-k)"), ("speedup_passes_paper_median", "1+N-k"))
        for suffix in ("", AGAINST_BEFORE)
    ]
    published = [
        dict.fromkeys(TABLE3_COLUMNS) | {"source": "paper", "count": "as printed", "base_of": "after"} | row
        for row in paper()["table3"]
    ]
    return rows + published


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """table3.csv; an empty cell where there is no value."""
    out = io.StringIO()
    writer = csv.DictWriter(out, TABLE3_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def provenance(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row a fact, a cell an arm; rows on which all arms agree come last."""
    facts = [_flat({k: a.summary.get(k) for k in _PROVENANCE}) for a in arms]
    keys = list(dict.fromkeys(key for found in facts for key in found))
    rows = [{"label": key, "cells": [_text(found.get(key)) for found in facts]} for key in keys]
    return sorted(rows, key=lambda row: len(set(row["cells"])) == 1)


def facts(arm: Arm) -> list[tuple[str, str]]:
    """The settings that a reader of any number needs beside it."""
    found = _flat({key: arm.summary.get(key) for key in ("settings", "device", "sandbox", "noise_floor")})
    wanted = ("acceptance", "tau", "top_k", "replay", "max_new_tokens", "dtype", "device", "sandbox")
    rule = next((value for key, value in found.items() if key.endswith(".acceptance")), None)
    unused = {"tau": "threshold", "top_k": "top_k"}
    shown = {key.split(".")[-1]: value for key, value in found.items() if not key.startswith("noise_floor")}
    rows = [(name, _text(shown[name])) for name in wanted if name in shown and unused.get(name, rule) == rule]
    return rows + [(key.replace("_", " "), _text(value)) for key, value in found.items() if key.startswith("noise_")]


_PROVENANCE = ("hashes", "settings", "versions", "device", "sandbox", "noise_floor", "commit")


def _group(
    title: str, figures: Sequence[Figure], entries: Mapping[str, Any], strict: set[str], suffix: str = ""
) -> Group:
    rows = [_row(f, entries[f.name + suffix], f.name + suffix in strict) for f in figures]
    return Group(title, tuple(row for row in rows if row.n))


def _row(figure: Figure, entry: Mapping[str, Any], headline: bool) -> Row:
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
        headline=headline,
    )


def _cell(estimate: Mapping[str, Any], figure: Figure) -> str:
    return f"{number(estimate['value'], figure.unit)} {bounds(estimate, figure.unit)}".rstrip()


def _measured(
    change: Mapping[str, Any], model: str, scope: str, section: Mapping[str, Any], stem: str, count: str, suffix: str
) -> dict[str, Any]:
    graded = change["quality"]["macro"] if scope == "average" else change["quality"]["benchmarks"].get(scope)
    quality = graded["figures"] if graded else {}
    speed = section["figures"][stem + suffix]
    stream, base = quality.get("quality_stream"), quality.get("quality_base")
    return {
        "source": "measured",
        "model": model,
        "benchmark": scope,
        "n": speed["n"],
        "n_quality": stream["n"] if stream else 0,
        "quality_arm_before": change["quality_before"] if stream and stream["n"] else None,
        "speed_arm_before": change["before"],
        "count": count,
        "base_of": "before" if suffix else "after",
        **_three("quality_before", stream and stream["before"], 100, 2),
        **_three("quality_after", stream and stream["after"], 100, 2),
        **_three("quality_after_base", base and base["after"], 100, 2),
        **_three("median_speedup_before", speed["before"], 1, 4),
        **_three("median_speedup_after", speed["after"], 1, 4),
    }


def _three(name: str, estimate: Mapping[str, Any] | None, scale: float, digits: int) -> dict[str, float | None]:
    cells: dict[str, float | None] = {}
    for end, key in (("", "value"), ("_low", "low"), ("_high", "high")):
        value = estimate[key] if estimate else None
        cells[f"{name}{end}"] = None if value is None else round(scale * value, digits)
    return cells


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {} if value is None else {path: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{path}.{key}" if path else str(key))
    return found


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
