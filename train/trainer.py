"""TRL's trainer with one method replaced: no logit without a label."""

from typing import Any

import torch
from torch import Tensor
from trl import SFTTrainer

from headstart.prompt import IGNORED


class LabelledTrainer(SFTTrainer):
    """Computes the same loss as SFTTrainer's `nll`, with logits only at positions that have a label.

    On a GPU TRL skips unlabelled positions by a kernel of its own; elsewhere it computes every logit, the prompts'
    included, which for a small model and a large vocabulary is most of the head's cost.
    """

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Sum of the labels' negative log-likelihoods / labels in the whole optimizer step, over all processes.

        `num_items_in_batch` counts the labels of every process; processes average gradients, hence the factor.
        """
        following = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
        labelled = following != IGNORED
        output = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            use_cache=False,
            logits_to_keep=labelled,  # a bool mask: logits come flat, shape (labels, vocabulary)
        )
        targets = following[labelled]
        loss = torch.nn.functional.cross_entropy(output.logits.float(), targets, reduction="sum")
        if num_items_in_batch is None:
            loss = loss / len(targets)
        else:
            loss = loss / num_items_in_batch * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss
