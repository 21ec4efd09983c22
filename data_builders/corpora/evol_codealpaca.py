"""Evol-CodeAlpaca: coding instructions grown by a model out of simpler ones (Luo et al. 2024, arXiv 2306.08568).

A row is {instruction, output}; the decontaminated copy of it names its answer `response`. Rows have no id: theirs is a
hash of their text. Some instructions are prompts of the growing that leaked ("Increase the difficulty of the given
programming test problem"): those ask for a problem and not for its solution, and are dropped.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from data_builders.corpora.protocol import Conversation, Origin, Unusable, text

NAME = "evol_codealpaca"
ORIGIN = Origin(
    hub="theblackcat102/evol-codealpaca-v1",
    files=("*.jsonl",),
    licence="apache-2.0",
    terms="Apache-2.0; the answers were written by a model of OpenAI, whose terms may apply",
)
COLUMNS = ("instruction", "output", "response")

_LEAKED = re.compile(r"(?:please )?increase the difficulty of the given (?:programming|coding)", re.IGNORECASE)


def conversation(row: Mapping[str, Any]) -> Conversation:
    """The instruction, answered by the output."""
    asked, answer = text(row, "instruction"), text(row, "output", "response")
    if _LEAKED.match(asked.lstrip()):
        raise Unusable("leaked prompt", "asks for a harder problem, not for a solution")
    content = f"{asked}\0{answer}".encode("utf-8", "surrogatepass")
    return Conversation(
        f"evol_codealpaca/{hashlib.sha256(content).hexdigest()[:16]}", (("user", asked), ("assistant", answer))
    )
