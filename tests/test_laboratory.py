"""The laboratory's small world: its answers are right, its parts are apart; its masked rows. (The benchmarks make its
models.)
"""

import itertools

import pytest
import torch
from laboratory import KINDS, ORDER, PLACES, SPECIAL, WORDS, Made, requests, tokenizer
from masked import MaskedCollator

from headstart.family import FAMILIES
from headstart.prompt import IGNORED, renderer

PARTS = {"made of": 150, "adapted on": 100, "held out": 100}


@pytest.fixture(scope="module")
def world() -> dict[str, list[Made]]:
    return {part: requests(part, count) for part, count in PARTS.items()}


def of(world: dict[str, list[Made]], kind: str) -> list[Made]:
    return [one for part in world.values() for one in part if one.kind == kind]


def run(program: str, x: int) -> int:
    """What a program of the world returns: one assignment after the other, from left to right."""
    for step in program.split(" : ")[1].removesuffix(" ; return x").split(" ; "):
        left, operator, right = step.removeprefix("x = ").split()
        a, b = (x if word == "x" else int(word) for word in (left, right))
        x = {"+": a + b, "-": a - b, "*": a * b, "max": max(a, b), "min": min(a, b)}[operator]
    return x


def test_a_specification_decides_the_program_and_its_examples_are_what_it_returns(world):
    examples = 0
    for one in of(world, "spec"):
        first, *rest = one.sentences
        assert all(f"{when} " in first for when in ORDER)
        for example in rest:
            given, becomes = example.removeprefix(" For example, ").removesuffix(".").split(" becomes ")
            assert run(one.answer, int(given)) == int(becomes), one
            examples += 1
    assert examples > 100


def test_the_last_sentence_decides_what_becomes_of_the_words(world):
    done = {
        "backwards": lambda words: list(reversed(words)),
        "alphabet": sorted,
        "twice": lambda words: list(itertools.chain.from_iterable(zip(words, words, strict=True))),
        "last": lambda words: [words[0], words[-1]],
    }
    for one in of(world, "late"):
        words = one.sentences[0].removeprefix("Here are words: ").removesuffix(".").split()
        assert set(words) <= set(WORDS)
        assert one.answer.split() == done[one.sentences[1].removesuffix(".").split()[-1]](words), one


def test_a_tone_is_kept_and_what_is_asked_for_is_named(world):
    openings = {"friendly": ("Well ,", "Oh ,"), "short": ("the",), "formal": ("Indeed ,", "the")}
    for one in of(world, "free"):
        asked = one.sentences[0].removeprefix("Tell me about the ").removesuffix(".")
        things, place = asked.split(" in the ")
        assert all(f"the {thing}" in one.answer for thing in things.split(" and the "))
        tone = one.sentences[1].split()[-1].removesuffix(".") if len(one.sentences) > 1 else None
        assert (f" in the {place}" in one.answer) == (tone != "short")
        if tone:
            assert one.answer.startswith(openings[tone]), one


def test_no_first_sentence_is_in_two_parts_and_no_request_in_one_twice(world):
    firsts = {part: {one.sentences[0] for one in rows} for part, rows in world.items()}
    for a, b in itertools.combinations(firsts, 2):
        assert not firsts[a] & firsts[b]
    for part, rows in world.items():
        assert len({one.text for one in rows}) == len(rows)
        assert {one.kind for one in rows} == set(KINDS), part


def test_answers_fit_their_places_and_come_back_from_the_tokenizer(world):
    known = tokenizer()
    for one in world["held out"]:
        ids = known(one.answer).input_ids
        assert len(ids) < PLACES
        assert known.decode(ids) == one.answer


def test_a_masked_row_hides_predicts_and_disturbs_what_it_says(world):
    """Every place of the answer is predicted; hidden ones count by the row's draw, one shown in ten is random."""
    known, places, made = tokenizer(), 8, world["held out"][:120]
    mask, first = known.convert_tokens_to_ids("<|mask|>"), len(SPECIAL)
    rendering = renderer(known, FAMILIES["bidirectional"])
    rows = [rendering.row("Write it.", one.answer) for one in made]
    given = [{"input_ids": row.ids, "labels": row.labels, "place": place} for place, row in enumerate(rows)]
    collator = MaskedCollator(0, mask, range(first, len(known)), places, len(rows), 0)
    found = collator(given)
    shown = disturbed = 0
    for at, row in enumerate(rows):
        prompt = row.labels.count(IGNORED)
        answer = (row.ids[prompt:] + [row.ids[-1]] * places)[:places]
        assert found["labels"][at].tolist()[: prompt + places] == [IGNORED] * prompt + answer
        seen, weight = (found[name][at, prompt : prompt + places] for name in ("input_ids", "weights"))
        hidden = seen == mask
        assert found["input_ids"][at, :prompt].tolist() == row.ids[:prompt]
        torch.testing.assert_close(weight[~hidden], torch.full_like(weight[~hidden], 1 / (len(rows) * places)))
        assert len(set(weight[hidden].tolist())) <= 1
        assert bool((weight[hidden] > 1 / (len(rows) * places)).all())
        other = ~hidden & (seen != torch.tensor(answer))
        assert bool((seen[other] >= first).all())
        shown, disturbed = shown + int((~hidden).sum()), disturbed + int(other.sum())
    assert 0.05 < disturbed / shown < 0.15
    assert shown > 200
    assert all(torch.equal(found[name], again) for name, again in collator(given).items())
