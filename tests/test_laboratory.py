"""The laboratory's small world: its answers are right, its parts are apart. (The benchmarks make its models.)"""

import itertools

import pytest
from laboratory import KINDS, ORDER, PLACES, WORDS, Made, requests, tokenizer

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
