"""Look-up proposals: what is proposed, what it saves, and that a model which recites is asked fewer times."""

from conftest import real_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import reciter

from headstart.batch import BatchDecoder
from headstart.decoder import Answer
from headstart.lookup import BOUND, LONGEST, lookup_passes, offered, pieces, propose

ANSWER = " Return the first value of that list and nothing else"
PROMPT = "Mend this:{}\n"


def test_what_followed_the_last_tokens_is_proposed():
    assert propose([1, 2, 3], [[9, 2, 3, 4, 5, 6]], longest=3, bound=2) == (4, 5)
    assert propose([1, 2, 3], [[9, 2, 3, 4, 5, 6]], longest=3, bound=9) == (4, 5, 6)
    assert propose([1, 2, 3], [[9, 2, 3, 4, 5, 6]], longest=3, bound=0) == ()
    assert propose([7], [[1, 2, 3]], longest=3, bound=2) == ()
    assert propose([], [[1, 2, 3]], longest=3, bound=2) == ()
    assert propose([1], [], longest=3, bound=2) == ()


def test_a_longer_match_goes_first_then_an_earlier_source_then_an_earlier_place():
    sources = [[3, 10, 2, 3, 11], [1, 2, 3, 12, 9, 2, 3, 13]]
    assert propose([1, 2, 3], sources, longest=3, bound=1) == (12,)
    assert propose([1, 2, 3], sources, longest=2, bound=1) == (11,)
    assert propose([1, 2, 3], sources, longest=1, bound=1) == (10,)
    assert propose([1, 2, 3], sources[::-1], longest=2, bound=1) == (12,)


def test_a_match_at_a_sources_end_proposes_nothing():
    assert propose([1, 2], [[1, 2]], longest=2, bound=3) == ()
    assert propose([1, 2], [[1, 2], [2, 5]], longest=2, bound=3) == (5,)
    assert propose([2], [[2, 2]], longest=2, bound=3) == (2,)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab c", max_size=8),
    st.lists(st.text("ab c", max_size=20), max_size=3),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_it_is_a_search_of_strings(answer, sources, longest, bound):
    """The rule again, with one character a token and `str.find`."""
    expected = ""
    for tail in [answer[-n:] for n in range(min(longest, len(answer)), 0, -1)]:
        found = [(text, text[:-1].find(tail)) for text in sources]
        places = [text[at + len(tail) :] for text, at in found if at >= 0]
        if places:
            expected = places[0][:bound]
            break
    tokens = [[ord(letter) for letter in text] for text in sources]
    assert propose([ord(letter) for letter in answer], tokens, longest, bound) == tuple(map(ord, expected))


def test_sources_are_cut_at_end_tokens():
    """Nothing is proposed past an end token, nor the end token itself: the pass gives it."""
    assert pieces([[1, 2, 0, 3, 7, 7, 4], [0], [], [5]], frozenset({0, 7})) == [(1, 2), (3,), (4,), (5,)]
    assert offered([2], pieces([[2, 0, 3], [2, 5, 0, 6]], frozenset({0})), limit=99) == (5,)


def test_proposals_leave_room_for_the_pass_own_token():
    source = [list(range(40))]
    assert offered([0], source, limit=99) == tuple(range(1, 1 + BOUND))
    for limit in (2, 3, 7):
        assert len(offered([0], source, limit)) == limit - 2
    assert offered([50, 51, 52, 0], [[9, 50, 51, 52, 0, 1], [0, 2]], 99) == (1,)
    assert LONGEST == 3


def test_the_passes_of_an_answer():
    answer = [1, 2, 3, 4, 5, 6, 0]
    assert lookup_passes(answer, 0, [], limit=99) == 7
    assert lookup_passes(answer, 3, [], limit=99) == 4
    assert lookup_passes(answer, 7, [], limit=99) == lookup_passes(answer, 6, [], limit=99) == 1
    assert lookup_passes(answer, 0, [(1, 2, 3, 4, 5, 6)], limit=99) == 2
    assert lookup_passes(answer, 0, [(2, 3, 9, 4, 5, 6)], limit=99) == 4  # 1; 2; 3 and 4; 5, 6 and 0


def recited(prompt, spoil, sources):
    """Passes of a model that recites ANSWER, plain and with look-ups, and the answer's length."""
    tokenizer = real_tokenizer("smollm2")
    model, end = reciter(tokenizer, ANSWER), tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole = (*tokenizer.encode(ANSWER, add_special_tokens=False), end)
    prompt, draft = tokenizer.encode(prompt, add_special_tokens=False), spoil(Answer(whole, "end"))
    decoder = BatchDecoder(model, frozenset({end}), 40, 4)
    plain = decoder.advance([prompt], [draft])[0]
    looked = decoder.advance([prompt], [draft], sources=[sources(draft, prompt)])[0]
    assert plain.answer == looked.answer == Answer(whole, "end")
    assert plain.kept == looked.kept
    return plain.passes, looked.passes, len(whole)


def test_the_rest_of_a_draft_saves_passes():
    """One wrong word: the pass that verifies, one for the word after it, and one for all the rest."""

    def spoil(answer):
        return Answer((*answer.tokens[:2], 5, *answer.tokens[3:]), "end")

    plain, recycled, length = recited(PROMPT.format(""), spoil, lambda draft, prompt: [draft.tokens, prompt])
    assert (plain, recycled) == (length - 2, 3)
    assert length > 8


def test_a_prompt_that_holds_the_answer_saves_base_passes():
    plain, looked, length = recited(PROMPT.format(ANSWER), lambda answer: Answer(), lambda draft, prompt: [prompt])
    assert (plain, looked) == (length, 2)
