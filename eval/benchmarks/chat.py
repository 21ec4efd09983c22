"""UltraChat: multi-turn dialogues (Ding et al. 2023, arXiv 2305.14233), split `test_sft` of UltraChat 200k.

The last user turn that was answered is streamed, all that stands before it is history, and the answer it got is the
reference, scored by F1. A last turn without an answer is left out. The rows of the older release, `{"id", "data":
[user, assistant, ...]}`, load too. A row's `prompt` is not read: it can differ from the first message in letter case.
"""

import itertools
from collections.abc import Container, Sequence
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from eval.benchmarks import rows
from eval.benchmarks.f1 import known, score, unfit
from eval.benchmarks.protocol import Metric
from eval.benchmarks.rows import Hub, Row
from headstart.request import Message, Request
from headstart.sentences import split

__all__ = ["METRIC", "NAME", "known", "load", "score", "unfit"]

NAME = "chat"
METRIC: Metric = "F1"
HUB = Hub("HuggingFaceH4/ultrachat_200k", "test_sft")


class Turn(Row):
    """A message of a row."""

    role: Literal["system", "user", "assistant"]
    content: str


class Dialogue(Row):
    """A row. `prompt_id` is a hash of the prompt, so that two dialogues that open alike share it."""

    id: int | str = Field(validation_alias=AliasChoices("prompt_id", "id"))
    messages: list[Turn]

    @model_validator(mode="before")
    @classmethod
    def _older_release(cls, row: Any) -> Any:
        if not isinstance(row, dict) or "messages" in row or not isinstance(row.get("data"), list):
            return row
        turns = zip(itertools.cycle(("user", "assistant")), row["data"], strict=False)
        return {**row, "messages": [{"role": role, "content": content} for role, content in turns]}

    @model_validator(mode="after")
    def _answered(self) -> "Dialogue":
        check_roles([turn.role for turn in self.messages])
        if "assistant" not in (turn.role for turn in self.messages):
            raise ValueError("no user turn has an answer")
        return self


def load(path: str | None) -> list[Request]:
    """All rows in their order, one request each; an id met again gets "/2", "/3" behind it.

    Raises UserError as `rows.read` does; roles that break `check_roles` and a dialogue without an answer count as a
    broken row.
    """
    requests: dict[str, Request] = {}
    for row in rows.read(Dialogue, HUB, path):
        request = _request(_free(f"{NAME}/{row.id}", requests), row)
        requests[request.id] = request
    return list(requests.values())


def check_roles(roles: Sequence[str]) -> None:
    """Raises ValueError, with the message's number, unless user and assistant take turns from the user on.

    One system message may stand first; it is history like any other message.
    """
    first = 1 if roles[:1] == ["system"] else 0
    if len(roles) == first:
        raise ValueError("there is no user turn")
    for number, role in enumerate(roles[first:]):
        due = ("user", "assistant")[number % 2]
        if role != due:
            rule = "after an optional system message, user and assistant take turns"
            raise ValueError(f"message {first + number + 1} has the role {role!r} where {due!r} is due; {rule}")


def _request(request_id: str, row: Dialogue) -> Request:
    messages = [Message(turn.role, turn.content) for turn in row.messages]
    if messages[-1].role == "user":
        messages.pop()
    *history, turn, answer = messages
    reference = answer.content if answer.content.strip() else None
    return Request(request_id, NAME, tuple(split(turn.content)), tuple(history), reference)


def _free(request_id: str, taken: Container[str]) -> str:
    names = itertools.chain([request_id], (f"{request_id}/{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)
