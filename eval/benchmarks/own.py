"""Your own requests: a .jsonl file, one request a line, scored by F1 where a line has a reference.

    "Write a haiku. It is about rain."                                              a string is the request's text
    {"text": "Write a haiku. It is about rain.", "reference": "...", "id": "haiku"}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}

Of `messages` the last user turn is streamed and what stands before it is history; an answer after it is the reference,
unless `reference` is given. `id` is the file's name and the line's number where it is not given. A reference that is
blank or null is none.
"""

import json
from pathlib import Path
from typing import Any

from eval.benchmarks.chat import check_roles
from eval.benchmarks.f1 import known, score, unfit
from eval.benchmarks.protocol import Metric
from headstart.request import Message, Request
from headstart.sentences import split
from recipes.errors import UserError

__all__ = ["METRIC", "NAME", "known", "load", "score", "unfit"]

NAME = "own"
METRIC: Metric = "F1"
KEYS = ("text", "messages", "id", "reference")
MESSAGE_KEYS = ("role", "content")


def load(path: str | None) -> list[Request]:
    """All lines in the file's order.

    Raises UserError where no file is given, where it cannot be read or holds no request, and, with file and line, for
    a line that is no request or whose id is there already.
    """
    if not path:
        raise UserError(f"{NAME}: these are your own requests; give their file: eval.benchmarks=[PATH.jsonl]")
    file = Path(path)
    try:
        whole = file.read_text(encoding="utf-8-sig")  # Windows' editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give a .jsonl file, one request a line") from None
    requests: dict[str, Request] = {}
    for number, line in enumerate(whole.split("\n"), 1):  # `splitlines` would also cut at U+2028 inside a string
        if not line.strip():
            continue
        try:
            request = _request(_parsed(line), f"{file.stem}/{number}")
            _expect(request.id not in requests, f"id {request.id!r} stands there twice")
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        requests[request.id] = request
    if not requests:
        raise UserError(f"{path}: holds no request; write one a line, a string or an object with text or messages")
    return list(requests.values())


def _parsed(line: str) -> Any:
    """Raises ValueError in words, without the position in "line 1" that json gives."""
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, character {error.pos + 1})") from None
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return found


def _request(row: Any, default_id: str) -> Request:
    """Raises ValueError that names the key."""
    row = {"text": row} if isinstance(row, str) else row
    _expect(isinstance(row, dict), "the line is no JSON object or string")
    _expect_keys(row, KEYS, "the line")
    _expect(("text" in row) != ("messages" in row), 'give either "text" or "messages"')
    _expect(isinstance(row.get("text", ""), str), '"text" must be a string')
    for key in ("id", "reference"):
        _expect(isinstance(row.get(key), str | None), f'"{key}" must be a string')
    history, text, answer = _turns(row["messages"]) if "messages" in row else ((), row["text"], None)
    _expect(text.strip(), "the turn to stream is blank")
    reference = answer if row.get("reference") is None else row["reference"]
    reference = reference if reference and reference.strip() else None
    return Request(row.get("id") or default_id, NAME, tuple(split(text)), history, reference)


def _turns(found: Any) -> tuple[tuple[Message, ...], str, str | None]:
    """History, the last user turn, and the answer to it, if any."""
    _expect(isinstance(found, list), '"messages" must be a list of {"role", "content"}')
    for number, message in enumerate(found, 1):
        _expect_keys(message, MESSAGE_KEYS, f"message {number}")
        for key in MESSAGE_KEYS:
            _expect(isinstance(message.get(key), str), f'message {number} needs the string "{key}"')
    messages = [Message(message["role"], message["content"]) for message in found]
    check_roles([message.role for message in messages])
    answer = messages.pop().content if messages[-1].role == "assistant" else None
    return tuple(messages[:-1]), messages[-1].content, answer


def _expect(good: Any, fault: str) -> None:
    if not good:
        raise ValueError(fault)


def _expect_keys(found: Any, keys: tuple[str, ...], where: str) -> None:
    _expect(isinstance(found, dict), f"{where} is no JSON object")
    for key in found:
        _expect(key in keys, f"{where} has the unknown key {key!r}; known are {', '.join(keys)}")
