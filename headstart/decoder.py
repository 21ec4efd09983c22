"""The decoder protocol, what decoders hand around, and the hook that counts every forward pass."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Stop = Literal["end", "length"]


@dataclass(frozen=True)
class Answer:
    """Answer tokens so far. `stop` is None while unfinished; with "end" the last token is an end token."""

    tokens: tuple[int, ...] = ()
    stop: Stop | None = None

    @property
    def written(self) -> tuple[int, ...]:
        """The tokens without the end token."""
        return self.tokens[:-1] if self.stop == "end" else self.tokens

    def extended(self, token: int, stop_ids: frozenset[int], limit: int) -> "Answer":
        """This answer and one token more; it ends at an end token, or at `limit` tokens from the answer's start."""
        tokens = (*self.tokens, token)
        stop: Stop | None = "end" if token in stop_ids else "length" if len(tokens) >= limit else None
        return Answer(tokens, stop)


@dataclass(frozen=True)
class Verified:
    """After a verification pass: `kept` draft tokens, and the answer as it then stands.

    `apart` are the places of those kept tokens that stand behind the answer's (`slots.keep=every` alone).
    """

    kept: int
    answer: Answer
    apart: tuple[int, ...] = ()


class Decoder(Protocol):
    """One model, one request at a time. It may keep a cache between calls; `forget` drops it.

    `claimed` is set by the session that uses it: a cache serves one session at a time.
    """

    claimed: bool

    def verify(self, prompt: Sequence[int], draft: Answer) -> Verified:
        """One pass over prompt and draft: keep the leading run that passes, and take the next token from it."""

    def decode(self, prompt: Sequence[int], answer: Answer, stopped: Callable[[], bool] = ...) -> Answer:
        """Decode on from `answer` until it ends, or until `stopped()`."""

    def forget(self) -> None:
        """Drop what is held from earlier calls."""


def settle(draft: Answer, kept: int, following: int, stop_ids: frozenset[int], limit: int) -> Answer:
    """The answer right after a verification that kept `kept` draft tokens and predicts `following` after them.

    A finished draft that is kept whole is the answer: through its end token, or at the limit.
    """
    if draft.stop is not None and kept == len(draft.tokens):
        return draft
    return Answer(draft.tokens[:kept]).extended(following, stop_ids, limit)


def scored(draft: Answer) -> Sequence[int]:
    """The draft tokens that go into the verification pass: nothing follows the last token of a finished draft."""
    return draft.tokens[:-1] if draft.stop is not None else draft.tokens


class PassCounter:
    """Counts a model's forward passes through a hook: calls, tokens, seconds, and passes by row of a batch.

    `rows` names whom the next calls are charged to: in a batch, the rows that are unfinished. Seconds are taken with
    the device synchronised, only while `timed` is set.
    """

    def __init__(self, model: Any, timed: bool = False) -> None:
        self.calls = 0
        self.texts = 0  # rows of all calls
        self.tokens = 0
        self.seconds = 0.0
        self.by_row: Counter[int] = Counter()
        self.rows: Iterable[int] = ()
        self.timed = timed
        self._device = model.device
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        )

    def __enter__(self) -> "PassCounter":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hook off the model."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.calls += 1
        self.texts += ids.shape[0]
        self.tokens += ids.numel()
        self.by_row.update(self.rows)
        self._start = now(self._device) if self.timed else 0.0

    def _after(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if self.timed:
            self.seconds += now(self._device) - self._start


def now(device: torch.device) -> float:
    """Monotonic seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
