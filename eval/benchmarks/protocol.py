"""What a benchmark module has to offer, and what a score is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from eval.sandbox import Limits
from headstart.request import Request

Metric = Literal["pass@1", "F1"]


@dataclass(frozen=True)
class Score:
    """`value` is 1 or 0 for pass@1, in [0, 1] for F1, None where it cannot be scored; `note` gives the reason
    ("passed" for 1, "scored" for an F1)."""

    value: float | None
    note: str


@dataclass(frozen=True)
class Known:
    """An answer whose verdict is known beforehand: the reference, which must score 1, or one that must score 0."""

    answer: str
    name: Literal["reference", "before"] = "reference"

    @property
    def expected(self) -> int:
        """The score that it must get."""
        return int(self.name == "reference")


class Benchmark(Protocol):
    """A module of this package: where its rows come from, how a row becomes a request, how an answer is scored."""

    NAME: str
    METRIC: Metric

    def load(self, path: str | None) -> list[Request]:
        """All requests in the benchmark's order, from the hub or, where `path` is given, from there.

        Raises UserError for rows that cannot be read or have another schema.
        """

    def unfit(self, request: Request) -> str | None:
        """Why this request cannot be scored on this machine ("needs torch"), or None. Such a request is excluded."""

    def known(self, request: Request) -> list[Known]:
        """Answers whose verdict is known; none where the request has no reference."""

    def score(self, requests: Sequence[Request], answers: Sequence[str], limits: Limits) -> list[Score]:
        """One score a request, in order. A fault of the harness raises SandboxError; it is never a wrong answer."""
