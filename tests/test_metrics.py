"""The figures of one arm, recomputed here by a few independent lines."""

import json
import random
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from synthetic_arms import left_out, record, records, timings

from eval.definitions import FIGURES
from eval.metrics import summarise
from headstart.residual import kept_share, residual, residual_paper, speedup, total_passes

QUICK: dict[str, Any] = {"confidence": 0.95, "samples": 200, "seed": 0}
CONTRACT = {
    "quality_base",
    "quality_stream",
    "base_passes_median",
    "stream_passes_median",
    "speedup_passes_mean",
    "speedup_passes_median",
    "speedup_seconds_mean",
    "speedup_seconds_median",
    "kept_share",
    "kept_share_pooled",
    "kept_tokens_mean",
    "one_pass_share",
    "keeps_nothing_share",
    "no_draft_share",
    "below_1x_share",
    "ends_by_itself_share",
}


def plain(name: str, **changed: Any) -> dict[str, Any]:
    return record(random.Random(name), name, "b", 0.5) | changed


def figures(
    found: list[dict[str, Any]], clock: list[dict[str, Any]], confidence: float, samples: int, seed: int
) -> Any:
    """The figures of one benchmark."""
    name = found[0]["benchmark"]
    return summarise({name: found}, clock, confidence, samples, seed)["benchmarks"][name]


def test_residual_of_one_request() -> None:
    assert [residual(10, 0), residual(10, 4), residual(10, 9), residual(10, 10)] == [10, 6, 1, 1]
    assert [residual_paper(10, 0), residual_paper(10, 4), residual_paper(10, 10)] == [11, 7, 1]
    assert (speedup(10, 4), speedup(0.5, 0.25), speedup(3, 0)) == (2.5, 2.0, None)
    assert (kept_share(8, 2), kept_share(8, 0), kept_share(0, 0)) == (0.25, 0.0, None)
    assert total_passes([12, 1, 5]) == 18
    for wrong in ((0, 0), (5, 6), (5, -1)):
        with pytest.raises(ValueError, match="kept"):
            residual(*wrong)
        with pytest.raises(ValueError, match="kept"):
            residual_paper(*wrong)
    with pytest.raises(ValueError, match="kept"):
        kept_share(3, 4)


def test_every_figure_of_the_contract_recomputed() -> None:
    found = records(1, 0.5, 40)
    clock = timings(found)
    got = figures(found, clock, **QUICK)
    rows = [r for r in found if not r["excluded"]]
    scored = [r for r in rows if r["base_score"] is not None]
    drafted = [r for r in rows if r["draft_tokens"]]
    seconds = [t["base_seconds"] / t["stream_seconds_cold"] for t in clock]
    passes = [r["base_passes"] / r["stream_passes"] for r in rows]
    expected = {
        "quality_base": mean(r["base_score"] for r in scored),
        "quality_stream": mean(r["stream_score"] for r in scored),
        "base_passes_median": median(r["base_passes"] for r in rows),
        "stream_passes_median": median(r["stream_passes"] for r in rows),
        "speedup_passes_mean": mean(passes),
        "speedup_passes_median": median(passes),
        "speedup_passes_pooled": sum(r["base_passes"] for r in rows) / sum(r["stream_passes"] for r in rows),
        "speedup_passes_paper_median": median(r["base_passes"] / r["stream_passes_paper"] for r in rows),
        "speedup_seconds_mean": mean(seconds),
        "speedup_seconds_median": median(seconds),
        "speedup_seconds_session_mean": mean(t["base_seconds"] / t["stream_seconds"] for t in clock),
        "kept_share": mean(r["kept_tokens"] / r["draft_tokens"] for r in drafted),
        "kept_share_pooled": sum(r["kept_tokens"] for r in rows) / sum(r["draft_tokens"] for r in rows),
        "kept_tokens_mean": mean(r["kept_tokens"] for r in rows),
        "one_pass_share": mean(r["stream_passes"] == 1 for r in rows),
        "keeps_nothing_share": mean(r["draft_tokens"] > 0 and r["kept_tokens"] == 0 for r in rows),
        "no_draft_share": mean(r["draft_tokens"] == 0 for r in rows),
        "below_1x_share": mean(s < 1 for s in seconds),
        "ends_by_itself_share": mean(r["base"]["stop"] == r["stream"]["stop"] == "end" for r in rows),
        "answer_tokens_mean": mean(len(r["stream"]["tokens"]) for r in rows),
        "unseen_characters_median": median(len(r["sentences"][-1]) for r in rows),
        "unseen_share_mean": mean(len(r["sentences"][-1]) / len("".join(r["sentences"])) for r in rows),
    }
    assert {name: got[name]["value"] for name in expected} == pytest.approx(expected)
    assert CONTRACT <= expected.keys() <= {f.name for f in FIGURES}
    assert (got["n"], got["n_excluded"], got["n_timed"], got["n_scored"]) == (39, 1, len(clock), len(scored))
    assert got["n_by_figure"]["kept_share"] == len(drafted)
    for figure in FIGURES:
        estimate = got[figure.name]
        assert set(estimate) == {"value", "low", "high"}
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    json.dumps(got, allow_nan=False)


def test_a_failed_scorer_is_no_wrong_answer() -> None:
    """Fault 33: 6 pass; assertion, timeout and syntax error fail; one sandbox start failure leaves quality, listed."""
    scores = [1.0] * 6 + [0.0] * 3
    found = [plain(f"b/{i}", base_score=s, stream_score=s) for i, s in enumerate(scores)]
    note = "base: harness error: sandbox did not start; stream: harness error: sandbox did not start"
    found.append(plain("b/9", base_score=None, stream_score=None, score_note=note))
    got = figures(found, [], **QUICK)
    assert got["quality_stream"]["value"] == got["quality_base"]["value"] == pytest.approx(6 / 9)
    assert (got["n"], got["n_scored"], got["harness_errors"], got["unscored"]) == (10, 9, ["b/9"], [])
    assert got["n_by_figure"]["speedup_passes_mean"] == 10


