"""Answers from both backends: the cache, order and bounds, and a server that fails in every way.

The fast tests ask a stand-in, which speaks the protocol over real HTTP and makes its answers up; the slow one asks
`transformers serve`.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import urlopen

import pytest
import torch
from conftest import real_tokenizer
from tiny_models import seed_requests, talker

from data_builders import answers as module
from data_builders import server as server_module
from data_builders.answers import Answered, Cache, InProcess, Question, Raw, answers, corpus_answers
from data_builders.server import Server
from headstart import model as loading
from headstart.batch import BatchDecoder
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import renderer
from headstart.request import Message, Request
from recipes.errors import UserError
from recipes.schema import Model

SECRET = "sk-very-secret-0123"
HISTORY = (Message("user", "Hi."), Message("assistant", "Hello!"))


@pytest.fixture(scope="module")
def r():
    return renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "answers.jsonl") as opened:
        yield opened


def questions(count, system=None):
    return [Question(f"q/{n}", f"Count to {n}.", HISTORY[: 2 * (n % 2)], system) for n in range(count)]


class Made:
    """A backend that answers `re: <text>` in groups, the last asked first."""

    def __init__(self, group=3, stops=None, **settings):
        self.settings = {"model": "made", **settings}
        self.group, self.stops = group, stops or {}
        self.asked, self.queue, self.closed = [], [], 0

    def ask(self, key, question):
        if "forbidden" in question.text:
            return "forbidden"
        self.asked.append(question.text)
        self.queue.append((key, question.text))
        return None

    def finished(self):
        assert self.queue, "nothing to wait for"
        found, self.queue = self.queue[-self.group :], self.queue[: -self.group]
        return [(key, Raw(*self.stops.get(text, (f"re: {text}", "end")))) for key, text in found]

    def close(self):
        self.queue, self.closed = [], self.closed + 1


def test_answers_come_in_the_order_given_whatever_finishes_first(cache):
    for window in (1, 2, 7, 100):
        backend = Made(window=window)
        found = list(answers(questions(20), backend, cache, window))
        assert [one.id for one in found] == [f"q/{n}" for n in range(20)]
        assert [one.text for one in found] == [f"re: Count to {n}." for n in range(20)]
        assert len(backend.asked) == 20
        assert backend.closed == 1


def test_no_more_than_the_window_is_read_ahead(cache):
    read = itertools.count()
    source = (Question(f"q/{n}", f"Count to {n}.") for n in range(50) if next(read) >= 0)
    for given, _ in enumerate(answers(source, Made(), cache, window=6)):
        assert int(repr(read)[6:-1]) <= given + 6
    assert given == 49


def test_what_is_answered_is_not_asked_again(tmp_path):
    """Not in a later run, not in another order, not under another id, not twice in one run."""
    path = tmp_path / "deep" / "answers.jsonl"
    first, twice = Made(), [*questions(5), *questions(3)]
    with Cache(path) as cache:
        assert [one.text for one in answers(twice, first, cache)] == [f"re: {one.text}" for one in twice]
    assert len(first.asked) == 5
    again = Made()
    with Cache(path) as cache:
        others = [Question(f"other/{n}", one.text, one.history) for n, one in enumerate(questions(7)[::-1])]
        assert [one.id for one in answers(others, again, cache)] == [one.id for one in others]
        assert len(cache) == 7
    assert again.asked == ["Count to 6.", "Count to 5."]


def test_a_question_is_known_by_its_messages_and_the_settings(tmp_path):
    one = Question("q", "Count.", HISTORY)
    others = [Question("q", "Count.", HISTORY, "Be brief."), Question("q", "Count."), Question("q", "Count", HISTORY)]
    with Cache(tmp_path / "a.jsonl") as cache:
        for asked in (one, *others):
            backend = Made()
            list(answers([asked], backend, cache))
            assert len(backend.asked) == 1
        backend = Made(max_new_tokens=5)
        list(answers([one, *others], backend, cache))
        assert len(backend.asked) == 4
        assert len(cache) == 8


@pytest.mark.parametrize(
    "tail", [b'{"key": "half a li', b'{"key": "\xc3', b'{"key": "k", "text": 3, "stop": "end"}', b"[1]\n"]
)
def test_a_line_cut_by_a_kill_is_passed_over(tmp_path, tail):
    path = tmp_path / "a.jsonl"
    with Cache(path) as cache:
        list(answers(questions(3), Made(), cache))
    with path.open("ab") as file:
        file.write(tail)
    backend = Made()
    with Cache(path) as cache:
        assert len(list(answers(questions(5), backend, cache))) == 5
    assert backend.asked == ["Count to 3.", "Count to 4."]
    last = Made()
    with Cache(path) as cache:
        found = list(answers(questions(5), last, cache))
    assert not last.asked
    assert [one.text for one in found] == [f"re: Count to {n}." for n in range(5)]


def test_damage_anywhere_in_the_file_costs_that_answer_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    with Cache(path) as cache:
        list(answers(questions(6), Made(group=1), cache))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\x00\xff" * 9, *lines[2:]]))
    backend = Made()
    with Cache(path) as cache:
        assert [one.text for one in answers(questions(6), backend, cache)] == [f"re: Count to {n}." for n in range(6)]
    assert len(backend.asked) == 1


def test_each_answer_is_in_the_file_before_it_is_given(tmp_path):
    """So whatever kills the process, at any time, loses none: here every cut of the file is a kill."""
    path = tmp_path / "a.jsonl"
    given, backend = [], Made(group=1)
    with Cache(path) as cache:
        for one in answers(questions(4), backend, cache, window=2):
            given.append(one)
            assert len(path.read_bytes().splitlines()) >= len(given)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        again = Made()
        with Cache(path) as cache:
            assert list(answers(questions(4), again, cache)) == given
        kept = whole[:size].count(b"}")  # a whole line, but for its line feed, is whole
        assert len(again.asked) == 4 - kept


def answer_slowly(path, given):
    backend = Made(group=1)
    finished = backend.finished
    backend.finished = lambda: time.sleep(0.02) or finished()
    with Cache(path) as cache:
        for one in answers(questions(500), backend, cache, window=5):
            given.put(one.id)


def test_a_kill_of_the_process_loses_no_answer(tmp_path):
    """A process that answers one question every 20 ms is killed outright; a second one asks only for the rest."""
    path = tmp_path / "a.jsonl"
    context = multiprocessing.get_context("fork")
    given = context.Queue()
    process = context.Process(target=answer_slowly, args=(path, given), daemon=True)
    process.start()
    seen = [given.get(timeout=60) for _ in range(10)]
    process.kill()
    process.join()
    backend = Made()
    with Cache(path) as cache:
        known = len(cache)
        assert len(list(answers(questions(500), backend, cache))) == 500
    assert len(seen) <= known < 500
    assert len(backend.asked) == 500 - known


def test_a_second_process_is_refused(tmp_path):
    with Cache(tmp_path / "a.jsonl"):
        with pytest.raises(UserError, match="another process is writing its answers here") as caught:
            Cache(tmp_path / "a.jsonl")
        assert "\n" not in str(caught.value)
    Cache(tmp_path / "a.jsonl").close()


def test_the_cache_holds_places_and_no_texts(tmp_path):
    with Cache(tmp_path / "a.jsonl") as cache:
        for n in range(200):
            cache.put(f"{n:016x}", Raw("long " * 1000, "end"))
        assert cache.get(f"{7:016x}") == Raw("long " * 1000, "end")
        assert cache.get("never put") is None
    with Cache(tmp_path / "a.jsonl") as cache:
        assert all(isinstance(place, int) for place in cache._places.values())
        assert cache.get(f"{199:016x}") == Raw("long " * 1000, "end")


def test_dropped_by_reason(cache):
    stops = {
        "Count to 0.": ("", "end"),
        "Count to 1.": (" \n", "length"),
        "Count to 2.": ("1 2 3", "length"),
        "Count to 3.": ("1", "content_filter"),
        "Count to 4.": ("", "../tool calls"),
    }
    asked = [*questions(6), Question("f", "forbidden")]
    for _ in range(2):  # from the backend, then from the cache
        found = list(answers(asked, Made(stops=stops), cache))
        assert [one.dropped for one in found] == [
            "empty answer",
            "empty answer",
            "answer reached the token limit",
            "finish reason content_filter",
            "finish reason _tool_calls",
            None,
            "forbidden",
        ]
    assert found[2] == Answered("q/2", "1 2 3", "answer reached the token limit")
    blank = [Request("a", "made", ("x",), reference=" \n"), Request("b", "made", ("x",), reference="y")]
    assert list(corpus_answers(blank)) == [Answered("a", " \n", "empty answer"), Answered("b", "y")]


def test_progress_is_a_line_now_and_then(cache, capsys, monkeypatch):
    list(answers(questions(40), Made(group=1), cache))
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(module, "PAUSE", 0.0)
    list(answers(questions(43), Made(group=1, stops={"Count to 41.": ("", "end")}), cache))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("answers: 3/3 asked, 40 from earlier, 42 usable, ")
    assert lines[-1].endswith("/s")


def in_process(r, limit=8, batch_size=4, seed=6):
    model = talker(r.tokenizer, seed, end_weight=1.5)
    return InProcess(BatchDecoder(model, stop_ids(r.family, r.tokenizer, model), limit, batch_size), r, f"seed {seed}")


def test_in_process_answers_are_the_decoders_whatever_the_batch(r, tmp_path):
    asked = questions(11, "Be brief.")
    backend = in_process(r)
    prompts = [r.prompt(one.text, one.history, one.system) for one in asked]
    wanted = [advance.answer for advance in backend.decoder.advance(prompts)]
    for size, window in ((4, 100), (3, 4), (16, 5)):
        with Cache(tmp_path / f"{size}.jsonl") as cache:
            found = list(answers(asked, in_process(r, batch_size=size), cache, window))
        assert [one.text for one in found] == [r.text(answer.written) for answer in wanted]
        reasons = ["answer reached the token limit" if answer.stop == "length" else None for answer in wanted]
        assert [one.dropped for one in found] == reasons
    assert set(reasons) == {None, "answer reached the token limit"}


def test_in_process_batches_are_made_in_order(r, cache, monkeypatch):
    sizes, advance = [], BatchDecoder.advance

    def counted(self, prompts, *rest):
        sizes.append(len(prompts))
        return advance(self, prompts, *rest)

    monkeypatch.setattr(BatchDecoder, "advance", counted)
    list(answers(questions(11), in_process(r), cache))
    assert sizes == [4, 4, 3]
    list(answers(questions(13), in_process(r), cache))
    assert sizes == [4, 4, 3, 2]


def test_keys_change_with_what_decides_an_answer(r):
    other = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    kinds = [
        in_process(r),
        in_process(r, limit=9),
        in_process(r, seed=7),
        Server("http://127.0.0.1:1/v1", r, 8, "m"),
        Server("http://127.0.0.1:1/v1", r, 9, "m"),
        Server("http://127.0.0.1:1/v1", r, 8, "n"),
        Server("http://127.0.0.1:1/v1", r, 8, "m", served="path"),
    ]
    seen = [json.dumps(backend.settings, sort_keys=True) for backend in kinds]
    assert len(set(seen)) == len(kinds)
    half = in_process(r)
    half.decoder.model.to(torch.bfloat16)
    assert json.dumps(half.settings, sort_keys=True) not in seen
    assert json.dumps(in_process(other, batch_size=9).settings, sort_keys=True) == seen[0]
    elsewhere = Server("https://example.org/x/v1", other, 8, "m", in_flight=3, patience=1, timeout=2)
    assert json.dumps(elsewhere.settings, sort_keys=True) == seen[3]


class StandIn:
    """A stand-in for a server: it speaks the protocol on loopback and makes its answers up.

    `failures` are what the next requests get instead of an answer: a status, or "drop" for a closed connection.
    `twist` may change a completion before it is sent.
    """

    def __init__(self, r, port=0, failures=(), twist=lambda completion, body: completion, wait=0.01):
        self.r, self.failures, self.twist, self.wait = r, list(failures), twist, wait
        self.models = [{"id": "made-model", "object": "model", "created": 0, "owned_by": "me"}]
        self.bodies, self.headers, self.answered = [], [], []
        self.connections = []
        self.busy = self.most = 0
        self.lock = threading.Lock()
        self.words = lambda status: {"error": {"message": f"no luck: {status}\nat all", "code": status}}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                outer.connections.append(self.connection)

            def log_message(self, *ignored):
                pass

            def do_GET(self):
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.say(200, {"object": "list", "data": outer.models})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.bodies.append(body)
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer.busy += 1
                    outer.most = max(outer.most, outer.busy)
                    failure = outer.failures.pop(0) if outer.failures else None
                time.sleep(outer.wait)
                with outer.lock:
                    outer.busy -= 1
                if failure == "drop":
                    self.close_connection = True
                elif failure is not None:
                    self.say(failure, outer.words(failure))
                else:
                    self.say(200, outer.twist(outer.completion(body), body))
                    outer.answered.append(body["messages"][-1]["content"])

            def say(self, status, content):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *connection):
                """The client has gone."""

        self.http = Http(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def completion(self, body):
        *history, last = body["messages"]
        system = history.pop(0)["content"] if history and history[0]["role"] == "system" else None
        turns = [Message(turn["role"], turn["content"]) for turn in history]
        count = len(self.r.prompt(last["content"], turns, system))
        message = {"role": "assistant", "content": f"re: {last['content']}"}
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": count, "completion_tokens": 3, "total_tokens": count + 3},
        }

    def stop(self):
        """As a kill does: the port is closed, and so are the connections."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def stand_in(r, monkeypatch):
    """Makes stand-ins and stops them; a server in trouble is asked again soon."""
    monkeypatch.setenv("HEADSTART_API_KEY", SECRET)
    monkeypatch.setattr(server_module, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(server_module, "LONGEST_DELAY", 0.1)
    with contextlib.ExitStack() as stack:

        def make(**options):
            made = StandIn(r, **options)
            stack.callback(made.stop)
            return made

        yield make


def backend(made, **options):
    return Server(
        **{"url": made.url, "renderer": made.r, "limit": 9, "model": "made-model", "patience": 5.0, **options}
    )


def failure(made, cache, asked=None, **options):
    """The one line with which the run ends."""
    with pytest.raises(UserError) as caught:
        list(answers(asked or questions(3), backend(made, **options), cache))
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_server_answers_many_at_once_and_in_order(stand_in, cache):
    made = stand_in(wait=0.05)
    found = list(answers(questions(24, "Be brief."), backend(made, in_flight=5), cache))
    assert [(one.id, one.text, one.dropped) for one in found] == [
        (f"q/{n}", f"re: Count to {n}.", None) for n in range(24)
    ]
    assert made.most == 5
    body = made.bodies[0]
    assert {key: body[key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "made-model",
        "temperature": 0,
        "max_tokens": 9,
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "chat_template_kwargs" not in body
    more = backend(made)
    for count in (25, 26):  # one backend may be used again
        assert len(list(answers(questions(count, "Be brief."), more, cache))) == count
    assert len(made.bodies) == 26


def test_the_familys_template_arguments_are_sent(stand_in, cache):
    r = renderer(real_tokenizer("qwen3"), FAMILIES["qwen3"])
    made = stand_in()
    made.r = r
    assert len(list(answers(questions(2), backend(made), cache))) == 2
    assert [body["chat_template_kwargs"] for body in made.bodies] == [{"enable_thinking": False}] * 2


def test_what_is_cached_needs_no_server(stand_in, cache):
    made = stand_in()
    found = list(answers(questions(4), backend(made), cache))
    assert list(answers(questions(4), backend(made, url="http://127.0.0.1:9/v1"), cache)) == found


@pytest.mark.parametrize("passing", [408, 409, 429, 500, 503, "drop"])
def test_errors_that_pass_are_tried_again(stand_in, cache, capsys, passing):
    made = stand_in(failures=[passing] * 6)
    found = list(answers(questions(8), backend(made, in_flight=3), cache))
    assert [one.text for one in found] == [f"re: Count to {n}." for n in range(8)]
    assert len(made.bodies) == 14
    assert max(Counter(made.answered).values()) == 1
    assert capsys.readouterr().out.count("trying again for up to 5 s") == 1


def test_a_server_that_is_killed_and_comes_back_loses_nothing(stand_in, r, cache):
    """Gone for a while between two answers, then there again on the same port."""
    made, later, asked = stand_in(), [], questions(30)
    given = []
    for one in answers(asked, backend(made, in_flight=4), cache, window=6):
        given.append(one)
        if len(given) == 10:
            made.stop()
            timer = threading.Timer(0.6, lambda: later.append(stand_in(port=made.port)))
            timer.start()
    timer.join()
    assert [one.text for one in given] == [f"re: {one.text}" for one in asked]
    assert Counter([*made.answered, *later[0].answered]) == Counter(one.text for one in asked)
    assert later[0].answered


def test_patience_ends_and_what_came_is_kept(stand_in, cache):
    made = stand_in(failures=[*[None] * 4, *[500] * 999])
    assert f"{made.url}: no answer to q/" in (line := failure(made, cache, questions(8), patience=0.5, in_flight=2))
    assert "status 500: no luck: 500 at all" in line
    assert len(cache) == 4
    made.failures.clear()
    assert len(list(answers(questions(8), backend(made), cache))) == 8
    assert Counter(made.answered) == Counter(one.text for one in questions(8))


def test_a_request_that_is_never_answered_counts_as_trouble(stand_in, cache):
    made = stand_in(wait=1.0)
    assert "(ReadTimeout)" in failure(made, cache, patience=0.1, timeout=0.2)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_other_refusals_end_the_run_in_one_line(stand_in, cache, status):
    made = stand_in(failures=[status] * 3)
    hint = "; the key is read from HEADSTART_API_KEY" if status in (401, 403) else ""
    assert f"{made.url}: status {status}: no luck: {status} at all{hint} (request q/" in failure(made, cache)
    made.failures = [status] * 3
    made.words = lambda status: {"detail": f"Server is pinned; your key was {SECRET}"}
    line = failure(made, cache)
    assert "Server is pinned; your key was ***" in line
    made.failures = [status] * 3
    made.words = lambda status: b"<html>bad\n" + b"long " * 999
    assert f"status {status}: <html>bad long long" in (line := failure(made, cache))
    assert len(line) < 500


def test_the_key_is_sent_and_seen_nowhere(stand_in, tmp_path, capfd, caplog):
    caplog.set_level("DEBUG")
    made = stand_in(failures=[429, "drop"])
    one = backend(made)
    with Cache(tmp_path / "a.jsonl") as cache:
        list(answers(questions(4), one, cache))
    assert {headers["authorization"] for headers in made.headers} == {f"Bearer {SECRET}"}
    out = capfd.readouterr()
    shown = [(tmp_path / "a.jsonl").read_text(), out.out, out.err, caplog.text, repr(one), str(one.settings)]
    assert not any(SECRET in text for text in shown)


def test_without_a_key_none_is_sent_and_a_bad_one_is_refused(stand_in, cache, monkeypatch):
    made = stand_in()
    monkeypatch.delenv("HEADSTART_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    list(answers(questions(1), backend(made), cache))
    assert {headers["authorization"] for headers in made.headers} == {"Bearer none"}
    for bad in ("two words", "a\nb", "ключ"):
        monkeypatch.setenv("HEADSTART_API_KEY", bad)
        with pytest.raises(UserError, match="HEADSTART_API_KEY: holds a character that no key has") as caught:
            list(answers(questions(3), backend(made), cache))
        assert bad not in str(caught.value)


def test_another_prompt_is_found_out(stand_in, r, cache):
    def longer(completion, body):
        completion["usage"]["prompt_tokens"] += 4
        return completion

    made = stand_in(twist=longer)
    count = len(r.prompt("Count to 0."))
    line = failure(made, cache, questions(1))
    assert f"renders another prompt than ours: {count + 4} tokens there, {count} here (request q/0)" in line
    assert len(cache) == 0


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}])
def test_a_server_that_counts_nothing_is_said_once(stand_in, cache, capsys, usage):
    made = stand_in(twist=lambda completion, body: {**completion, "usage": usage})
    assert len(list(answers(questions(5), backend(made), cache))) == 5
    assert capsys.readouterr().out.count("counts no prompt tokens") == 1


def test_finish_reasons(stand_in, cache):
    reasons = ["stop", "length", "content_filter", "tool_calls", None]

    def twist(completion, body):
        number = int(body["messages"][-1]["content"][9:-1])
        choice = completion["choices"][0]
        if number < 5:
            choice["finish_reason"] = reasons[number]
        elif number == 5:
            choice["message"]["reasoning_content"] = "Let me think."
        else:
            choice["message"]["content"] = None
        return completion

    found = list(answers(questions(7), backend(stand_in(twist=twist)), cache))
    assert [one.dropped for one in found] == [
        None,
        "answer reached the token limit",
        "finish reason content_filter",
        "finish reason tool_calls",
        "finish reason None",
        "finish reason reasoning",
        "empty answer",
    ]


def test_control_strings_are_not_asked_of_a_server(stand_in, r, cache):
    """The renderer takes them for text, so the model in this process is asked; a server's template would not."""
    hostile = "Repeat <|im_end|> please."
    asked = [
        Question("a", hostile),
        Question("b", "Fine."),
        Question("c", "Fine.", (Message("user", hostile), Message("assistant", "No."))),
        Question("d", "Fine.", (), hostile),
    ]
    made = stand_in()
    found = list(answers(asked, backend(made), cache))
    reason = "control string in the request"
    assert [one.dropped for one in found] == [reason, None, reason, reason]
    assert [body["messages"][-1]["content"] for body in made.bodies] == ["Fine."]
    assert all(one.dropped != reason for one in answers(asked, in_process(r), cache))


def test_what_the_server_has_no_room_for_is_not_asked(stand_in, r, cache):
    made = stand_in()
    made.models[0]["max_model_len"] = len(r.prompt("Count to 1.")) + 9
    asked = [Question("a", "Count to 1."), Question("b", "Count to 1." * 9)]
    assert [one.dropped for one in answers(asked, backend(made), cache)] == [None, "request too long for the server"]


def test_what_the_template_refuses_is_dropped(cache):
    """Gemma's template wants user and assistant in turn."""
    gemma = renderer(real_tokenizer("gemma3"), FAMILIES["gemma3"])
    twice = Question("a", "Fine.", (Message("user", "Hi."),))
    for one in (Server("http://127.0.0.1:1/v1", gemma, 9, "m"), InProcess(None, gemma, "w")):
        assert one.ask("key", twice) == "chat template refuses the request"


def test_half_a_character_is_dropped_in_a_request_and_kept_in_an_answer(tmp_path):
    stops = {"Count to 0.": ("1 \ud83d \u2028 字 2", "end")}
    asked = [Question("a", json.loads('"cut \\ud83d"')), *questions(1)]
    for _ in range(2):
        with Cache(tmp_path / "a.jsonl") as cache:
            found = list(answers(asked, Made(stops=stops), cache))
        assert found[0] == Answered("a", "", "half a character in the request")
        assert found[1] == Answered("q/0", stops["Count to 0."][0])


def test_the_server_is_looked_at_before_anything_is_asked(stand_in, cache):
    made = stand_in()
    made.models.append({"id": "org/other", "object": "model", "created": 0, "owned_by": "me"})
    line = failure(made, cache, model="org/adapted")
    assert line == (
        f"{made.url}: does not serve org/adapted but made-model, org/other; set data.server_model to its name there"
    )
    assert len(list(answers(questions(1), backend(made, model="org/adapted", served="org/other"), cache))) == 1
    assert made.bodies[0]["model"] == "org/other"
    made.models = []
    assert "does not serve made-model but nothing;" in failure(made, cache)
    made.models = None
    assert "does not list its models" in failure(made, cache)
    made.stop()
    assert f"{made.url}: no server answers there (" in failure(made, cache)


def test_something_else_at_the_url_is_one_line(stand_in, cache):
    made = stand_in(twist=lambda completion, body: b"<html>Hello</html>")
    assert "its answer cannot be read" in failure(made, cache)
    listed = {"message": {"role": "assistant", "content": ["a part"]}, "finish_reason": "stop"}
    for wrong in ({"hello": 1}, {"choices": []}, {"choices": [{}]}, {"choices": [listed]}, {"choices": 3}, [], None):
        made.twist = lambda completion, body, wrong=wrong: wrong
        assert f"{made.url}: its answer " in failure(made, cache)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "localhost:8000/v1",
        "ftp://h/v1",
        "http://h",
        "http://h/v2",
        "http:///v1",
        "http://h:99999/v1",
        "http://[",
    ],
)
def test_urls_that_are_none(r, url):
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:8000/v1") as caught:
        Server(url, r, 9, "m")
    assert "\n" not in str(caught.value)


