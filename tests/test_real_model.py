"""SmolLM2-135M on real requests: float32 exactness, every forward pass counted, and look-ups that change no answer.

Requests of four benchmarks from HEADSTART_SHARED; HumanEval's alone where it is not set.
"""

import functools
import os
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from eval import arms, suite
from eval.replay import draft_of, replay
from headstart.decoder import Answer
from headstart.residual import residual
from headstart.session import StreamingSession
from recipes.loader import parse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
REQUESTS = 64
WEIGHTS = ("recipe=smollm2", "model.dtype=float32", "eval.arm=message")
ROWS = {"mbpp": "mbpp", "coedit": "coedit", "mtbench": "mt_bench"}


def load(mode, **changes):
    settings = {"replay": mode, "max_new_tokens": 96, "batch_size": 64, **changes}
    overrides = [f"eval.{key}={value}" for key, value in settings.items()]
    return replace(weights(), recipe=parse([*WEIGHTS, *overrides]).recipe)


@functools.cache
def weights():
    return arms.load(parse(WEIGHTS))


@pytest.fixture(scope="module")
def requests():
    """HumanEval first; of each benchmark as many. Those of one sentence are left out, they cannot be streamed."""
    shared = os.environ.get("HEADSTART_SHARED")
    folder = Path(shared) / "data" if shared else None
    paths = {name: folder / sub for name, sub in ROWS.items()} if folder else {}
    names = ["humaneval", *paths]
    given = [f"eval.paths.{name}={path}" for name, path in paths.items()]
    invocation = parse(["recipe=smollm2", f"eval.benchmarks=[{','.join(names)}]", "eval.limit=96", *given])
    each = REQUESTS // len(names)
    found = suite.load(invocation).requests.values()
    return [request for rows in found for request in [r for r in rows if len(r.sentences) > 1][:each]]


@pytest.fixture(scope="module")
def replayed(requests):
    """Every draft and look-ups in one run, and the last draft alone in another."""
    lines = {"last": replay(load("last"), requests), "full": replay(load("full", recycle="true"), requests)}
    for found in lines.values():
        assert [line["id"] for line in found if line["excluded"] is not None] == []
        assert len(found) == REQUESTS
    return lines


def test_the_streamed_answer_is_the_base_answer(replayed):
    """Under greedy in float32, token for token, for replay=last and replay=full."""
    for mode, lines in replayed.items():
        for line in lines:
            assert line["stream"]["tokens"] == line["base"]["tokens"], (mode, line["id"])


def test_last_and_full_report_the_same_residual(replayed):
    for last, full in zip(replayed["last"], replayed["full"], strict=True):
        for key in ("base_passes", "stream_passes", "stream_passes_paper", "draft_tokens", "kept_tokens", "draft"):
            assert last[key] == full[key], (last["id"], key)
        assert last["total_passes"] is None
        assert full["total_passes"] == sum(update["passes"] for update in full["updates"])


def test_look_ups_save_passes_and_change_no_answer(replayed):
    """Of both sides, token for token; prints what they save."""
    names = ("base_passes", "base_passes_lookup", "stream_passes", "stream_passes_recycle")
    by_benchmark = {}
    for line in replayed["full"]:
        assert line["recycle_differs"] == [], line["id"]
        base, base_found, stream, stream_found = (line[name] for name in names)
        assert 1 <= base_found <= base
        assert 1 <= stream_found <= stream
        by_benchmark.setdefault(line["benchmark"], []).append((base, base_found, stream, stream_found))
    for name, rows in by_benchmark.items():
        medians = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"\n{name}, {len(rows)} requests, median", *(f"{n} {v:g}" for n, v in zip(names, medians, strict=True)))
    total = [sum(column) for column in zip(*(row for rows in by_benchmark.values() for row in rows), strict=True)]
    assert total[1] < total[0]
    assert total[3] < total[2]


def test_an_independent_hook_counts_the_same(requests, replayed, monkeypatch):
    """One request at a time through a session: base, each update and the residual, counted by wrapping forward."""
    arm = load("full")
    calls = []
    forward = arm.model.forward

    def counted(**kwargs):
        calls.append(kwargs["input_ids"].numel())
        return forward(**kwargs)

    monkeypatch.setattr(arm.model, "forward", counted)
    for request, line in list(zip(requests, replayed["full"], strict=True))[:3]:
        decoder = arm.decoder()
        prompt = arm.prompt(request, len(request.sentences))
        calls.clear()
        base = decoder.decode(prompt, decoder.verify(prompt, Answer()).answer)
        assert (len(calls), list(base.tokens)) == (line["base_passes"], line["base"]["tokens"])
        assert sum(calls) == len(prompt) + len(base.tokens) - 1
        decoder.forget()
        with StreamingSession(decoder, arm.renderer, arm.system) as session:
            for i, update in enumerate(line["updates"][:-1], start=1):
                calls.clear()
                session.update(request.prefix(i)).result()
                assert len(calls) == update["passes"]
            assert session.draft == draft_of(line)
            calls.clear()
            final = session.submit(request.text)
        assert len(calls) == line["stream_passes"] == residual(len(final.answer.tokens), final.kept)
        assert list(final.answer.tokens) == line["stream"]["tokens"]