def test_one_failed_side_leaves_both_quality_figures() -> None:
    found = [plain("b/0", base_score=1.0, stream_score=1.0)]
    found.append(plain("b/1", base_score=1.0, stream_score=None, score_note="stream: harness error: killed"))
    got = figures(found, [], **QUICK)
    assert got["n_by_figure"]["quality_base"] == got["n_by_figure"]["quality_stream"] == 1
    assert got["harness_errors"] == ["b/1"]


def test_mean_of_ratios_and_ratio_of_sums_are_two_figures() -> None:
    """Fault 34: 100/50 and 2/2, then a third request with no pass left."""
    found = [
        plain("b/0", base_passes=100, stream_passes=50, kept_tokens=50, draft_tokens=100),
        plain("b/1", base_passes=2, stream_passes=2, kept_tokens=0, draft_tokens=2),
    ]
    got = figures(found, [], **QUICK)
    assert got["speedup_passes_mean"]["value"] == pytest.approx(1.5)
    assert got["speedup_passes_pooled"]["value"] == pytest.approx(102 / 52)
    assert got["kept_share"]["value"] == pytest.approx(0.25)
    assert got["kept_share_pooled"]["value"] == pytest.approx(50 / 102)
    third = figures([*found, plain("b/2", base_passes=7, stream_passes=0)], [], **QUICK)
    assert third["n_undefined_speedup"] == 1
    assert third["n_by_figure"]["speedup_passes_mean"] == 2
    assert third["speedup_passes_mean"]["value"] == pytest.approx(1.5)
    json.dumps(third, allow_nan=False)


def test_an_empty_draft_has_no_kept_share() -> None:
    found = [
        plain("b/0", draft_tokens=0, kept_tokens=0),
        plain("b/1", draft_tokens=10, kept_tokens=5),
        plain("b/2", draft_tokens=10, kept_tokens=0),
    ]
    got = figures(found, [], **QUICK)
    assert got["kept_share"]["value"] == pytest.approx(0.25)
    assert got["n_by_figure"]["kept_share"] == 2
    assert got["no_draft_share"]["value"] == got["keeps_nothing_share"]["value"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_requests_give_no_interval(n: int) -> None:
    got = figures([plain(f"b/{i}") for i in range(n)] + [left_out("b/x", "b", "single sentence")], [], **QUICK)
    assert (got["n"], got["n_excluded"]) == (n, 1)
    assert all(got[f.name]["low"] is None and got[f.name]["high"] is None for f in FIGURES)
    assert (got["speedup_passes_mean"]["value"] is None) == (n == 0)
    assert got["speedup_seconds_mean"]["value"] is None


def test_untimed_and_unscored_requests_have_null_figures() -> None:
    got = figures([plain(f"b/{i}", base_score=None, stream_score=None) for i in range(4)], [], **QUICK)
    for name in ("quality_base", "quality_stream", "speedup_seconds_mean", "below_1x_share"):
        assert got[name] == {"value": None, "low": None, "high": None}
    assert got["unscored"] == ["b/0", "b/1", "b/2", "b/3"]


def test_intervals_are_seeded_and_cover() -> None:
    found = records(3, 0.5, 40)
    first, again = figures(found, [], **QUICK), figures(found, [], **QUICK)
    assert first == again
    assert figures(found, [], 0.95, 200, 1)["kept_share"] != first["kept_share"]
    narrow = figures(found, [], 0.5, 200, 0)["kept_share"]
    assert first["kept_share"]["low"] < narrow["low"] < narrow["high"] < first["kept_share"]["high"]
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        flips = rng.random(60) < 0.4
        sample = [plain(f"b/{i}", base_score=float(f), stream_score=float(f)) for i, f in enumerate(flips)]
        low_high = figures(sample, [], 0.95, 200, trial)["quality_stream"]
        covered += low_high["low"] <= 0.4 <= low_high["high"]
    assert covered >= 50


def test_macro_is_the_mean_of_benchmarks_and_pooled_is_one_set() -> None:
    groups = {"a": records(1, 0.9, 20, "a"), "b": records(2, 0.1, 40, "b")}
    got = summarise(groups, [], **QUICK)
    own = {name: figures(found, [], **QUICK) for name, found in groups.items()}
    assert got["benchmarks"] == own
    for name in ("kept_share", "speedup_passes_median", "quality_stream"):
        assert got["macro"][name]["value"] == pytest.approx(mean(own[b][name]["value"] for b in own))
    one_set = [r | {"benchmark": "pooled"} for r in (*groups["a"], *groups["b"])]
    assert got["pooled"] == figures(one_set, [], **QUICK)
    assert got["macro"]["n"] == got["pooled"]["n"] == 58
    assert [e["id"] for e in got["excluded"]] == ["a/3", "b/3"]
    assert got["excluded"][0]["reason"] == "single sentence"


def test_macro_interval_is_narrower_than_its_benchmarks() -> None:
    """Benchmarks are resampled independently, so their errors average out."""
    groups = {name: records(i, 0.5, 40, name) for i, name in enumerate("abcd")}
    got = summarise(groups, [], 0.95, 500, 0)
    width = {k: v["kept_share"]["high"] - v["kept_share"]["low"] for k, v in got["benchmarks"].items()}
    macro = got["macro"]["kept_share"]["high"] - got["macro"]["kept_share"]["low"]
    assert macro < 0.75 * mean(width.values())
