"""Verification and decoding for many requests abreast: for evaluation and data building.

Rows are left-padded. After a pass each row's rejected tokens lie at the right end of the cache; the rows are shifted so
that the holes fall into the left padding: then index distances equal text distances, which sliding-window layers need.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from headstart.acceptance import Rule, Rules, greedy, leading_run
from headstart.autoregressive import common_prefix
from headstart.decoder import Answer, PassCounter, Verified, scored, settle
from headstart.lookup import Tokens, offered, pieces

GROUP = 8  # rows that are prefilled together


@dataclass(frozen=True)
class Advance:
    """One request after verification and regeneration: `kept` draft tokens, `passes` counted by the model's hook."""

    answer: Answer
    kept: int
    passes: int


@dataclass(frozen=True)
class BatchDecoder:
    """Greedy decoding of up to `batch_size` requests abreast; the settings are those of `AutoregressiveDecoder`.

    A batch is made of requests in the order given, so its shape depends on the list alone.
    """

    model: Any
    stop_ids: frozenset[int]
    limit: int
    batch_size: int
    rule: Rule = greedy

    def advance(
        self,
        prompts: Sequence[Tokens],
        drafts: Sequence[Answer] | None = None,
        progress: Callable[[int], None] = lambda done: None,
        sources: Sequence[Sequence[Tokens]] | None = None,
    ) -> list[Advance]:
        """Verify each draft under its prompt and decode on to the end. Without drafts this is plain decoding.

        `progress` is called with the number of requests that a batch finished. With `sources`, those of each request,
        every pass after the first also verifies what is looked up in them (`headstart.lookup`): the greedy answer in
        fewer passes.
        """
        drafts = drafts or [Answer()] * len(prompts)
        sources = sources or [()] * len(prompts)
        results: list[Advance] = []
        for part in self._parts(len(prompts)):
            results += self._advance(prompts[part], drafts[part], sources[part])
            progress(len(prompts[part]))
        return results

    @torch.inference_mode()
    def verify(self, prompts: Sequence[Tokens], drafts: Sequence[Answer], rules: Rules) -> list[list[Advance]]:
        """Verify each draft under its prompt, once for all `rules`: what stands right after that pass, by rule.

        `rules` is asked about each request once, in no order, and told its place.
        """
        results: list[list[Advance]] = []
        for part in self._parts(len(prompts)):
            with PassCounter(self.model) as counter:
                placed = partial(_placed, rules, part.start)
                _, judged = self._verify(counter, prompts[part], drafts[part], placed)
            for row, by_rule in enumerate(judged):
                results.append([Advance(after.answer, after.kept, counter.by_row[row]) for after in by_rule])
        return results

    def _parts(self, number: int) -> list[slice]:
        return [slice(begin, begin + self.batch_size) for begin in range(0, number, self.batch_size)]

    @torch.inference_mode()
    def _advance(
        self, prompts: Sequence[Tokens], drafts: Sequence[Answer], sources: Sequence[Sequence[Tokens]]
    ) -> list[Advance]:
        searched = [pieces(given, self.stop_ids) for given in sources]
        with PassCounter(self.model) as counter:
            batch, judged = self._verify(counter, prompts, drafts, lambda row, *scores: (self.rule(*scores),))
            kept = [by_rule[0].kept for by_rule in judged]
            answers = [by_rule[0].answer for by_rule in judged]
            batch.drop_right([max(0, len(scored(draft)) - k) for draft, k in zip(drafts, kept, strict=True)])

            def offer(row: int) -> tuple[int, ...]:
                return offered(answers[row].tokens, searched[row], self.limit)

            for row, tokens in batch.run(counter, answers, offer):
                for token in tokens:
                    answers[row] = answers[row].extended(token, self.stop_ids, self.limit)
        return [Advance(answers[row], kept[row], counter.by_row[row]) for row in range(len(prompts))]

    def _verify(
        self, counter: PassCounter, prompts: Sequence[Tokens], drafts: Sequence[Answer], rules: Rules
    ) -> tuple["_Batch", list[list[Verified]]]:
        batch = _Batch(self.model, [[*p, *scored(d)] for p, d in zip(prompts, drafts, strict=True)])
        judged: dict[int, list[Verified]] = {}
        for row, scores in batch.prefill(counter, [1 + len(scored(draft)) for draft in drafts]):
            judged[row] = self._judged(scores, drafts[row], partial(rules, row))
        return batch, [judged[row] for row in range(len(drafts))]

    def _judged(
        self, scores: Tensor, draft: Answer, rules: Callable[[Tensor, Tensor], Sequence[Tensor]]
    ) -> list[Verified]:
        """`scores`, shape (fed draft tokens + 1, vocabulary), judged by each rule."""
        drafted = torch.tensor(draft.tokens, dtype=torch.long, device=scores.device)
        judged = []
        for passes in rules(scores[: len(drafted)], drafted):
            kept = leading_run(passes)
            following = int(scores[min(kept, len(scores) - 1)].argmax())
            judged.append(Verified(kept, settle(draft, kept, following, self.stop_ids, self.limit)))
        return judged


def _placed(rules: Rules, begin: int, row: int, logits: Tensor, draft: Tensor) -> Sequence[Tensor]:
    """`rules` on a row of the part that begins with request `begin`."""
    return rules(begin + row, logits, draft)


