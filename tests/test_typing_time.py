"""Time to draft: the model by hand, its two limits, and what it needs."""

import json
import math
from statistics import mean, median
from typing import Any

import pytest
from synthetic_arms import left_out, records, timings

from eval.metrics import included, summarise
from eval.typing_time import WORDS_A_MINUTE, speeds, time_to_draft, typed
from recipes.errors import UserError

OWN = 40 * 5 / 60
QUICK: dict[str, Any] = {"confidence": 0.95, "samples": 200, "seed": 0}


def walked(n: int = 30, benchmark: str = "humaneval") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of a full replay, and their seconds at 40 passes a second."""
    found = records(1, 0.5, n, benchmark)
    clock = [
        t | {"update_seconds": [u["passes"] / 40 for u in r["updates"]]}
        for r, t in zip(included(found), timings(found, every=1), strict=True)
        if r["updates"] is not None
    ]
    return found, clock


def request(**changed: Any) -> dict[str, Any]:
    """Drafts of 10 and 12 tokens, of which 6 and 9 are kept, and an answer of 15; sentences of 8, 20 and 10."""
    counts = [(10, 0), (12, 6), (15, 9)]
    updates = [{"draft_tokens": n, "kept_tokens": k, "passes": n - k} for n, k in counts]
    line = {
        "id": "a/0",
        "benchmark": "a",
        "sentences": ["x" * 8, "y" * 20, "z" * 10],
        "stream": {"tokens": list(range(15))},
        "base_passes": 15,
        "stream_passes": 6,
        "draft_tokens": 12,
        "kept_tokens": 9,
        "updates": updates,
        "excluded": None,
    }
    return line | changed


def pooled(found: list[dict[str, Any]], clock: list[dict[str, Any]], own: float = OWN) -> dict[str, Any]:
    return time_to_draft({"x": found}, clock, own, **QUICK)["pooled"]


@pytest.mark.parametrize(
    ("speed", "finished", "last_finished", "residual"),
    [
        (1.0, 2, True, 6),  # 20 and 10 s for 10 and 6 passes of a second
        (1.7, 1, False, 6),  # 5 of the second draft's 6 passes: 11 tokens, of which 9 are kept
        (2.0, 1, False, 6),  # 10 passes are exactly enough for the first; 11 tokens of the second
        (2.5, 0, False, 6),  # the first is cut at 8, which still holds the 6 that are kept; 4 passes make 10
        (5.0, 0, False, 15 - 6),  # the first is cut at 4, and 2 passes make 6
        (10.0, 0, False, 15 - 3),  # 2, and 1
        (11.0, 0, False, 15 - 1),  # 1, and no whole pass more
        (30.0, 0, False, 15),
    ],
)
def test_cut_drafts_by_hand(speed: float, finished: int, last_finished: bool, residual: int) -> None:
    got = typed((request(), [10.0, 6.0, 6.0]), speed)
    assert (got.drafts, got.finished, got.last_finished) == (2, finished, last_finished)
    assert got.speedup == 15 / residual


def test_a_draft_whose_former_draft_was_cut_takes_longer() -> None:
    """Two tokens of the first draft are there in time; the second then needs 10 passes and not 6, and 8 s are short."""
    line = request(sentences=["x" * 8, "y" * 2, "z" * 8])
    assert typed((line, [10.0, 6.0, 6.0]), 1.0).finished == 0
    assert typed((line, [2.0, 6.0, 6.0]), 1.0).finished == 2


def test_a_draft_that_is_kept_whole_needs_its_verification_alone() -> None:
    updates = [
        {"draft_tokens": 10, "kept_tokens": 0, "passes": 10},
        {"draft_tokens": 10, "kept_tokens": 10, "passes": 1},
    ]
    line = request(updates=[*updates, {"draft_tokens": 15, "kept_tokens": 10, "passes": 5}], kept_tokens=10)
    seconds = [1.0, 1.0, 1.0]
    assert (typed((line, seconds), 10.0).finished, typed((line, seconds), 10.0).speedup) == (2, 3.0)
    late = typed((line, seconds), 20.0)
    assert (late.finished, late.speedup) == (1, 3.0)  # the pass is cut, but the tokens were there before it


@pytest.mark.parametrize("slow", [0.0, 1e-9])
def test_infinitely_slow_typing_gives_the_measured_figures_exactly(slow: float) -> None:
    found, clock = walked()
    timed = {t["id"] for t in clock}
    rows = [r for r in included(found) if r["id"] in timed]
    for r, t in zip(rows, clock, strict=True):
        got = typed((r, t["update_seconds"]), slow)
        assert got.speedup == r["base_passes"] / r["stream_passes"]
        assert got.finished == got.drafts == 2
    part = pooled(found, clock)
    measured = summarise({"pooled": rows}, clock, **QUICK)["benchmarks"]["pooled"]
    for name in ("speedup_passes_mean", "speedup_passes_median"):
        assert part["measured"][name] == measured[name]
    assert part["measured"]["drafts_finished_share"] == {"value": 1.0, "low": 1.0, "high": 1.0}


@pytest.mark.parametrize("fast", [math.inf, 1e9])
def test_infinitely_fast_typing_keeps_nothing(fast: float) -> None:
    found, clock = walked()
    by_id = {r["id"]: r for r in found}
    for t in clock:
        r = by_id[t["id"]]
        got = typed((r, t["update_seconds"]), fast)
        assert got.speedup == r["base_passes"] / len(r["stream"]["tokens"])
        assert got.finished == 0


def test_faster_typing_never_leaves_more() -> None:
    found, clock = walked()
    by_id = {r["id"]: r for r in found}
    for t in clock:
        runs = [typed((by_id[t["id"]], t["update_seconds"]), 1.3**k) for k in range(-10, 30)]
        assert [r.finished for r in runs] == sorted((r.finished for r in runs), reverse=True)
        assert [r.speedup for r in runs] == sorted((r.speedup for r in runs), reverse=True)


def test_figures_over_a_range_of_speeds_recomputed() -> None:
    found, clock = walked(30)
    part = pooled(found, clock, own=10.0)
    by_id = {r["id"]: r for r in found}
    assert (part["n"], part["n_drafts"], part["reason"]) == (28, 56, None)
    assert [round(row["words_a_minute"]) for row in part["speeds"]] == [20, 40, 60, 80, 100, 120]
    assert [row["own"] for row in part["speeds"]] == [False] * 5 + [True]
    shares = []
    for row in part["speeds"]:
        runs = [typed((by_id[t["id"]], t["update_seconds"]), row["chars_per_second"]) for t in clock]
        assert row["drafts_finished_share"]["value"] == pytest.approx(sum(r.finished for r in runs) / 56)
        assert row["last_draft_finished_share"]["value"] == pytest.approx(mean(r.last_finished for r in runs))
        assert row["speedup_passes_mean"]["value"] == pytest.approx(mean(r.speedup for r in runs))
        assert row["speedup_passes_median"]["value"] == pytest.approx(median(r.speedup for r in runs))
        for name in ("drafts_finished_share", "speedup_passes_mean"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        shares.append(row["drafts_finished_share"]["value"])
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]
    json.dumps(part, allow_nan=False)


def test_the_recipes_own_speed_stands_once_in_its_place() -> None:
    assert speeds(OWN) == sorted([(words * 5 / 60, words == 40) for words in WORDS_A_MINUTE])
    assert [own for _, own in speeds(0.5)] == [True] + [False] * 6
    assert speeds(5.5)[3] == (5.5, True)


def test_each_benchmark_and_all_together() -> None:
    (a, clock_a), (b, clock_b) = walked(20, "a"), walked(10, "b")
    got = time_to_draft({"a": a, "b": b}, clock_a + clock_b, OWN, **QUICK)
    assert [got["benchmarks"][name]["n"] for name in "ab"] == [18, 8]
    assert got["pooled"]["n"] == 26
    assert got["benchmarks"]["a"] == time_to_draft({"a": a}, clock_a, OWN, **QUICK)["benchmarks"]["a"]


def test_without_a_full_replay_or_seconds_there_is_a_reason() -> None:
    found, clock = walked()
    last = [r | {"updates": None} for r in found]
    nothing = {"n": 0, "n_drafts": 0, "measured": None, "speeds": None}
    for lines, times, said in (
        (last, clock, "only the last draft was made; it needs eval.replay=full"),
        (found, [], "no request was timed; it needs eval.timed above 0"),
        (found, [t | {"update_seconds": None} for t in clock], "no request was timed; it needs eval.timed above 0"),
        ([left_out("a/0", "a", "single sentence")], clock, "no request is included"),
    ):
        assert pooled(lines, times) == nothing | {"reason": said}


def test_seconds_of_other_updates_are_refused_by_name() -> None:
    clock = [{"id": "a/0", "update_seconds": [1.0, 1.0]}]
    with pytest.raises(UserError, match=r"a/0 has the seconds of 2 updates, requests\.jsonl has 3 for 3 sentences"):
        pooled([request()], clock)


def test_a_clock_that_stands_still_makes_no_draft_late() -> None:
    assert typed((request(), [0.0, 0.0, 0.0]), 1e9).finished == 2
