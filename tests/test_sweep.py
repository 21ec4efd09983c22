"""The frontier over tau: each tau's lines are those of a run of its own, at a part of the calls."""

import json
import statistics
from functools import cache

import pytest
import torch
from conftest import real_tokenizer
from tiny_models import REQUESTS, SHORT, counted, invocation, save, talker

from eval import arms
from eval.replay import replay
from eval.sweep import FRONTIER, frontier, sweep
from headstart.request import Request
from headstart.residual import residual

SEED = 71
TAUS = (0.9, 0.3, 0.5, 0.1, 0.7)
SOME = REQUESTS[:14]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """An arm of a tiny model that is sure of some tokens and unsure of others, by overrides."""
    folder, tokenizer = tmp_path_factory.mktemp("sweep"), real_tokenizer("smollm2")
    model = talker(tokenizer, seed=SEED, end_weight=1.5)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(16)
    save(model, tokenizer, folder / "tiny")
    return lambda *overrides: arms.load(invocation(folder / "tiny", folder / "run", *SHORT, *overrides))


@pytest.fixture(scope="module")
def alone(load):
    """A tau's own run: its lines, and the calls that it took."""

    @cache
    def run(tau):
        arm = load("eval.acceptance=threshold", f"eval.tau={tau}", "eval.replay=full")
        calls = counted(arm.model)
        return replay(arm, SOME), len(calls)

    return run


@pytest.fixture(scope="module")
def swept(load):
    """The sweep's lines by tau, and the calls that it took."""
    arm = load()
    calls = counted(arm.model)
    return sweep(arm, SOME, TAUS), len(calls)


def included(lines):
    return [line for line in lines if line["excluded"] is None]


@pytest.mark.parametrize("tau", TAUS)
def test_each_tau_is_a_run_of_its_own(swept, alone, tau):
    """Field by field, updates included."""
    for line, expected in zip(swept[0][tau], alone(tau)[0], strict=True):
        assert line == expected
        assert list(line) == list(expected)
    json.dumps(swept[0][tau])


def test_the_taus_differ(swept):
    """Else the test above could not fail: they keep different runs, and the loose ones change answers."""
    kept = {tau: [u["kept_tokens"] for line in included(swept[0][tau]) for u in line["updates"]] for tau in TAUS}
    assert len({tuple(runs) for runs in kept.values()}) == len(TAUS)
    answers = {tau: [line["stream"] and line["stream"]["tokens"] for line in swept[0][tau]] for tau in TAUS}
    assert answers[0.1] != answers[0.3]
    assert list(swept[0]) == list(TAUS)


def test_a_sure_token_is_the_likeliest_so_sure_taus_agree(swept):
    """Over 0.5 nothing but the most likely token passes: the answers are those of base, and so are the drafts."""
    for tau in (0.5, 0.7, 0.9):
        for line in included(swept[0][tau]):
            assert line["stream"] == line["base"]
    assert [line["draft"] for line in swept[0][0.7]] == [line["draft"] for line in swept[0][0.9]]


def test_shared_work_is_done_once(swept, alone, load):
    total = sum(alone(tau)[1] for tau in TAUS)
    assert swept[1] < 0.6 * total
    # 0.7 and 0.9 have all drafts in common, and what 0.9 decodes leads over all that 0.7 needs
    assert calls_of(load, (0.7,)) <= calls_of(load, (0.9,)) == calls_of(load, (0.7, 0.9))
    assert calls_of(load, (0.3,)) == calls_of(load, (0.3, 0.300001, 0.300002))


def calls_of(load, taus):
    arm = load("eval.batch_size=64")
    calls = counted(arm.model)
    sweep(arm, SOME, taus)
    return len(calls)


def test_an_independent_count_of_one_request(load, alone):
    """One tau, one request: a verification for each sentence but the first, and what is decoded on, each token once."""
    arm = load("eval.batch_size=1")
    calls = counted(arm.model)
    for request, line in zip(SOME, alone(0.3)[0], strict=True):
        calls.clear()
        assert sweep(arm, [request], (0.3,)) == {0.3: [line]}
        if line["excluded"] is None:
            first, *rest = line["updates"]
            passes = len(line["base"]["tokens"]) + first["passes"] + sum(update["passes"] for update in rest)
            last = rest[-1]["passes"] - 1  # not decoded where base leads over it
            assert len(calls) in (passes, passes - last)


def test_passes_are_what_a_tau_would_have_cost_alone(swept):
    for lines in swept[0].values():
        for line in included(lines):
            for update in line["updates"]:
                assert update["passes"] == residual(update["draft_tokens"], update["kept_tokens"])
            assert line["total_passes"] == sum(update["passes"] for update in line["updates"])
            assert line["base_passes_lookup"] is None


def test_the_arms_own_rule_plays_no_part(swept, load):
    for given in (("eval.replay=full", "eval.acceptance=top_k"), ("eval.recycle=true",)):
        assert sweep(load(*given), SOME[:4], (0.3,))[0.3] == swept[0][0.3][:4]


def test_what_cannot_be_replayed_is_excluded_by_every_tau(load):
    single = Request("alone", "made", ("One sentence.",))
    arm = load()
    found = sweep(arm, [single, *SOME[:2]], (0.3, 0.9), unfit=lambda r: "no library" if r == SOME[0] else None)
    for lines in found.values():
        assert [line["excluded"] for line in lines][:2] == ["single sentence", "no library"]
        assert lines[2]["id"] == SOME[1].id
        assert lines[2]["base"]
    assert sweep(arm, [single], (0.3,))[0.3][0]["excluded"] == "single sentence"
    assert sweep(arm, [], (0.3,)) == {0.3: []}


def scored(tau, lines, benchmark, scores):
    """Lines as they stand in sweep.jsonl, with scores of a benchmark."""
    given = [{"base_score": 1.0, "stream_score": scores[i % 3]} for i in range(len(lines))]
    named = {"tau": tau, "benchmark": benchmark}
    return [line | named | ({} if line["excluded"] else score) for line, score in zip(lines, given, strict=True)]


def test_the_frontier(swept):
    """An entry for each tau, its figures recomputed by hand."""
    by_tau = {
        tau: {"a": scored(tau, lines[:7], "a", (1.0, tau, 0.0)), "b": scored(tau, lines[7:], "b", (0.0, 0.5, 1.0))}
        for tau, lines in swept[0].items()
    }
    written = [line for groups in by_tau.values() for lines in groups.values() for line in lines]
    entries = frontier(written, 0.95, 50, 0)
    assert [entry["tau"] for entry in entries] == sorted(TAUS)
    assert frontier([], 0.95, 50, 0) == []
    json.dumps(entries)
    for entry in entries:
        groups = by_tau[entry["tau"]]
        for found, part in [(groups["a"] + groups["b"], entry), *((groups[n], entry["benchmarks"][n]) for n in "ab")]:
            found = included(found)
            speedups = [line["base_passes"] / line["stream_passes"] for line in found]
            shares = [line["kept_tokens"] / line["draft_tokens"] for line in found if line["draft_tokens"]]
            assert part["n"] == len(found)
            assert part["quality_stream"]["value"] == pytest.approx(statistics.mean(r["stream_score"] for r in found))
            assert part["speedup_passes_mean"]["value"] == pytest.approx(statistics.mean(speedups))
            assert part["speedup_passes_median"]["value"] == pytest.approx(statistics.median(speedups))
            assert part["kept_share"]["value"] == pytest.approx(statistics.mean(shares))
            assert part["one_pass_share"]["value"] == pytest.approx(
                sum(r["stream_passes"] == 1 for r in found) / len(found)
            )
            assert part["kept_share"]["low"] <= part["kept_share"]["value"] <= part["kept_share"]["high"]
        assert set(entry) == {"tau", "n", *FRONTIER, "macro", "benchmarks"}
        both = [entry["benchmarks"][n]["speedup_passes_median"]["value"] for n in "ab"]
        assert entry["macro"]["speedup_passes_median"]["value"] == pytest.approx(statistics.mean(both))
