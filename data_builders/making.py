"""Last stage: pairs of the chosen requests, with the corpus' answers alone, or with what a model adds to them.

A model may answer the whole request (`data.answers=self`: greedy, without the system message for incomplete requests,
so that the adapter learns to give under the message what the plain model gives), draft from an earlier prefix as it
would while the user types (`data.kind=draft-refinement`), and say how far a prefix foretells the answer
(`data.max_surprise`). All that it says is kept in caches and never asked twice.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_builders import pairs
from data_builders.answers import Backend, Cache, Question, Raw, answers, corpus_answers
from data_builders.cuts import Cut, whole
from data_builders.pairs import Draft
from data_builders.reading import Drawn
from headstart.prompt import IGNORED, Renderer, Row
from headstart.request import Request
from recipes.run_folder import digest
from recipes.schema import Data

BLOCK = 256  # requests whose drafts are asked for together
LATEST = 0.5  # share of drafts made from the prefix just before; the others are from any earlier one


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

    def cuts(self, drawn: Drawn) -> list[Cut]:
        """The prefixes of which pairs are made, and the whole request where the recipe wants it."""
        return [*drawn.cuts, *([whole(drawn.request)] if self.data.whole else [])]

    def pair(self, request: Request, cut: Cut, answer: str, draft: Draft | None = None) -> dict[str, Any]:
        """One pair."""
        return pairs.pair(request, cut, answer, self.system, self.data.answers, draft)

    def of_corpus(self, requests: Iterable[Drawn]) -> Iterator[Made]:
        """Pairs with the corpus' own answers, as they are."""
        for drawn in requests:
            reference = drawn.request.reference or ""
            yield Made([self.pair(drawn.request, cut, reference) for cut in self.cuts(drawn)])


def needs_model(data: Data) -> bool:
    """Whether the pairs need more than the corpus."""
    return data.answers == "self" or data.kind == "draft-refinement" or data.max_surprise is not None


@dataclass(frozen=True)
class ModelMaker:
    """A maker with a model. `likelihoods` scores training rows, in nats a token; None where nothing is scored."""

    maker: Maker
    backend: Backend | None
    cache: Cache
    renderer: Renderer
    likelihoods: Callable[[Sequence[Row]], list[float]] | None
    scored_by: str

    def of_model(self, requests: Iterable[Drawn]) -> Iterator[Made]:
        """Pairs of each request, in order."""
        block: list[tuple[Drawn, str, str | None]] = []
        for drawn, text, dropped in self._answered(requests):
            block.append((drawn, text, dropped))
            if len(block) == BLOCK:
                yield from self._block(block)
                block = []
        yield from self._block(block)

    def _answered(self, requests: Iterable[Drawn]) -> Iterator[tuple[Drawn, str, str | None]]:
        asked = deque[Drawn]()

        def remembered() -> Iterator[Drawn]:
            for drawn in requests:
                asked.append(drawn)
                yield drawn

        if self.maker.data.answers == "corpus":
            found = corpus_answers(drawn.request for drawn in remembered())
        else:
            found = self._ask(
                Question(drawn.request.id, drawn.request.text, drawn.request.history) for drawn in remembered()
            )
        for answered in found:
            yield asked.popleft(), answered.text, answered.dropped

    def _ask(self, questions: Iterable[Question]) -> Iterator[Any]:
        assert self.backend is not None
        return answers(questions, self.backend, self.cache)

    def _block(self, block: Sequence[tuple[Drawn, str, str | None]]) -> Iterator[Made]:
        made = [
            Made([], [{"id": drawn.request.id, "dropped": dropped, "answer": text}] if dropped else [])
            for drawn, text, dropped in block
        ]
        usable = [(at, drawn, text) for at, (drawn, text, dropped) in enumerate(block) if dropped is None]
        if self.maker.data.kind == "draft-refinement":
            self._refine(usable, made)
        else:
            for at, drawn, text in usable:
                made[at].pairs.extend(self.maker.pair(drawn.request, cut, text) for cut in self.maker.cuts(drawn))
        if self.likelihoods is not None:
            self._foreseen({at: drawn.request for at, drawn, _ in usable}, made)
        yield from made

    def _refine(self, usable: Sequence[tuple[int, Drawn, str]], made: Sequence[Made]) -> None:
        """Pairs with a draft that an earlier prefix brought forth; none where there is no earlier prefix."""
        wanted = [
            (at, drawn, text, cut, sentences)
            for at, drawn, text in usable
            for cut in self.maker.cuts(drawn)
            if (sentences := self._earlier(drawn.request, cut))
        ]
        questions = (
            Question(f"{d.request.id}#draft{n}", d.request.prefix(n), d.request.history, self.maker.system)
            for _, d, _, _, n in wanted
        )
        for (at, drawn, text, cut, sentences), draft in zip(wanted, self._ask(questions), strict=True):
            if draft.dropped in (None, "answer reached the token limit"):  # a draft may be cut off: it is one still
                made[at].pairs.append(self.maker.pair(drawn.request, cut, text, Draft(draft.text, sentences)))
            else:
                reason = f"draft: {draft.dropped}"
                made[at].dropped.append({"id": f"{drawn.request.id}#{len(cut.prefix)}", "dropped": reason})

    def _earlier(self, request: Request, cut: Cut) -> int:
        """How many sentences the draft is made from: often those just before, else any number below; 0 for none."""
        boundary = len(request.prefix(cut.sentences)) == len(cut.prefix) if cut.sentences else False
        most = cut.sentences - 1 if boundary else cut.sentences
        draw = random.Random(f"{self.maker.seed}:draft:{request.id}#{len(cut.prefix)}")
        return most if most < 2 or draw.random() < LATEST else draw.randint(1, most)

    def _foreseen(self, requests: dict[int, Request], made: Sequence[Made]) -> None:
        """Drop the cuts that do not foretell the answer at all: it is far less likely than after the whole request."""
        limit = self.maker.data.max_surprise
        assert limit is not None
        cut = [(at, row) for at in requests for row in made[at].pairs if row["cut"] != "whole"]
        whole_rows = {at: self._row(row["completion"], requests[at], requests[at].text) for at, row in cut}
        prefix_rows = [self._row(row["completion"], requests[at], row["prompt"][-1]["content"]) for at, row in cut]
        scores = self._scored([*whole_rows.values(), *prefix_rows])
        known = dict(zip(whole_rows, scores, strict=False))
        for (at, row), score in zip(cut, scores[len(whole_rows) :], strict=True):
            if (surprise := known[at] - score) > limit:
                made[at].pairs.remove(row)
                reason = "answer not foreseeable from the cut"
                made[at].dropped.append({"id": row["id"], "dropped": reason, "nats_a_token": f"{surprise:.3f}"})

    def _row(self, completion: Any, request: Request, text: str) -> Row:
        return self.renderer.row(text, completion[0]["content"], request.history, self.maker.system)

    def _scored(self, rows: Sequence[Row]) -> list[float]:
        assert self.likelihoods is not None
        keys = [digest(["likelihood", self.scored_by, row.ids, row.labels.count(IGNORED)]) for row in rows]
        fresh = {key: row for key, row in zip(keys, rows, strict=True) if self.cache.get(key) is None}
        for key, score in zip(fresh, self.likelihoods(list(fresh.values())), strict=True):
            self.cache.put(key, Raw(repr(score), "score"))
        return [float(found.text) for key in keys if (found := self.cache.get(key)) is not None]
