"""The frozen base as it is trained on: attention kernel, 4 bits, Liger kernels; what was chosen, and why."""

import importlib.util
import os
from typing import Any

from accelerate import DeepSpeedPlugin, PartialState
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, BitsAndBytesConfig, GenerationConfig
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_flash_attn_2_available

from headstart import model as loading
from recipes.errors import UserError
from recipes.schema import Model, Recipe
from train.agreement import read_launch


def attention(recipe: Recipe) -> tuple[str, str]:
    """The attention kernel that the recipe comes to here, and why.

    Raises UserError where flash_attention_2 is asked for and cannot be had.
    """
    asked, on_gpu = recipe.train.attention, loading.device(recipe.model).type == "cuda"
    if asked == "sdpa":
        return "sdpa", "train.attention=sdpa"
    reason = None
    if not on_gpu:
        reason = "FlashAttention needs a GPU"
    elif recipe.model.dtype == "float32":
        reason = "FlashAttention needs model.dtype=bfloat16"
    elif not is_flash_attn_2_available():
        reason = "the package flash-attn is not installed"
    elif not _has_flash_attention(recipe.model):
        reason = "transformers has no FlashAttention for this architecture"
    if reason and asked == "flash_attention_2":
        raise UserError(f"train.attention=flash_attention_2: {reason}; mend that or set train.attention=sdpa")
    return ("sdpa", reason) if reason else ("flash_attention_2", "flash-attn is installed")


def _has_flash_attention(settings: Model) -> bool:
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(loading.load_config(settings))]
    return bool(architecture._supports_flash_attn)


def check(recipe: Recipe) -> None:
    """Raise UserError, before weights are loaded, where what the recipe asks for cannot be had in this launch."""
    if loading.family(recipe.model).decoder == "bidirectional":
        raise UserError(
            f"model.family={recipe.model.family}: such a model can be evaluated and audited, not trained here"
        )
    attention(recipe)
    on_gpu = loading.device(recipe.model).type == "cuda"
    if recipe.train.liger and not (on_gpu and _installed("liger_kernel")):
        why = "pip install liger-kernel" if on_gpu else "its kernels need a GPU; set train.liger=false"
        raise UserError(f"train.liger=true: {why}")
    if recipe.train.base_4bit and not _installed("bitsandbytes"):
        raise UserError("train.base_4bit=true: pip install bitsandbytes, or set train.base_4bit=false")
    if recipe.train.keep == "best" and zero_stage() == 3:
        raise UserError("train.keep=best: nothing is watched under ZeRO-3; launch under zero2.yaml or keep=last")
    if recipe.train.base_4bit and zero_stage() == 3:
        raise UserError("train.base_4bit=true: ZeRO-3 cannot share out 4-bit weights; launch under zero2.yaml")


def mend_generation(config: GenerationConfig, name: str) -> dict[str, str] | None:
    """Make sampling values without do_sample valid, which transformers refuses to save; returns what was changed.

    Raises UserError where the generation config of the model `name` could still not be saved.
    """
    found = _invalid(config)
    if found is None:
        return None
    config.do_sample = True
    if left := _invalid(config):
        raise UserError(f"{name}: its generation_config.json cannot be saved again, so nothing can be merged: {left}")
    return {"changed": "do_sample set to true", "reason": found}


def check_generation(settings: Model) -> None:
    """Raise UserError, before anything is trained, where the generation config is one that no merge could save."""
    if config := loading.load_generation_config(settings):
        mend_generation(config, settings.name)


def load_base(recipe: Recipe) -> Any:
    """The base on this process' device, in the recipe's dtype or in 4 bits. Raises UserError as `check` does."""
    check(recipe)
    kernel, why = attention(recipe)
    if PartialState().is_main_process:
        print(f"attention: {kernel} ({why})")
    quantization = None
    if recipe.train.base_4bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=loading.torch_dtype(recipe.model.dtype),
        )
    settings = recipe.model
    if read_launch(os.environ, world=1).stage == 3:  # the weights are shared out: no device ever holds all of them
        settings = settings.model_copy(update={"device": "cpu"})
    base = loading.load_model(settings, attention=kernel, quantization=quantization)
    if recipe.train.liger:
        apply_liger_kernel(base, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    return base


def zero_stage() -> int:
    """DeepSpeed's ZeRO stage in this launch; 0 without DeepSpeed."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    return int(DeepSpeedPlugin().zero_stage) if launched else 0


def _invalid(config: GenerationConfig) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
