"""Before against after: pairing, tests, both forms, refusals, verdicts."""

import itertools
import json
import random
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import pytest
from synthetic_arms import HASHES, SETTINGS, record, records, timings, write_arm, write_run

from eval.compare import compare
from eval.evidence import Arm, one_of_each, read_arms
from eval.pairing import check_together
from eval.resampling import mcnemar_p, permutation_p, swapped
from eval.verdict import verdicts
from recipes.errors import UserError


def arm(name: str, found: list[dict[str, Any]], clock: list[dict[str, Any]] | None = None, **changed: Any) -> Arm:
    summary = {"arm": name, "settings": SETTINGS | {"arm": name}, "hashes": HASHES, "device": "cpu"} | changed
    return Arm(name, Path(name), tuple(found), tuple(clock if clock is not None else timings(found)), summary)


def change(
    before: Arm, after: Arm, quality: Arm | None = None, samples: int = 400, force: bool = False
) -> dict[str, Any]:
    return compare(before, after, quality, 0.95, samples, 0, force)


def plain(name: str, **changed: Any) -> dict[str, Any]:
    return record(random.Random(name), name, "b", 0.5) | changed


def test_mcnemar_by_hand() -> None:
    """One pair is won, eight are lost: p = 2 (C(9,0) + C(9,1)) / 2^9."""
    before = np.array([1.0] * 8 + [0.0] + [1.0] * 5 + [0.0] * 5)
    after = np.array([0.0] * 8 + [1.0] + [1.0] * 5 + [0.0] * 5)
    assert mcnemar_p(before, after) == pytest.approx(20 / 512)
    assert mcnemar_p(before, before) == 1.0


def test_permutation_p_agrees_with_enumeration() -> None:
    rng = np.random.default_rng(3)
    before, after = rng.random((1, 8)), rng.random((1, 8)) + 0.3
    difference = (after - before)[0]
    signs = [np.mean(np.array(s) * difference) for s in itertools.product((1, -1), repeat=8)]
    exact = np.mean(np.abs(signs) >= abs(difference.mean()) - 1e-12)
    null = swapped("mean", before, after, 20000, (0, 1))
    assert permutation_p(float(difference.mean()), null) == pytest.approx(exact, abs=0.01)


def test_figures_are_paired_on_the_requests_that_both_have() -> None:
    before, after = records(1, 0.3, 30), records(2, 0.8, 30)
    after = after[:20]
    before[10] |= {"excluded": "empty answer (base)"}
    got = change(arm("message", before), arm("merged", after))
    part = got["benchmarks"]["humaneval"]
    ids = {r["id"] for r in after if not r["excluded"]} - {"humaneval/10"}
    first = {r["id"]: r for r in before if r["id"] in ids}
    second = {r["id"]: r for r in after if r["id"] in ids}
    drafted = [i for i in ids if first[i]["draft_tokens"] and second[i]["draft_tokens"]]
    share = part["figures"]["kept_share"]
    expected = [mean(side[i]["kept_tokens"] / side[i]["draft_tokens"] for i in drafted) for side in (first, second)]
    assert [share["before"]["value"], share["after"]["value"]] == pytest.approx(expected)
    assert share["change"]["value"] == pytest.approx(expected[1] - expected[0])
    assert share["n"] == len(drafted)
    assert share["change"]["low"] < share["change"]["value"] < share["change"]["high"]
    assert part["n"] == len(ids) == 18
    assert got["unpaired"]["after"] == ["humaneval/10"]
    assert got["unpaired"]["before"] == [f"humaneval/{i}" for i in range(20, 30)]
    json.dumps(got, allow_nan=False)


def test_after_speedups_come_in_two_forms_and_the_stricter_is_the_headline() -> None:
    """Longer answers: against its own base the after model gains, against the before model's base it loses."""
    before = [plain(f"b/{i}", base_passes=100, stream_passes=50, stream_passes_paper=51) for i in range(12)]
    after = [plain(f"b/{i}", base_passes=300, stream_passes=100, stream_passes_paper=101) for i in range(12)]
    for a, b in zip(after, before, strict=True):
        a["sentences"] = b["sentences"]
    figures = change(arm("message", before), arm("merged", after))["benchmarks"]["b"]
    own = figures["figures"]["speedup_passes_median"]
    strict = figures["figures"]["speedup_passes_median_against_before"]
    assert (own["before"]["value"], own["after"]["value"]) == (2.0, 3.0)
    assert (strict["before"]["value"], strict["after"]["value"]) == (2.0, 1.0)
    assert figures["headline"]["speedup_passes_median"] == "speedup_passes_median_against_before"
    assert figures["figures"]["stream_passes_mean"]["change"]["value"] == 50
    shorter = change(arm("message", after), arm("merged", before))["benchmarks"]["b"]
    assert shorter["headline"]["speedup_passes_median"] == "speedup_passes_median"


