"""Objective self_distill: its loss, worked out row by row, and its runs on tiny models."""

import itertools

import pytest
import tiny_run
import torch
from conftest import tiny_model
from datasets import Dataset
from peft import get_peft_model
from tiny_run import distance, rows, train, weights, write_pairs, write_recipe
from trl import SFTConfig

from headstart.family import FAMILIES
from headstart.prompt import IGNORED, conversation, renderer
from headstart.request import Message
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Train
from train.adapter import lora_config
from train.distill import DistillCollator, DistillTrainer, kl_divergence
from train.preflight import micro_batches
from train.rows import tokens_read, training_rows, whole_request

DISTILLED = {"objective": "self_distill", "dropout": 0.0}
ROWS = [  # prefix, whole request with and without the message; answers of 3, 2 and 1 tokens
    {"input_ids": [5, 6, 7, 8, 9], "labels": [IGNORED] * 2 + [7, 8, 9], "teacher_ids": [3, 5, 6, 11, 7, 8, 9]},
    {"input_ids": [4, 12, 3], "labels": [IGNORED, 12, 3], "teacher_ids": [4, 15, 12, 3]},
    {"input_ids": [9, 9, 2], "labels": [IGNORED, IGNORED, 2], "teacher_ids": [9, 2]},
]
RETAINED = [[], [20, 4, 15, 12, 3], [20, 9, 2]]


@pytest.fixture(scope="module")
def smollm2():
    """The renderer of SmolLM2's real tokenizer."""
    return renderer(tiny_run.tokenizer("smollm2"), FAMILIES["smollm2"])


def adapted(family="smollm2"):
    """A tiny model with an adapter that does something."""
    model = get_peft_model(tiny_model(family), lora_config(Train(dropout=0.0), FAMILIES[family]))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    return model


def made(tmp_path, model, retain=0.0, temperature=1.0):
    """A trainer of three rows, and their batch."""
    batch = [{**row, "retained_ids": ids if retain else []} for row, ids in zip(ROWS, RETAINED, strict=True)]
    trainer = DistillTrainer(
        retain=retain,
        temperature=temperature,
        model=model,
        args=SFTConfig(
            str(tmp_path), max_length=None, use_cpu=True, bf16=False, report_to="none", remove_unused_columns=False
        ),
        train_dataset=Dataset.from_list(batch),
        data_collator=DistillCollator(0),
        processing_class=tiny_run.tokenizer("smollm2"),
    )
    return trainer, trainer.data_collator(batch)


def alone(model, ids, answer):
    """Log-probabilities over the vocabulary of each answer token, of one row without padding."""
    return model(input_ids=torch.tensor([ids])).logits[0, -answer - 1 : -1].float()


@torch.no_grad()
def by_hand(model, retain, temperature):
    """The summed loss, row by row and token by token."""
    total = 0.0
    for row, whole in zip(ROWS, RETAINED, strict=True):
        answer = sum(label != IGNORED for label in row["labels"])
        with model.disable_adapter():
            wanted = (alone(model, row["teacher_ids"], answer) / temperature).softmax(-1)
        for ids, weight in ((row["input_ids"], 1.0), (whole, retain)):
            if ids and weight:
                said = alone(model, ids, answer).log_softmax(-1)
                total += weight * float((wanted * (wanted.log() - said)).sum())
    return total


@pytest.mark.parametrize(("retain", "temperature"), [(0.0, 1.0), (0.5, 1.0), (2.0, 0.5)])
def test_the_loss_is_the_divergence_worked_out_row_by_row(tmp_path, family, retain, temperature):
    model = adapted(family)
    trainer, batch = made(tmp_path, model, retain, temperature)
    labels = 6  # those of the prefixes alone: the second term takes nothing from the first
    assert int((batch["labels"] != IGNORED).sum()) == labels
    assert int((batch["retained_labels"] != IGNORED).sum()) == (3 if retain else 0)
    loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(labels))
    assert float(loss) == pytest.approx(by_hand(model, retain, temperature) / labels, rel=1e-4)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if ".lora_" in name}
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if ".lora_" in name)


