"""Pairs in TRL's conversational prompt-completion format, with columns of our own."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from data_builders.cuts import Cut
from headstart.prompt import conversation
from headstart.request import Request

Fate = Literal["right", "partly right", "stale"]
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("completion", _MESSAGES),
        ("id", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("rest", pa.string()),
        ("cut", pa.string()),
        ("cut_characters", pa.int64()),
        ("cut_sentences", pa.int64()),
        ("sentences", pa.int64()),
        ("answer_source", pa.string()),
        ("draft", pa.string()),
        ("draft_sentences", pa.int64()),
        ("draft_fate", pa.string()),
    ]
)
_BATCH = 1_000


@dataclass(frozen=True)
class Draft:
    """What the model answered to the first `sentences` sentences: the draft that a later prefix finds."""

    text: str
    sentences: int


def pair(
    request: Request, cut: Cut, answer: str, system: str | None, answer_source: str, draft: Draft | None = None
) -> dict[str, Any]:
    """One row: system message, history and prefix ask; the answer to the whole request answers.

    `rest` is what was held back. A draft stays a column beside the prompt: it is never part of it.
    """
    whole = cut.kind == "whole"
    kind = "whole-request" if whole else "prefix-to-answer"
    return {
        "prompt": conversation(cut.prefix, request.history, system),
        "completion": [{"role": "assistant", "content": answer}],
        "id": f"{request.id}#{len(cut.prefix)}",
        "source": request.source,
        "kind": kind if draft is None else "draft-refinement",
        "rest": request.text[len(cut.prefix) :],
        "cut": cut.kind,
        "cut_characters": len(cut.prefix),
        "cut_sentences": cut.sentences,
        "sentences": len(request.sentences),
        "answer_source": answer_source,
        "draft": draft.text if draft else None,
        "draft_sentences": draft.sentences if draft else None,
        "draft_fate": fate(draft.text, answer) if draft else None,
    }


def fate(draft: str, answer: str) -> Fate:
    """What becomes of a draft beside the right answer: all of it stays, its first words do, or nothing."""
    drafted, right = draft.split(), answer.split()
    if drafted == right:
        return "right"
    return "partly right" if drafted[:1] == right[:1] else "stale"


class Shard:
    """A Parquet file of pairs on its way: `path` is there once it is closed without an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path.with_name(f".{path.name}.{os.getpid()}")
        self._writer = pq.ParquetWriter(self._hidden, SCHEMA, compression="zstd")
        self._rows: list[Mapping[str, Any]] = []

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
        if kind is None:
            self._hidden.rename(self.path)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append pairs."""
        self._rows += rows
        if len(self._rows) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows = []
