"""Your own conversations: a .jsonl (or .jsonl.gz, .parquet) file, one row a request with its answer.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"text": "Write a haiku. It is about rain.", "reference": "...", "id": "haiku"}
    {"text": "Write a haiku. It is about rain."}                           where the model itself answers
    {"prompt": "..." or messages, "completion": "..." or messages}         TRL's own format

`conversations` with {"from", "value"} is read too, and the roles "human" and "gpt". `id` is a hash of the row's text
where it is not given. Other columns are left alone.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from data_builders.corpora.protocol import Conversation, Origin, Unusable, text

NAME = "jsonl"
ORIGIN = Origin(hub=None, licence="unknown", terms="a file of your own: its terms are yours to know")
COLUMNS = ("id", "language", "messages", "conversations", "prompt", "completion", "text", "reference")


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The row's turns."""
    turns = _turns(row)
    given = row.get("id")
    if given is None or given != given or not str(given).strip():  # pandas writes NaN where there is none
        given = hashlib.sha256(json.dumps(turns, default=str).encode()).hexdigest()[:16]
    return Conversation(f"own/{given}", turns, language=row.get("language"))


def _turns(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if row.get("messages") is not None:
        return _messages(row["messages"], "role", "content")
    if row.get("conversations") is not None:
        return _messages(row["conversations"], "from", "value")
    if row.get("prompt") is not None:
        return (*_side(row["prompt"], "user"), *_side(row.get("completion"), "assistant"))
    answer = row.get("reference")
    return (("user", text(row, "text")), *_side(answer, "assistant"))


def _side(found: Any, role: str) -> tuple[tuple[str, str], ...]:
    if found is None:
        return ()
    return ((role, found),) if isinstance(found, str) else _messages(found, "role", "content")


def _messages(found: Any, role: str, content: str) -> tuple[tuple[str, str], ...]:
    try:
        return tuple([(message[role], message[content]) for message in found])
    except (TypeError, KeyError):
        raise Unusable("malformed row", f'a list of {{"{role}", "{content}"}} is due') from None
