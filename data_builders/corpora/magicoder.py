"""Magicoder-OSS-Instruct-75K: coding problems drawn up around fragments of open source (Wei et al. 2024, 2312.02120).

A row is {lang, raw_index, index, seed, openai_fingerprint, problem, solution}; the solution brings its own fence.
"""

from collections.abc import Mapping
from typing import Any

from data_builders.corpora.protocol import Conversation, Origin, Unusable, text

NAME = "magicoder"
ORIGIN = Origin(
    hub="ise-uiuc/Magicoder-OSS-Instruct-75K",
    files=("*.jsonl",),
    licence="mit",
    terms="MIT; the answers were written by a model of OpenAI, whose terms may apply",
)
COLUMNS = ("lang", "raw_index", "index", "problem", "solution")


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The problem, answered by the solution; `extra` has "lang"."""
    if not isinstance(row.get("raw_index"), int) or not isinstance(row.get("index"), int):
        raise Unusable("malformed row", "raw_index and index: two whole numbers are due")
    turns = (("user", text(row, "problem")), ("assistant", text(row, "solution")))
    return Conversation(f"magicoder/{row['raw_index']}/{row['index']}", turns, extra={"lang": text(row, "lang")})