def test_seconds_against_the_before_models_base() -> None:
    found = [plain(f"b/{i}") for i in range(6)]
    clock = [{"id": r["id"], "base_seconds": 4.0, "stream_seconds": 1.0, "stream_seconds_cold": 2.0} for r in found]
    slow = [t | {"base_seconds": 12.0} for t in clock]
    part = change(arm("message", found, clock), arm("merged", found, slow))["benchmarks"]["b"]
    assert part["figures"]["speedup_seconds_mean"]["after"]["value"] == 6.0
    assert part["figures"]["speedup_seconds_mean_against_before"]["after"]["value"] == 2.0
    assert part["figures"]["speedup_seconds_session_mean_against_before"]["after"]["value"] == 4.0
    assert part["headline"]["speedup_seconds_mean"] == "speedup_seconds_mean_against_before"


def test_the_subset_whose_answers_end_by_themselves_on_both_sides() -> None:
    before, after = records(1, 0.3, 40), records(2, 0.8, 40)
    part = change(arm("message", before), arm("merged", after))["benchmarks"]["humaneval"]
    ending = [
        (b, a)
        for b, a in zip(before, after, strict=True)
        if not b["excluded"] and all(r[s]["stop"] == "end" for r in (b, a) for s in ("base", "stream"))
    ]
    assert part["ends_by_itself"]["n"] == len(ending) < part["n"]
    got = part["ends_by_itself"]["figures"]["speedup_passes_median_against_before"]["after"]["value"]
    assert got == pytest.approx(median(b["base_passes"] / a["stream_passes"] for b, a in ending))


def test_quality_is_judged_against_its_own_arm_with_exact_mcnemar() -> None:
    scores = {"plain": [1.0] * 9 + [0.0] * 3, "message": [0.0] * 12, "merged": [0.0] * 8 + [1.0] + [0.0] * 3}
    arms = {
        name: arm(name, [plain(f"b/{i}", base_score=s, stream_score=s) for i, s in enumerate(found)])
        for name, found in scores.items()
    }
    got = change(arms["message"], arms["merged"], arms["plain"])
    quality = got["quality"]["benchmarks"]["b"]["figures"]["quality_stream"]
    assert (got["quality_before"], quality["test"]) == ("plain", "exact McNemar")
    assert quality["before"]["value"] == pytest.approx(9 / 12)
    assert quality["after"]["value"] == pytest.approx(1 / 12)
    assert quality["p"] == pytest.approx(2 / 2**8)
    said = {v.topic: v for v in verdicts(got, "b")}["quality"]
    assert said.outcome == "fell"
    assert "(plain against merged) fell from 75.0% to 8.3%" in said.sentence


def test_f1_scores_are_not_put_through_mcnemar() -> None:
    before = [plain(f"b/{i}", base_score=0.5, stream_score=0.1 * (i % 5)) for i in range(20)]
    after = [plain(f"b/{i}", base_score=0.5, stream_score=0.1 * (i % 7)) for i in range(20)]
    got = change(arm("message", before), arm("merged", after))["quality"]["benchmarks"]["b"]["figures"]
    assert got["quality_stream"]["test"] == "paired permutation"
    assert got["quality_served"]["before"]["value"] == pytest.approx(0.5)


def test_equal_arms_show_no_change_and_different_ones_do() -> None:
    found = records(1, 0.3, 60)
    same = change(arm("message", found), arm("merged", found))
    entry = same["benchmarks"]["humaneval"]["figures"]["kept_share"]
    assert (entry["change"], entry["p"]) == ({"value": 0.0, "low": 0.0, "high": 0.0}, 1.0)
    assert {v.outcome for v in verdicts(same, "humaneval")} == {"no change shown"}
    better = change(arm("message", found), arm("merged", records(2, 0.9, 60)))
    said = {v.topic: v for v in verdicts(better, "humaneval")}
    assert said["kept share"].outcome == "rose"
    assert said["kept share"].sentence.startswith("Kept share (mean of shares) rose from ")
    assert "p = " in said["kept share"].sentence
    assert "n = " in said["kept share"].sentence
    assert "(the stricter form)" in said["speedup in passes, median"].sentence


