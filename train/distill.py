"""Objective `self_distill`: the model learns to say after a prefix what it says itself after the whole request.

The teacher is the same model with its adapter switched off. It reads the whole request, without the message for
incomplete requests, and the answer; the student reads the prefix, with the message, and the answer. Each answer token's
loss is KL(teacher || student). Pairs that are drawn for it have a second row, the whole request with the message, whose
tokens count `train.retain` times: there the student has to stay what the teacher is. The sum is divided by the tokens
of the first rows alone, so that the second term is added to the first and takes nothing from it.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.prompt import IGNORED
from train.trainer import LabelledTrainer, in_chunks, labelled_logits, padded


class DistillTrainer(LabelledTrainer):
    """LabelledTrainer with the loss replaced. Its batches come from `DistillCollator`."""

    def __init__(self, *args: Any, retain: float, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retain = retain
        self.temperature = temperature

    def summed_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Weighted sum over the answer tokens of KL(teacher || student) in nats: a float32 scalar.

        The teacher's distribution is softmax(logits / temperature), so that its first choice can be made to count more.
        """
        batch, ids = inputs["teacher_ids"].shape[0], inputs["input_ids"]
        labels = torch.cat([inputs["labels"], inputs["retained_labels"]])
        adapted = self.accelerator.unwrap_model(model)
        with torch.no_grad(), adapted.disable_adapter():
            teacher, places = labelled_logits(
                adapted, inputs["teacher_ids"], inputs["teacher_mask"], inputs["teacher_labels"]
            )
        student, labelled = labelled_logits(model, ids, inputs["attention_mask"], labels)
        ends = places.sum(dim=1).cumsum(dim=0).tolist()
        of_row = [range(*span) for span in itertools.pairwise([0, *ends])]  # places of each row's answer in `teacher`
        said_by = torch.tensor([*range(ends[-1]), *(n for at in inputs["retained_of"].tolist() for n in of_row[at])])
        weights = torch.ones(len(student), device=ids.device)
        weights[int(labelled[:batch].sum()) :] = self.retain
        return in_chunks(partial(_divergence, teacher, self.temperature), student, said_by.to(ids.device), weights)


def _divergence(teacher: Tensor, temperature: float, student: Tensor, said_by: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of KL(teacher[said_by] || student), rows of logits; float32."""
    return (weights * kl_divergence(teacher[said_by] / temperature, student)).sum()


def kl_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) in nats of each row, from logits of shape (n, vocabulary): float32, shape (n,)."""
    wanted, said = teacher.float().log_softmax(dim=-1), student.float().log_softmax(dim=-1)
    return (wanted.exp() * (wanted - said)).sum(dim=-1)


@dataclass(frozen=True)
class DistillCollator:
    """Batches of the columns that `rows.training_rows` makes under objective=self_distill.

    The student's tensors hold first each row's prefix, then the whole requests of the rows that have one, whose places
    among the rows are in `retained_of` and whose labels are apart, in `retained_labels`; the teacher's hold each row's
    whole request. All are padded on the right.
    """

    pad: int

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        retained = [at for at, row in enumerate(rows) if row["retained_ids"]]
        answers = [len(row["labels"]) - row["labels"].count(IGNORED) for row in rows]
        students = [*(row["input_ids"] for row in rows), *(rows[at]["retained_ids"] for at in retained)]
        ids, mask, labels = padded(students, [*answers, *(answers[at] for at in retained)], self.pad)
        teacher_ids, teacher_mask, teacher_labels = padded([row["teacher_ids"] for row in rows], answers, self.pad)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels[: len(rows)],
            "retained_labels": labels[len(rows) :],
            "teacher_ids": teacher_ids,
            "teacher_mask": teacher_mask,
            "teacher_labels": teacher_labels,
            "retained_of": torch.tensor(retained, dtype=torch.long),
        }
