"""Writes the report: report.html, report.md, report.json, table3.csv and figures/."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.compare import QUALITY_SERVED, against_before, compare
from eval.definitions import FIGURES
from eval.evidence import Arm, read_arms
from eval.metrics import Table, summarise, table
from eval.pairing import paired
from eval.report_figures import drawn
from eval.report_replay import embedded, replays
from eval.report_tables import (
    arm_rows,
    as_csv,
    before_after,
    facts,
    paper,
    provenance,
    quality_rows,
    table3,
    unseen_rows,
)
from eval.verdict import verdicts
from recipes.schema import Report

_TEMPLATES = Path(__file__).with_name("templates")


def build_report(
    before_dir: Path,
    after_dir: Path,
    quality_before_dir: Path | None,
    out_dir: Path,
    settings: Report,
    seed: int,
    recipe_name: str,
) -> Path:
    """Reads the arms' folders and writes the report into `out_dir`; returns the path of report.html.

    Raises:
        UserError: where a folder is incomplete or broken, or the arms cannot be compared.
    """
    folders = [before_dir, after_dir, *([quality_before_dir] if quality_before_dir else [])]
    distinct = list(dict.fromkeys(folders))
    arms = dict(zip(distinct, read_arms(*distinct), strict=True))
    before, after, *rest = (arms[folder] for folder in folders)
    change = compare(before, after, rest[0] if rest else None, settings.confidence, settings.bootstrap, seed)
    summaries = {arm.label: _summary(arm, settings, seed) for arm in arms.values()}
    found = _verdicts(change)
    out_dir.mkdir(parents=True, exist_ok=True)
    charts = drawn(_tables(before, after), before.label, after.label, out_dir / "figures")
    context = _context(recipe_name, change, summaries, found, list(arms.values()), settings)
    replay = {"benchmarks": replays({"before": before, "after": after}, settings.replays), "limit": settings.replays}
    _write(out_dir / "report.json", _json(recipe_name, change, summaries, found))
    _write(out_dir / "table3.csv", as_csv(context["table3"]))
    _write(out_dir / "report.md", _environment(autoescape=False).get_template("report.md.j2").render(context))
    _write(out_dir / "report.html", _html(context, charts, replay))
    return out_dir / "report.html"


def _summary(arm: Arm, settings: Report, seed: int) -> dict[str, Any]:
    """The arm's summary.json with its figures computed anew from its requests, at the report's confidence."""
    fresh = summarise(arm.by_benchmark(), arm.timings, settings.confidence, settings.bootstrap, seed)
    return dict(arm.summary) | fresh


def _verdicts(change: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    scopes: dict[str, str | None] = {name: name for name in change["benchmarks"]}
    if len(scopes) > 1:
        scopes |= {"macro": None}
    return {title: [asdict(v) for v in verdicts(change, scope)] for title, scope in scopes.items()}


def _tables(before: Arm, after: Arm) -> dict[str, tuple[Table, Table, Table]]:
    result = {}
    for name, pairs in paired(before, after).items():
        earlier = table([b for b, _ in pairs], before.timings)
        later = table([a for _, a in pairs], after.timings)
        result[name] = earlier, later, against_before(earlier, later)
    return result


def _context(
    recipe_name: str,
    change: Mapping[str, Any],
    summaries: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Any],
    arms: Sequence[Arm],
    settings: Report,
) -> dict[str, Any]:
    scopes: dict[str, Mapping[str, Any]] = dict(change["benchmarks"])
    if len(scopes) > 1:
        scopes |= {"macro": change["macro"], "pooled": change["pooled"]}
    return {
        "recipe": recipe_name,
        "change": change,
        "summaries": summaries,
        "verdicts": found,
        "labels": [arm.label for arm in arms],
        "scopes": {name: _scope(change, name, section) for name, section in scopes.items()},
        "arm_rows": {name: arm_rows(summaries, name) for name in change["benchmarks"]},
        "table3": table3(change, recipe_name),
        "paper": paper(),
        "unseen": unseen_rows(summaries[change["after"]]),
        "provenance": provenance(arms),
        "facts": {arm.label: facts(arm) for arm in arms},
        "definitions": [*FIGURES, QUALITY_SERVED],
        "confidence": f"{100 * settings.confidence:g}%",
        "samples": settings.bootstrap,
    }


def _scope(change: Mapping[str, Any], name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n": section["n"],
        "groups": before_after(section) + quality_rows(change, name),
        "short": before_after(section, short=True) + quality_rows(change, name),
        "short_ending": before_after(section["ends_by_itself"], short=True),
        "n_ending": section["ends_by_itself"]["n"],
        "ending": before_after(section["ends_by_itself"]),
    }


def _json(recipe_name: str, change: Any, summaries: Any, found: Any) -> str:
    whole = {"recipe": recipe_name, "arms": summaries, "change": change, "verdicts": found, "paper": paper()}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def _html(context: Mapping[str, Any], charts: Mapping[str, str], replay: Any) -> str:
    """One page that needs nothing else; its policy allows its own script by hash and no other."""
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment(autoescape=True)
        .get_template("report.html.j2")
        .render(
            context,
            charts={name: Markup(svg) for name, svg in charts.items()},
            replay=Markup(embedded(replay)),
            has_replay=bool(replay["benchmarks"]),
            style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=digest,
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
    return environment


def _cell(text: Any) -> str:
    """Text that stays one plain cell of a Markdown table."""
    flat = " ".join(str(text).split())
    for mark in "\\`*_[]|<>":
        flat = flat.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return flat


def _write(path: Path, text: str) -> None:
    """UTF-8; half a surrogate pair, which a model can write, becomes a question mark."""
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")
