"""The figures of one arm: pure functions of the lines of requests.jsonl and timings.jsonl."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.definitions import BY_NAME, FIGURES, Figure
from eval.resampling import Array, Estimate, average, estimate, interval, seed_for
from headstart.residual import kept_share

Line = Mapping[str, Any]
Table = dict[str, Array]

HARNESS_ERROR = "harness error"
LEAST_PASSES = 1  # an answer that is kept whole still costs its verification
TURNED = 0.1  # the change of a score that counts as turned; pass or fail changes by 1
FAST = 2.0  # the speedup in passes from which an answer can be fast but wrong
LIMITS = {"1x": 1.0, "09x": 0.9, "08x": 0.8}
# Quotients of one request: column -> numerator and denominator.
QUOTIENTS = {
    "speedup_passes": ("base_passes", "stream_passes"),
    "speedup_passes_paper": ("base_passes", "stream_passes_paper"),
    "speedup_passes_lookup": ("base_passes_lookup", "stream_passes"),
    "speedup_passes_recycle": ("base_passes_lookup", "stream_passes_recycle"),
    "speedup_seconds": ("base_seconds", "stream_seconds_cold"),
    "speedup_seconds_session": ("base_seconds", "stream_seconds"),
    "lookup_gain": ("base_passes", "base_passes_lookup"),
    "total_over_base": ("total_passes", "base_passes"),
    "unseen_share": ("unseen_characters", "turn_characters"),
    "unseen_tokens_share": ("unseen_tokens", "turn_tokens"),
}
_NOTE = re.compile(r"(base|stream): (.*?)(?:; (?=stream: )|$)")  # of a line's score_note
KEPT = {"none": "keeps_nothing", "some": "keeps_some", "all": "keeps_all", "no_draft": "no_draft"}


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
    `unscored`; an answer that fails its tests has the score 0 and stays, and `failures` counts the reasons.
    `n_undefined_speedup` counts requests with a residual of zero passes, which have no speedup; `n_zero_denominator`
    counts, for each of QUOTIENTS that has some, the requests that have none for such a reason.

    Args:
        records_by_benchmark: lines of requests.jsonl.
        timings: lines of timings.jsonl; those of other requests are ignored.

    Returns:
        `benchmarks` (figures of each), `macro` (mean of the benchmarks' values, resampled within each), `pooled` (all
        requests as one set), and `excluded`: [{"id", "benchmark", "reason"}]. Figures are `n`, `n_excluded`,
        `n_timed`, `n_scored`, `n_by_figure`, and each figure as {"value", "low", "high"}: value is None with no
        request to rest on, low and high are None below two. Benchmarks and pooled have `by_kept` too, see there.
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
            | {"by_kept": by_kept(rows[name], confidence, samples, seed_for(seed, name))}
            for name, records in records_by_benchmark.items()
        },
        "macro": _rendered(everything, all_rows, macro, confidence),
        "pooled": _rendered(everything, all_rows, pooled, confidence)
        | {"by_kept": by_kept(all_rows, confidence, samples, seed_for(seed, "pooled"))},
        "excluded": excluded(everything),
    }


def by_kept(rows: Table, confidence: float, samples: int, seed: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Quality and speed of the requests that keep none, some or all of their draft, or have none (KEPT).

    Each group has `n`, `n_scored`, and `quality_base`, `quality_stream`, `speedup_passes_median` as {"value", "low",
    "high"}, resampled within the group. The groups are disjoint, and together they are all included requests.
    """
    result = {}
    for name, column in KEPT.items():
        group = {key: values[rows[column] == 1] for key, values in rows.items()}
        wanted = ("quality_base", "quality_stream", "speedup_passes_median")
        found = {figure: _estimate(BY_NAME[figure], group, samples, seed) for figure in wanted}
        counts = {"n": len(group[column]), "n_scored": found["quality_base"].n}
        result[name] = counts | {figure: interval(e.value, e.draws, confidence) for figure, e in found.items()}
    return result


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


def failures(records: Iterable[Line]) -> dict[str, dict[str, int]]:
    """Why answers got the score 0, by side: reason -> how many.

    "extraction" and "format" are answers in which no program was found, which says something else of a model than
    wrong programs do.
    """
    found = {side: Counter[str]() for side in ("base", "stream")}
    for record in records:
        for side, note in _NOTE.findall(record["score_note"] or ""):
            found[side].update([note] if record[f"{side}_score"] == 0 and note != "scored" else [])
    return {side: dict(counts.most_common()) for side, counts in found.items()}


