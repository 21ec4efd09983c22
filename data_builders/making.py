"""Last stage: pairs of the chosen requests, here with the corpus' own answers; `modelling` adds what a model says."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_builders import pairs
from data_builders.cuts import Cut, whole
from data_builders.pairs import Draft
from data_builders.reading import Drawn
from headstart.request import Request
from recipes.schema import Data


@dataclass(frozen=True)
class Made:
    """The pairs of one request; `dropped` names those that were not made, with the reason, for review."""

    pairs: list[dict[str, Any]]
    dropped: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Maker:
    """What of a recipe decides the pairs of a request that has its answer."""

    data: Data
    system: str | None
    seed: int
    control: re.Pattern[str] | None = None
    """Control strings of the model's template, which may stand in a corpus as text."""

    def cuts(self, drawn: Drawn) -> list[Cut]:
        """The prefixes of which pairs are made, and the whole request where the recipe wants it."""
        return [*drawn.cuts, *([whole(drawn.request)] if self.data.whole else [])]

    def holds_control(self, pair: Mapping[str, Any]) -> bool:
        """Whether a text of the pair holds one: headstart reads it as text, other trainers as control."""
        turns = [*pair["prompt"], *pair["completion"]]
        return self.control is not None and any(self.control.search(turn["content"]) for turn in turns)

    def pair(self, request: Request, cut: Cut, answer: str, draft: Draft | None = None) -> dict[str, Any]:
        """One pair."""
        return pairs.pair(request, cut, answer, self.system, self.data.answers_of(request.source), draft)

    def of_corpus(self, requests: Iterable[Drawn]) -> Iterator[Made]:
        """Pairs with the corpus' own answers, as they are."""
        for drawn in requests:
            reference = drawn.request.reference or ""
            yield Made([self.pair(drawn.request, cut, reference) for cut in self.cuts(drawn)])


def needs_model(data: Data) -> bool:
    """Whether the pairs need more than the corpus."""
    return data.self_answered or data.kind == "draft-refinement" or data.max_surprise is not None
