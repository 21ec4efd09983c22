"""A streaming session: what it submits is plain greedy decoding, whatever was typed before and when."""

import threading
from functools import cache

import pytest
import torch
from conftest import real_tokenizer
from tiny_models import talker

from headstart import StreamingSession
from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer, PassCounter
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import renderer
from headstart.request import Message
from headstart.residual import residual
from recipes.errors import UserError

LIMIT = 24
SYSTEM = "The request may be unfinished."
HISTORY = (Message("user", "Hi."), Message("assistant", "Hello!"))
TYPED = ("Write a function.", " It takes a list of words.", " It returns the longest.", " Ties: the first.")
WHOLE = "".join(TYPED)
LONG = 8  # a seed whose answers run to the limit and differ
PATIENCE = 60


@cache
def proven():
    return renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])


class Held(AutoregressiveDecoder):
    """A decoder whose first `holds` drafts stand still after `written` tokens until they are told to stop."""

    def __init__(self, *arguments, holds=1, written=5):
        super().__init__(*arguments)
        self.holds, self.written = holds, written
        self.standing = threading.Event()
        self.fed = []

    def verify(self, prompt, draft):
        self.fed.append(draft)
        return super().verify(prompt, draft)

    def decode(self, prompt, answer, stopped=lambda: False):
        if not self.holds:
            return super().decode(prompt, answer, stopped)
        self.holds -= 1
        asked = 0

        def held():
            nonlocal asked
            asked += 1
            if asked > self.written:
                self.standing.set()
                wait_for(stopped)
            return stopped()

        return super().decode(prompt, answer, held)


def wait_for(condition):
    """Until `condition()`; a test that would wait for ever fails instead."""
    tick = threading.Event()
    for _ in range(PATIENCE * 1000):
        if condition():
            return
        tick.wait(0.001)
    raise TimeoutError


def make(kind=AutoregressiveDecoder, seed=LONG, **changes):
    """A session on a tiny model, and its decoder."""
    r = proven()
    model = talker(r.tokenizer, seed, end_weight=3.0 if seed == 51 else 1.0)
    decoder = kind(model, stop_ids(r.family, r.tokenizer, model), LIMIT, **changes)
    return StreamingSession(decoder, r, SYSTEM, HISTORY), decoder


def plain(decoder, text):
    """Plain greedy decoding by another decoder of the same model."""
    fresh = AutoregressiveDecoder(decoder.model, decoder.stop_ids, LIMIT)
    prompt = proven().prompt(text, HISTORY, SYSTEM)
    return fresh.decode(prompt, fresh.verify(prompt, Answer()).answer)


@pytest.mark.parametrize("seed", [LONG, 4, 10, 51])
def test_the_submitted_answer_is_plain_greedy_decoding(seed):
    session, decoder = make(seed=seed)
    with session:
        for i in range(1, len(TYPED)):
            session.update("".join(TYPED[:i]))
            held = session.wait()
            assert held.answer == session.draft == plain(decoder, "".join(TYPED[:i]))
        with PassCounter(decoder.model) as counter:
            last = session.submit(WHOLE)
        assert last.answer == plain(decoder, WHOLE)
        assert counter.calls == residual(len(last.answer.tokens), last.kept)
        assert session.text(last.answer) == proven().text(last.answer.written)


def test_every_keystroke_is_an_update():
    """Updates overtake each other; none is waited for."""
    session, decoder = make(seed=4)
    with session:
        for i in range(1, len(WHOLE), 3):
            session.update(WHOLE[:i])
        assert session.submit(WHOLE).answer == plain(decoder, WHOLE)


def test_a_submit_without_an_update():
    session, decoder = make()
    with session:
        assert session.wait() is None
        last = session.submit(WHOLE)
        assert (last.kept, last.answer) == (0, plain(decoder, WHOLE))


def test_a_submit_stops_the_draft_and_verifies_what_exists():
    session, decoder = make(Held)
    with session:
        draft = session.update(TYPED[0])
        assert decoder.standing.wait(PATIENCE)
        assert not draft.done()
        with PassCounter(decoder.model) as counter:
            last = session.submit(WHOLE)
        begun = draft.result(PATIENCE).answer
        assert (len(begun.tokens), begun.stop) == (1 + 5, None)  # the verification's own token, and five more
        assert begun.tokens == plain(decoder, TYPED[0]).tokens[:6]
        assert decoder.fed == [Answer(), begun]
        assert last.answer == plain(decoder, WHOLE)
        assert counter.calls == residual(len(last.answer.tokens), last.kept)


def test_an_update_stops_the_draft_and_verifies_what_exists():
    session, decoder = make(Held, holds=2, written=3)
    with session:
        first = session.update(TYPED[0])
        assert decoder.standing.wait(PATIENCE)
        decoder.standing.clear()
        second = session.update("".join(TYPED[:2]))
        assert decoder.standing.wait(PATIENCE)
        begun, (empty, fed) = first.result(PATIENCE).answer, decoder.fed
        assert empty == Answer()
        assert fed == begun
        assert len(begun.tokens) == 4
        third = session.update("".join(TYPED[:3]))
        assert third.result(PATIENCE).answer == plain(decoder, "".join(TYPED[:3]))
        assert decoder.fed[2] == second.result(PATIENCE).answer
        assert session.submit(WHOLE).answer == plain(decoder, WHOLE)


