"""What a corpus module has to offer: where its rows come from, and how a row becomes a conversation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol


@dataclass(frozen=True)
class Origin:
    """Where a corpus lives on the hub (`files` are patterns inside its repository), and on what terms."""

    hub: str | None
    files: tuple[str, ...] = ()
    licence: str = "unknown"
    terms: str = ""


@dataclass(frozen=True)
class Conversation:
    """A row as its corpus understands it; `rules.admit` decides whether a request is made of it.

    `turns` are (role, content), of whatever role and content the row has. `sentences` is the corpus' own cut of the
    last user turn, where it has one. `language` is the row's own word for it; `flagged` and `redacted` are its marks.
    """

    id: str
    turns: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...] | None = None
    language: str | None = None
    flagged: bool = False
    redacted: bool = False
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class Unusable(Exception):
    """A row of which no request is made: `reason` is one of a few, counted; `detail` says more, for review."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)  # both, so that it can be pickled
        self.reason = reason
        self.detail = detail


class Corpus(Protocol):
    """A module of this package."""

    NAME: str
    ORIGIN: Origin
    COLUMNS: tuple[str, ...]
    """The columns that are read of a Parquet file, "a.list.element.b" inside nested ones; () for all."""

    def conversation(self, row: Mapping[str, Any]) -> Conversation:
        """Raises Unusable for a row that is not of the corpus' schema, or not of its training part."""


class Included(Protocol):
    """A corpus whose rows come with headstart."""

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """All rows, in their order."""


def text(row: Mapping[str, Any], *names: str) -> str:
    """The string in the first of the columns `names` that the row has. Raises Unusable where there is none."""
    for name in names:
        if name in row:
            if isinstance(row[name], str):
                return str(row[name])
            raise Unusable("malformed row", f"{name}: a string is due, here is {type(row[name]).__name__}")
    raise Unusable("malformed row", f"{' or '.join(names)}: not there")
