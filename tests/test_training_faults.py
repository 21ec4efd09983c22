"""Faults of training that other projects had in public, as requirements on ours: what other tests do not show already.

Number of the fault -> tests here; tests elsewhere that cover it.

6 the prompt is no prefix of the conversation -> test_prompt: test_training_prompt_is_the_evaluators_prompt_...,
   test_a_think_block_in_the_generation_prompt_only_is_refused (both for every family)
7 the mask covers the wrong tokens -> test_prompt: the same; test_train: test_a_pair_longer_than_max_length_...
8 a default system message in one path only -> test_prompt: test_default_system_text_is_seen; test_builder:
   test_training_prompts_are_the_evaluators_prompts; test_distill: test_teacher_and_retained_rows_...
9, 10 odd turns, control strings -> test_known_faults
11 templates trim -> test_prompt: test_answers_and_drafts_keep_their_blanks
15 only one end token, 16 sampling values -> test_known_faults; test_watch: test_its_figures_are_those_of_the_evaluator
27 all labels masked after truncation -> test_no_batch_is_without_a_label; test_train: test_a_pair_longer_than_...,
   test_no_pair_that_fits_is_an_error, test_a_loss_that_is_not_finite_stops_with_one_line
28 packed samples see each other -> test_rows_of_a_batch_do_not_see_each_other, test_nothing_is_packed
29 LoRA's targets -> test_train: test_the_adapter_sits_on_q_k_v_o_..., test_the_adapter_leaves_a_vision_tower_alone,
   test_fused_projections_are_refused_...; the table of adapted modules: test_a_run_saves_the_adapter_alone
30 an empty adapter -> test_train: test_an_adapter_that_is_not_whole_is_refused; test_launch (ZeRO-2, ZeRO-3)
31 sampling values stop the save, 32 merges that go wrong -> test_merge
"""

import pytest
import torch
from conftest import real_tokenizer, tiny_model
from datasets import Dataset
from tiny_run import rows, write_pairs
from trl import SFTConfig

from headstart.family import FAMILIES
from headstart.prompt import IGNORED, renderer
from recipes.loader import resolve
from recipes.schema import Train
from train import sft
from train.rows import training_rows
from train.trainer import LabelledTrainer, labelled_logits, padded

IDS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [4, 3, 2], [9, 8, 7, 6, 20]]
ANSWERS = [5, 1, 2]
KERNELS = ("sdpa", "eager")


def trainer(model, tmp_path):
    row = {"input_ids": [1, 2], "labels": [IGNORED, 2]}
    settings = SFTConfig(str(tmp_path), max_length=None, use_cpu=True, bf16=False, report_to="none")
    given = {"train_dataset": Dataset.from_list([row]), "processing_class": real_tokenizer("smollm2")}
    return LabelledTrainer(model=model, args=settings, **given)


def loss_and_gradients(model, tmp_path, batch):
    model.zero_grad()
    loss = trainer(model, tmp_path).compute_loss(model, batch, num_items_in_batch=torch.tensor(sum(ANSWERS)))
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("left", "right"), [(0, 7), (7, 0), (3, 3)])
def test_padding_changes_nothing_on_either_side(family, kernel, left, right, tmp_path):
    model = tiny_model(family)
    model.set_attn_implementation(kernel)
    ids, mask, labels = padded(IDS, ANSWERS, 0)
    plain = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    fill = {"input_ids": 17, "attention_mask": 0, "labels": IGNORED}
    wide = {name: torch.nn.functional.pad(x, (left, right), value=fill[name]) for name, x in plain.items()}
    expected, found = (loss_and_gradients(model, tmp_path, batch) for batch in (plain, wide))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_rows_of_a_batch_do_not_see_each_other(family, kernel):
    model = tiny_model(family)
    model.set_attn_implementation(kernel)
    together, _ = labelled_logits(model, *padded(IDS, ANSWERS, 0))
    alone = [labelled_logits(model, *padded([row], [answer], 0))[0] for row, answer in zip(IDS, ANSWERS, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_nothing_is_packed(tmp_path):
    given = sft.arguments(resolve("smollm2", ["model.device=cpu"]).recipe, tmp_path, 1)
    assert not given.packing
    assert not given.padding_free
    assert given.max_length is None


def test_no_batch_is_without_a_label(tmp_path):
    pairs = rows(8)
    for pair in pairs[::2]:
        pair["prompt"][-1]["content"] += " word" * 60
    write_pairs(pairs, tmp_path)
    rendering = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    found = training_rows(tmp_path, rendering, Train(max_length=60), 0)
    assert len(found.too_long) == 4
    assert all(row["labels"][-1] == rendering.end_of_turn for row in found.dataset)