def test_an_update_that_was_overtaken_before_it_began_costs_nothing():
    session, decoder = make(Held)
    with session:
        session.update(TYPED[0])
        assert decoder.standing.wait(PATIENCE)
        overtaken = [session.update("".join(TYPED[:i])) for i in (2, 3)]
        last = session.submit(WHOLE)
        begun = decoder.fed[1]
        assert len(decoder.fed) == 2  # the first draft's verification and the submitted one's
        assert overtaken[0].result(PATIENCE).answer == overtaken[1].result(PATIENCE).answer == begun
        assert len(begun.tokens) == 6
        assert last.answer == plain(decoder, WHOLE)


def test_a_submit_is_never_stopped():
    """An update from another thread waits its turn."""
    session, decoder = make(Held, holds=0)
    entered, go = threading.Event(), threading.Event()
    forward = decoder.model.forward

    def slow(**arguments):
        if len(decoder.fed) == 1:
            entered.set()
            assert go.wait(PATIENCE)
        return forward(**arguments)

    decoder.model.forward = slow
    answers = []
    with session:
        caller = threading.Thread(target=lambda: answers.append(session.submit(TYPED[0])))
        caller.start()
        assert entered.wait(PATIENCE)
        later = session.update(WHOLE)
        go.set()
        caller.join(PATIENCE)
        assert later.result(PATIENCE).answer == plain(decoder, WHOLE)
    assert answers[0].answer == plain(decoder, TYPED[0])


EDITS = {
    "shrinks": (WHOLE, TYPED[0]),
    "edited in the middle": ("Write a funtion. It takes words.", "Write a function. It takes words."),
    "edited at the start": (WHOLE, "Please w" + WHOLE[1:]),
    "all removed": (WHOLE, " "),
    "back and forth": (WHOLE, TYPED[0], WHOLE),
    "a token is cut": ("Reverse the str", "Reverse the string please."),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("seed", [LONG, 51])
def test_text_that_is_edited(edit, seed):
    session, decoder = make(seed=seed)
    with session:
        for text in EDITS[edit]:
            session.update(text)
            session.wait()
        assert session.draft == plain(decoder, EDITS[edit][-1])
        assert session.submit(WHOLE).answer == plain(decoder, WHOLE)


def test_equal_text_costs_one_pass_and_keeps_the_draft():
    session, decoder = make()
    with session:
        session.update(WHOLE)
        whole = session.wait().answer
        for again in (session.update, session.submit):
            with PassCounter(decoder.model) as counter:
                again(WHOLE)
                update = session.wait()
            assert (update.kept, update.answer) == (len(whole.tokens), whole)
            assert counter.calls == 1
            assert counter.tokens == len(whole.tokens)  # the prompt's last token and the draft but its own last


def test_after_a_submit_the_session_goes_on():
    """A request sent too early is edited and sent again."""
    session, decoder = make(seed=4)
    with session:
        session.submit(TYPED[0])
        session.update("".join(TYPED[:2]))
        assert session.submit(WHOLE).answer == plain(decoder, WHOLE)


class Breaks:
    """A hook that raises in the `at`-th pass of the model from now on, after some layers' caches have grown."""

    def __init__(self, model, at):
        self.left = at
        self.handle = model.model.layers[1].register_forward_pre_hook(self.count)

    def count(self, module, arguments):
        self.left -= 1
        if self.left == 0:
            self.handle.remove()
            raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_pass_that_fails_reaches_the_caller_and_the_session_goes_on(at):
    """In the verification, in the first decoding pass, later; in the background and in the submit itself."""
    session, decoder = make()
    with session:
        session.update(TYPED[0])
        held = session.wait().answer
        Breaks(decoder.model, at)
        failed = session.update(WHOLE)
        with pytest.raises(torch.OutOfMemoryError):
            session.wait()
        assert isinstance(failed.exception(), torch.OutOfMemoryError)
        assert session.draft == held
        Breaks(decoder.model, at)
        with pytest.raises(torch.OutOfMemoryError):
            session.submit(WHOLE)
        last = session.submit(WHOLE)
        assert last.answer == plain(decoder, WHOLE)


def test_a_text_that_cannot_be_rendered_reaches_the_caller():
    session, decoder = make()
    with session:
        with pytest.raises(TypeError):
            session.submit(None)
        session.update(TYPED[0])
        assert session.submit(WHOLE).answer == plain(decoder, WHOLE)


def test_closing_while_it_drafts_stops_the_draft():
    session, decoder = make(Held)
    draft = session.update(TYPED[0])
    assert decoder.standing.wait(PATIENCE)
    before = {thread.name for thread in threading.enumerate() if thread.name.startswith("headstart")}
    session.close()
    assert draft.done()
    assert draft.result().answer.stop is None
    assert before
    assert not before & {thread.name for thread in threading.enumerate()}
    session.close()
    with pytest.raises(RuntimeError):
        session.update(WHOLE)


def test_an_error_inside_the_with_block_ends_the_thread():
    session, decoder = make(Held)
    drafts = []

    def fail():
        with session:
            drafts.append(session.update(TYPED[0]))
            assert decoder.standing.wait(PATIENCE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert drafts[0].done()


def test_a_decoder_serves_one_session_at_a_time():
    decoder = AutoregressiveDecoder(talker(real_tokenizer("smollm2"), LONG), frozenset({2}), LIMIT)
    with StreamingSession(decoder, proven()), pytest.raises(RuntimeError, match="another session"):
        StreamingSession(decoder, proven())
    with StreamingSession(decoder, proven()) as session:
        assert session.submit("Hi.").answer.tokens


def test_a_prompt_beyond_the_context_is_refused():
    decoder = AutoregressiveDecoder(talker(real_tokenizer("smollm2"), LONG), frozenset({2}), LIMIT)
    with StreamingSession(decoder, proven()) as session:
        with pytest.raises(UserError, match="exceed the context"):
            session.submit("word " * 5000)
        assert session.submit("Hi.").answer.tokens
