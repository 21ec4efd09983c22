"""Objective slot_diffusion: the reference's batches, and runs on tiny models."""

import json
import random

import pytest
import tiny_run
import torch
from conftest import tiny_model
from datasets import Dataset
from peft import get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM
from trl import SFTConfig

from headstart.family import FAMILIES
from headstart.prompt import IGNORED
from recipes.schema import Train
from train.adapter import lora_config
from train.slots import (
    SlotCollator,
    SlotTrainer,
    arrange,
    batch,
    counted,
    draw,
    next_tokens,
    placed_logits,
    weighed,
)

GOLDEN = "data/slot_diffusion_golden"
MASK = 96


@pytest.fixture
def folder(shared):
    if not (shared / GOLDEN).is_dir():
        pytest.skip(f"{GOLDEN} is absent")
    return shared / GOLDEN


def test_the_references_batches_are_reproduced(folder):
    cases, undefined = json.loads((folder / "objective_cases.json").read_text())["cases"], 0
    models = {
        name: Qwen3ForCausalLM.from_pretrained(folder / "models" / name, dtype=torch.float32).eval()
        for name in ("rand", "count", "markov")
    }
    assert len(cases) == 54
    for case in cases:
        source, mask_id = random.Random(case["python_seed"]), case["mask_id"]
        rows = [ids[: sum(mask)] for ids, mask in zip(case["input_ids"], case["attention_mask"], strict=True)]
        answers = [len(row) - prompt for row, prompt in zip(rows, case["prompt_lengths"], strict=True)]
        draws = [draw(answer, source) for answer in answers]
        for drawn, wanted in zip(draws, case["draws"], strict=True):
            assert (drawn.size, list(drawn.masked)) == (wanted["slot_size"], wanted["masked_slots"])
            assert list(drawn.shown) == wanted["unmasked_order"]
        made = [arrange(row, n, drawn, mask_id) for row, n, drawn in zip(rows, answers, draws, strict=True)]
        fed = batch(made, case["pad_id"])
        assert fed["input_ids"].tolist() == case["permuted_input_ids"], case["id"]
        assert fed["position_ids"].tolist() == case["position_ids"], case["id"]
        assert fed["labels"].tolist() == case["labels"], case["id"]
        masked = pad_sequence([one.masked for one in made], batch_first=True)
        assert masked.long().tolist() == case["masked"], case["id"]
        targets = sum(next_tokens(drawn, n) for drawn, n in zip(draws, answers, strict=True))
        assert targets == case["n_ar_targets"], case["id"]
        weights = pad_sequence(
            [weighed(*one, len(rows), targets) for one in zip(made, draws, answers, strict=True)], batch_first=True
        )
        with torch.no_grad():
            logits, labelled = placed_logits(models[case["model"]], fed)
        parts = cross_entropy(logits, fed["labels"][labelled], reduction="none") * weights[labelled]
        of_masks = masked[labelled]
        losses = float(parts[~of_masks].sum()), float(parts[of_masks].sum())
        undefined += case["ar_loss"] is None
        assert losses[0] == pytest.approx(case["ar_loss"] or 0.0, rel=1e-5, abs=1e-6), case["id"]  # the NaN ones: 0
        assert losses[1] == pytest.approx(case["mdm_loss"], rel=1e-5, abs=1e-6), case["id"]
    assert undefined == 9


ROWS = [
    {"input_ids": [5, 6, 7, *range(20, 39), 2], "labels": [IGNORED] * 3 + [*range(20, 39), 2], "draft_ids": []},
    {"input_ids": [4, *range(40, 49), 2], "labels": [IGNORED, *range(40, 49), 2], "draft_ids": [*range(60, 64)]},
    {"input_ids": [9, 9, 3, 2], "labels": [IGNORED, IGNORED, 3, 2], "draft_ids": [70] * 9},
    {"input_ids": [8, *range(50, 70), 2], "labels": [IGNORED, *range(50, 70), 2], "draft_ids": []},
]


def adapted():
    model = get_peft_model(tiny_model("qwen3"), lora_config(Train(dropout=0.0), FAMILIES["refusion"]))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.05)
    return model


def gradient(tmp_path, splits, rows=ROWS):
    """Gradient and loss of one step over `rows`, cut into micro-batches."""
    data = counted(Dataset.from_list(rows), len(rows), seed=7)
    collator = SlotCollator(0, MASK, len(rows), 7)
    settings = {"max_length": None, "use_cpu": True, "bf16": False, "report_to": "none", "remove_unused_columns": False}
    trainer = SlotTrainer(
        model=adapted(),
        args=SFTConfig(str(tmp_path), **settings),
        train_dataset=data,
        data_collator=collator,
        processing_class=tiny_run.tokenizer("smollm2"),
    )
    trainer.model.eval()
    parts = [[data[at] for at in part] for part in splits]
    losses = [trainer.compute_loss(trainer.model, collator(part)) for part in parts]
    sum(losses).backward()
    grads = [p.grad.flatten() for _, p in sorted(trainer.model.named_parameters()) if p.grad is not None]
    return torch.cat(grads), float(sum(losses))


def test_a_step_does_not_depend_on_how_it_is_cut(tmp_path):
    whole, loss = gradient(tmp_path, [[0, 1, 2, 3]])
    assert torch.isfinite(whole).all()
    assert whole.norm() > 0
    assert loss > 0
    for splits in ([[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 2], [1, 0]]):
        other, same = gradient(tmp_path, splits)
        assert float((other - whole).norm() / whole.norm()) < 1e-4
        assert same == pytest.approx(loss, rel=1e-5)


def test_a_step_without_a_next_token_has_a_finite_loss(tmp_path):
    rows = [{"input_ids": [4, 7, 2], "labels": [IGNORED, IGNORED, 2], "draft_ids": []}] * 4
    grads, loss = gradient(tmp_path, [[0, 1, 2, 3]], rows)
    assert torch.isfinite(grads).all()
    assert loss >= 0


def test_draws_follow_from_seed_and_place_alone():
    one, other = (counted(Dataset.from_list(ROWS), size, 7) for size in (4, 2))
    assert one["place"][:] == [0, 1, 2, 3]
    assert sum(other["targets"][::2]) == one["targets"][0]
    first, second = (SlotCollator(0, MASK, 4, 7)([one[at]])["input_ids"].tolist() for at in (0, 0))
    assert first == second
    drawn = {tuple(SlotCollator(0, MASK, 4, seed)([one[0]])["position_ids"][0].tolist()) for seed in range(20)}
    assert len(drawn) > 5


def test_a_draft_is_shown_where_a_slot_is_not_masked_and_the_labels_stay_the_answers():
    ids, answer, draft = [1, *range(20, 40)], 20, [*range(60, 70)]
    seen = 0
    for seed in range(30):
        drawn = draw(answer, random.Random(seed))
        plain, shown = arrange(ids, answer, drawn, MASK), arrange(ids, answer, drawn, MASK, draft)
        assert shown.labels.tolist() == plain.labels.tolist()
        assert shown.masked.tolist() == plain.masked.tolist()
        for at, place in enumerate(shown.positions.tolist()):
            drafted = 1 <= place <= len(draft) and not shown.masked[at]
            assert shown.ids[at] == (draft[place - 1] if drafted else plain.ids[at])
            seen += drafted
    assert seen > 50


def test_logits_of_permuted_rows_are_those_of_rows_alone():
    """Faults 13 and 28: padding and jumping positions change nothing, and the rows do not see each other."""
    model = tiny_model("qwen3")
    data = counted(Dataset.from_list(ROWS), 4, 3)
    collator = SlotCollator(0, MASK, 4, 3)
    together, labelled = placed_logits(model, collator([data[at] for at in range(4)]))
    begin = 0
    for at in range(4):
        alone, _ = placed_logits(model, collator([data[at]]))
        torch.testing.assert_close(together[begin : begin + len(alone)], alone, rtol=0, atol=2e-4)
        begin += len(alone)
    assert begin == int(labelled.sum())
