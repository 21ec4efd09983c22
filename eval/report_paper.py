"""The paper's Tables 1, 2 and 3, in its own layout: our rows first, the paper's after them."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eval.definitions import AGAINST_BEFORE, BY_NAME
from eval.evidence import Arm
from eval.report_absent import NOT_TIMED, why, why_paired
from eval.report_change import scopes_of
from eval.report_grid import Cell, Column, Grid, Line, estimate, missing, printed, text

_NOT_PRINTED = "not given in the paper"
_ONE_COUNT = missing("the paper has its own count only")
_LEFT_OUT = "no request was scored in both arms"
_QUALITY = (
    Column("quality_base", "base", "share", "quality"),
    Column("quality_stream", "stream", "share", "quality"),
)
_AFTER = "passes after the final token, median"
_PASSES = (
    Column("base_passes_median", "base", "passes", _AFTER),
    Column("stream_passes_paper_median", "stream, paper’s count", "passes", _AFTER),
    Column("stream_passes_median", "stream, our count", "passes", _AFTER),
)
_SPEED = (
    Column("speedup_passes_paper_mean", "mean", "times", "speedup in passes, paper’s count"),
    Column("speedup_passes_paper_median", "median", "times", "speedup in passes, paper’s count"),
    Column("speedup_passes_mean", "mean", "times", "speedup in passes, our count"),
    Column("speedup_passes_median", "median", "times", "speedup in passes, our count"),
    Column("speedup_seconds_mean", "mean", "times", "speedup in wall clock"),
    Column("speedup_seconds_median", "median", "times", "speedup in wall clock"),
)
_NAMES = tuple(Column(key, key) for key in ("source", "model", "benchmark", "n"))
_CLOCK = (Column("n_timed", "n timed", group="wall clock"), Column("hardware", "on", group="wall clock"))
_TABLE3_NAMES = (
    "source", "model", "benchmark", "n", "n_quality", "quality_arm_before", "speed_arm_before", "count", "base_of",
)  # fmt: skip
_TABLE3 = (
    *(Column(key, key.replace("_", " ")) for key in _TABLE3_NAMES),
    Column("quality_before", "quality before", "share"),
    Column("quality_after", "quality after", "share"),
    Column("quality_after_base", "after, base answer", "share"),
    Column("median_speedup_before", "median speedup before", "times"),
    Column("median_speedup_after", "median speedup after", "times"),
)
_COUNTS = (("speedup_passes_median", "max(1, N-k)"), ("speedup_passes_paper_median", "1+N-k"))
_OUR_COUNT = "Our count of the passes after the final token is max(1, N - k), the paper’s is 1 + N - k."
_AVERAGE = "“average” is the mean over the benchmarks above it, each with equal weight; ours are {names}."


@cache
def paper() -> dict[str, Any]:
    """The paper's numbers, and where it does not agree with itself."""
    return yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8"))


def benchmark_name(scope: str) -> str:
    """A benchmark as the paper prints it, and its metric; MT-Bench, part of the paper's chat, stands by itself here."""
    return {**paper()["benchmarks"], "mtbench": "MT-Bench (F1)"}.get(scope, scope)


def model_name(key: str, variant: str | None = None) -> str:
    """A model of the paper."""
    name = paper()["models"][key]["name"]
    return f"{name}, {variant}" if variant else name


def footnotes(table: str) -> tuple[str, ...]:
    """What the paper says of a table's numbers that does not fit them."""
    found = [d["text"] for d in paper()["disagreements"] if table in d["about"]]
    return tuple(f"The paper does not agree with itself: {line}" for line in found)


