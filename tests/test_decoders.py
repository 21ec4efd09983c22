"""Streaming equals plain greedy decoding, token for token and pass for pass, on tiny float32 models of each family."""

import itertools
import math
import random
from functools import cache, partial

import pytest
import torch
from conftest import tiny_model

from headstart import acceptance
from headstart.autoregressive import AutoregressiveDecoder
from headstart.batch import GROUP, BatchDecoder
from headstart.decoder import Answer, PassCounter
from headstart.lookup import lookup_passes, pieces
from headstart.residual import residual
from recipes.schema import Eval

STOPS = frozenset({2, 7})
LIMIT = 24
PROMPTS = [[random.Random(n).randrange(8, 97) for _ in range(n)] for n in (5, 8, 9, 30)]


def plain_greedy(model, prompt, limit=LIMIT, stops=STOPS):
    """The reference: no cache, no draft, the whole text again for each token."""
    answer = Answer()
    while answer.stop is None:
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.inference_mode():
            token = int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        answer = answer.extended(token, stops, limit)
    return answer


@cache
def expected_answer(family, number):
    """Plain greedy decoding of PROMPTS[number] by the family's tiny model."""
    return plain_greedy(tiny_model(family), PROMPTS[number])


def drafts_of(answer):
    """Drafts of every fate: empty, one token, kept whole, rejected at 0, in the middle, at the last, unfinished."""
    tokens, wrong = answer.tokens, lambda i: (answer.tokens[i] + 1) % 97
    middle = len(tokens) // 2
    return {
        "empty": Answer(),
        "one right": Answer(tokens[:1]),
        "one wrong": Answer((wrong(0),)),
        "whole": answer,
        "at 0": Answer((wrong(0), *tokens[1:]), answer.stop),
        "middle": Answer((*tokens[:middle], wrong(middle), *tokens[middle + 1 :]), answer.stop),
        "last": Answer((*tokens[:-1], wrong(-1)), "length"),
        "unfinished": Answer(tokens[:middle]),
        "too long": Answer((*tokens[:-1], *[5] * (LIMIT - len(tokens)), 5), "length"),
        "ends too soon": Answer((*tokens[:middle], 2), "end"),
    }


def test_one_request_at_a_time_equals_plain_greedy(family):
    model = tiny_model(family)
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
    for number, prompt in enumerate(PROMPTS):
        expected = expected_answer(family, number)
        for name, draft in drafts_of(expected).items():
            decoder.forget()
            with PassCounter(model) as counter:
                verified = decoder.verify(prompt, draft)
                answer = decoder.decode(prompt, verified.answer)
            assert answer == expected, name
            assert counter.calls == residual(len(answer.tokens), verified.kept), name


