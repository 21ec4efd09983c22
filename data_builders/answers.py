"""Answers to requests: the corpus' own, or a model's, each written down as soon as it is there.

A model answers through a backend: in this process (`InProcess`), or behind a URL (`data_builders.server`). What a cache
holds is not asked again, so a killed run goes on where it was. Answers that cannot be used are dropped by reason.
"""

import fcntl
import itertools
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headstart.batch import BatchDecoder
from headstart.decoders import OneByOne
from headstart.family import context_length
from headstart.lookup import Tokens
from headstart.prompt import Renderer, conversation
from headstart.request import Message, Request
from recipes.errors import UserError
from recipes.run_folder import digest

WINDOW = 1024  # questions
PAUSE = 5.0  # seconds between two lines of progress
TEMPLATE = "chat template refuses the request"
TOO_LONG = "request too long for the model"
BROKEN = "half a character in the request"  # a lone surrogate, as JSON can hold one


@dataclass(frozen=True)
class Question:
    """What is asked: a user turn after `history`. `system` is None for the answer to a whole request."""

    id: str
    text: str
    history: tuple[Message, ...] = ()
    system: str | None = None


@dataclass(frozen=True)
class Answered:
    """An answer's text; `dropped` is None or the reason why no pair is made of it."""

    id: str
    text: str
    dropped: str | None = None


@dataclass(frozen=True)
class Raw:
    """What a backend gave. `stop` is "end", "length", or another word of the server's."""

    text: str
    stop: str


class Backend(Protocol):
    """A model that answers. It holds what it was asked and hands answers out as they finish, in no order."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides an answer, JSON-like; the cache keeps answers of other settings apart."""

    def ask(self, key: str, question: Question) -> str | None:
        """Take a question. Returns the reason where it cannot be asked: then nothing of it will finish."""

    def finished(self) -> Sequence[tuple[str, Raw]]:
        """Wait until at least one answer is there. Raises UserError where none will come."""

    def close(self) -> None:
        """Drop what was asked and did not finish. It may be asked again afterwards."""


