"""What a model adds to pairs: answers, drafts, and how far a prefix foretells the answer; and whose model it is.

A model may answer the whole request (`data.answers=self`: greedy, without the system message for incomplete requests,
so that the adapter learns to give under the message what the plain model gives), draft from an earlier prefix as it
would while the user types (`data.kind=draft-refinement`), and say how far a prefix foretells the answer
(`data.max_surprise`). All that it says is kept in a cache and never asked twice.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_builders.answers import Answered, Backend, Cache, InProcess, Question, Raw, answers, corpus_answers
from data_builders.cuts import Cut
from data_builders.making import Made, Maker
from data_builders.pairs import Draft
from data_builders.reading import Drawn
from data_builders.server import Server
from headstart import model as loading
from headstart.decoders import batch_decoder, settings_of
from headstart.family import stop_ids
from headstart.likelihood import mean_log_likelihoods
from headstart.prompt import IGNORED, Renderer, Row
from headstart.request import Request
from recipes.run_folder import digest
from recipes.schema import Recipe

CACHE = "answers.jsonl"  # in the run's folder: it serves a build with other cuts too
BLOCK = 256  # requests whose drafts are asked for together
LATEST = 0.5  # share of drafts made from the prefix just before; the others are from any earlier one


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
        for whose, part in itertools.groupby(requests, lambda drawn: self.maker.data.answers_of(drawn.request.source)):
            asked = deque[Drawn]()
            given = _remembered(part, asked)
            if whose == "corpus":
                found = corpus_answers(drawn.request for drawn in given)
            else:
                found = self._ask(Question(d.request.id, d.request.text, d.request.history) for d in given)
            for answered in found:
                yield asked.popleft(), answered.text, answered.dropped

    def _ask(self, questions: Iterable[Question]) -> Iterator[Answered]:
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
        wanted = []
        for at, drawn, text in usable:
            for cut in self.maker.cuts(drawn):
                if sentences := self._earlier(drawn.request, cut):
                    wanted.append((at, drawn, text, cut, sentences))
                else:
                    made[at].dropped.append(_lost(drawn.request, cut, "no earlier prefix to draft from"))
        questions = (
            Question(f"{d.request.id}#draft{n}", d.request.prefix(n), d.request.history, self.maker.system)
            for _, d, _, _, n in wanted
        )
        for (at, drawn, text, cut, sentences), draft in zip(wanted, self._ask(questions), strict=True):
            if draft.dropped in (None, "answer reached the token limit"):  # a draft may be cut off: it is one still
                made[at].pairs.append(self.maker.pair(drawn.request, cut, text, Draft(draft.text, sentences)))
            else:
                made[at].dropped.append(_lost(drawn.request, cut, f"draft: {draft.dropped}"))

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
                made[at].dropped.append({"pair": row["id"], "dropped": reason, "nats_a_token": f"{surprise:.3f}"})

    def _row(self, completion: Any, request: Request, text: str) -> Row:
        return self.renderer.row(text, completion[0]["content"], request.history, self.maker.system)

    def _scored(self, rows: Sequence[Row]) -> list[float]:
        assert self.likelihoods is not None
        keys = [digest(["likelihood", self.scored_by, row.ids, row.labels.count(IGNORED)]) for row in rows]
        fresh = {key: row for key, row in zip(keys, rows, strict=True) if self.cache.get(key) is None}
        for key, score in zip(fresh, self.likelihoods(list(fresh.values())), strict=True):
            self.cache.put(key, Raw(repr(score), "score"))
        return [float(found.text) for key in keys if (found := self.cache.get(key)) is not None]


def _remembered(requests: Iterable[Drawn], asked: deque[Drawn]) -> Iterator[Drawn]:
    for drawn in requests:
        asked.append(drawn)
        yield drawn


def _lost(request: Request, cut: Cut, reason: str) -> dict[str, str]:
    """A pair that is not made, for review."""
    return {"pair": f"{request.id}#{len(cut.prefix)}", "dropped": reason}


@contextmanager
def model_maker(recipe: Recipe, maker: Maker, rendering: Renderer, run_dir: Path) -> Iterator[ModelMaker]:
    """A maker with the recipe's model: behind `data.server`, or in this process.

    Raises UserError where the server or the model cannot be had.
    """
    data = recipe.data
    answering = data.self_answered or data.kind == "draft-refinement"
    here = (answering and data.server is None) or data.max_surprise is not None
    model = loading.load_model(recipe.model) if here else None
    weights = loading.weights_hash(recipe.model)
    backend: Backend | None = None
    if data.server is not None and answering:
        name = f"{recipe.model.name}@{recipe.model.revision or 'main'}"
        served = data.server_model or recipe.model.name
        backend = Server(data.server, rendering, data.max_new_tokens, name, served, data.in_flight)
    elif answering:
        stops = stop_ids(loading.family(recipe.model), rendering.tokenizer, model)
        print(f"end tokens: {', '.join(rendering.tokenizer.convert_ids_to_tokens(sorted(stops)))}")
        decoder = batch_decoder(model, rendering, stops, data.max_new_tokens, data.batch_size, recipe.slots)
        backend = InProcess(decoder, rendering, weights, settings_of(recipe))
    scored = partial(mean_log_likelihoods, model, batch_size=data.batch_size) if data.max_surprise else None
    with Cache(run_dir / CACHE) as cache:
        yield ModelMaker(maker, backend, cache, rendering, scored, digest([weights, recipe.model.dtype]))