def test_kept_tokens_are_the_leading_run(family):
    model = tiny_model(family)
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
    expected = expected_answer(family, 1)
    n, kept = len(expected.tokens), {}
    for name, draft in drafts_of(expected).items():
        kept[name] = decoder.verify(PROMPTS[1], draft).kept
    assert n > 3
    assert kept == kept | {"empty": 0, "one right": 1, "one wrong": 0, "whole": n, "at 0": 0, "middle": n // 2}
    assert kept == kept | {"last": n - 1, "unfinished": n // 2, "too long": n - 1, "ends too soon": n // 2}


def test_a_batch_equals_one_at_a_time(family):
    model = tiny_model(family)
    jobs = []
    for number, prompt in enumerate(PROMPTS):
        expected = expected_answer(family, number)
        jobs += [(prompt, draft, expected) for draft in drafts_of(expected).values()]
    random.Random(0).shuffle(jobs)
    single = AutoregressiveDecoder(model, STOPS, LIMIT)
    for size in (1, 3, len(jobs)):
        advances = BatchDecoder(model, STOPS, LIMIT, size).advance([j[0] for j in jobs], [j[1] for j in jobs])
        for (prompt, draft, expected), advance in zip(jobs, advances, strict=True):
            assert advance.answer == expected
            assert advance.kept == single.verify(prompt, draft).kept
            assert advance.passes == residual(len(expected.tokens), advance.kept)


def counting(model):
    """Tokens fed in each call of the model's forward, counted by wrapping it."""
    calls, forward = [], model.forward

    def wrapped(*args, **kwargs):
        calls.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    model.forward = wrapped
    return calls


def sources_of(draft, prompt, expected):
    """Nothing; the prompt; draft and prompt; the answer itself; the answer spoilt; the answer with end tokens."""
    spoilt = [(token + (i % 4 == 3)) % 97 for i, token in enumerate(expected.tokens)]
    ended = [number for token in expected.tokens for number in (token, 2)]
    texts = ([], [prompt], [draft.tokens, prompt], [expected.tokens], [spoilt, prompt], [ended, expected.tokens[3:]])
    return [[tuple(text) for text in sources] for sources in texts]


def lookup_jobs(family):
    """(prompt, draft, sources, the expected answer) of every fate and every kind of sources, mixed."""
    jobs = []
    for number, prompt in enumerate(PROMPTS):
        expected = expected_answer(family, number)
        for draft in drafts_of(expected).values():
            jobs += [(prompt, draft, sources, expected) for sources in sources_of(draft, prompt, expected)]
    random.Random(1).shuffle(jobs)
    return jobs


def test_lookups_change_nothing_but_the_passes(family):
    """Abreast, rows keep different numbers of proposals in a pass; the window of Gemma-3 is 8, texts are up to 54."""
    model, jobs = tiny_model(family), lookup_jobs(family)
    single = AutoregressiveDecoder(model, STOPS, LIMIT)
    prompts, drafts, sources, answers = (list(column) for column in zip(*jobs, strict=True))
    kept = [single.verify(prompt, draft).kept for prompt, draft in zip(prompts, drafts, strict=True)]
    calls, taken = counting(model), []
    for size in (5, len(jobs)):
        calls.clear()
        advances = BatchDecoder(model, STOPS, LIMIT, size).advance(prompts, drafts, sources=sources)
        assert [advance.answer for advance in advances] == answers
        assert [advance.kept for advance in advances] == kept
        passes = [advance.passes for advance in advances]
        parts = [passes[i : i + size] for i in range(0, len(jobs), size)]
        assert len(calls) == sum(math.ceil(len(part) / GROUP) - 1 + max(part) for part in parts)
        taken.append(passes)
    assert taken[0] == taken[1]
    for (_, _, given, answer), k, passes in zip(jobs, kept, taken[0], strict=True):
        assert passes == lookup_passes(answer.tokens, k, pieces(given, STOPS), LIMIT) <= residual(len(answer.tokens), k)
    assert sum(taken[0]) < 0.7 * sum(residual(len(a.tokens), k) for a, k in zip(answers, kept, strict=True))


def test_an_independent_count_of_lookups(family):
    """One row: its passes are the calls of forward, and each feeds the last token and the proposals."""
    model = tiny_model(family)
    calls, prompt = counting(model), PROMPTS[2]
    expected = expected_answer(family, 2)
    decoder = BatchDecoder(model, STOPS, LIMIT, 1)
    saved = 0
    for draft in drafts_of(expected).values():
        for sources in sources_of(draft, prompt, expected):
            calls.clear()
            (advance,) = decoder.advance([prompt], [draft], sources=[sources])
            assert advance.answer == expected
            assert advance.passes == len(calls)
            assert sum(calls[1:]) >= len(expected.tokens) - advance.kept - 1
            saved += residual(len(expected.tokens), advance.kept) - len(calls)
    assert saved > 0


def test_lookups_stop_at_an_end_token_and_at_the_limit():
    """A source that goes on past the end, and one that repeats the answer for ever."""
    model = tiny_model("llama3")
    free = plain_greedy(model, PROMPTS[0], stops=frozenset())
    decoder = BatchDecoder(model, frozenset(), LIMIT, 2)
    for source in (free.tokens + (5,) * 20, free.tokens * 3):
        (advance,) = decoder.advance([PROMPTS[0]], sources=[[source]])
        assert advance.answer == free
        assert advance.passes < 8
    end = free.tokens[9]
    ended = plain_greedy(model, PROMPTS[0], stops=frozenset({end}))
    (advance,) = BatchDecoder(model, frozenset({end}), LIMIT, 2).advance([PROMPTS[0]], sources=[[free.tokens * 2]])
    assert advance.answer == ended
    assert ended.stop == "end"


def test_one_pass_judged_by_several_rules(family):
    """What stands after it, for each rule, is what a decoder with that rule alone says."""
    model = tiny_model(family)
    jobs = [
        (prompt, draft)
        for number, prompt in enumerate(PROMPTS)
        for draft in drafts_of(expected_answer(family, number)).values()
    ]
    prompts, drafts = ([job[i] for job in jobs] for i in (0, 1))
    taus = (1e-4, 0.02, 0.3, 0.9)
    calls = counting(model)
    asked = []

    def rules(place, logits, draft):
        asked.append(place)
        assert tuple(draft.tolist()) == drafts[place].tokens
        return acceptance.thresholds(logits, draft, taus)

    size = 2 * GROUP + 3
    judged = BatchDecoder(model, STOPS, LIMIT, size).verify(prompts, drafts, rules)
    parts = [len(jobs[i : i + size]) for i in range(0, len(jobs), size)]
    assert len(calls) == sum(math.ceil(part / GROUP) for part in parts)
    assert sorted(asked) == list(range(len(jobs)))
    for i, tau in enumerate(taus):
        alone = AutoregressiveDecoder(model, STOPS, LIMIT, partial(acceptance.threshold, tau=tau))
        for (prompt, draft), by_rule in zip(jobs, judged, strict=True):
            assert by_rule[i].passes == 1
            verified = alone.verify(prompt, draft)
            assert (by_rule[i].kept, by_rule[i].answer) == (verified.kept, verified.answer)
    assert len({tuple(after.kept for after in by_rule) for by_rule in judged}) > 5


def test_decoding_on_from_settled_tokens(family):
    """Under `everything` a draft is where decoding starts, whatever the model thinks of it."""
    model = tiny_model(family)
    expected = expected_answer(family, 3)
    decoder = BatchDecoder(model, STOPS, LIMIT, 3, acceptance.everything)
    begun = [Answer(expected.tokens[:n]) for n in (0, 1, 5, len(expected.tokens) - 1)]
    for start, advance in zip(begun, decoder.advance([PROMPTS[3]] * 4, begun), strict=True):
        assert advance.answer == expected
        assert advance.kept == len(start.tokens)
        assert advance.passes == len(expected.tokens) - len(start.tokens)
    forced = Answer(((expected.tokens[0] + 1) % 97,))
    (advance,) = decoder.advance([PROMPTS[3]], [forced])
    assert advance.answer.tokens[:1] == forced.tokens
    on = plain_greedy(model, [*PROMPTS[3], *forced.tokens], LIMIT - 1)
    assert advance.answer.tokens[1:] == on.tokens


def test_the_cache_rolls_back_twice_and_more(family):
    """A session's cache: prompts that grow and change, drafts that fall; logits equal a cold run's."""
    model = tiny_model(family)
    warm, cold = (AutoregressiveDecoder(model, STOPS, LIMIT) for _ in range(2))
    draft = Answer()
    prompt = PROMPTS[3]
    for cut, change in itertools.product((9, 14, 22, 30), (0, 3)):
        current = [*prompt[: cut - change], *([11] * change)]
        cold.forget()
        expected = cold.decode(current, cold.verify(current, Answer()).answer)
        draft = warm.decode(current, warm.verify(current, draft).answer)
        assert draft == expected == plain_greedy(model, current)


@pytest.mark.parametrize("length", [5, 8, 9, 30])
def test_sliding_window_rejecting_none_one_all(length):
    """Fault 12: logits after a roll-back equal a cold run's, below, at and beyond the window."""
    model = tiny_model("gemma3")
    prompt = [random.Random(length).randrange(8, 97) for _ in range(length)]
    expected = plain_greedy(model, prompt)
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
    for right in (len(expected.tokens), len(expected.tokens) - 1, 0):
        wrong = tuple((token + 1) % 97 for token in expected.tokens[right:])
        verified = decoder.verify(prompt, Answer(expected.tokens[:right] + wrong, "length"))
        assert verified.kept == right
        assert decoder.decode(prompt, verified.answer) == expected


def test_positions_and_mask_after_a_partial_acceptance():
    """Fault 13: positions continue at the cache's length."""
    model = tiny_model("llama3")
    seen = []
    model.register_forward_pre_hook(lambda _m, _a, kw: seen.append(kw["position_ids"].tolist()), with_kwargs=True)
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
    prompt = PROMPTS[2]
    expected = plain_greedy_tokens(decoder, prompt)
    seen.clear()
    draft = Answer((*expected[:2], (expected[2] + 1) % 97, *expected[3:6]))
    answer = decoder.decode(prompt, decoder.verify(prompt, draft).answer)
    assert answer.tokens == expected
    assert seen[0] == [list(range(len(prompt) - 1, len(prompt) + 6))]  # the prompt was held: only its last token is fed
    assert seen[1:3] == [[[len(prompt) + 2]], [[len(prompt) + 3]]]


def plain_greedy_tokens(decoder, prompt):
    return decoder.decode(prompt, decoder.verify(prompt, Answer()).answer).tokens


def test_stops_on_any_end_token_and_at_the_limit():
    """Fault 15: the stop set is a union; an answer cut at the limit has that many tokens."""
    model = tiny_model("llama3")
    free = plain_greedy(model, PROMPTS[0], stops=frozenset())
    assert (len(free.tokens), free.stop) == (LIMIT, "length")
    for at in (3, 9):
        token = free.tokens[at]
        first = free.tokens.index(token)
        decoder = AutoregressiveDecoder(model, frozenset({1, token}), LIMIT)
        answer = Answer(plain_greedy_tokens(decoder, PROMPTS[0]), "end")
        assert answer.tokens == free.tokens[: first + 1]
        assert answer.written == free.tokens[:first]


def test_sampling_values_and_penalties_change_nothing(family):
    """Fault 16: base and stream ignore what generation_config says."""
    model = tiny_model(family)
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
    expected = plain_greedy_tokens(decoder, PROMPTS[3])
    model.generation_config.update(do_sample=True, temperature=0.6, repetition_penalty=1.2)
    decoder.forget()
    assert plain_greedy_tokens(decoder, PROMPTS[3]) == expected
    assert BatchDecoder(model, STOPS, LIMIT, 2).advance([PROMPTS[3]])[0].answer.tokens == expected


def test_acceptance_rules():
    logits = torch.log(torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]))
    draft = torch.tensor([0, 2, 0])
    assert acceptance.greedy(logits, draft).tolist() == [True, False, False]
    assert acceptance.threshold(logits, draft, tau=0.29).tolist() == [True, True, False]
    assert acceptance.threshold(logits, draft, tau=0.61).tolist() == [False, False, False]
    both = acceptance.thresholds(logits, draft, taus=(0.29, 0.61))
    assert [mask.tolist() for mask in both] == [[True, True, False], [False, False, False]]
    assert acceptance.everything(logits, draft).all()
    assert acceptance.top_k(logits, draft, k=1).tolist() == [True, False, False]
    assert acceptance.top_k(logits, draft, k=2).tolist() == [True, True, False]
    assert acceptance.leading_run(torch.tensor([True, False, True])) == 1
    assert acceptance.leading_run(torch.tensor([], dtype=torch.bool)) == 0
    assert acceptance.rule(Eval(acceptance="top_k", top_k=3, replay="full"))(logits, draft).all()
    assert acceptance.rule(Eval(acceptance="threshold", tau=0.25, replay="full"))(logits, draft).tolist() == [1, 1, 0]


