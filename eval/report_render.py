"""The pages: what report.html and report.md are filled with."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.compare import QUALITY_SERVED
from eval.definitions import FIGURES
from eval.report_change import arm_rows, before_after, brief, quality_rows, scopes_of
from eval.report_grid import Grid
from eval.report_paper import benchmark_name, paper
from eval.report_provenance import facts, left_out
from eval.report_replay import embedded, replays
from eval.report_runs import Evidence, Run
from recipes.schema import Report

_TEMPLATES = Path(__file__).with_name("templates")
_SCOPES = {"average": "macro"}


@dataclass(frozen=True)
class Found:
    """All that a report says: the evidence, `compare`'s result and the verdicts of each run, each arm's summary."""

    evidence: Evidence
    changes: dict[str, dict[str, Any]]
    verdicts: dict[str, dict[str, list[dict[str, str]]]]
    summaries: dict[str, dict[str, Any]]
    forced: list[str]


def legend(run: Run, bases: bool = True) -> tuple[str, ...]:
    """The series of a run's charts; `bases` tells the two forms of an after-figure apart."""
    before, after = f"before ({run.before.label})", f"after ({run.after.label})"
    return (before, f"{after}, own base", "after, base of before") if bases else (before, after)


def page_context(
    found: Found, grids: Mapping[str, Grid], charts: Mapping[str, Mapping[str, Any]], settings: Report
) -> dict[str, Any]:
    """What both templates are filled with."""
    arms = found.evidence.arms
    return {
        "title": ", ".join(run.name for run in found.evidence.runs),
        "runs": [_run(run, found, charts[run.name]) for run in found.evidence.runs],
        "arms": [{"label": arm.label, "facts": facts(arm)} for arm in arms],
        "summaries": found.summaries,
        "forced": found.forced,
        "shared": found.evidence.shared,
        "grids": grids,
        "paper": paper(),
        "left_out": left_out(arms, found.summaries),
        "definitions": [*FIGURES, QUALITY_SERVED],
        "confidence": f"{100 * settings.confidence:g}%",
        "alpha": f"{1 - settings.confidence:.3g}",
        "samples": settings.bootstrap,
    }


def _run(run: Run, found: Found, charts: Mapping[str, Any]) -> dict[str, Any]:
    change = found.changes[run.name]
    labels = list(dict.fromkeys((run.before.label, run.after.label, run.quality_before.label)))
    return {
        "name": run.name,
        "change": change,
        "verdicts": found.verdicts[run.name],
        "scopes": {name: _scope(change, name, section) for name, section in scopes_of(change).items()},
        "labels": labels,
        "arm_rows": {name: arm_rows(labels, found.summaries, name) for name in change["benchmarks"]},
        "charts": charts,
        "legend": legend(run),
        "legend_kept": legend(run, bases=False),
    }


def _scope(change: Mapping[str, Any], name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    quality = quality_rows(change, _SCOPES.get(name, name))
    return {
        "n": section["n"],
        "groups": before_after(section) + quality,
        "short": before_after(section, short=True) + quality,
        "brief": brief(section, quality),
        "short_ending": before_after(section["ends_by_itself"], short=True),
        "n_ending": section["ends_by_itself"]["n"],
    }


def shown_requests(found: Found, limit: int) -> dict[str, Any]:
    """What the page's replay steps through: `limit` requests of each benchmark of each run."""
    runs = [
        {
            "name": run.name,
            "arms": {"before": run.before.label, "after": run.after.label},
            "benchmarks": replays({"before": run.before, "after": run.after}, limit),
        }
        for run in found.evidence.runs
    ]
    return {"runs": [run for run in runs if run["benchmarks"]]}


def markdown(context: Mapping[str, Any]) -> str:
    """A short report, for a pull request."""
    return _environment(autoescape=False).get_template("report.md.j2").render(context)


def html(context: Mapping[str, Any], replay: Mapping[str, Any]) -> str:
    """One page that needs nothing else; its policy allows its own script by hash and no other."""
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    return (
        _environment(autoescape=True)
        .get_template("report.html.j2")
        .render(
            context,
            replay=Markup(embedded(replay)),
            has_replay=bool(replay["runs"]),
            style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _environment(autoescape: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _cell
    environment.filters["named"] = benchmark_name
    environment.filters["svg"] = Markup
    return environment


def _cell(text: Any) -> str:
    """Text that stays one plain cell of a Markdown table."""
    flat = " ".join(str(text).split())
    for mark in "\\`*_[]|<>":
        flat = flat.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return flat
