"""The slot-diffusion decoder: the reference's own runs token for token, what is mended, drafts in one pass."""

import itertools
import json
import random
import threading
from functools import cache, partial

import pytest
import torch
from conftest import tiny_model
from slot_transcription import Transcription
from transformers import DynamicCache, Qwen3ForCausalLM

from headstart.acceptance import everything, greedy, threshold
from headstart.decoder import Answer, PassCounter
from headstart.decoders import OneByOne, walk
from headstart.slot_diffusion import SlotDiffusionDecoder, block_length
from recipes.errors import UserError
from recipes.schema import Slots

GOLDEN = "data/slot_diffusion_golden"
CASES = 77
MASK, END, OTHER_END = 96, 2, 5
PROMPT = [11, 12, 13, 14, 15]
SMALL = Slots(slot_size=4, serial_blocks=2, slot_threshold=0.3, token_threshold=0.1)


@cache
def golden(shared):
    return json.loads((shared / GOLDEN / "decode_cases.json").read_text())


@cache
def reference_model(shared, name):
    return Qwen3ForCausalLM.from_pretrained(shared / GOLDEN / "models" / name, dtype=torch.float32).eval()


@pytest.fixture
def folder(shared):
    if not (shared / GOLDEN).is_dir():
        pytest.skip(f"{GOLDEN} is absent")
    return shared


def settings(case, compat):
    given = case["settings"]
    return Slots(
        slot_size=given["slot_size"],
        serial_blocks=given["serial_num_blocks"],
        slot_threshold=float(given["slot_threshold"]),
        token_threshold=float(given["token_threshold"]),
        compat=compat,
    )


def of_case(folder, case, compat):
    model, limit = reference_model(folder, case["model"]), case["settings"]["gen_length"]
    ends = frozenset({case["eos_id"]})
    return SlotDiffusionDecoder(model, ends, case["mask_id"], limit, settings(case, compat), greedy)


def small(rule=greedy, limit=24, ends=(END, OTHER_END), seed=0, slots=SMALL, **changes):
    """A decoder over a tiny random model of 97 tokens."""
    model = tiny_model("qwen3", seed=seed)
    return SlotDiffusionDecoder(model, frozenset(ends), MASK, limit, slots.model_copy(update=changes), rule)


def test_the_reference_is_reproduced_token_for_token_and_call_for_call(folder):
    cases = golden(folder)["cases"]
    assert len(cases) == CASES
    for case in cases:
        decoder, start = of_case(folder, case, "reference"), len(case["prompt_ids"])
        with PassCounter(decoder.model) as counter:
            filled = decoder.fill(case["prompt_ids"], [])
        by_place = sorted(filled.committed, key=lambda one: one[1])
        assert case["prompt_ids"] + [token for token, _ in by_place] == case["output_ids"], case["id"]
        assert [start + place for _, place in filled.committed] == case["commit_positions"], case["id"]
        calls = [[call.phase, call.rows, call.tokens, call.cached] for call in decoder.calls]
        assert calls == case["calls"], case["id"]
        assert counter.calls == case["n_calls"], case["id"]
        assert counter.tokens == case["n_query_tokens"], case["id"]
        for step, wanted in zip(filled.steps, case["steps"], strict=True):
            assert [start + place for place in step.open] == wanted["open"], case["id"]
            assert [start + place for place in step.chosen] == wanted["chosen"], case["id"]
            assert (step.fallback, step.path) == (wanted["fallback"], wanted["path"]), case["id"]
            assert [start + place for place in step.committed] == wanted["committed"], case["id"]
            assert sorted(start + place for place in step.closed) == sorted(wanted["closed"]), case["id"]


def test_settings_on_which_the_reference_breaks_are_refused(folder):
    refused = golden(folder)["invalid_settings"]
    assert len(refused) == 4
    for case in refused:
        with pytest.raises(UserError, match=r"no whole number of slots; change slots\.slot_size"):
            block_length(settings(case, "none"), case["settings"]["gen_length"])


