"""The decoder of a model's family: for one request at a time, and for many."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.acceptance import Rule, Rules, greedy, leading_run
from headstart.autoregressive import AutoregressiveDecoder
from headstart.batch import Advance, BatchDecoder
from headstart.bidirectional import BidirectionalDecoder, by_token
from headstart.decoder import Answer, PassCounter
from headstart.family import token_id
from headstart.lookup import Tokens
from headstart.prompt import Renderer
from headstart.slot_diffusion import SlotDiffusionDecoder, block_length
from recipes.schema import BIDIRECTIONAL, DIFFUSION, Recipe, Slots

Diffusion = SlotDiffusionDecoder | BidirectionalDecoder
SingleDecoder = AutoregressiveDecoder | Diffusion


@dataclass(frozen=True)
class OneByOne:
    """`BatchDecoder` for models whose requests are decoded one after the other: one of them fills the device.

    `batch_size` is how many are done between two calls of `progress`.
    """

    decoder: Diffusion
    batch_size: int

    @property
    def model(self) -> Any:
        return self.decoder.model

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.decoder.stop_ids

    @property
    def limit(self) -> int:
        return self.decoder.limit

    def advance(
        self,
        prompts: Sequence[Tokens],
        drafts: Sequence[Answer] | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Advance]:
        """Verify each draft under its prompt and decode on to the end. Without drafts this is plain decoding.

        Raises RuntimeError where the decoder's own list of passes is not what the model's hook counted.
        """
        results = []
        for number, (prompt, draft) in enumerate(zip(prompts, drafts or [Answer()] * len(prompts), strict=True), 1):
            self.decoder.forget()
            self.decoder.calls.clear()
            with PassCounter(self.model) as counter:
                verified = self.decoder.verify(prompt, draft)
                answer = self.decoder.decode(prompt, verified.answer)
            behind = sum(place >= len(answer.tokens) for place in verified.apart)  # of an end that a gap brought
            results.append(Advance(answer, verified.kept - behind, self._passes(counter)))
            if number % self.batch_size == 0 or number == len(prompts):
                progress((number - 1) % self.batch_size + 1)
        return results

    def verify(self, prompts: Sequence[Tokens], drafts: Sequence[Answer], rules: Rules) -> list[list[Advance]]:
        """Verify each draft under its prompt, once for all `rules`: what stands right after that pass, by rule."""
        results = []
        for place, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
            self.decoder.forget()
            self.decoder.calls.clear()
            with PassCounter(self.model) as counter:
                logits, drafted = self.decoder.scores(prompt, draft)
            kept, passes = [leading_run(passed) for passed in rules(place, logits, drafted)], self._passes(counter)
            results.append([Advance(Answer(draft.tokens[:run]), run, passes) for run in kept])
        return results

    def _passes(self, counter: PassCounter) -> int:
        """What the hook counted; copies of a text that a bidirectional decoder reads abreast are a pass each."""
        passes = counter.texts if isinstance(self.decoder, BidirectionalDecoder) else counter.calls
        if passes != len(self.decoder.calls):
            raise RuntimeError(f"the hook counted {passes} passes, the decoder {len(self.decoder.calls)}")
        return passes


def single_decoder(
    model: Any, rendering: Renderer, stop_ids: frozenset[int], limit: int, slots: Slots, rule: Rule = greedy
) -> SingleDecoder:
    """One request at a time. Raises UserError where `slots` and `limit` do not go together."""
    family = rendering.family
    if family.decoder == "autoregressive":
        return AutoregressiveDecoder(model, stop_ids, limit, rule)
    mask = token_id(rendering.tokenizer, str(family.mask_token))
    if family.decoder == "slot-diffusion":
        return SlotDiffusionDecoder(model, stop_ids, mask, limit, slots, rule)
    return BidirectionalDecoder(model, stop_ids, mask, limit, slots, rule, family.shifted)


def batch_decoder(
    model: Any,
    rendering: Renderer,
    stop_ids: frozenset[int],
    limit: int,
    batch_size: int,
    slots: Slots,
    rule: Rule = greedy,
) -> BatchDecoder | OneByOne:
    """Many requests, abreast where the family allows it. Raises UserError as `single_decoder` does."""
    if rendering.family.decoder == "autoregressive":
        return BatchDecoder(model, stop_ids, limit, batch_size, rule)
    decoder = single_decoder(model, rendering, stop_ids, limit, slots, rule)
    assert not isinstance(decoder, AutoregressiveDecoder)
    return OneByOne(decoder, batch_size)


def check(recipe: Recipe, benchmarks: Iterable[str]) -> None:
    """Raise UserError, before a model is loaded, where a benchmark's slots and the limit do not go together."""
    if recipe.model.family in DIFFUSION:
        for name in benchmarks:
            slots, limit = recipe.slots.of(name), recipe.eval.max_new_tokens
            block_length(by_token(slots) if recipe.model.family in BIDIRECTIONAL else slots, limit)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides an answer beside weights, limit and rule: nothing for an autoregressive model."""
    return {"slots": recipe.slots.model_dump(mode="json")} if recipe.model.family in DIFFUSION else {}


def walk(decoder: BatchDecoder | OneByOne, paths: Sequence[Sequence[Tokens]]) -> list[tuple[Advance, ...]]:
    """Each request's steps, one for each prompt of its path; requests that have an i-th prompt take step i together."""
    steps: list[list[Advance]] = [[] for _ in paths]
    for i in range(max(map(len, paths))):
        rows = [row for row, path in enumerate(paths) if len(path) > i]
        held = [steps[row][-1].answer if steps[row] else Answer() for row in rows]
        for row, step in zip(rows, decoder.advance([paths[row][i] for row in rows], held), strict=True):
            steps[row].append(step)
    return [tuple(taken) for taken in steps]
