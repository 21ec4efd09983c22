"""Replaying requests on tiny models: counts against independent counts, the fate of drafts, timings."""

import dataclasses
import json

import pytest
from conftest import real_tokenizer
from tiny_models import REQUESTS, SHORT, counted, invocation, reciter, save, talker_folder

from eval import arms, timing
from eval import replay as replaying
from eval.replay import COUNTS, draft_of, replay
from eval.replay import _updates as updates_of
from headstart import StreamingSession
from headstart.autoregressive import AutoregressiveDecoder
from headstart.batch import Advance, BatchDecoder
from headstart.decoder import Answer
from headstart.request import Request
from headstart.residual import residual, residual_paper
from recipes.errors import UserError

RESIDUAL = [name for name in COUNTS if name not in ("updates", "total_passes")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that writes answers of all kinds: empty, ended, cut, kept whole, in part, not at all."""
    return talker_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def load(model, tmp_path_factory):
    """An arm of the tiny model, by overrides."""
    folder = tmp_path_factory.mktemp("arms")
    return lambda *overrides: arms.load(invocation(model, folder / "run", *SHORT, *overrides))


@pytest.fixture(scope="module")
def replayed(load):
    return {mode: replay(load(f"eval.replay={mode}"), REQUESTS) for mode in ("last", "full")}


@pytest.fixture
def fitting(replayed):
    """A request that is not excluded and keeps part of its draft."""
    part = next(line for line in replayed["last"] if fate(line) == "part")
    return next(request for request in REQUESTS if request.id == part["id"])


def included(lines):
    return [line for line in lines if line["excluded"] is None]


def fate(line):
    if line["excluded"]:
        return line["excluded"]
    if not line["draft_tokens"]:
        return "no draft"
    shares = {0: "nothing", line["draft_tokens"]: "whole"}
    return shares.get(line["kept_tokens"], "part")


def test_the_requests_meet_every_fate(replayed):
    fates = {fate(line) for line in replayed["last"]}
    assert fates == {"empty answer (base)", "no draft", "nothing", "whole", "part"}
    assert {line["stream"]["stop"] for line in included(replayed["last"])} == {"end", "length"}


def test_the_lines_are_in_order_and_have_the_contracts_keys(replayed):
    keys = {"id", "benchmark", "sentences", "draft", "base", "stream", "excluded", *COUNTS}
    for lines in replayed.values():
        assert [line["id"] for line in lines] == [request.id for request in REQUESTS]
        assert all(set(line) == keys for line in lines)
        for line, request in zip(lines, REQUESTS, strict=True):
            assert "".join(line["sentences"]) == request.text
            json.dumps(line)


def test_the_streamed_answer_is_the_base_answer(replayed):
    """Under greedy in float32, token for token."""
    for lines in replayed.values():
        assert len(included(lines)) > 15
        for line in included(lines):
            assert line["stream"] == line["base"]


def test_last_and_full_agree(replayed):
    for last, full in zip(replayed["last"], replayed["full"], strict=True):
        assert {name: last[name] for name in RESIDUAL} == {name: full[name] for name in RESIDUAL}
        assert [last[side] for side in ("draft", "base", "stream", "excluded")] == [
            full[side] for side in ("draft", "base", "stream", "excluded")
        ]
        assert (last["updates"], last["total_passes"]) == (None, None)


def test_the_counts_follow_from_the_tokens(replayed):
    for line in included(replayed["full"]):
        n, k = len(line["stream"]["tokens"]), line["kept_tokens"]
        assert line["base_passes"] == len(line["base"]["tokens"])
        assert line["stream_passes"] == max(1, n - k)
        assert line["stream_passes_paper"] == 1 + n - k
        assert line["total_passes"] == sum(update["passes"] for update in line["updates"])
        assert len(line["updates"]) == len(line["sentences"])
        ended = line["draft"]["stop"] == "end"
        assert line["draft_tokens"] == (0 if len(line["draft"]["tokens"]) == ended else len(line["draft"]["tokens"]))
        last, before = line["updates"][-1], line["updates"][-2]
        assert (last["passes"], last["tokens"]) == (line["stream_passes"], line["stream"]["tokens"])
        assert (before["tokens"], before["text"]) == (line["draft"]["tokens"], line["draft"]["text"])
        if line["draft_tokens"]:
            assert last["kept_tokens"] == line["kept_tokens"]


def test_full_is_a_session_walked_step_by_step(load, replayed):
    """Every update's answer, kept tokens and passes, the latter counted independently."""
    arm = load("eval.replay=full")
    calls = counted(arm.model)
    for request, line in zip(REQUESTS, replayed["full"], strict=True):
        with StreamingSession(arm.decoder(), arm.renderer, arm.system, request.history) as session:
            walked = []
            for i in range(1, 1 + len(request.sentences)):
                calls.clear()
                session.update(request.prefix(i))
                update = session.wait()
                walked.append((len(calls), update.kept, list(update.answer.tokens)))
        if line["excluded"]:
            assert line["excluded"] == "empty answer (base)"
            assert walked[-1][2] == line["base"]["tokens"]
        else:
            assert walked == [(u["passes"], u["kept_tokens"], u["tokens"]) for u in line["updates"]]


def test_an_independent_count_of_a_batch_of_one(load):
    """Base, drafts and the streamed answer of each request, one at a time, by wrapping forward."""
    arm = load("eval.replay=full", "eval.batch_size=1")
    calls = counted(arm.model)
    for request in REQUESTS[:8]:
        calls.clear()
        (line,) = replay(arm, [request])
        drafts = [len(update["tokens"]) for update in (line["updates"] or [])[:-1]]
        if line["excluded"] is None:  # each draft is made from nothing, and then costs what a walk would cost
            assert len(calls) == line["base_passes"] + sum(drafts) + line["stream_passes"]
            prompts = [len(arm.prompt(request, i)) for i in range(1, 1 + len(request.sentences))]
            decoded = [max(0, n - 1) for n in (line["base_passes"], *drafts)]
            verified = max(0, len(line["draft"]["tokens"]) - (line["draft"]["stop"] is not None))
            after = line["stream_passes"] - 1
            assert sum(calls) == 2 * prompts[-1] + sum(prompts[:-1]) + sum(decoded) + verified + after


def test_texts_of_an_update_add_up(replayed):
    """Kept and dropped text are the text held before; kept text begins the new text; no character is cut in two."""
    for line in included(replayed["full"]):
        held = ""
        for update in line["updates"]:
            assert update["kept_text"] + update["dropped_text"] == held
            assert update["text"].startswith(update["kept_text"])
            assert not update["kept_tokens"] or update["kept_text"] or not held
            held = update["text"]
        assert held == line["stream"]["text"]


def test_a_character_that_is_cut_between_tokens(load):
    """Kept tokens may end inside a character: its bytes belong to what was dropped, and the texts still add up."""
    arm = load("eval.replay=full")
    tokenizer = arm.renderer.tokenizer
    texts = ("ab \U0001f389 cd", "ab \U0001f98a")
    old, new = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    same = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    assert arm.renderer.text(old[:same]).endswith("\ufffd")
    steps = [Advance(Answer(old, "length"), 0, 9), Advance(Answer(new, "length"), same, 2)]
    first, second = updates_of(arm, steps)
    assert first["text"] == "ab \U0001f389 cd"
    assert second["kept_text"] + second["dropped_text"] == first["text"]
    assert second["text"].startswith(second["kept_text"])
    assert second["kept_text"].strip() == "ab"


@pytest.mark.parametrize("mode", ["last", "full"])
def test_the_batch_size_changes_nothing(load, replayed, recycled, mode):
    for size in (1, 12):
        settings = (f"eval.replay={mode}", f"eval.batch_size={size}")
        assert replay(load(*settings), REQUESTS[:12]) == replayed[mode][:12]
        assert replay(load(*settings, "eval.recycle=true"), REQUESTS[:12]) == recycled[mode][:12]


LOOKUPS = ("base_passes_lookup", "stream_passes_recycle", "recycle_differs")


@pytest.fixture(scope="module")
def recycled(load):
    return {mode: replay(load(f"eval.replay={mode}", "eval.recycle=true"), REQUESTS) for mode in ("last", "full")}


def test_recycle_adds_columns_and_changes_no_other(replayed, recycled):
    for mode, lines in recycled.items():
        assert [{**line, **dict.fromkeys(LOOKUPS)} for line in lines] == replayed[mode]
        assert list(lines[0]) == list(replayed[mode][0])
    assert recycled["last"] == [{**line, "updates": None, "total_passes": None} for line in recycled["full"]]


@pytest.fixture(scope="module")
def drifting(tmp_path_factory):
    """A tiny model whose answers often take up again what they left of the draft, after a divergence."""
    folder = tmp_path_factory.mktemp("drifting")
    model = talker_folder(folder / "model", seed=66)
    return replay(arms.load(invocation(model, folder / "run", *SHORT, "eval.recycle=true")), REQUESTS)


def test_recycle_is_lossless_and_saves_passes(drifting):
    """Under greedy in float32 no answer differs; rejected drafts help, and no request needs more passes."""
    found = included(drifting)
    for line in found:
        assert line["recycle_differs"] == []
        assert 1 <= line["base_passes_lookup"] <= line["base_passes"]
        assert 1 <= line["stream_passes_recycle"] <= line["stream_passes"]
    saved = sum(line["stream_passes"] - line["stream_passes_recycle"] for line in found)
    assert saved > sum(line["stream_passes"] for line in found) / 4
    excluded = [line for line in drifting if line["excluded"]]
    assert excluded
    assert all({line[name] for name in LOOKUPS} == {None} for line in excluded)


def test_base_looks_up_in_its_prompt(tmp_path):
    """An answer that stands in the request costs both sides few passes, and is the same."""
    words = "one two three four five six seven eight nine ten"
    save(reciter(real_tokenizer("smollm2"), words), real_tokenizer("smollm2"), tmp_path / "model")
    arm = arms.load(invocation(tmp_path / "model", tmp_path / "run", *SHORT, "eval.recycle=true"))
    (line,) = replay(arm, [Request("r", "made", ("Do it.", f" Repeat {words}!"))])
    assert line["base"]["text"] == words
    assert line["recycle_differs"] == []
    assert line["base_passes"] == 11
    assert line["base_passes_lookup"] < 6


def test_an_independent_count_of_recycled_passes(load, recycled):
    """One request at a time, by wrapping forward: what recycle adds is what its columns say."""
    for request, line in list(zip(REQUESTS, recycled["last"], strict=True))[:8]:
        calls = []
        for recycle in ("false", "true"):
            arm = load("eval.batch_size=1", f"eval.recycle={recycle}")
            made = counted(arm.model)
            (again,) = replay(arm, [request])
            calls.append(len(made))
        if line["excluded"] is None:
            assert again == line
            assert calls[1] - calls[0] == line["base_passes_lookup"] + line["stream_passes_recycle"]


def test_what_each_side_looks_things_up_in(load, replayed, monkeypatch):
    """Base in its prompt, stream in its draft and then in the same prompt; the plain runs in nothing."""
    seen, advance = [], BatchDecoder.advance

    def watched(self, prompts, drafts=None, progress=lambda done: None, sources=None):
        seen.append((list(prompts), drafts, sources))
        return advance(self, prompts, drafts, progress, sources)

    monkeypatch.setattr(BatchDecoder, "advance", watched)
    arm = load("eval.recycle=true")
    request = REQUESTS[0]
    replay(arm, [request])
    prompt, draft = arm.prompt(request, len(request.sentences)), draft_of(replayed["last"][0])
    assert [sources for _, _, sources in seen] == [None, None, None, [[prompt]], [[draft.tokens, prompt]]]
    assert [(prompts, drafts) for prompts, drafts, _ in seen[-2:]] == [([prompt], [Answer()]), ([prompt], [draft])]


def test_a_recycled_count_that_the_answer_does_not_imply_is_an_error(load, monkeypatch):
    monkeypatch.setattr(replaying, "lookup_passes", lambda *given: 1000)
    with pytest.raises(RuntimeError, match=r"made/\d+: the hook counted \d+ passes for base with look-ups"):
        replay(load("eval.recycle=true"), REQUESTS[:3])


def test_an_answer_that_look_ups_change_is_named(load, recycled, monkeypatch):
    """As near-ties do in bfloat16."""
    advance = BatchDecoder.advance

    def flipped(self, prompts, drafts=None, progress=lambda done: None, sources=None):
        made = advance(self, prompts, drafts, progress, sources)
        if sources is None or len(sources[0]) == 1:
            return made
        return [dataclasses.replace(m, answer=Answer((*m.answer.tokens[:-1], 5), "length")) for m in made]

    monkeypatch.setattr(BatchDecoder, "advance", flipped)
    monkeypatch.setattr(replaying, "_agree", lambda *given: None)
    found = included(replay(load("eval.recycle=true"), REQUESTS[:8]))
    assert found
    assert all(line["recycle_differs"] == ["stream"] for line in found)


@pytest.mark.parametrize("rule", ["threshold", "top_k"])
def test_recycle_is_for_greedy_alone(load, rule):
    with pytest.raises(UserError, match=f"recycle=true is lossless under acceptance=greedy only; with {rule}"):
        load("eval.recycle=true", "eval.replay=full", f"eval.acceptance={rule}")


RULES = {
    "top_k=1": ("eval.acceptance=top_k", "eval.top_k=1"),
    "top_k=3": ("eval.acceptance=top_k", "eval.top_k=3"),
    "tau=4.5e-5": ("eval.acceptance=threshold", "eval.tau=4.5e-5"),  # each of 49,000 tokens has about 2e-5
    "tau=2.5e-5": ("eval.acceptance=threshold", "eval.tau=2.5e-5"),
}


@pytest.fixture(scope="module")
def ruled(load):
    """The first requests under each rule."""
    return {name: replay(load("eval.replay=full", *settings), REQUESTS[:16]) for name, settings in RULES.items()}


@pytest.mark.parametrize("name", RULES)
def test_other_rules_walk_every_sentence(load, replayed, ruled, name):
    """Equal to one request at a time, verify, keep, regenerate; whatever the batch."""
    arm = load("eval.replay=full", *RULES[name])
    lines = ruled[name]
    for request, line in zip(REQUESTS, lines, strict=False):
        decoder, draft, walked = arm.decoder(), Answer(), []
        for i in range(1, 1 + len(request.sentences)):
            prompt = arm.prompt(request, i)
            verified = decoder.verify(prompt, draft)
            draft = decoder.decode(prompt, verified.answer)
            passes = residual(len(draft.tokens), verified.kept)
            walked.append((passes, verified.kept, list(draft.tokens), draft.stop))
        if line["excluded"] is None:
            assert [step[:3] for step in walked] == [
                (u["passes"], u["kept_tokens"], u["tokens"]) for u in line["updates"]
            ]
            assert line["stream"]["stop"] == walked[-1][3]
            assert line["stream_passes_paper"] == residual_paper(len(line["stream"]["tokens"]), walked[-1][1])
    greedy = replayed["full"][:16]
    if name == "top_k=1":
        assert lines == greedy
    else:
        assert any(line["stream"] != line["base"] for line in included(lines))
        assert [line["base"] for line in lines] == [line["base"] for line in greedy]


def test_a_looser_rule_keeps_more_of_the_same_drafts(ruled):
    """Of the first update, whose draft no rule has touched."""
    kept = {}
    for name, lines in ruled.items():
        kept[name] = {line["id"]: line["updates"][1]["kept_tokens"] for line in included(lines)}
    for strict, loose in (("top_k=1", "top_k=3"), ("tau=4.5e-5", "tau=2.5e-5")):
        both = kept[strict].keys() & kept[loose].keys()
        assert all(kept[strict][name] <= kept[loose][name] for name in both)
        assert sum(kept[strict][name] for name in both) < sum(kept[loose][name] for name in both)


def test_a_draft_of_no_written_tokens_counts_as_none(replayed):
    found = [line for line in included(replayed["full"]) if line["draft"]["text"] == ""]
    assert found
    for line in found:
        assert len(line["draft"]["tokens"]) == 1
        assert line["draft"]["stop"] == "end"
        assert (line["draft_tokens"], line["kept_tokens"]) == (0, 0)
        assert line["stream_passes"] == line["base_passes"]


def test_an_empty_answer_is_excluded_with_its_evidence(replayed):
    for lines in replayed.values():
        found = [line for line in lines if line["excluded"]]
        assert found
        for line in found:
            assert line["excluded"] == "empty answer (base)"
            assert {line[name] for name in COUNTS} == {None}
            assert len(line["base"]["tokens"]) == 1
            assert line["draft"] is not None


def test_a_model_that_always_ends_at_once(load):
    arm = load()
    silent = dataclasses.replace(arm, model=reciter(arm.renderer.tokenizer, ""))
    assert {line["excluded"] for line in replay(silent, REQUESTS[:3])} == {"empty answer (base)"}


def test_what_cannot_be_replayed_is_excluded_by_reason(load, fitting):
    """A single sentence; a prompt that leaves no room for the answer."""
    arm = load("eval.replay=full")
    alone = Request("alone", "made", ("One sentence.",))
    long = Request("long", "made", ("Please.", " Say yes." * 1500))
    lines = replay(arm, [alone, fitting, long])
    assert [line["excluded"] for line in lines] == ["single sentence", None, "longer than the model's context"]
    assert lines[0]["draft"] is lines[0]["base"] is lines[0]["stream"] is None
    assert {lines[2][name] for name in COUNTS} == {None}
    assert lines[1] == replay(arm, [fitting])[0]
    assert replay(arm, []) == []


def test_a_prompt_that_just_fits_is_replayed(load, fitting):
    arm = load()
    need = len(arm.prompt(fitting, len(fitting.sentences))) + 12
    for room, reason in ((need, None), (need - 1, "longer than the model's context")):
        arm.model.config.max_position_embeddings = room
        assert replay(arm, [fitting])[0]["excluded"] == reason


def test_a_timing_decodes_what_was_replayed(load, replayed):
    arm = load("eval.replay=full")
    timing.warm_up(arm, REQUESTS[0])
    pairs = [(r, line) for r, line in zip(REQUESTS, replayed["full"], strict=True) if line["excluded"] is None][:3]
    taken = []
    for number, (request, line) in enumerate(pairs):
        taken.append(timing.time_request(arm, request, line, stream_first=bool(number % 2)))
        assert taken[-1]["id"] == request.id
        assert taken[-1]["base_tokens"] == line["base"]["tokens"]
        assert taken[-1]["stream_tokens"] == line["stream"]["tokens"]
        assert len(taken[-1]["update_seconds"]) == len(request.sentences)
        seconds = [taken[-1][name] for name in ("base_seconds", "stream_seconds", "stream_seconds_cold")]
        assert all(0 < value < 60 for value in (*seconds, *taken[-1]["update_seconds"]))
    lines = {line["id"]: line for line in replayed["full"]}
    floor = timing.noise_floor(lines, taken, "float32")
    assert floor["streamed_answer_differs_from_base"] == floor["alone_differs_from_batched"] == 0.0
    assert (floor["n"], floor["n_alone"]) == (len(included(replayed["full"])), 3)
    without = timing.time_request(arm, *(pairs[0][0], replayed["last"][REQUESTS.index(pairs[0][0])]), False)
    assert without["update_seconds"] is None


def test_a_timed_side_starts_with_what_it_says(load, replayed, fitting, monkeypatch):
    """Base and cold start with an empty cache, warm with the prompt before the last sentence."""
    arm = load("eval.replay=last")
    request, line = fitting, replayed["last"][REQUESTS.index(fitting)]
    held, verify = [], AutoregressiveDecoder.verify

    def seen(self, prompt, draft):
        held.append((list(self._held), list(prompt), draft))
        return verify(self, prompt, draft)

    monkeypatch.setattr(AutoregressiveDecoder, "verify", seen)
    timing.time_request(arm, request, line, stream_first=False)
    before, whole = (arm.prompt(request, len(request.sentences) - k) for k in (1, 0))
    draft = draft_of(line)
    assert held == [([], whole, Answer()), ([], whole, draft), ([], before, Answer()), (before, whole, draft)]
    held.clear()
    timing.time_request(arm, request, line, stream_first=True)
    assert [draft for _, _, draft in held] == [Answer(), draft, draft, Answer()]