def test_what_the_default_mends(folder):
    """No slot is lost, nothing follows the first end token, the mask token is no answer, the tail is decoded."""
    changed = {"lost": 0, "after": 0, "mask": 0, "tail": 0}
    for case in golden(folder)["cases"]:
        decoder, limit = of_case(folder, case, "none"), case["settings"]["gen_length"]
        filled = decoder.fill(case["prompt_ids"], [])
        answer, tokens = decoder.decode(case["prompt_ids"], Answer()), {p: t for t, p in filled.committed}
        ends = [place for place, token in sorted(tokens.items()) if token == case["eos_id"]]
        wanted = min(ends) + 1 if ends else limit
        assert sorted(tokens)[:wanted] == list(range(wanted)), f"{case['id']}: places are missing before the end"
        assert answer.tokens == tuple(tokens[place] for place in range(wanted)), case["id"]
        assert answer.stop == ("end" if ends else "length"), case["id"]
        assert case["mask_id"] not in answer.tokens, case["id"]
        changed["lost"] += "rows_eos_lost_slots" in case["tags"]
        changed["after"] += case["n_after_first_eos"] > 0
        changed["mask"] += "mask_in_output" in case["tags"]
        changed["tail"] += "tail_dropped" in case["tags"]
    assert changed == {"lost": 12, "after": 17, "mask": 2, "tail": 7}


def alone(model, ids, positions):
    """Logits of the last token, of one sequence without a cache kept from before."""
    with torch.no_grad():
        ids, positions = torch.tensor([ids]), torch.tensor([positions])
        return model(input_ids=ids, position_ids=positions, cache=DynamicCache(), use_cache=True).logits[0, -1]