def test_looser_rules_keep_more_and_go_on_from_the_argmax(family):
    """Under another rule the token after the kept run is the same pass' argmax, and batch equals single."""
    model = tiny_model(family)
    expected = expected_answer(family, 1)
    draft = drafts_of(expected)["middle"]
    rule = acceptance.rule(Eval(acceptance="top_k", top_k=97, replay="full"))
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT, rule)
    assert decoder.verify(PROMPTS[1], draft).answer == draft  # everything passes: the draft is the answer
    strict = AutoregressiveDecoder(
        model, STOPS, LIMIT, acceptance.rule(Eval(acceptance="top_k", top_k=1, replay="full"))
    )
    assert strict.decode(PROMPTS[1], strict.verify(PROMPTS[1], draft).answer) == expected
    third = acceptance.rule(Eval(acceptance="top_k", top_k=3, replay="full"))
    alone = AutoregressiveDecoder(model, STOPS, LIMIT, third)
    batch = BatchDecoder(model, STOPS, LIMIT, 4, third)
    for number, prompt in enumerate(PROMPTS):
        for d in drafts_of(expected_answer(family, number)).values():
            verified = alone.verify(prompt, d)
            advance = batch.advance([prompt], [d])[0]
            assert (advance.kept, advance.answer) == (verified.kept, alone.decode(prompt, verified.answer))


def test_an_independent_count_agrees(family):
    """Calls and tokens, counted by wrapping the model's forward instead of the hook."""
    model = tiny_model(family)
    calls = counting(model)
    decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
    prompt = PROMPTS[3]
    with PassCounter(model, timed=True) as counter:
        answer = decoder.decode(prompt, decoder.verify(prompt, Answer()).answer)
        base = counter.calls
        decoder.forget()
        verified = decoder.verify(prompt, Answer((*answer.tokens[:4], 3)))
        decoder.decode(prompt, verified.answer)
    assert len(calls) == counter.calls == base + residual(len(answer.tokens), verified.kept)
    assert sum(calls) == counter.tokens == (len(prompt) + base - 1) + (len(prompt) + 5) + len(answer.tokens) - 5
    assert 0 < counter.seconds < 60
    assert not model._forward_pre_hooks  # the counter took its hooks off
