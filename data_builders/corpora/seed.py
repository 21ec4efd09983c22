"""The seed corpus: small Python tasks written for headstart, each with several requests and one tested answer.

A task is one file in `seed_tasks/`; its name is the task's name and the function's. A line `=== answer`, `=== tests` or
`=== request` opens a section. Every request says first what the function does and illustrates it afterwards.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from headstart.request import Request
from headstart.sentences import split
from recipes.errors import UserError

VERSION = "1"
LICENCE = "Apache-2.0"

_MARKER = re.compile(r"^=== (answer|tests|request)\n", re.MULTILINE)


@dataclass(frozen=True)
class Task:
    """One task: the answer's text (a fenced block, maybe a closing sentence), asserts, and the requests' texts."""

    name: str
    answer: str
    tests: str
    requests: tuple[str, ...]


def load() -> list[Request]:
    """All requests, by task name and then in the order of the file.

    `reference` is the whole answer; `extra` has "task", "entry_point", "tests" (plain asserts) and "preamble".
    """
    return [request for task in load_tasks() for request in _requests(task)]


def load_tasks() -> list[Task]:
    """All tasks, by name."""
    folder = resources.files(__package__) / "seed_tasks"
    files = (file for file in folder.iterdir() if file.name.endswith(".txt"))
    return [_read(file) for file in sorted(files, key=lambda file: file.name)]


def split_tasks(requests: Sequence[Request], heldout_tasks: int, seed: int) -> tuple[list[Request], list[Request]]:
    """Set `heldout_tasks` whole tasks aside: (train, heldout), both in the given order.

    The tasks with the smallest hashes of seed and name are held out. So another task in the corpus pushes at most one
    task over to the other side. Raises UserError where nothing would be left to train on.
    """
    tasks = sorted({request.extra["task"] for request in requests}, key=lambda task: _rank(task, seed))
    if not 0 <= heldout_tasks < max(len(tasks), 1):
        raise UserError(
            f"data.heldout_tasks={heldout_tasks}: the corpus has {len(tasks)} tasks, set it to 0..{len(tasks) - 1}"
        )
    heldout = set(tasks[:heldout_tasks])
    return (
        [request for request in requests if request.extra["task"] not in heldout],
        [request for request in requests if request.extra["task"] in heldout],
    )


def _rank(task: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{task}".encode()).digest()


def _read(file: Traversable) -> Task:
    name = file.name.removesuffix(".txt")
    head, *parts = _MARKER.split(file.read_text(encoding="utf-8"))
    sections = [(kind, text.strip("\n")) for kind, text in zip(parts[::2], parts[1::2], strict=True)]
    kinds = [kind for kind, _ in sections]
    if head or kinds[:2] != ["answer", "tests"] or set(kinds[2:]) != {"request"}:
        raise UserError(f"{file.name}: write one '=== answer', one '=== tests', then a '=== request' for each request")
    return Task(name, sections[0][1], sections[1][1], tuple(text for _, text in sections[2:]))


def _requests(task: Task) -> list[Request]:
    extra = {"task": task.name, "entry_point": task.name, "tests": task.tests, "preamble": ""}
    return [
        Request(f"seed/{task.name}/{k}", "seed", tuple(split(text)), reference=task.answer, extra=dict(extra))
        for k, text in enumerate(task.requests, start=1)
    ]