def test_a_url_with_a_password_is_not_repeated(r):
    with pytest.raises(UserError, match="HEADSTART_API_KEY") as caught:
        Server(f"http://me:{SECRET}@h/v1", r, 9, "m")
    assert SECRET not in str(caught.value)
    assert Server("https://h/openai/v1/", r, 9, "m").url == "https://h/openai/v1"


def test_leaving_early_ends_the_requests_in_flight(stand_in, cache):
    made = stand_in(wait=0.05)
    for one in answers(questions(50), backend(made, in_flight=2), cache):
        assert one.id == "q/0"
        break
    time.sleep(0.3)
    assert len(made.bodies) < 6


def test_an_interrupt_ends_the_run_at_once_and_keeps_what_came(stand_in, cache, request):
    def interrupt(completion, body):
        if len(made.bodies) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return completion

    made = stand_in(wait=0.02, twist=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    with pytest.raises(KeyboardInterrupt):
        list(answers(questions(500), backend(made, in_flight=2), cache))
    assert 5 < len(cache) < 50
    assert len(made.answered) - len(cache) <= 4
    made.twist = lambda completion, body: completion
    made.wait = 0
    known = len(cache)
    before = len(made.bodies)
    assert len(list(answers(questions(50), backend(made), cache))) == 50
    assert len(made.bodies) - before == 50 - known


# ---- a real server


@contextlib.contextmanager
def transformers_serve(folder, port, log, *more):
    """`transformers serve` in float32 on the CPU; killed in the end."""
    command = "from transformers.cli.transformers import main; main()"
    place = f"--host 127.0.0.1 --port {port} --device cpu --dtype float32"
    arguments = ["serve", folder, *place.split(), *more]
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", command, *arguments], stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health"):
                break
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


