"""The figures of one arm, recomputed here by a few independent lines."""

import json
import random
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from synthetic_arms import left_out, record, records, timings

from eval.compare import against_before, changes
from eval.definitions import BY_NAME, FIGURES
from eval.metrics import columns_of, included, summarise, table
from eval.resampling import interval, permutation_p, seed_for
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


def lines(seed: int = 1, n: int = 80) -> list[dict[str, Any]]:
    """Synthetic lines with every column: all fates of a draft, F1 scores that rise and fall, look-up, token counts."""
    found, rng = records(seed, 0.5, n), random.Random(seed)
    losers = [r for r in included(found) if not r["kept_tokens"]]
    for r, short in zip(losers, (3, 3, 6, 6), strict=False):  # 3/4 and 6/7 in the paper's count
        r |= {"base_passes": short, "stream_passes": short, "stream_passes_paper": short + 1}
    for r in included(found):
        r |= {
            "base_passes_lookup": max(1, r["base_passes"] - rng.randrange(20)),
            "stream_passes_recycle": max(1, r["stream_passes"] - rng.randrange(20)),
            "turn_tokens": 20 + rng.randrange(9),
            "unseen_tokens": 3 + rng.randrange(9),
        }
        if r["base_score"] is not None:
            r |= {"base_score": rng.choice((0.0, 0.4, 1.0)), "stream_score": rng.choice((0.0, 0.35, 0.5, 1.0))}
    return found


def slow_and_fast(found: list[dict[str, Any]], every: int = 2) -> list[dict[str, Any]]:
    """Seconds at which some requests lose a little and some a lot."""
    rng = random.Random(5)
    return [
        t | {"stream_seconds_cold": t["stream_seconds_cold"] * rng.uniform(0.9, 1.5)} for t in timings(found, every)
    ]


