"""The figures of one arm: pure functions of the lines of requests.jsonl and timings.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.definitions import FIGURES, Figure
from eval.resampling import Array, Estimate, average, estimate, interval, seed_for
from headstart.residual import kept_share

Line = Mapping[str, Any]
Table = dict[str, Array]

HARNESS_ERROR = "harness error"


def summarise(
    records_by_benchmark: Mapping[str, Sequence[Line]],
    timings: Iterable[Line],
    confidence: float,
    samples: int,
    seed: int,
) -> dict[str, Any]:
    """Every figure of design.md's result contract, and how many requests each rests on.

    Excluded requests leave every figure and are counted in `n_excluded`. A request without a score on either side
    leaves both quality figures: those that the scorer itself failed on are listed in `harness_errors`, the rest in
    `unscored`; an answer that fails its tests has the score 0 and stays. `n_undefined_speedup` counts requests with
    a residual of zero passes, which have no speedup.

    Args:
        records_by_benchmark: lines of requests.jsonl.
        timings: lines of timings.jsonl; those of other requests are ignored.

    Returns:
        `benchmarks` (figures of each), `macro` (mean of the benchmarks' values, resampled within each), `pooled` (all
        requests as one set), and `excluded`: [{"id", "benchmark", "reason"}]. Figures are `n`, `n_excluded`,
        `n_timed`, `n_scored`, `n_by_figure`, and each figure as {"value", "low", "high"}: value is None with no
        request to rest on, low and high are None below two.
    """
    timings = list(timings)
    everything = [record for records in records_by_benchmark.values() for record in records]
    rows = {name: table(included(records), timings) for name, records in records_by_benchmark.items()}
    estimates = {name: _estimates(rows[name], samples, seed_for(seed, name)) for name in rows}
    all_rows = table(included(everything), timings)
    macro = {f.name: average([estimates[name][f.name] for name in rows]) for f in FIGURES}
    pooled = _estimates(all_rows, samples, seed_for(seed, "pooled"))
    return {
        "benchmarks": {
            name: _rendered(records, rows[name], estimates[name], confidence)
            for name, records in records_by_benchmark.items()
        },
        "macro": _rendered(everything, all_rows, macro, confidence),
        "pooled": _rendered(everything, all_rows, pooled, confidence),
        "excluded": excluded(everything),
    }


def included(records: Iterable[Line]) -> list[Line]:
    """The requests that every figure rests on."""
    return [r for r in records if r["excluded"] is None]


def excluded(records: Iterable[Line]) -> list[dict[str, str]]:
    """The others, with the reason of each."""
    return [
        {"id": r["id"], "benchmark": r["benchmark"], "reason": r["excluded"]}
        for r in records
        if r["excluded"] is not None
    ]


def harness_error(record: Line) -> bool:
    """Whether the scorer, not the answer, failed: no score on one side, and its note says so."""
    return not _scored(record) and HARNESS_ERROR in (record["score_note"] or "")


def table(records: Sequence[Line], timings: Iterable[Line]) -> Table:
    """One column a quantity, one row a request, (n,) each; NaN where it is undefined for that request.

    Args:
        records: included requests only.
    """
    timed = {t["id"]: t for t in timings}
    clock = [timed.get(r["id"], {}) for r in records]
    scored = [_scored(r) for r in records]
    draft, kept = _column(r["draft_tokens"] for r in records), _column(r["kept_tokens"] for r in records)
    unseen = _column(len(r["sentences"][-1]) for r in records)
    stream_passes = _column(r["stream_passes"] for r in records)
    raw = {
        "base_score": _column(r["base_score"] if s else None for r, s in zip(records, scored, strict=True)),
        "stream_score": _column(r["stream_score"] if s else None for r, s in zip(records, scored, strict=True)),
        "base_passes": _column(r["base_passes"] for r in records),
        "stream_passes": stream_passes,
        "stream_passes_paper": _column(r["stream_passes_paper"] for r in records),
        "total_passes": _column(r["total_passes"] for r in records),
        "draft_tokens": draft,
        "kept_tokens": kept,
        "kept_share": _column(kept_share(r["draft_tokens"], r["kept_tokens"]) for r in records),
        "one_pass": _flags(stream_passes == 1),
        "keeps_nothing": _flags((draft > 0) & (kept == 0)),
        "no_draft": _flags(draft == 0),
        "ends": _column(float(ends_by_itself(r)) for r in records),
        "answer_tokens": _column(len(r["stream"]["tokens"]) for r in records),
        "unseen_characters": unseen,
        "unseen_share": _divided(unseen, _column(sum(map(len, r["sentences"])) for r in records)),
        "base_seconds": _column(t.get("base_seconds") for t in clock),
        "stream_seconds": _column(t.get("stream_seconds") for t in clock),
        "stream_seconds_cold": _column(t.get("stream_seconds_cold") for t in clock),
    }
    return with_speedups(raw)


def with_speedups(raw: Table) -> Table:
    """The table with the columns that divide the base side's cost by the streamed side's."""
    seconds = _divided(raw["base_seconds"], raw["stream_seconds_cold"])
    return raw | {
        "speedup_passes": _divided(raw["base_passes"], raw["stream_passes"]),
        "speedup_passes_paper": _divided(raw["base_passes"], raw["stream_passes_paper"]),
        "speedup_seconds": seconds,
        "speedup_seconds_session": _divided(raw["base_seconds"], raw["stream_seconds"]),
        "below_1x": np.where(np.isnan(seconds), np.nan, _flags(seconds < 1)),
    }


def ends_by_itself(record: Line) -> bool:
    """Whether both answers reach their end of turn within the limit."""
    return record["base"]["stop"] == "end" and record["stream"]["stop"] == "end"


def columns_of(rows: Table, figure: Figure) -> Array:
    """The figure's columns, stacked: (1 or 2, n), NaN where undefined."""
    return np.stack([rows[name] for name in figure.columns])


def _estimates(rows: Table, samples: int, seed: Sequence[int]) -> dict[str, Estimate]:
    result = {}
    for figure in FIGURES:
        columns = columns_of(rows, figure)
        defined = ~np.isnan(columns).any(axis=0)
        result[figure.name] = estimate(figure.estimator, columns[:, defined], samples, seed)
    return result


def _rendered(
    records: Sequence[Line], rows: Table, estimates: Mapping[str, Estimate], confidence: float
) -> dict[str, Any]:
    inside = included(records)
    without_score = [r for r in inside if not _scored(r)]
    return {
        "n": len(inside),
        "n_excluded": len(records) - len(inside),
        "n_timed": int(np.sum(~np.isnan(rows["base_seconds"]))),
        "n_scored": len(inside) - len(without_score),
        "harness_errors": [r["id"] for r in without_score if harness_error(r)],
        "unscored": [r["id"] for r in without_score if not harness_error(r)],
        "n_undefined_speedup": int(np.sum(np.isnan(rows["speedup_passes"]))),
        "n_by_figure": {name: e.n for name, e in estimates.items()},
        **{name: interval(e.value, e.draws, confidence) for name, e in estimates.items()},
    }


def _scored(record: Line) -> bool:
    return record["base_score"] is not None and record["stream_score"] is not None


def _column(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def _flags(condition: np.ndarray) -> Array:
    return condition.astype(np.float64)


def _divided(numerator: Array, denominator: Array) -> Array:
    """NaN where the denominator is zero or either side is undefined."""
    out = np.full_like(numerator, np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)