def test_one_pair_is_too_few_to_say() -> None:
    got = change(arm("message", [plain("b/0")]), arm("merged", [plain("b/0")]))
    assert {v.outcome for v in verdicts(got, "b")} == {"too few requests"}


@pytest.mark.parametrize("n", [2, 5, 6])
def test_no_test_can_show_a_change_among_fewer_than_six(n: int) -> None:
    """p is at least 2 / 2^n: 0.0625 with five requests that all change alike, 0.03125 with six."""
    before = [plain(f"b/{i}", stream_passes=90 + i) for i in range(n)]
    after = [plain(f"b/{i}", stream_passes=10 + i) for i in range(n)]
    got = change(arm("message", before), arm("merged", after), samples=4000)
    said = {v.topic: v for v in verdicts(got, "b")}["residual passes, mean"]
    assert said.outcome == ("fell" if n == 6 else "too few requests")
    assert "disagree" not in said.sentence
    assert n == 6 or f"too few requests to say (n = {n}: no test could show a change)" in said.sentence


def test_a_speedup_made_by_longer_answers_is_called_out() -> None:
    before = [plain(f"b/{i}", base_passes=60 + i, stream_passes=60 + i) for i in range(30)]
    after = [plain(f"b/{i}", base_passes=120 + 2 * i, stream_passes=60 + i) for i in range(30)]
    said = {v.topic: v for v in verdicts(change(arm("message", before), arm("merged", after)), "b")}
    assert "caution" in said
    assert said["speedup in passes, mean"].outcome == "no change shown"


def test_macro_and_pooled_over_benchmarks() -> None:
    before = records(1, 0.3, 30, "a") + records(1, 0.3, 20, "b")
    after = records(2, 0.8, 30, "a") + records(2, 0.5, 20, "b")
    got = change(arm("message", before), arm("merged", after))
    parts = [got["benchmarks"][name]["figures"]["kept_share"]["change"]["value"] for name in "ab"]
    macro = got["macro"]["figures"]["kept_share"]
    assert macro["change"]["value"] == pytest.approx(mean(parts))
    assert macro["change"]["low"] < macro["change"]["value"] < macro["change"]["high"]
    assert 0 < macro["p"] < 0.05
    assert got["pooled"]["n"] == sum(got["benchmarks"][name]["n"] for name in "ab")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hashes": HASHES | {"data": "d2"}}, "data hash (d2 before, d1 after)"),
        ({"hashes": HASHES | {"renderer": "r2"}}, "renderer hash"),
        ({"hashes": HASHES | {"sentence_rule": "s2"}}, "sentence_rule hash"),
        ({"hashes": {"data": "d1", "renderer": "r1"}}, "sentence_rule hash (none before"),
        ({"settings": SETTINGS | {"acceptance": "threshold"}}, "acceptance (threshold before, greedy after)"),
        ({"settings": SETTINGS | {"max_new_tokens": 64}}, "max_new_tokens (64 before, 128 after)"),
        ({"settings": SETTINGS | {"dtype": "bfloat16"}}, "dtype"),
        ({"device": "NVIDIA A100"}, "device"),
    ],
)
def test_what_differs_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    found = records(1, 0.3, 10)
    with pytest.raises(UserError) as refused:
        change(arm("message", found, **changed), arm("merged", found))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        *({"limit": 7}, {"limit": {"humaneval": 7}}, {"replay": "full"}, {"timed": 3}, {"tau": 0.9}, {"top_k": 4}),
        *({"system_message": None}, {"recycle": True}, {"sweep": [0.5]}, {"preset": "paper"}, {"paths": {"b": "x"}}),
    ],
)
def test_what_does_not_change_a_figure_may_differ(settings: dict[str, Any]) -> None:
    found = records(1, 0.3, 10)
    with_message = SETTINGS | {"system_message": "The request may be incomplete."}
    before = arm("plain", found, settings=with_message | settings)
    assert change(before, arm("merged", found, settings=with_message))["benchmarks"]["humaneval"]["n"] == 9