def test_every_figure_recomputed() -> None:
    found = lines()
    clock = slow_and_fast(found)
    got = figures(found, clock, **QUICK)
    rows = [r for r in found if not r["excluded"]]
    scored = [r for r in rows if r["base_score"] is not None]
    drafted = [r for r in rows if r["draft_tokens"]]
    full = [r for r in rows if r["total_passes"] is not None]
    seconds = [t["base_seconds"] / t["stream_seconds_cold"] for t in clock]
    session = [t["base_seconds"] / t["stream_seconds"] for t in clock]
    passes = [r["base_passes"] / r["stream_passes"] for r in rows]
    paper = [r["base_passes"] / r["stream_passes_paper"] for r in rows]
    wrong = [r["base_score"] - r["stream_score"] > 0.0999 for r in scored]
    fast = [r["base_passes"] >= 2 * r["stream_passes"] for r in scored]
    base_sum, stream_sum = sum(r["base_passes"] for r in rows), sum(r["stream_passes"] for r in rows)
    expected = {
        "quality_stream": mean(r["stream_score"] for r in scored),
        "quality_base": mean(r["base_score"] for r in scored),
        "speedup_passes_mean": mean(passes),
        "speedup_passes_median": median(passes),
        "speedup_passes_pooled": base_sum / stream_sum,
        "passes_removed_share": 1 - stream_sum / base_sum,
        "speedup_passes_paper_mean": mean(paper),
        "speedup_passes_paper_median": median(paper),
        "speedup_seconds_mean": mean(seconds),
        "speedup_seconds_median": median(seconds),
        "speedup_seconds_pooled": sum(t["base_seconds"] for t in clock) / sum(t["stream_seconds_cold"] for t in clock),
        "speedup_seconds_session_mean": mean(session),
        "speedup_seconds_session_median": median(session),
        "below_1x_share": mean(s < 1 for s in seconds),
        "ceiling_median": median(r["base_passes"] for r in rows),
        "ceiling_reached": median(passes) / median(r["base_passes"] for r in rows),
        "below_09x_share": mean(s < 0.9 for s in seconds),
        "below_08x_share": mean(s < 0.8 for s in seconds),
        "losers_median": median(s for s in seconds if s < 1),
        "below_1x_share_paper": mean(s < 1 for s in paper),
        "below_09x_share_paper": mean(s < 0.9 for s in paper),
        "below_08x_share_paper": mean(s < 0.8 for s in paper),
        "losers_median_paper": median(s for s in paper if s < 1),
        "turned_wrong_share": mean(wrong),
        "turned_right_share": mean(r["stream_score"] - r["base_score"] > 0.0999 for r in scored),
        "fast_but_wrong_share": mean(w and f for w, f in zip(wrong, fast, strict=True)),
        "wrong_among_fast_share": mean(w for w, f in zip(wrong, fast, strict=True) if f),
        "stream_passes_median": median(r["stream_passes"] for r in rows),
        "stream_passes_mean": stream_sum / len(rows),
        "stream_passes_paper_median": median(r["stream_passes_paper"] for r in rows),
        "base_passes_median": median(r["base_passes"] for r in rows),
        "base_passes_mean": base_sum / len(rows),
        "stream_seconds_cold_median": median(t["stream_seconds_cold"] for t in clock),
        "stream_seconds_median": median(t["stream_seconds"] for t in clock),
        "base_seconds_median": median(t["base_seconds"] for t in clock),
        "total_passes_over_base": sum(r["total_passes"] for r in full) / sum(r["base_passes"] for r in full),
        "total_over_base_mean": mean(r["total_passes"] / r["base_passes"] for r in full),
        "kept_share": mean(r["kept_tokens"] / r["draft_tokens"] for r in drafted),
        "kept_share_pooled": sum(r["kept_tokens"] for r in rows) / sum(r["draft_tokens"] for r in rows),
        "kept_tokens_mean": mean(r["kept_tokens"] for r in rows),
        "one_pass_share": mean(r["stream_passes"] == 1 for r in rows),
        "one_pass_share_paper": mean(r["kept_tokens"] == len(r["stream"]["tokens"]) for r in rows),
        "keeps_nothing_share": mean(r["draft_tokens"] > 0 == r["kept_tokens"] for r in rows),
        "keeps_some_share": mean(0 < r["kept_tokens"] < r["draft_tokens"] for r in rows),
        "keeps_all_share": mean(0 < r["kept_tokens"] == r["draft_tokens"] for r in rows),
        "no_draft_share": mean(r["draft_tokens"] == 0 for r in rows),
        "ends_by_itself_share": mean(r["base"]["stop"] == r["stream"]["stop"] == "end" for r in rows),
        "answer_tokens_mean": mean(len(r["stream"]["tokens"]) for r in rows),
        "unseen_characters_median": median(len(r["sentences"][-1]) for r in rows),
        "unseen_share_mean": mean(len(r["sentences"][-1]) / len("".join(r["sentences"])) for r in rows),
        "unseen_tokens_median": median(r["unseen_tokens"] for r in rows),
        "unseen_tokens_share": mean(r["unseen_tokens"] / r["turn_tokens"] for r in rows),
        "speedup_passes_lookup_median": median(r["base_passes_lookup"] / r["stream_passes"] for r in rows),
        "speedup_passes_recycle_median": median(r["base_passes_lookup"] / r["stream_passes_recycle"] for r in rows),
        "lookup_gain_median": median(r["base_passes"] / r["base_passes_lookup"] for r in rows),
    }
    assert list(expected) == [f.name for f in FIGURES]
    assert expected.keys() >= CONTRACT
    assert {name: got[name]["value"] for name in expected} == pytest.approx(expected)
    assert all(value > 0 for value in expected.values())  # every fate occurs
    assert (got["n"], got["n_excluded"], got["n_timed"], got["n_scored"]) == (79, 1, len(clock), len(scored))
    assert got["n_by_figure"]["kept_share"] == len(drafted)
    assert got["n_by_figure"]["losers_median"] == sum(s < 1 for s in seconds)
    for figure in FIGURES:
        estimate = got[figure.name]
        assert set(estimate) == {"value", "low", "high"}
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    json.dumps(got, allow_nan=False)


def test_a_figure_of_two_estimators_is_computed_anew_on_each_resample() -> None:
    found = lines()
    clock = slow_and_fast(found, every=1)
    got = figures(found, clock, **QUICK)
    rows = included(found)
    by_id = {t["id"]: t for t in clock}
    drawn: dict[str, list[float]] = {"ceiling_reached": [], "losers_median": [], "speedup_seconds_pooled": []}
    places = np.random.default_rng(seed_for(0, "humaneval")).integers(0, len(rows), size=(200, len(rows)))
    for draw in places.tolist():
        sample = [rows[i] for i in draw]
        base, cold = ([by_id[r["id"]][key] for r in sample] for key in ("base_seconds", "stream_seconds_cold"))
        reached = median(r["base_passes"] / r["stream_passes"] for r in sample)
        drawn["ceiling_reached"].append(reached / median(r["base_passes"] for r in sample))
        drawn["losers_median"].append(median(b / c for b, c in zip(base, cold, strict=True) if b < c))
        drawn["speedup_seconds_pooled"].append(sum(base) / sum(cold))
    for name, draws in drawn.items():
        low, high = np.percentile(draws, [2.5, 97.5])
        assert (got[name]["low"], got[name]["high"]) == pytest.approx((low, high))
        assert low < high