def table1(arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Table 1's layout: quality, median passes after the final token, speedups. The paper's rows are ReFusion-8B's."""
    columns = (*_NAMES, *_QUALITY, *_PASSES, *_SPEED, *_CLOCK)
    lines = [*_our_lines(arms, summaries, (*_QUALITY, *_PASSES, *_SPEED)), *_their_lines("table1", True)]
    title = "Table 1: base and stream of each model, with the passes after the final token"
    notes = (*_notes(arms, summaries), "The paper prints no average row; ReFusion-8B’s is computed from its rows.")
    return Grid("table1", title, columns, tuple(lines), (*notes, *footnotes("table1")))


def table2(arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Table 2's layout: quality and speedups. The paper's rows are its three autoregressive models, not adapted."""
    columns = (*_NAMES, *_QUALITY, *_SPEED, *_CLOCK)
    lines = [*_our_lines(arms, summaries, (*_QUALITY, *_SPEED)), *_their_lines("table2", False)]
    title = "Table 2: base and stream of each model"
    return Grid("table2", title, columns, tuple(lines), (*_notes(arms, summaries), *footnotes("table2")))


def table3(runs: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Table 3's layout: before -> after.

    `count` says how residual passes are counted, `base_of` whose base passes the after-speedup is taken against,
    `quality_arm_before` and `speed_arm_before` which arms the before-columns are of. Quality is that of the streamed
    answers, speedups are medians in passes.

    Args:
        runs: run -> `compare`'s result.
    """
    ours = [line for run, change in runs.items() for line in _changes(run, change)]
    theirs = [_published_change(row) for row in paper()["table3"]]
    notes = (
        "Quality is that of the streamed answers. The paper gives no adapted model’s base quality; ours stands beside.",
        f"{_OUR_COUNT} “Base of” says whose base passes the after-speedup is taken against.",
        paper()["remarks"]["table3"],
        *footnotes("table3"),
    )
    return Grid("table3", "Table 3: before and after adaptation", _TABLE3, (*ours, *theirs), notes)


def _our_lines(
    arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]], columns: Sequence[Column]
) -> list[Line]:
    lines = []
    for arm in arms:
        for scope, figures in scopes_of(summaries[arm.label]).items():
            if scope != "pooled":
                names = ("measured", arm.label, benchmark_name(scope), figures["n"])
                clock = text(arm.summary["device"]) if figures["n_timed"] else missing(NOT_TIMED)
                cells = [_figure(figures, c.key) for c in columns]
                lines.append(Line((*map(text, names), *cells, text(figures["n_timed"]), clock)))
    return lines


def _figure(figures: Mapping[str, Any], name: str) -> Cell:
    return estimate(figures[name], BY_NAME[name].unit, why(name, figures))


def _their_lines(table: str, with_passes: bool) -> list[Line]:
    lines = []
    for model, rows in paper()[table].items():
        for scope, row in rows.items():
            name = {"computed": "average, computed"}.get(scope, benchmark_name(scope))
            passes = [*(printed(v, "passes", 0) for v in row["passes"]), _ONE_COUNT] if with_passes else []
            cells = [
                *(printed(value, "share") for value in row["quality"]),
                *passes,
                *(printed(value, "times") for value in row["by_passes"]),
                *[_ONE_COUNT] * 2,
                *(printed(value, "times") for value in row["by_seconds"]),
            ]
            names = map(text, ("paper", model_name(model), name))
            hardware = text(paper()["models"][model]["hardware"])
            lines.append(Line((*names, missing(_NOT_PRINTED), *cells, missing(_NOT_PRINTED), hardware), "paper"))
    return lines


def _notes(arms: Sequence[Arm], summaries: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    names = list(dict.fromkeys(name for arm in arms for name in summaries[arm.label]["benchmarks"]))
    clock = "Wall clock is of the hardware in the last column: ratios of seconds do not carry over to other hardware."
    return (_OUR_COUNT, clock, *([_AVERAGE.format(names=", ".join(names))] if len(names) > 1 else []))


def _changes(run: str, change: Mapping[str, Any]) -> list[Line]:
    scopes = {name: part for name, part in scopes_of(change).items() if name != "pooled"}
    return [
        _change(run, change, scope, section, stem, count, suffix)
        for scope, section in scopes.items()
        for stem, count in _COUNTS
        for suffix in ("", AGAINST_BEFORE)
    ]


def _change(
    run: str, change: Mapping[str, Any], scope: str, section: Mapping[str, Any], stem: str, count: str, suffix: str
) -> Line:
    quality = change["quality"]
    graded = quality["macro"] if scope == "average" else quality["benchmarks"].get(scope)
    figures = graded["figures"] if graded else {}
    scored = figures["quality_stream"]["n"] if figures else 0
    speed, base_of = section["figures"][stem + suffix], "before" if suffix else "after"
    arm_before = text(change["quality_before"]) if scored else missing(_LEFT_OUT)
    names = map(text, ("measured", run, benchmark_name(scope), speed["n"], scored))
    return Line(
        (
            *names,
            arm_before,
            *map(text, (change["before"], count, base_of)),
            *(
                estimate(figures[name][side], "share", _LEFT_OUT) if figures else missing(_LEFT_OUT)
                for name, side in (("quality_stream", "before"), ("quality_stream", "after"), ("quality_base", "after"))
            ),
            *(estimate(speed[side], "times", why_paired(stem)) for side in ("before", "after")),
        )
    )


def _published_change(row: Mapping[str, Any]) -> Line:
    names = ("paper", model_name(row["model"], row.get("variant")), benchmark_name(row["scope"]))
    return Line(
        (
            *map(text, names),
            *[missing(_NOT_PRINTED)] * 4,
            text("as printed"),
            text("after"),
            *(printed(value, "share") for value in row["quality"]),
            missing(_NOT_PRINTED),
            *(printed(value, "times") for value in row["median"]),
        ),
        "paper",
    )
