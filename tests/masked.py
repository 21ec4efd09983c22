"""Batches of masked diffusion (LLaDA, arXiv 2502.09992) for the laboratory's bidirectional model: tokens of an answer
are hidden and predicted in place.

The answer is followed by end tokens up to a fixed number of places, so that an answer's length is something that the
model predicts too. Each place is hidden with a probability drawn for the row. The loss is `slots.SlotTrainer`'s: a
hidden token counts 1 / (rows of the step x probability x places).

Beyond LLaDA, the tokens that are shown are predicted as well, and one in ten of them is a random token (BERT, arXiv
1810.04805, does both). What a network says of a token that it sees is then trained; without it, so small a one learns
more slowly and its word on a visible token is an accident.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.prompt import IGNORED
from train.slots import LEAST, Arranged, batch

RANDOM = 0.1  # share of the tokens shown that are random ones


@dataclass(frozen=True)
class MaskedCollator:
    """Batches of rows with `place` (see `slots.counted`); `places` of answer, `rows` pairs in an optimizer step.

    Random tokens are drawn from the ids in `known`. A visible token counts 1 / (rows of the step x places).
    """

    pad: int
    mask_id: int
    known: range
    places: int
    rows: int
    seed: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = [self._row(row) for row in rows]
        weights = [weight for _, weight in made]
        longest = max(len(weight) for weight in weights)
        fed = batch([arranged for arranged, _ in made], self.pad)
        padded = [torch.cat([weight, weight.new_zeros(longest - len(weight))]) for weight in weights]
        return {**fed, "weights": torch.stack(padded)}

    def _row(self, row: dict[str, Any]) -> tuple[Arranged, Tensor]:
        source = random.Random(f"{self.seed}:masked:{row['place']}")
        prompt = row["labels"].count(IGNORED)
        answer = row["input_ids"][prompt:][: self.places]
        answer += [answer[-1]] * (self.places - len(answer))
        whole = torch.tensor([*row["input_ids"][:prompt], *answer])
        probability = LEAST + (1 - LEAST) * source.random()
        hidden = torch.tensor([False] * prompt + [source.random() < probability for _ in answer])
        noise = {at: source.choice(self.known) for at in range(prompt, len(whole)) if source.random() < RANDOM}
        seen = whole.clone()
        seen[list(noise)] = torch.tensor(list(noise.values()), dtype=seen.dtype)
        answered = torch.arange(len(whole)) >= prompt
        labels = torch.where(answered, whole, IGNORED)
        arranged = Arranged(torch.where(hidden, self.mask_id, seen), torch.arange(len(whole)), labels, hidden)
        return arranged, answered / (self.rows * self.places * torch.where(hidden, probability, 1.0))
