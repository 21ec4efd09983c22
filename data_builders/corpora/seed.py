"""The seed corpus: small Python tasks written for headstart, each with several requests and one tested answer.

A task is one file in `seed_tasks/`; its name is the task's name and the function's. A line `=== answer`, `=== tests` or
`=== request` opens a section. Every request says first what the function does and illustrates it afterwards.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from data_builders.corpora.protocol import Conversation, Origin
from recipes.errors import UserError

NAME = "seed"
VERSION = "1"
ORIGIN = Origin(hub=None, licence="apache-2.0", terms="Apache-2.0; written for headstart and part of it")
COLUMNS = ()

_MARKER = re.compile(r"^=== (answer|tests|request)\n", re.MULTILINE)


@dataclass(frozen=True)
class Task:
    """One task: the answer's text (a fenced block, maybe a closing sentence), asserts, and the requests' texts."""

    name: str
    answer: str
    tests: str
    requests: tuple[str, ...]


def rows() -> Iterator[dict[str, Any]]:
    """One row a request, by task name and then in the order of the file."""
    for task in load_tasks():
        extra = {"task": task.name, "entry_point": task.name, "tests": task.tests, "preamble": ""}
        for number, text in enumerate(task.requests, 1):
            yield {"id": f"{NAME}/{task.name}/{number}", "text": text, "answer": task.answer, "extra": extra}


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The row; `extra` has "task", "entry_point", "tests" (plain asserts) and "preamble"."""
    return Conversation(row["id"], (("user", row["text"]), ("assistant", row["answer"])), extra=row["extra"])


def load_tasks() -> list[Task]:
    """All tasks, by name."""
    folder = resources.files(__package__) / "seed_tasks"
    files = (file for file in folder.iterdir() if file.name.endswith(".txt"))
    return [_read(file) for file in sorted(files, key=lambda file: file.name)]


def _read(file: Traversable) -> Task:
    name = file.name.removesuffix(".txt")
    head, *parts = _MARKER.split(file.read_text(encoding="utf-8"))
    sections = [(kind, text.strip("\n")) for kind, text in zip(parts[::2], parts[1::2], strict=True)]
    kinds = [kind for kind, _ in sections]
    if head or kinds[:2] != ["answer", "tests"] or set(kinds[2:]) != {"request"}:
        raise UserError(f"{file.name}: write one '=== answer', one '=== tests', then a '=== request' for each request")
    return Task(name, sections[0][1], sections[1][1], tuple(text for _, text in sections[2:]))
