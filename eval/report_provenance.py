"""Where the numbers come from: how each arm was measured, and what was left out of it and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eval.evidence import Arm, flat
from eval.report_grid import Column, Grid, Line, missing, text

_FACTS = ("acceptance", "tau", "top_k", "replay", "max_new_tokens", "dtype", "device", "sandbox")
_UNUSED = {"tau": "threshold", "top_k": "top_k"}
_PROVENANCE = ("hashes", "settings", "versions", "device", "sandbox", "noise_floor", "commit")


def provenance(arms: Sequence[Arm]) -> Grid:
    """A row a fact, a cell an arm; rows on which all arms agree come last."""
    found = [flat({key: arm.summary.get(key) for key in _PROVENANCE}) for arm in arms]
    keys = dict.fromkeys(key for facts in found for key in facts)
    rows = [(key, *(_said(facts.get(key)) for facts in found)) for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    lines = [Line((text(key), *(text(v) if v else missing("not recorded") for v in values))) for key, *values in rows]
    columns = (Column("fact", ""), *(Column(arm.label, arm.label) for arm in arms))
    return Grid("provenance", "How each arm was made and measured", columns, tuple(lines))


def facts(arm: Arm) -> list[tuple[str, str]]:
    """The settings that a reader of any number needs beside it."""
    found = flat({key: arm.summary.get(key) for key in ("settings", "device", "sandbox")})
    shown = {key.split(".")[-1]: value for key, value in found.items() if key != "settings.model.device"}
    rule = shown.get("acceptance")
    return [(name, _said(shown[name])) for name in _FACTS if name in shown and _UNUSED.get(name, rule) == rule]


def left_out(arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm what counts and what does not: excluded requests by reason, and those without a score.

    Returns:
        [{"label", "n", "n_excluded", "n_scored", "n_timed", "undefined", "harness_errors", "unscored",
        "failures", "reasons": [(benchmark, reason, [id])]}]
    """
    return [_left_out(arm.label, summaries[arm.label]) for arm in arms]


def excluded_grid(arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Every excluded request: excluded.csv."""
    columns = tuple(Column(key, key) for key in ("arm", "benchmark", "id", "why"))
    lines = [
        Line(tuple(map(text, (arm.label, one["benchmark"], one["id"], one["reason"]))))
        for arm in arms
        for one in summaries[arm.label]["excluded"]
    ]
    return Grid("excluded", "Requests that are in no figure", columns, tuple(lines))


def _left_out(label: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    pooled = summary["pooled"]
    counts = ("n", "n_excluded", "n_scored", "n_timed", "n_undefined_speedup", "harness_errors", "unscored", "failures")
    reasons = Counter((one["benchmark"], one["reason"]) for one in summary["excluded"])
    ids = {key: [o["id"] for o in summary["excluded"] if (o["benchmark"], o["reason"]) == key] for key in reasons}
    return {"label": label} | {k: pooled[k] for k in counts} | {"reasons": [(*key, ids[key]) for key in reasons]}


def _said(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