def test_none_some_all_and_no_draft_are_all_requests() -> None:
    got = figures(lines(), [], **QUICK)
    names = ("no_draft_share", "keeps_nothing_share", "keeps_some_share", "keeps_all_share")
    assert sum(got[name]["value"] for name in names) == pytest.approx(1)
    found = [
        plain("b/0", draft_tokens=0, kept_tokens=0),
        plain("b/1", draft_tokens=8, kept_tokens=0),
        plain("b/2", draft_tokens=8, kept_tokens=7),
        plain("b/3", draft_tokens=8, kept_tokens=8),
        plain("b/4", draft_tokens=1, kept_tokens=1),
    ]
    got = figures(found, [], **QUICK)
    assert [got[name]["value"] for name in names] == pytest.approx([0.2, 0.2, 0.2, 0.4])


def test_quality_and_speed_by_what_is_kept() -> None:
    found = lines()
    rows = included(found)
    got = figures(found, [], **QUICK)["by_kept"]
    groups = {
        "none": [r for r in rows if r["draft_tokens"] and not r["kept_tokens"]],
        "some": [r for r in rows if 0 < r["kept_tokens"] < r["draft_tokens"]],
        "all": [r for r in rows if 0 < r["kept_tokens"] == r["draft_tokens"]],
        "no_draft": [r for r in rows if not r["draft_tokens"]],
    }
    assert list(got) == list(groups)
    assert sum(part["n"] for part in got.values()) == len(rows)
    for name, group in groups.items():
        scored = [r for r in group if r["base_score"] is not None]
        assert (got[name]["n"], got[name]["n_scored"]) == (len(group), len(scored))
        assert got[name]["quality_base"]["value"] == pytest.approx(mean(r["base_score"] for r in scored))
        assert got[name]["quality_stream"]["value"] == pytest.approx(mean(r["stream_score"] for r in scored))
        speedups = [r["base_passes"] / r["stream_passes"] for r in group]
        assert got[name]["speedup_passes_median"]["value"] == pytest.approx(median(speedups))
    whole = summarise({"a": records(1, 0.5, 20, "a"), "b": records(2, 0.5, 20, "b")}, [], **QUICK)
    for name in ("none", "some", "all", "no_draft"):
        assert whole["pooled"]["by_kept"][name]["n"] == sum(
            b["by_kept"][name]["n"] for b in whole["benchmarks"].values()
        )
    assert "by_kept" not in whole["macro"]
    json.dumps(whole, allow_nan=False)


def test_a_group_without_requests_has_null_figures() -> None:
    got = figures([plain(f"b/{i}", draft_tokens=9, kept_tokens=9) for i in range(3)], [], **QUICK)["by_kept"]
    assert got["all"]["n"] == 3
    empty = {"value": None, "low": None, "high": None}
    assert got["some"]["n"] == 0
    assert got["some"]["quality_stream"] == got["some"]["speedup_passes_median"] == empty


def test_a_score_turns_when_it_changes_by_a_tenth() -> None:
    pairs = [(1.0, 0.0), (0.0, 1.0), (0.6, 0.5), (0.6, 0.55), (0.3, 0.4), (0.3, 0.39), (1.0, 1.0), (None, None)]
    found = [
        plain(f"b/{i}", base_score=b, stream_score=s, base_passes=20, stream_passes=10 if i < 2 else 11)
        for i, (b, s) in enumerate(pairs)
    ]
    got = figures(found, [], **QUICK)
    names = ("turned_wrong_share", "turned_right_share", "fast_but_wrong_share", "wrong_among_fast_share")
    assert [got[name]["value"] for name in names] == pytest.approx([2 / 7, 2 / 7, 1 / 7, 1 / 2])
    assert {got["n_by_figure"][name] for name in names} == {7}
    assert got["quality_stream"]["value"] == pytest.approx(mean(s for _, s in pairs if s is not None))
    assert got["unscored"] == ["b/7"]
    slow = figures([r | {"stream_passes": 20} for r in found], [], **QUICK)
    assert slow["wrong_among_fast_share"] == {"value": None, "low": None, "high": None}
    assert slow["fast_but_wrong_share"]["value"] == 0