def test_what_differs_is_compared_by_force_and_said() -> None:
    before, after = records(1, 0.3, 12), records(2, 0.3, 12)
    cut = after[2]["sentences"]
    after[2]["sentences"] = [cut[0] + cut[1], *cut[2:]]  # the same text, cut otherwise
    after[4]["sentences"] = ["Another request. ", "Of other text."]
    other = arm("message", before, hashes=HASHES | {"sentence_rule": "s2"}, settings=SETTINGS | {"dtype": "bfloat16"})
    with pytest.raises(UserError, match=r"report\.force=true"):
        change(other, arm("merged", after))
    got = change(other, arm("merged", after), force=True)
    assert got["forced"] == [
        "message and merged differ in sentence_rule hash (s2 before, s1 after)",
        "message and merged differ in dtype (bfloat16 before, float32 after)",
    ]
    assert got["unpaired"]["after"] == ["humaneval/4"]
    assert got["benchmarks"]["humaneval"]["n"] == 10
    assert change(arm("message", before), arm("merged", before), force=True)["forced"] == []


def test_runs_of_other_models_may_share_a_report_but_not_what_they_were_measured_by() -> None:
    found = records(1, 0.3, 10)
    one = arm("merged", found, settings=SETTINGS | {"model": {"family": "smollm2", "name": "a", "dtype": "float32"}})
    bigger = SETTINGS | {"model": {"family": "qwen3", "name": "b", "dtype": "bfloat16"}}
    other = {"settings": bigger, "hashes": HASHES | {"renderer": "r2"}}
    assert check_together(one, arm("merged", found, **other)) == []
    for changed in (
        {"hashes": HASHES | {"renderer": "r2", "data": "d2"}},
        {"settings": bigger | {"max_new_tokens": 7}},
    ):
        apart = arm("merged", found, **(other | changed))
        with pytest.raises(UserError, match="do not belong in one report"):
            check_together(one, apart)
        assert len(check_together(one, apart, force=True)) == 1
    again = {"settings": one.summary["settings"], "hashes": HASHES | {"renderer": "r2"}}
    with pytest.raises(UserError, match="renderer hash"):
        check_together(one, arm("merged", found, **again))


def test_tau_must_agree_where_it_is_used() -> None:
    found = records(1, 0.3, 10)
    settings = SETTINGS | {"acceptance": "threshold"}
    with pytest.raises(UserError, match="tau"):
        change(arm("message", found, settings=settings | {"tau": 0.9}), arm("merged", found, settings=settings))


def test_other_sentences_and_no_shared_request_are_refused() -> None:
    before, after = records(1, 0.3, 10), records(2, 0.3, 10)
    after[2]["sentences"] = ["Another. ", "Cut."]
    with pytest.raises(UserError, match="sentences of humaneval/2"):
        change(arm("message", before), arm("merged", after))
    with pytest.raises(UserError, match="share no included request"):
        change(arm("message", before), arm("merged", records(2, 0.3, 10, "mbpp")))


def test_a_quality_arm_of_other_requests_leaves_out_quality_alone() -> None:
    arms = arm("message", records(1, 0.3, 20)), arm("merged", records(2, 0.3, 20))
    got = change(*arms, arm("plain", records(3, 0.3, 20, "mbpp")))
    whole = change(*arms)
    assert got["benchmarks"] == whole["benchmarks"]
    assert got["quality"]["benchmarks"] == {}
    for scope in ("humaneval", None):
        said = {v.topic: v for v in verdicts(got, scope)}["quality"]
        assert said.outcome == "too few requests"
        assert "plain and merged share no included request" in said.sentence