@pytest.mark.parametrize("scoring", ["mask", "ar"])
@pytest.mark.parametrize("stop", [None, "end", "length"])
def test_a_draft_token_is_judged_by_what_stands_to_its_left(scoring, stop):
    tokens = (21, 22, 23, 24, 25, 26, 27, 28, END)
    decoder = small(scoring=scoring)
    logits, drafted = decoder.scores(PROMPT, Answer(tokens, stop))
    assert drafted.tolist() == list(tokens)
    assert len(decoder.calls) == 1
    for at in range(len(tokens)):
        text = [*PROMPT, *tokens[:at]]
        places = list(range(len(text)))
        if scoring == "mask" and at % 4 == 0:
            text, places = [*text, MASK], [*places, len(places)]
        torch.testing.assert_close(logits[at], alone(decoder.model, text, places), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kept", [0, 1, 4, 6, 9])
def test_the_cache_after_a_partly_kept_draft_is_that_of_a_cold_run(kept):
    tokens = (21, 22, 23, 24, 25, 26, 27, 28, 29)
    accepted = torch.arange(len(tokens)) < kept
    warm = small(rule=lambda logits, draft: accepted[: len(draft)])
    warm.decode([9, 8, 7, 6], warm.verify([9, 8, 7, 6], Answer()).answer)  # leaves a cache of another prompt
    verified = warm.verify(PROMPT, Answer(tokens))
    assert verified.kept == kept
    assert verified.answer == Answer(tokens[:kept])
    answer = warm.decode(PROMPT, verified.answer)
    cold = small()
    assert answer == cold.decode(PROMPT, Answer(tokens[:kept]))
    assert answer.tokens[:kept] == tokens[:kept]


@pytest.mark.parametrize("floor", [False, True])
def test_a_draft_that_is_kept_whole_costs_one_pass_and_under_the_papers_floor_three(floor):
    costs = []
    for seed in range(16):
        decoder = small(rule=everything, seed=seed, paper_floor=floor, token_threshold=0.0)
        draft = decoder.decode([11 + seed, 3], Answer())
        (advance,) = OneByOne(decoder, 1).advance([[11 + seed, 3]], [draft])
        costs.append(advance.passes)
        assert advance.answer.tokens[: advance.kept] == draft.tokens[: advance.kept]
    assert min(costs) == (3 if floor else 1)
    assert floor or max(costs) == 1


def test_half_a_slot_is_kept_or_dropped():
    tokens = tuple(range(20, 31))
    for half_kept, kept in (("keep", 6), ("drop", 4)):
        decoder = small(rule=lambda logits, draft: torch.arange(len(draft)) < 6, half_kept=half_kept)
        assert decoder.verify(PROMPT, Answer(tokens)).kept == kept


def test_every_token_that_passes_can_be_kept_and_the_gaps_are_filled():
    tokens, passes = (21, 22, 23, 24, 25, 26, 27, END), torch.tensor([1, 1, 0, 1, 0, 0, 1, 1]).bool()
    decoder = small(rule=lambda logits, draft: passes[: len(draft)], keep="every", ends=(END,))
    verified = decoder.verify(PROMPT, Answer(tokens, "end"))
    assert verified.kept == 5
    assert verified.answer == Answer(tokens[:2])
    answer = decoder.decode(PROMPT, verified.answer)
    assert [answer.tokens[at] for at in (0, 1, 3, 6)][: len(answer.tokens)] == [21, 22, 24, 27]
    assert len(answer.tokens) == 8
    assert answer.stop == "end"
    cold = small(ends=(END,)).fill(PROMPT, [(tokens[at], at) for at in (0, 1, 3, 6, 7)])
    assert answer.tokens == tuple(token for token, _ in sorted(cold.committed, key=lambda one: one[1]))


def test_a_token_kept_behind_an_end_that_a_gap_brings_is_no_kept_token():
    passes, shorter = torch.tensor([True, False] * 12), 0
    for seed in range(12):
        decoder = small(lambda logits, draft: passes[: len(draft)], keep="every", seed=seed, ends=range(2, 14))
        draft = Answer(tuple(range(20, 44)), "length")
        advanced = OneByOne(decoder, 1).advance([PROMPT], [draft])[0]
        answer = advanced.answer.tokens
        assert advanced.kept == sum(place % 2 == 0 for place in range(len(answer)))
        assert answer[::2] == draft.tokens[: len(answer) : 2]
        shorter += len(answer) < 23
    assert shorter


def test_every_end_token_ends_an_answer_and_is_not_its_text():
    found = set()
    for seed in range(40):
        answer = small(seed=seed, ends=(END, OTHER_END, 30, 31, 32, 33)).decode([seed + 8, 3, 9], Answer())
        if answer.stop == "end":
            found.add(answer.tokens[-1])
            ends = {END, OTHER_END, 30, 31, 32, 33}
            assert not ends & set(answer.written)
            assert answer.tokens[-1] in ends
    assert len(found) > 1, "only one of the end tokens was met"


def test_no_answer_is_longer_than_the_limit_and_places_before_its_end_are_all_there():
    for seed in range(12):
        for limit in (3, 8, 17, 24):
            slots = Slots(slot_size=4, serial_blocks=1, slot_threshold=0.2, token_threshold=0.05)
            answer = small(seed=seed, limit=limit, slots=slots).decode(PROMPT, Answer())
            assert answer.stop == "end" or len(answer.tokens) == limit


def test_passes_are_those_that_the_hook_counts():
    decoder = OneByOne(small(rule=partial(threshold, tau=0.02)), 2)
    paths = [[[11], [11, 12], [11, 12, 13]], [[21], [21, 22]]]
    done = []
    for path in walk(decoder, paths):
        done.append(len(path))
        assert all(step.passes >= 1 for step in path)
    assert done == [3, 2]
    said = []
    decoder.advance([path[-1] for path in paths], progress=said.append)
    assert said == [2]


def test_decoding_that_is_stopped_leaves_a_leading_run():
    decoder, passes = small(), iter([False, False, True])
    part = decoder.decode(PROMPT, Answer(), lambda: next(passes, True))
    whole = small().decode(PROMPT, Answer())
    assert part.stop is None or part == whole
    again = decoder.decode(PROMPT, part)
    assert again.stop is not None
    assert again.tokens[: len(part.tokens)] == part.tokens


def test_a_session_streams_with_it():
    from conftest import real_tokenizer

    from headstart.family import FAMILIES
    from headstart.prompt import renderer
    from headstart.session import StreamingSession

    rendering = renderer(real_tokenizer("refusion"), FAMILIES["refusion"])
    model = tiny_model("qwen3", len(rendering.tokenizer))
    mask = rendering.tokenizer.convert_tokens_to_ids("<|mask|>")
    decoder = SlotDiffusionDecoder(model, frozenset({rendering.end_of_turn}), mask, 16, SMALL, greedy)
    before = threading.active_count()
    with StreamingSession(decoder, rendering) as session:
        session.update("Add two numbers.")
        session.wait()
        final = session.submit("Add two numbers. Be brief.")
    assert final.answer.stop is not None
    assert final.kept <= len(final.answer.tokens)
    assert threading.active_count() == before


def test_the_cache_changes_no_token_and_no_pass():
    """Faults 12 and 13: against the described steps without any cache, over settings and prompts."""
    paths = set()
    for seed in range(24):
        chosen = {
            "slot_size": (4, 6)[seed % 2],
            "serial_blocks": 1 + seed % 2,
            "slot_threshold": (0.2, 0.02)[seed // 2 % 2],
        }
        slots = Slots(**chosen, token_threshold=(0.08, 0.0)[seed // 4 % 2])
        decoder = small(seed=seed, slots=slots, ends=(END, 30 + seed, 60))
        prompt = [7 + seed, 3, 12, 50 - seed]
        plain = Transcription(decoder.model, decoder.stop_ids, MASK, slots)
        assert list(decoder.decode(prompt, Answer()).tokens) == plain.decode(prompt, 24), seed
        assert len(decoder.calls) == plain.passes, seed
        decoder.forget()
        paths |= {(step.path, len(step.chosen) > 1) for step in decoder.fill(prompt, []).steps}
    assert paths == {("prefix", False), ("prefix", True), ("rows", False), ("rows", True)}


def test_gaps_of_any_length_are_filled_whole_side_by_side():
    """Slots are as long as their gap at most, so rows are of several lengths: none behind a short one gets lost."""
    draw, rows = random.Random(1), 0
    ends = frozenset(range(0, 96, 8))
    for seed in range(120):
        slots = Slots(slot_size=8, serial_blocks=1, slot_threshold=0, token_threshold=draw.choice([0.1, 0.3, 0.9]))
        decoder = small(ends=ends, seed=seed % 8, slots=slots)
        places = list(itertools.accumulate(draw.choice([4, 5, 6, 8]) for _ in range(4)))
        kept = [(draw.randrange(1, 8), place) for place in places if place < 24]
        filled = decoder.fill([draw.randrange(96) for _ in range(3)], kept)
        rows += any(step.path == "rows" and len(step.chosen) > 1 for step in filled.steps)
        assert decoder._answer(filled).stop is not None, (seed, kept)
    assert rows > 60


def test_a_next_turn_reads_nothing_that_was_completed_side_by_side_from_the_cache():
    draft, several = Answer(tuple(range(50, 60))), 0
    slots = Slots(slot_size=4, serial_blocks=1, slot_threshold=0.02, token_threshold=0.3)
    for seed in range(8):
        warm, cold = (small(ends=(END,), seed=seed, slots=slots) for _ in range(2))
        filled = warm.fill(PROMPT, [])
        several += any(step.path == "rows" and len(step.chosen) > 1 for step in filled.steps)
        turn = [*PROMPT, *warm._answer(filled).tokens, 9, 8]
        torch.testing.assert_close(warm.scores(turn, draft)[0], cold.scores(turn, draft)[0], atol=1e-4, rtol=0)
    assert several > 4


def test_a_prompt_that_does_not_fit_is_refused():
    decoder = small()
    decoder.context = 20
    with pytest.raises(UserError, match="exceed the context of 20"):
        decoder.verify(PROMPT, Answer())