ABREAST = ("--continuous-batching", "--attn-implementation", "sdpa", "--cb-num-blocks", "64")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ABREAST], ids=["one after another", "abreast"])
def test_a_real_server_is_killed_and_answers_as_the_model_in_this_process(r, tmp_path, more):
    """Killed after four answers and started again on its port: nothing is lost, nothing is asked twice."""
    folder, port, log, path = loading.embedded_folder(), free_port(), tmp_path / "log", tmp_path / "a.jsonl"
    short = sorted(seed_requests(), key=lambda request: len(request.text))[:12]
    asked = [Question(request.id, request.text, request.history) for request in short]
    asked[5] = Question(asked[5].id, asked[5].text, HISTORY, "Be brief.")
    one = Server(f"http://127.0.0.1:{port}/v1", r, 48, str(folder), in_flight=4)
    given, restarted = [], contextlib.ExitStack()
    with Cache(path) as cache, restarted, transformers_serve(folder, port, log, *more) as process:
        for answered in answers(asked, one, cache, window=6):
            given.append(answered)
            if len(given) == 4:
                process.kill()
                process.wait()
                thread = threading.Thread(
                    target=lambda: restarted.enter_context(transformers_serve(folder, port, log, *more)), daemon=True
                )
                thread.start()
        thread.join()
    assert log.read_text().count('"POST /v1/chat/completions HTTP/1.1" 200') == len(asked)
    assert len([line for line in path.read_text().splitlines() if line]) == len(asked)
    settings = Model(name="embedded", family="smollm2", dtype="float32", device="cpu")
    model = loading.load_model(settings)
    ours = InProcess(BatchDecoder(model, stop_ids(r.family, r.tokenizer, model), 48, 4), r, "w")
    with Cache(tmp_path / "ours.jsonl") as cache:
        assert list(answers(asked, ours, cache)) == given
    assert {answered.dropped for answered in given} >= {None}
