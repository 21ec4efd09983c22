"""The frozen base as it is trained on: attention kernel, Liger kernels, 4 bits."""

import json

import pytest
import tiny_run
import torch
from tiny_run import save_base, tokenizer, train, weights, write_recipe

from headstart.family import FAMILIES
from headstart.tiny import tiny_folder
from recipes.errors import UserError
from recipes.loader import parse
from train import base, merge


def recipe(*overrides):
    return parse(["recipe=smollm2", "model.device=cpu", *overrides]).recipe


@pytest.mark.parametrize(
    ("gpu", "installed", "overrides", "kernel", "why"),
    [
        (False, True, (), "sdpa", "needs a GPU"),
        (True, True, (), "flash_attention_2", "flash-attn is installed"),
        (True, False, (), "sdpa", "flash-attn is not installed"),
        (True, True, ("model.dtype=float32",), "sdpa", "needs model.dtype=bfloat16"),
        (True, True, ("train.attention=sdpa",), "sdpa", "train.attention=sdpa"),
    ],
)
def test_flash_attention_is_taken_where_it_is_and_the_reason_is_given(
    monkeypatch, gpu, installed, overrides, kernel, why
):
    """A GPU cannot be had here: that there is one is made up."""
    monkeypatch.setattr(base.loading, "device", lambda model: torch.device("cuda" if gpu else "cpu"))
    monkeypatch.setattr(base, "is_flash_attn_2_available", lambda: installed)
    found = base.attention(recipe(*overrides))
    assert found[0] == kernel
    assert why in found[1]


def test_flash_attention_that_is_asked_for_and_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(base.loading, "device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(base, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(UserError, match="flash_attention_2: the package flash-attn is not installed"):
        base.check(recipe("train.attention=flash_attention_2"))


@pytest.mark.parametrize(("family", "kernel"), [("qwen3", "flash_attention_2"), ("gemma3", "sdpa")])
def test_flash_attention_is_taken_where_the_architecture_has_it(monkeypatch, family, kernel):
    """Gemma-3's multimodal architecture has none in transformers."""
    monkeypatch.setattr(base.loading, "device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(base, "is_flash_attn_2_available", lambda: True)
    here = (f"model.name={tiny_folder(tokenizer(family), FAMILIES[family])}", f"model.family={family}")
    assert base.attention(recipe(*here))[0] == kernel
    if kernel == "sdpa":
        with pytest.raises(UserError, match="has no FlashAttention for this architecture"):
            base.attention(recipe(*here, "train.attention=flash_attention_2"))


def test_what_a_recipe_asks_for_and_is_not_installed_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(base, "_installed", lambda package: False)
    with pytest.raises(UserError, match=r"train\.base_4bit=true: pip install bitsandbytes"):
        base.check(recipe("train.base_4bit=true"))
    monkeypatch.setattr(base.loading, "device", lambda model: torch.device("cuda"))
    with pytest.raises(UserError, match=r"train\.liger=true: pip install liger-kernel"):
        base.check(recipe("train.liger=true"))


def test_4_bits_are_refused_under_zero3(monkeypatch):
    monkeypatch.setattr(base, "_installed", lambda package: True)
    monkeypatch.setattr(base, "zero_stage", lambda: 3)
    with pytest.raises(UserError, match="ZeRO-3 cannot share out 4-bit weights"):
        base.check(recipe("train.base_4bit=true"))


def test_liger_kernels_are_put_on_the_layers_alone(monkeypatch):
    """The kernels need a GPU: that they are asked for, and for what, is all that can be seen here."""
    given = []
    monkeypatch.setattr(base, "check", lambda recipe: None)
    monkeypatch.setattr(base, "apply_liger_kernel", lambda model, config: given.append(config))
    folder = tiny_run.small_base()
    base.load_base(recipe(f"model.name={folder}", "train.liger=true"))
    base.load_base(recipe(f"model.name={folder}"))
    assert given == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_the_kernel_is_printed(capsys):
    base.load_base(recipe(f"model.name={tiny_run.small_base()}"))
    assert "attention: sdpa (FlashAttention needs a GPU)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A base whose layers are wide enough for blocks of 64 values."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    return save_base(tmp_path_factory.mktemp("wide") / "base", "smollm2", tiny_run.byte_tokenizer(), **sizes)


def test_a_4_bit_base_is_trained_on_and_merged_into_the_full_one(wide, tmp_path):
    """bitsandbytes for real, on the CPU."""
    settings = {"steps": 4, "dropout": 0.0}
    full = train(write_recipe(tmp_path / "full", wide, "smollm2", **settings))
    given = write_recipe(tmp_path / "small", wide, "smollm2", **settings, base_4bit=True)
    adapter = train(given)
    assert tiny_run.card(adapter)["base_4bit"]
    assert not tiny_run.card(full)["base_4bit"]
    assert 1e-3 < tiny_run.distance(weights(full), weights(adapter)) < 1.0  # near, and not the same
    assert merge.main([f"recipe={given}"]) == 0
    merged = adapter.parent / "merged"
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())


def test_the_4_bit_base_really_is(wide):
    model = base.load_base(recipe(f"model.name={wide}", "train.base_4bit=true"))
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16
