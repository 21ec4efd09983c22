"""TRL's trainer with its loss replaced: no logit without a label, and float32 logits of a few positions at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from trl import SFTTrainer

from headstart.prompt import IGNORED

CHUNK = 256  # labelled positions whose float32 logits are held at once


class LabelledTrainer(SFTTrainer):
    """Objective `sft`: the loss is SFTTrainer's `nll`, made of logits at labelled positions only."""

    def _send_telemetry(self) -> None:
        """Nothing is sent: TRL tells the hub of every trainer that is made."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The labels' summed losses / labels in the whole optimizer step, over all processes.

        `num_items_in_batch` counts the labels of every process; processes average gradients, hence the factor.
        """
        loss = self.share(self.summed_loss(model, inputs), inputs, num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def share(self, loss: Tensor, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """A batch's summed loss as its part of the step's."""
        if num_items_in_batch is None:
            return loss / (inputs["labels"][:, 1:] != IGNORED).sum()
        return loss / num_items_in_batch * self.accelerator.num_processes

    def summed_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Negative log-likelihood of the labels in nats, summed over the batch: a float32 scalar."""
        logits, labelled = labelled_logits(model, inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        targets = shifted(inputs["labels"])[labelled]
        return in_chunks(_negative_log_likelihood, logits, targets)


def labelled_logits(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits that predict the labels, row by row, of shape (labels, vocabulary); and the bool mask of their places.

    `ids`, `mask` and `labels` have shape (rows, tokens); the place of a label is that of the token before it.
    """
    labelled = shifted(labels) != IGNORED
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=labelled)
    return output.logits, labelled  # a bool mask as logits_to_keep: the logits come flat


def padded(rows: Sequence[Sequence[int]], answers: Sequence[int], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and labels, (rows, longest), padded on the right; a row's last `answers[row]` tokens are labels."""
    ids = [torch.tensor(row) for row in rows]
    labels = [
        torch.where(torch.arange(len(row)) < len(row) - n, IGNORED, row) for row, n in zip(ids, answers, strict=True)
    ]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad_id),
        pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    )


def shifted(labels: Tensor) -> Tensor:
    """Each position's label is the token that follows it."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def in_chunks(summed: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`summed(*chunks)` over CHUNK positions at a time, added up; what it makes is made anew on the way back.

    So beside the logits themselves only one chunk's float32 values are held, forward and backward.
    """
    parts = zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)
    return torch.stack([checkpoint(summed, *chunks, use_reentrant=False) for chunks in parts]).sum()


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.float(), targets, reduction="sum")