class _Batch:
    """The cache, mask and positions of a left-padded batch whose rows leave when they are finished."""

    def __init__(self, model: Any, rows: Sequence[Sequence[int]]) -> None:
        self.model = model
        width = max(map(len, rows))
        padded = [[0] * (width - len(row)) + list(row) for row in rows]
        self.ids = torch.tensor(padded, device=model.device)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        self.mask = (torch.arange(width, device=model.device) >= width - lengths.unsqueeze(1)).long()
        self.rows = list(range(len(rows)))
        self.cache = DynamicCache()

    def prefill(self, counter: PassCounter, wanted: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Feed everything; yields each row with the logits of its last `wanted[row]` columns, (wanted, vocabulary).

        Rows of like length go together: a padded column costs as much as a token of text. No logits are held for
        longer than their group needs.
        """
        order = sorted(self.rows, key=lambda row: int(self.mask[row].sum()))
        groups = [order[begin : begin + GROUP] for begin in range(0, len(order), GROUP)]
        caches = []
        for group in groups:
            cache, width = DynamicCache(), max(wanted[row] for row in group)
            columns = self.mask.shape[1] - int(self.mask[group].sum(dim=1).max())  # that are padding in all of them
            mask = self.mask[group, columns:]
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            counter.rows = group
            logits = self._forward(self.ids[group, columns:], mask, positions, cache, width)
            caches.append(cache)
            yield from ((row, logits[place, width - wanted[row] :]) for place, row in enumerate(group))
        self._join(caches, order)

    def _join(self, caches: Sequence[DynamicCache], order: Sequence[int]) -> None:
        """The groups' caches as one, its rows in their own order again, padded on the left to one width."""
        width, back = self.mask.shape[1], torch.tensor(order, device=self.mask.device).argsort()
        for number, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
            parts: Any = [[layer.keys for layer in layers], [layer.values for layer in layers]]
            keys, values = (torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in part])[back] for part in parts)
            self.cache.update(keys, values, number)

    def drop_right(self, counts: Sequence[int]) -> None:
        """Take `counts[row]` tokens off the right end of each row; trim the left padding."""
        if any(counts):
            width, shift = self.mask.shape[1], torch.tensor(counts, device=self.mask.device).unsqueeze(1)
            longest = int((self.mask.sum(dim=1, keepdim=True) - shift).max())
            self._gather(torch.arange(width - longest, width, device=self.mask.device) - shift)

    def run(
        self, counter: PassCounter, answers: Sequence[Answer], offer: Callable[[int], tuple[int, ...]]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (row, its next tokens) of each pass while rows are unfinished.

        `offer(row)` proposes tokens after the row's answer; those that the model chooses too are kept, and its own
        token after them. The caller extends `answers` before the next step.
        """
        self._leave(answers, share=1.0)
        while unfinished := {row for row in self.rows if answers[row].stop is None}:
            counter.rows = unfinished
            offers = [offer(row) if row in unfinished else () for row in self.rows]
            fed = [(answers[row].tokens[-1], *proposed) for row, proposed in zip(self.rows, offers, strict=True)]
            chosen = self._feed(fed)
            runs = [run[: common_prefix(proposed, run) + 1] for proposed, run in zip(offers, chosen, strict=True)]
            self.drop_right([len(whole) - len(run) for whole, run in zip(chosen, runs, strict=True)])
            yield from ((row, run) for row, run in zip(self.rows, runs, strict=True) if row in unfinished)
            self._leave(answers, share=0.75)

    def _feed(self, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """One pass over some tokens of each row, padded on the right to one width; what the model chooses after each.

        Padding stands after a row's tokens, so these do not see it; `drop_right` has to take it off again.
        """
        width, device = max(map(len, tokens)), self.mask.device
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens], device=device)
        positions = self.mask.sum(dim=1, keepdim=True) + torch.arange(width, device=device)
        self.mask = torch.cat([self.mask, torch.ones_like(positions)], dim=1)
        logits = self._forward(ids, self.mask, positions, self.cache, width)
        chosen: list[list[int]] = logits.argmax(dim=-1).tolist()
        return chosen

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache, width: int) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=width,
        )
        logits: Tensor = output.logits
        return logits

    def _leave(self, answers: Sequence[Answer], share: float) -> None:
        """Let finished rows leave the batch once the unfinished are at most `share` of it; trim the left padding."""
        stay = [i for i, row in enumerate(self.rows) if answers[row].stop is None]
        if not stay or len(stay) == len(self.rows) or len(stay) > share * len(self.rows):
            return
        index = torch.tensor(stay, device=self.mask.device)
        self.rows = [self.rows[i] for i in stay]
        self.mask = self.mask[index]
        self.cache.batch_select_indices(index)
        begin = self.mask.shape[1] - int(self.mask.sum(dim=1).max())
        if begin:
            columns = torch.arange(begin, self.mask.shape[1], device=self.mask.device)
            self._gather(columns.expand(len(stay), -1))

    def _gather(self, columns: Tensor) -> None:
        """Rebuild each row of cache and mask from `columns`, shape (rows, new width); negative columns are padding."""
        source = columns.clamp(min=0)
        self.mask = self.mask.gather(1, source) * (columns >= 0)
        layer: Any
        for layer in self.cache.layers:
            index = source[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
