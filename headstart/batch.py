"""Verification and decoding for many requests abreast: for evaluation and data building.

Rows are left-padded. After the verification pass each row's rejected draft tokens lie at the right end of the cache;
the rows are shifted so that the holes fall into the left padding: then index distances equal text distances, which
sliding-window layers need.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.acceptance import Rule, greedy, leading_run
from headstart.decoder import Answer, PassCounter, scored, settle


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
        prompts: Sequence[Sequence[int]],
        drafts: Sequence[Answer] | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Advance]:
        """Verify each draft under its prompt and decode on to the end. Without drafts this is plain decoding.

        `progress` is called with the number of requests that a batch finished.
        """
        drafts = drafts or [Answer()] * len(prompts)
        results: list[Advance] = []
        for begin in range(0, len(prompts), self.batch_size):
            end = begin + self.batch_size
            results += self._advance(prompts[begin:end], drafts[begin:end])
            progress(len(prompts[begin:end]))
        return results

    @torch.inference_mode()
    def _advance(self, prompts: Sequence[Sequence[int]], drafts: Sequence[Answer]) -> list[Advance]:
        with PassCounter(self.model) as counter:
            counter.rows = range(len(prompts))
            batch, verified = self._verify(prompts, drafts)
            answers = [answer for _, answer in verified]
            for row, token in batch.run(counter, answers):
                answers[row] = answers[row].extended(token, self.stop_ids, self.limit)
        return [
            Advance(answer, kept, counter.by_row[row])
            for row, (answer, (kept, _)) in enumerate(zip(answers, verified, strict=True))
        ]

    def _verify(
        self, prompts: Sequence[Sequence[int]], drafts: Sequence[Answer]
    ) -> tuple["_Batch", list[tuple[int, Answer]]]:
        batch = _Batch(self.model, [[*p, *scored(d)] for p, d in zip(prompts, drafts, strict=True)])
        width = 1 + max(len(scored(draft)) for draft in drafts)
        logits = batch.prefill(width)
        verified, rejected = [], []
        for row, draft in enumerate(drafts):
            fed = len(scored(draft))
            scores = logits[row, width - 1 - fed :]
            drafted = torch.tensor(draft.tokens, dtype=torch.long, device=scores.device)
            kept = leading_run(self.rule(scores[: len(drafted)], drafted))
            following = int(scores[min(kept, fed)].argmax())
            verified.append((kept, settle(draft, kept, following, self.stop_ids, self.limit)))
            rejected.append(fed - min(kept, fed))
        batch.drop_right(rejected)
        return batch, verified


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

    def prefill(self, width: int) -> Tensor:
        """Feed everything; logits of the last `width` columns, shape (rows, width, vocabulary)."""
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        return self._forward(self.ids, positions, width)

    def drop_right(self, counts: Sequence[int]) -> None:
        """Take `counts[row]` tokens off the right end of each row."""
        if any(counts):
            width = self.mask.shape[1]
            shift = torch.tensor(counts, device=self.mask.device).unsqueeze(1)
            self._gather(torch.arange(width, device=self.mask.device) - shift)

    def run(self, counter: PassCounter, answers: list[Answer]) -> Iterator[tuple[int, int]]:
        """Yield (row, next token) while rows are unfinished; the caller extends `answers` before the next step."""
        self._leave(answers, share=1.0)
        while unfinished := [row for row in self.rows if answers[row].stop is None]:
            counter.rows = unfinished
            last = torch.tensor([[answers[row].tokens[-1]] for row in self.rows], device=self.mask.device)
            positions = self.mask.sum(dim=1, keepdim=True)
            self.mask = torch.cat([self.mask, torch.ones_like(positions)], dim=1)
            chosen = self._forward(last, positions, 1)[:, -1].argmax(dim=-1).tolist()
            alive = set(unfinished)
            yield from ((row, token) for row, token in zip(self.rows, chosen, strict=True) if row in alive)
            self._leave(answers, share=0.75)

    def _forward(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=width,
        )
        return output.logits

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
