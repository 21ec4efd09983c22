"""A request: the chat history and the final user turn, of which only the final turn is streamed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Message:
    """One finished turn of a chat; `role` is "user" or "assistant", or "system" for the first of a history."""

    role: str
    content: str


@dataclass(frozen=True)
class Request:
    """A benchmark's or a corpus' request.

    `sentences` joined are the final user turn, byte for byte. Usually they come from `sentences.split`; a benchmark
    may cut its own. `reference` is the known good answer, if any; `extra` is what the benchmark's scorer needs.
    """

    id: str
    source: str
    sentences: tuple[str, ...]
    history: tuple[Message, ...] = ()
    reference: str | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def text(self) -> str:
        """The whole final user turn, `S_n` as text."""
        return "".join(self.sentences)

    def prefix(self, i: int) -> str:
        """`S_i` as text: the first `i` sentences, 1 <= i <= n."""
        if not 1 <= i <= len(self.sentences):
            raise IndexError(f"{self.id}: prefix {i} of a request of {len(self.sentences)} sentences")
        return "".join(self.sentences[:i])