def table(records: Sequence[Line], timings: Iterable[Line]) -> Table:
    """One column a quantity, one row a request, (n,) each; NaN where it is undefined for that request.

    Args:
        records: included requests only. Counts that a line does not have (no look-up, an older run) are undefined.
    """
    timed = {t["id"]: t for t in timings}
    clock = [timed.get(r["id"], {}) for r in records]
    scored = [r if _scored(r) else {} for r in records]
    counts = {key: _column(r.get(key) for r in records) for key in _COUNTS}
    scores = {key: _column(r.get(key) for r in scored) for key in ("base_score", "stream_score")}
    seconds = {key: _column(t.get(key) for t in clock) for key in _SECONDS}
    raw = {
        **counts,
        **scores,
        **seconds,
        **_kept(counts),
        "kept_share": _column(kept_share(r["draft_tokens"], r["kept_tokens"]) for r in records),
        "turned_wrong": _where(scores["base_score"] - scores["stream_score"], at_least=TURNED),
        "turned_right": _where(scores["stream_score"] - scores["base_score"], at_least=TURNED),
        "ends": _column(float(ends_by_itself(r)) for r in records),
        "answer_tokens": _column(len(r["stream"]["tokens"]) for r in records),
        "unseen_characters": _column(len(r["sentences"][-1]) for r in records),
        "turn_characters": _column(sum(map(len, r["sentences"])) for r in records),
    }
    return with_speedups(raw)


def with_speedups(raw: Table) -> Table:
    """The table with the columns that rest on both sides' cost, computed anew from its counts and seconds."""
    quotients = {name: _divided(raw[above], raw[below]) for name, (above, below) in QUOTIENTS.items()}
    slow = {
        f"below_{limit}{count}": _where(quotients[column], below=bound)
        for limit, bound in LIMITS.items()
        for count, column in (("", "speedup_seconds"), ("_paper", "speedup_passes_paper"))
    }
    of_scored = np.where(np.isnan(raw["turned_wrong"]), np.nan, quotients["speedup_passes"])
    fast = _where(of_scored, at_least=FAST)
    return {
        **raw,
        **quotients,
        **slow,
        "ceiling": raw["base_passes"] / LEAST_PASSES,
        "passes_removed": raw["base_passes"] - raw["stream_passes"],
        "fast": fast,
        "fast_but_wrong": fast * raw["turned_wrong"],
    }


def ends_by_itself(record: Line) -> bool:
    """Whether both answers reach their end of turn within the limit."""
    return record["base"]["stop"] == "end" and record["stream"]["stop"] == "end"


def columns_of(rows: Table, figure: Figure) -> Array:
    """The figure's columns, stacked: (1 or 2, n), NaN where undefined."""
    return np.stack([rows[name] for name in figure.columns])


def _estimates(rows: Table, samples: int, seed: Sequence[int]) -> dict[str, Estimate]:
    return {figure.name: _estimate(figure, rows, samples, seed) for figure in FIGURES}


def _estimate(figure: Figure, rows: Table, samples: int, seed: Sequence[int]) -> Estimate:
    columns = columns_of(rows, figure)
    defined = ~np.isnan(columns).any(axis=0)
    return estimate(figure.estimator, columns[:, defined], samples, seed)


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
        "failures": failures(inside),
        "n_undefined_speedup": int(np.sum(np.isnan(rows["speedup_passes"]))),
        "n_zero_denominator": {name: n for name in QUOTIENTS if (n := int(np.sum(rows[QUOTIENTS[name][1]] == 0)))},
        "n_by_figure": {name: e.n for name, e in estimates.items()},
        **{name: interval(e.value, e.draws, confidence) for name, e in estimates.items()},
    }


_COUNTS = (
    "base_passes", "stream_passes", "stream_passes_paper", "total_passes", "draft_tokens", "kept_tokens",
    "base_passes_lookup", "stream_passes_recycle", "unseen_tokens", "turn_tokens",
)  # fmt: skip
_SECONDS = ("base_seconds", "stream_seconds", "stream_seconds_cold")


def _kept(counts: Table) -> Table:
    """What became of the last draft, as flags: exactly one of `no_draft`, `keeps_nothing`, `_some`, `_all` is set."""
    draft, kept = counts["draft_tokens"], counts["kept_tokens"]
    return {
        "no_draft": _flags(draft == 0),
        "keeps_nothing": _flags((draft > 0) & (kept == 0)),
        "keeps_some": _flags((kept > 0) & (kept < draft)),
        "keeps_all": _flags((kept > 0) & (kept == draft)),
        "one_pass": _flags(counts["stream_passes"] == 1),
        "one_pass_paper": _flags(counts["stream_passes_paper"] == 1),
    }


def _scored(record: Line) -> bool:
    return record["base_score"] is not None and record["stream_score"] is not None


def _column(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def _flags(condition: np.ndarray) -> Array:
    return condition.astype(np.float64)


def _where(values: Array, at_least: float = -np.inf, below: float = np.inf) -> Array:
    """1 where the value lies in [at_least, below), else 0; NaN stays. 0.6 - 0.5 counts as 0.1."""
    inside = (values >= at_least - 1e-9) & (values < below)
    return np.where(np.isnan(values), np.nan, _flags(inside))


def _divided(numerator: Array, denominator: Array) -> Array:
    """NaN where the denominator is zero or either side is undefined."""
    out = np.full_like(numerator, np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator > 0)
