"""Objective `slot_diffusion` (ReFusion): the next token on committed slots, masked diffusion on the others.

A row's answer is cut into slots of 4, 8, 16 or 32 tokens, each masked with a probability drawn for the row. The slots
that are not masked come first, in random order, then the masked ones; every token keeps its true position. A token's
label is the next one of its slot, a mask token's label is the token that it hides: both are read where they stand, with
no shift. Under data.kind=draft-refinement the slots that are not masked show the draft's tokens, and the labels stay
the answer's: the model learns to judge and to mend what it is shown.

Every row's draws follow from the run's seed and its place in the training order, so that they are the same however
many processes share a step, and in a run that is resumed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from headstart.prompt import IGNORED
from train.trainer import LabelledTrainer, in_chunks

SIZES = (4, 8, 16, 32)  # tokens of a slot
LEAST = 0.001  # probability that a slot is masked, at the least


@dataclass(frozen=True)
class Draw:
    """What is random in a row: tokens of a slot, probability of a mask, masked slots and the order of the others."""

    size: int
    probability: float
    masked: tuple[int, ...]
    shown: tuple[int, ...]


@dataclass(frozen=True)
class Arranged:
    """A row as it is fed, (tokens,) each: ids, positions, labels (no shift), and which are mask tokens."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    masked: Tensor


def draw(answer_tokens: int, source: random.Random) -> Draw:
    """The draws of a row, in the reference's order: size, probability, a number a slot, the order of those shown."""
    size = source.choice(SIZES)
    probability = LEAST + (1 - LEAST) * source.random()
    numbers = [source.random() for _ in range(-(-answer_tokens // size))]
    shown = [at for at, number in enumerate(numbers) if number >= probability]
    source.shuffle(shown)
    return Draw(size, probability, tuple(at for at, n in enumerate(numbers) if n < probability), tuple(shown))


def next_tokens(drawn: Draw, answer_tokens: int) -> int:
    """Tokens of a row that have a next-token label: all but the last of each slot that is not masked."""
    return sum(min(drawn.size, answer_tokens - at * drawn.size) - 1 for at in drawn.shown)


def arrange(ids: Sequence[int], answer_tokens: int, drawn: Draw, mask_id: int, draft: Sequence[int] = ()) -> Arranged:
    """Reorder and mask a row, whose last `answer_tokens` are its answer; `draft` stands in for what is shown of it."""
    whole, prompt = torch.tensor(list(ids)), len(ids) - answer_tokens
    slots = torch.arange(answer_tokens).split(drawn.size)
    order = [slots[at] + prompt for at in (*drawn.shown, *drawn.masked)]
    positions = torch.cat([torch.arange(prompt), *order])
    hidden = sum(len(slots[at]) for at in drawn.masked)
    masked = torch.arange(len(whole)) >= len(whole) - hidden
    seen = whole.clone()
    reach = min(len(draft), answer_tokens)
    seen[prompt : prompt + reach] = torch.tensor(list(draft[:reach]), dtype=whole.dtype)
    following = torch.cat([whole[1:], whole.new_full((1,), IGNORED)])
    ends = torch.tensor([int(slot[-1]) + prompt for slot in slots])
    following[ends] = IGNORED
    following[:prompt] = IGNORED
    labels = torch.where(masked, whole[positions], following[positions])
    return Arranged(torch.where(masked, mask_id, seen[positions]), positions, labels, masked)


def weighed(arranged: Arranged, drawn: Draw, answer_tokens: int, rows: int, targets: int) -> Tensor:
    """What each token's loss counts in its optimizer step, (tokens,), float32.

    A next token 1 / those of the step (`targets`); a mask token 1 / (rows of the step x probability x answer tokens).
    """
    masks = 1 / (rows * drawn.probability * answer_tokens)
    weight = torch.where(arranged.masked, masks, 1 / max(1, targets))
    return weight * (arranged.labels != IGNORED)


def counted(ordered: Dataset, effective_batch: int, seed: int) -> Dataset:
    """The rows in training order, with `place` and the number of next-token labels in its step, `targets`."""
    lengths = [sum(label != IGNORED for label in labels) for labels in ordered["labels"]]
    found = [next_tokens(draw(n, _source(seed, place)), n) for place, n in enumerate(lengths)]
    sums = [sum(found[i : i + effective_batch]) for i in range(0, len(found), effective_batch)]
    with_places = ordered.add_column("place", list(range(len(found))))
    return with_places.add_column("targets", [sums[place // effective_batch] for place in range(len(found))])


@dataclass(frozen=True)
class SlotCollator:
    """Batches of rows that `counted` has been over, padded on the right; `rows` are the pairs of an optimizer step."""

    pad: int
    mask_id: int
    rows: int
    seed: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        made, weights = [], []
        for row in rows:
            answer = sum(label != IGNORED for label in row["labels"])
            drawn = draw(answer, _source(self.seed, row["place"]))
            arranged = arrange(row["input_ids"], answer, drawn, self.mask_id, row.get("draft_ids", ()))
            made.append(arranged)
            weights.append(weighed(arranged, drawn, answer, self.rows, row["targets"]))
        return {**batch(made, self.pad), "weights": pad_sequence(weights, batch_first=True)}


def batch(rows: Sequence[Arranged], pad: int) -> dict[str, Tensor]:
    """The model's input and the labels, (rows, longest) each; padding has its own index as its position."""

    def wide(tensors: list[Tensor], value: int) -> Tensor:
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    mask = wide([torch.ones_like(row.ids) for row in rows], 0)
    positions = wide([row.positions for row in rows], 0)
    return {
        "input_ids": wide([row.ids for row in rows], pad),
        "attention_mask": mask,
        "position_ids": torch.where(mask.bool(), positions, torch.arange(mask.shape[1])),
        "labels": wide([row.labels for row in rows], IGNORED),
    }


class SlotTrainer(LabelledTrainer):
    """LabelledTrainer with the loss replaced. Its batches come from `SlotCollator`."""

    def share(self, loss: Tensor, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """The weights hold the whole step already; processes average gradients, hence the factor."""
        return loss * self.accelerator.num_processes

    def summed_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Weighted sum of the labels' negative log-likelihoods in nats: a float32 scalar."""
        logits, labelled = placed_logits(model, inputs)
        return in_chunks(_weighted, logits, inputs["labels"][labelled], inputs["weights"][labelled])


def placed_logits(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that have a label, (labels, vocabulary), and the bool mask of their places.

    The 2-D attention mask has to be given: without it transformers takes positions that jump for packed sequences.
    """
    labelled = inputs["labels"] != IGNORED
    fed = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return model(**fed, use_cache=False, logits_to_keep=labelled).logits, labelled


def _weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (cross_entropy(logits.float(), labels, reduction="none") * weights).sum()


def _source(seed: int, place: int) -> random.Random:
    return random.Random(f"{seed}:slots:{place}")