def test_no_logit_is_made_without_a_label(tmp_path):
    model, made_of = adapted(), []
    trainer, batch = made(tmp_path, model, retain=1.0)
    model.get_output_embeddings().register_forward_hook(lambda *io: made_of.append(io[2].numel() // 97))
    trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(9))
    assert made_of == [6, 9]  # the teacher's, the student's


def test_a_model_that_reads_what_its_teacher_reads_has_no_loss(tmp_path):
    model = get_peft_model(tiny_model("smollm2"), lora_config(Train(), FAMILIES["smollm2"])).eval()
    trainer, _ = made(tmp_path, model)
    same = [{**row, "input_ids": row["teacher_ids"], "retained_ids": []} for row in ROWS]
    for row in same:
        answer = [label for label in row["labels"] if label != IGNORED]
        row["labels"] = [IGNORED] * (len(row["input_ids"]) - len(answer)) + answer
    loss = trainer.compute_loss(model, DistillCollator(0)(same), num_items_in_batch=torch.tensor(6))
    assert abs(float(loss)) < 1e-6


def test_the_divergence_is_torchs():
    torch.manual_seed(0)
    one, other = torch.randn(7, 11), torch.randn(7, 11)
    logs = other.log_softmax(-1), one.log_softmax(-1)
    expected = torch.nn.functional.kl_div(*logs, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl_divergence(one, other), expected)
    assert float(kl_divergence(one.bfloat16(), other.bfloat16()).min()) >= 0


def test_teacher_and_retained_rows_hold_the_whole_request_and_end_with_the_answer(tmp_path, smollm2):
    pairs = rows(6)
    pairs[5]["rest"] = ""
    write_pairs(pairs, tmp_path)
    settings = Train(objective="self_distill", retain=1.0, retain_share=1.0)
    found = training_rows(tmp_path, smollm2, settings, seed=0, message=tiny_run.MESSAGE).dataset
    for pair, row in zip(pairs, found, strict=True):
        answer = [label for label in row["labels"] if label != IGNORED]
        task = pair["prompt"][-1]["content"] + pair["rest"]
        assert row["teacher_ids"] == [*smollm2.prompt(task), *answer]
        whole = [*smollm2.prompt(task, system=tiny_run.MESSAGE), *answer] if pair["rest"] else []
        assert row["retained_ids"] == whole
    some = training_rows(tmp_path, smollm2, settings.model_copy(update={"retain_share": 0.5}), seed=1).dataset
    assert 0 < sum(bool(ids) for ids in some["retained_ids"]) < 5
    none = training_rows(tmp_path, smollm2, settings.model_copy(update={"retain": 0.0}), seed=0).dataset
    assert not any(none["retained_ids"])


def test_the_teacher_reads_the_requests_own_system_message():
    asked = [Message("system", "You are a pirate."), Message("user", "a"), Message("assistant", "b")]
    for message in (tiny_run.MESSAGE, None):
        pair = {"prompt": conversation("Sum", asked, message), "rest": " it."}
        assert whole_request(pair, without=message)["prompt"] == conversation("Sum it.", asked, None)
        assert whole_request(pair)["prompt"] == conversation("Sum it.", asked, message)
    pair = {"prompt": conversation("Sum", (), tiny_run.MESSAGE), "rest": ""}
    assert whole_request(pair, without=tiny_run.MESSAGE)["prompt"] == conversation("Sum", (), None)


def test_training_counts_the_tokens_that_the_dry_run_counts(tmp_path, smollm2):
    """The rate that training prints is what train.tokens_per_second asks for."""
    write_pairs(rows(6), tmp_path)
    for settings in (Train(), Train(objective="self_distill", retain=1.0, retain_share=0.5)):
        found = training_rows(tmp_path, smollm2, settings, seed=1, message=tiny_run.MESSAGE).dataset
        shapes = micro_batches(found, 2)
        assert tokens_read(found, 0) == sum(s.filled + (s.teacher.filled if s.teacher else 0) for s in shapes)
        assert tokens_read(found, 6) == 0
        assert 0 < tokens_read(found, 4) < tokens_read(found, 0)


def test_a_pair_whose_whole_request_is_too_long_is_dropped(tmp_path, smollm2):
    pairs = rows(4)
    pairs[2]["rest"] = " word" * 300
    write_pairs(pairs, tmp_path)
    found = training_rows(tmp_path, smollm2, Train(objective="self_distill", max_length=300), seed=0)
    assert [row["id"] for row in found.too_long] == [pairs[2]["id"]]
    assert len(training_rows(tmp_path, smollm2, Train(max_length=300), seed=0).dataset) == 4


def test_retain_without_self_distill_is_refused():
    with pytest.raises(UserError, match=r"train\.retain=0\.5 holds under objective=self_distill only"):
        parse(["recipe=smollm2", "train.retain=0.5"])


# whole runs


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """The adapter of 6 steps of 8 rows, each step in one forward pass."""
    settings = {**DISTILLED, "steps": 6, "retain": 1.0, "retain_share": 0.5}
    return weights(
        train(write_recipe(tmp_path_factory.mktemp("distilled"), tiny_run.small_base(), "smollm2", **settings))
    )


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_and_padding_do_not_change_the_update(tmp_path, distilled, micro_batch):
    settings = {**DISTILLED, "steps": 6, "retain": 1.0, "retain_share": 0.5, "micro_batch": micro_batch}
    found = weights(train(write_recipe(tmp_path, tiny_run.small_base(), "smollm2", **settings)))
    assert distance(distilled, found) < 1e-3


@pytest.mark.parametrize(
    "other", [{"objective": "sft", "retain": 0.0}, {"retain": 0.0}, {"retain_share": 1.0}, {"teacher_temperature": 0.5}]
)
def test_other_objectives_come_to_other_updates(tmp_path, distilled, other):
    settings = {**DISTILLED, "steps": 6, "retain": 1.0, "retain_share": 0.5, **other}
    found = weights(train(write_recipe(tmp_path, tiny_run.small_base(), "smollm2", **settings)))
    assert distance(distilled, found) > 1e-2


def test_the_loss_falls(tmp_path):
    recipe = write_recipe(tmp_path, tiny_run.small_base(), "smollm2", **DISTILLED, steps=12, learning_rate=1e-2)
    losses = tiny_run.losses(train(recipe))
    assert all(loss >= 0 for loss in losses)
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert len(set(itertools.pairwise(losses))) > 1