def test_losers_are_those_below_one() -> None:
    found = [plain(f"b/{i}") for i in range(6)]

    def clocked(speedups: list[float]) -> Any:
        clock = [
            {"id": r["id"], "base_seconds": s, "stream_seconds": 1.0, "stream_seconds_cold": 1.0}
            for r, s in zip(found, speedups, strict=False)
        ]
        got = figures(found, clock, **QUICK)
        return got["losers_median"], got["n_by_figure"]["losers_median"], got

    some, n, got = clocked([0.7, 1.0, 0.95, 3.0, 0.85])
    assert (some["value"], n) == (0.85, 3)
    assert some["low"] >= 0.7
    assert some["high"] <= 0.95
    shares = [got[f"below_{limit}x_share"]["value"] for limit in ("1", "09", "08")]
    assert shares == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert clocked([0.7, 0.8, 1.2])[0]["value"] == pytest.approx(0.75)
    assert clocked([0.7, 1.2, 1.2])[:2] == ({"value": 0.7, "low": None, "high": None}, 1)
    assert clocked([1.0, 1.2])[:2] == ({"value": None, "low": None, "high": None}, 0)


def test_what_was_not_run_is_null() -> None:
    """replay=last makes no total, recycle=false no look-up; neither is a zero."""
    found = [plain(f"b/{i}", updates=None, total_passes=None, base_passes_lookup=None) for i in range(4)]
    got = figures(found, [], **QUICK)
    absent = ("total_over_base_mean", "total_passes_over_base", "lookup_gain_median", "speedup_passes_recycle_median")
    for name in (*absent, "unseen_tokens_share"):
        assert (got[name], got["n_by_figure"][name]) == ({"value": None, "low": None, "high": None}, 0)
    assert got["n_zero_denominator"] == {}


def test_a_denominator_of_zero_is_counted() -> None:
    """Fault 34, in passes and in seconds: null for that request, never infinite."""
    found = [plain("b/0", stream_passes=0, base_passes_lookup=0), *(plain(f"b/{i}") for i in range(1, 4))]
    clock = [t | ({"stream_seconds_cold": 0.0} if t["id"] == "b/1" else {}) for t in timings(found, every=1)]
    got = figures(found, clock, **QUICK)
    zero = {"speedup_passes": 1, "speedup_passes_lookup": 1, "lookup_gain": 1, "speedup_seconds": 1}
    assert got["n_zero_denominator"] == zero
    names = ("speedup_passes_mean", "speedup_seconds_median", "below_08x_share", "ceiling_reached")
    assert [got["n_by_figure"][name] for name in names] == [3, 3, 3, 3]
    json.dumps(got, allow_nan=False)


def test_a_change_of_any_figure_survives_what_is_undefined() -> None:
    """Before without look-up, scores and losers, after with them: each figure has a change, or null and no p."""
    before = [r | {"base_score": None, "stream_score": None} for r in included(records(1, 0.5))]
    after = included(lines(2, 40))
    early = [t | {"stream_seconds_cold": 0.5 * t["base_seconds"]} for t in timings(before)]
    tables = table(before, early), table(after, slow_and_fast(after))
    found = changes(*tables, FIGURES, 100, (0, 1))
    assert list(found) == [f.name for f in FIGURES]
    for name in ("lookup_gain_median", "turned_wrong_share", "losers_median"):
        assert (found[name].value, found[name].null, found[name].exact_p) == (None, None, None)
    assert found["losers_median"].after.n > 0
    shown = {name: interval(c.value, c.draws, 0.95) for name, c in found.items()}
    json.dumps(shown, allow_nan=False)
    same = changes(tables[1], tables[1], FIGURES, 100, (0, 1))
    assert all(c.value == 0 and permutation_p(c.value, c.null) == 1 for c in same.values())


def test_a_crossed_figure_rests_on_the_base_that_before_brings() -> None:
    found = included(lines())
    rows = table(found, slow_and_fast(found))
    dear = {**rows, "base_passes": 3 * rows["base_passes"], "base_seconds": 3 * rows["base_seconds"]}
    crossed = against_before(dear, rows)
    for figure in FIGURES:
        if figure.crossed:
            assert not np.array_equal(columns_of(rows, figure), columns_of(crossed, figure), equal_nan=True), (
                figure.name
            )
    assert BY_NAME["below_09x_share"].crossed
    assert BY_NAME["losers_median_paper"].crossed


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