def test_evidence_is_read_back_and_broken_files_are_named(tmp_path: Path) -> None:
    before, after, plain_arm = write_run(tmp_path)
    arms = read_arms(before, after, plain_arm)
    assert [a.label for a in arms] == ["message", "merged", "plain"]
    assert list(arms[0].by_benchmark()) == ["humaneval"]
    with pytest.raises(UserError, match="same folder"):
        change(arms[0], arms[0])
    lines = (after / "requests.jsonl").read_text().splitlines(keepends=True)
    for broken, said in (
        ([*lines[:2], "{half\n"], "line 3: not JSON"),
        ([*lines[:2], '{"id": "x"}\n'], "line 3: benchmark, sentences"),
        ([*lines[:2], lines[0]], "line 3: id humaneval/0 is there twice"),
        (["7\n"], "line 1: not an object but int"),
        ([json.dumps(json.loads(lines[0]) | {"base_passes": None})], "line 1: base_passes cannot be NoneType"),
        ([json.dumps(json.loads(lines[0]) | {"stream": {"tokens": [1]}})], "line 1, stream: text, stop missing"),
        ([json.dumps(json.loads(lines[0]) | {"id": []})], "line 1: id cannot be list"),
    ):
        (after / "requests.jsonl").write_text("".join(broken))
        with pytest.raises(UserError) as refused:
            read_arms(before, after)
        assert said in str(refused.value)
    with pytest.raises(UserError, match=r"summary.json: not there"):
        read_arms(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", b'{"arm": "\xff"}', "summary.json: not JSON"),
        ("summary.json", b"[]", "summary.json: not an object but list"),
        ("summary.json", b'{"arm": "a", "settings": {}, "hashes": [], "device": "cpu"}', "hashes cannot be list"),
        ("requests.jsonl", b"{}\n\xff\n", "requests.jsonl, line 1: id missing"),
        ("requests.jsonl", b"\xff\n", "requests.jsonl, line 1: not JSON"),
        ("timings.jsonl", b'{"id": "x", "base_seconds": "1"}\n', "timings.jsonl, line 1: stream_seconds"),
    ],
)
def test_what_is_no_evidence_is_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    folder = write_run(tmp_path)[0]
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_arms(folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def scored(name: str, scores: list[float], passes: int, base: int = 100) -> Arm:
    lines = [
        plain(f"b/{i}", base_score=s, stream_score=s, base_passes=base, stream_passes=passes + i % 5)
        for i, s in enumerate(scores)
    ]
    return arm(name, lines, [])


def test_the_plain_verdict() -> None:
    """In one sentence: speed, and how much of quality may be lost unseen."""
    half = [0.0, 1.0] * 20

    def said(before: Arm, after: Arm) -> str:
        return verdicts(change(before, after), "b")[0].sentence

    slow, fast = scored("message", half, 80), scored("merged", half, 10)
    # Nothing differs among 40: up to 1 - 0.05^(1/40) of requests could, unseen.
    assert said(slow, fast).startswith(
        "Faster in passes (seconds not judged), quality unchanged within ±7.2 points (median in passes 1.22×"
    )
    assert said(fast, slow).startswith("Slower, quality unchanged within")
    assert said(slow, scored("merged", half, 80)).startswith("No change of speed shown ([+0.00, +0.00])")
    assert "quality fell by 50.0 points" in said(slow, scored("merged", [0.0] * 40, 10))
    nothing = scored("message", [0.0] * 40, 80)
    assert "no answer is right on either side, n = 40" in said(nothing, scored("merged", [0.0] * 40, 10))
    few = said(scored("message", [1.0], 80), scored("merged", [1.0], 10))
    assert few.startswith("Too few requests to say whether it is faster")


def test_an_average_is_bounded_by_its_smallest_benchmark() -> None:
    """40 and 4 scored requests weigh the same in a mean: a quarter of the 4 turned wrong moves it by 12.5 points."""
    sides = []
    for name in ("message", "merged"):
        lines = [
            plain(f"{b}/{i}", benchmark=b, base_score=i % 2, stream_score=i % 2)
            for b, n in (("b", 40), ("c", 4))
            for i in range(n)
        ]
        sides.append(arm(name, lines, []))
    said = verdicts(change(*sides), None)[0].sentence
    assert f"quality unchanged within ±{100 * (1 - 0.05 ** (1 / 8)):.1f} points" in said


def test_a_verdict_of_passes_that_seconds_contradict() -> None:
    arms = [scored(name, [0.0, 1.0] * 10, passes) for name, passes in (("message", 80), ("merged", 10))]
    clocks = [
        [{"id": r["id"], "base_seconds": 2.0, "stream_seconds": 1.0, "stream_seconds_cold": cold} for r in a.records]
        for a, cold in zip(arms, (1.0, 3.0), strict=True)
    ]
    timed = [arm(a.label, list(a.records), clock) for a, clock in zip(arms, clocks, strict=True)]
    assert verdicts(change(*timed), "b")[0].sentence.startswith("Faster in passes (but slower in seconds), ")


def test_equal_befores_are_one(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / run)[0] for run in "ab")
    other = write_arm(tmp_path / "c" / "eval" / "message", "message", records(1, 0.3), device="another")
    assert one_of_each([first, second, other]) == {first: first, second: first, other: other}


def test_arms_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_arm(tmp_path / run / "eval" / "merged", "merged", records(i, 0.5)) for i, run in enumerate("ab")]
    assert [a.label for a in read_arms(*folders)] == ["merged (a/merged)", "merged (b/merged)"]
    deeper = [write_arm(tmp_path / p / "run" / "eval" / "merged", "merged", records(1, 0.5)) for p in "xy"]
    assert [a.label for a in read_arms(*deeper)] == ["merged (x/run/merged)", "merged (y/run/merged)"]
