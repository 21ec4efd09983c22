"""A streaming session: drafts an answer while the user types, and finishes it at "send"."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

from headstart.decoder import Answer, Decoder
from headstart.prompt import Renderer
from headstart.request import Message


@dataclass(frozen=True)
class Update:
    """What one update came to: tokens kept of the draft held before it, and the answer now held."""

    kept: int
    answer: Answer


class StreamingSession:
    """Holds draft and cache between calls; all model work runs on one thread of its own.

    `update(text)` returns at once; `submit(text)` returns the finished answer. Either one, coming while the session
    drafts, stops the draft at its next token and verifies what exists. Use it as a context manager, or `close` it.
    A decoder serves one session at a time.
    """

    def __init__(
        self, decoder: Decoder, renderer: Renderer, system: str | None = None, history: Sequence[Message] = ()
    ) -> None:
        if decoder.claimed:
            raise RuntimeError("this decoder serves another session; give each session a decoder of its own")
        decoder.claimed = True
        self.draft = Answer()
        self._decoder = decoder
        self._renderer = renderer
        self._system = system
        self._history = tuple(history)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headstart")
        self._stop = Event()
        self._work: Future[Update] | None = None

    def update(self, text: str) -> "Future[Update]":
        """The user turn reads `text` so far: verify the draft held, and draft on in the background."""
        return self._start(text, final=False)

    def submit(self, text: str) -> Update:
        """The user turn is `text`: verify the draft held, decode the rest, and return the finished answer."""
        return self._start(text, final=True).result()

    def wait(self) -> Update | None:
        """Wait until the draft under way is whole. Raises what the draft raised."""
        return self._work.result() if self._work else None

    def text(self, answer: Answer) -> str:
        """The text of an answer, without its end token."""
        return self._renderer.text(answer.written)

    def close(self) -> None:
        """Stop drafting and end the thread."""
        self._stop.set()
        self._worker.shutdown(wait=True)
        self._decoder.claimed = False

    def __enter__(self) -> "StreamingSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, text: str, final: bool) -> "Future[Update]":
        self._stop.set()  # of the draft under way; it leaves what it has in self.draft
        self._stop = Event()
        self._work = self._worker.submit(self._advance, text, Event() if final else self._stop)
        return self._work

    def _advance(self, text: str, stop: Event) -> Update:
        if stop.is_set():
            return Update(0, self.draft)  # a later update came before this one began: nothing is lost
        prompt = self._renderer.prompt(text, self._history, self._system)
        try:
            verified = self._decoder.verify(prompt, self.draft)
            self.draft = self._decoder.decode(prompt, verified.answer, stop.is_set)
        except BaseException:
            self._decoder.forget()  # a pass that broke off may have left half of the layers' caches longer
            raise
        return Update(verified.kept, self.draft)