class Cache:
    """Answers in an append-only file, one JSON line each; holds the places in the file, not the texts.

    A line that a kill cut short, or that is otherwise no answer, is passed over. Raises UserError where another process
    has the file open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = path.open("ab")
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._out.close()
            raise UserError(f"{path}: another process is writing its answers here; wait for it to end") from None
        self._in = path.open("rb")
        self._places = dict[str, int]()
        place, line = 0, b"\n"
        for line in self._in:
            if (entry := _entry(line)) is not None:
                self._places.setdefault(entry[0], place)
            place += len(line)
        if not line.endswith(b"\n"):
            self._out.write(b"\n")
            self._out.flush()

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Raw | None:
        """The answer under a key, if there is one."""
        if key not in self._places:
            return None
        self._in.seek(self._places[key])
        entry = _entry(self._in.readline())
        return entry[1] if entry is not None and entry[0] == key else None

    def put(self, key: str, raw: Raw) -> None:
        """Write an answer down; from then on a kill of this process does not lose it."""
        place = self._out.seek(0, os.SEEK_END)
        line = json.dumps({"key": key, "stop": raw.stop, "text": raw.text}, ensure_ascii=False)
        self._out.write(f"{line}\n".encode("utf-8", "surrogatepass"))  # as json reads it
        self._out.flush()
        self._places[key] = place

    def close(self) -> None:
        """Let go of the file."""
        self._in.close()
        self._out.close()


@dataclass
class InProcess:
    """The model in this process, greedy; batches are made of the questions in the order asked.

    In float32 an answer does not depend on its batch. In bfloat16 near-ties may fall otherwise in another batch, which
    a run that was killed, or has other questions, may make. `weights` names the model's weights, `decoding` what else
    decides an answer.
    """

    decoder: BatchDecoder | OneByOne
    renderer: Renderer
    weights: str
    decoding: Mapping[str, Any] = field(default_factory=dict)
    _asked: deque[tuple[str, Tokens]] = field(default_factory=deque, init=False, repr=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "backend": "in-process",
            "weights": self.weights,
            "dtype": str(self.decoder.model.dtype).removeprefix("torch."),
            "renderer": self.renderer.fingerprint,
            "stop_ids": sorted(self.decoder.stop_ids),
            "max_new_tokens": self.decoder.limit,
            "greedy": True,
            **self.decoding,
        }

    def ask(self, key: str, question: Question) -> str | None:
        try:
            prompt = self.renderer.prompt(question.text, question.history, question.system)
        except UserError:
            return TEMPLATE
        if len(prompt) + self.decoder.limit > context_length(self.decoder.model.config):
            return TOO_LONG
        self._asked.append((key, prompt))
        return None

    def finished(self) -> Sequence[tuple[str, Raw]]:
        count = min(self.decoder.batch_size, len(self._asked))
        keys, prompts = zip(*(self._asked.popleft() for _ in range(count)), strict=True)
        answers = [advance.answer for advance in self.decoder.advance(prompts)]
        raws = [Raw(self.renderer.text(answer.written), answer.stop or "") for answer in answers]
        return list(zip(keys, raws, strict=True))

    def close(self) -> None:
        self._asked.clear()


def answers(questions: Iterable[Question], backend: Backend, cache: Cache, window: int = WINDOW) -> Iterator[Answered]:
    """The answer to each question, in their order; asks what the cache lacks, and the same thing once.

    At most `window` questions are held at a time: read and not yet answered to the caller. It should be several times
    what the backend does abreast. Raises UserError where the
    backend does; what came in until then is in the cache.
    """
    source, held, desk = iter(questions), deque[_Held](), _Desk(backend, cache)
    try:
        while True:
            held.extend(map(desk.take, itertools.islice(source, window - len(held))))
            if not held:
                break
            if held[0].answered is None:
                desk.receive()
            while held and (answered := held[0].answered) is not None:
                held.popleft()
                yield answered
        desk.say()
    finally:
        backend.close()


def corpus_answers(requests: Iterable[Request]) -> Iterator[Answered]:
    """The references that came with the requests."""
    for request in requests:
        yield _answered(request.id, Raw(request.reference or "", "end"))


@dataclass
class _Held:
    """A question that was read; `answered` is None until it is."""

    id: str
    answered: Answered | None = None


class _Desk:
    """Takes questions, from the cache where it has them, and says how far it is."""

    def __init__(self, backend: Backend, cache: Cache) -> None:
        self.backend = backend
        self.cache = cache
        self.scope = digest(backend.settings)
        self.waiting = dict[str, list[_Held]]()
        self.asked = self.came = self.cached = self.usable = 0
        self.began = self.said = time.monotonic()

    def take(self, question: Question) -> _Held:
        """Look it up, or ask."""
        held = _Held(question.id)
        try:
            key = digest([self.scope, conversation(question.text, question.history, question.system)])
        except UnicodeEncodeError:
            held.answered = Answered(question.id, "", BROKEN)
            return held
        if key in self.waiting:
            self.waiting[key].append(held)
        elif (raw := self.cache.get(key)) is not None:
            self.cached += 1
            self._settle(held, raw)
        elif (reason := self.backend.ask(key, question)) is not None:
            held.answered = Answered(question.id, "", reason)
        else:
            self.asked += 1
            self.waiting[key] = [held]
        return held

    def receive(self) -> None:
        """Wait for answers, write them down, and hand them to those who wait."""
        for key, raw in self.backend.finished():
            self.cache.put(key, raw)
            self.came += 1
            for held in self.waiting.pop(key):
                self._settle(held, raw)
        if time.monotonic() - self.said >= PAUSE:
            self.say()

    def say(self) -> None:
        """A line of progress."""
        self.said = time.monotonic()
        rate = self.came / max(self.said - self.began, 1e-9)
        earlier = f", {self.cached} from earlier" if self.cached else ""
        print(f"answers: {self.came}/{self.asked} asked{earlier}, {self.usable} usable, {rate:.1f}/s", flush=True)

    def _settle(self, held: _Held, raw: Raw) -> None:
        held.answered = _answered(held.id, raw)
        self.usable += held.answered.dropped is None


def _answered(question_id: str, raw: Raw) -> Answered:
    """An answer that is blank, reached the token limit (it would teach not to stop) or stopped otherwise is dropped."""
    if raw.stop not in ("end", "length"):
        return Answered(question_id, raw.text, f"finish reason {re.sub(r'[^a-zA-Z0-9]+', '_', raw.stop)[:40]}")
    if not raw.text.strip():
        return Answered(question_id, raw.text, "empty answer")
    return Answered(question_id, raw.text, None if raw.stop == "end" else "answer reached the token limit")


def _entry(line: bytes) -> tuple[str, Raw] | None:
    """The key and answer of a line of the cache; None where it is no whole one."""
    try:
        found = json.loads(line)
        key, raw = found["key"], Raw(found["text"], found["stop"])
    except (ValueError, TypeError, KeyError):
        return None
    return (key, raw) if all(isinstance(part, str) for part in (key, raw.text, raw.stop)) else None
