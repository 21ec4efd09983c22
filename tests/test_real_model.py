"""SmolLM2-135M on real HumanEval requests: float32 exactness, and every forward pass counted."""

import pytest

from eval import arms
from eval.benchmarks import humaneval
from eval.replay import draft_of, replay
from headstart.decoder import Answer
from headstart.residual import residual
from headstart.session import StreamingSession
from recipes.loader import parse

pytestmark = pytest.mark.slow
REQUESTS = 22


def load(mode, **changes):
    settings = {"replay": mode, "arm": "message", "max_new_tokens": 96, "batch_size": 22, **changes}
    overrides = [f"eval.{key}={value}" for key, value in settings.items()]
    return arms.load(parse(["recipe=smollm2", "model.dtype=float32", *overrides]))


@pytest.fixture(scope="module")
def requests():
    return humaneval.load()[:REQUESTS]


@pytest.fixture(scope="module")
def replayed(requests):
    return {mode: replay(load(mode), requests) for mode in ("last", "full")}


def test_the_streamed_answer_is_the_base_answer(replayed):
    """Under greedy in float32, token for token, for replay=last and replay=full."""
    for mode, lines in replayed.items():
        assert len([line for line in lines if line["excluded"] is None]) >= 20
        for line in lines:
            assert line["stream"]["tokens"] == line["base"]["tokens"], (mode, line["id"])


def test_last_and_full_report_the_same_residual(replayed):
    for last, full in zip(replayed["last"], replayed["full"], strict=True):
        for key in ("base_passes", "stream_passes", "stream_passes_paper", "draft_tokens", "kept_tokens", "draft"):
            assert last[key] == full[key], (last["id"], key)
        assert last["total_passes"] is None
        assert full["total_passes"] == sum(update["passes"] for update in full["updates"])


def test_an_independent_hook_counts_the_same(requests, replayed):
    """One request at a time through a session: base, each update and the residual, counted by wrapping forward."""
    arm = load("full")
    calls = []
    forward = arm.model.forward

    def counted(**kwargs):
        calls.append(kwargs["input_ids"].numel())
        return forward(**kwargs)

    arm.model.forward = counted
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
