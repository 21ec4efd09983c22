"""The LoRA adapter: where it sits, what is saved beside it, and the proof that what was saved is whole."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from headstart import model as loading
from headstart.family import Family
from headstart.prompt import Renderer
from recipes.errors import UserError
from recipes.schema import Model, Recipe, Train

WEIGHTS = "adapter_model.safetensors"
CARD = "headstart.json"


def lora_config(settings: Train, family: Family) -> LoraConfig:
    """LoRA on the attention projections of the language layers (paper, section 7)."""
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=family.lora_target,
        task_type="CAUSAL_LM",
    )


def refuse_quantised(settings: Model) -> None:
    """Raise UserError where the base's weights are stored quantised: an adapter cannot be merged into them."""
    if "quantization_config" in loading.load_config(settings).to_dict():
        raise UserError(f"model.name={settings.name}: its weights are quantised; give the full-precision model")


def adapted_modules(model: Any, family: Family) -> list[str]:
    """Names of the modules that the family's pattern matches in full. Raises UserError where it is not 4 a layer."""
    names = [name for name, _ in model.named_modules() if re.fullmatch(family.lora_target, name)]
    layers = model.config.get_text_config().num_hidden_layers
    if len(names) != 4 * layers:
        near = sorted({name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if "attn." in name})
        raise UserError(
            f"family {family.name}: the LoRA pattern matches {len(names)} modules, expected q, k, v, o in {layers} "
            f"layers; attention modules here are named {', '.join(near)}"
        )
    return names


def write_card(folder: Path, renderer: Renderer, model: Model, modules: list[str], step: int, base_4bit: bool) -> None:
    """Save what the adapter was trained with: base weights, family, renderer, adapted modules; of which step it is."""
    card = {
        "step": step,
        "base": model.name,
        "base_weights": loading.weights_hash(model),
        "base_4bit": base_4bit,
        "family": model.family,
        "renderer": renderer.fingerprint,
        "adapted_modules": modules,
    }
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n")


def write_readme(folder: Path, recipe: Recipe, step: int) -> None:
    """What a person has to know of the adapter, in the place of PEFT's empty form."""
    on_hub = recipe.model.name != loading.EMBEDDED and not Path(recipe.model.name).exists()
    lines = [
        "---",
        "library_name: peft",
        *([f"base_model: {recipe.model.name}"] if on_hub else []),
        "---",
        "",
        f"# LoRA adapter for {Path(recipe.model.name).name}: answers to incomplete requests",
        "",
        f"Trained by headstart, objective {recipe.train.objective}, step {step}. Put this system message in front of a "
        "request, whole or unfinished:",
        "",
        f"> {recipe.prompt.system_message or '(none)'}",
        "",
        f"`{CARD}` names base weights and modules, `recipe.yaml` the settings, `step.json` data and versions.",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines))


def check_base(folder: Path, model: Model) -> list[str]:
    """Names of the modules that the adapter in `folder` adapts.

    Raises UserError where it was trained on other base weights than the recipe's model.
    """
    try:
        card = json.loads((folder / CARD).read_text())
        trained_on, modules = card["base_weights"], list(card["adapted_modules"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder / CARD}: missing or not readable; train the adapter with train/sft.py") from None
    found = loading.weights_hash(model)
    if trained_on != found:
        raise UserError(
            f"{folder}: this adapter belongs to another base ({card['base']}, weights {trained_on}); "
            f"the recipe's model is {model.name}, weights {found}; set model.name to the adapter's base"
        )
    return modules


def prove_adapter(folder: Path, modules: list[str]) -> None:
    """Reload what was saved and check it: `lora_A` and `lora_B` of each module, none empty, all finite, `lora_B` moved.

    Raises UserError that names the first tensor that fails.
    """
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be loaded ({error}); train the adapter again") from error
    expected = {f"base_model.model.{module}.lora_{side}.weight" for module in modules for side in "AB"}
    if odd := sorted(expected ^ tensors.keys()):
        what = "is missing" if odd[0] in expected else "belongs to no adapted module"
        raise UserError(f"{folder / WEIGHTS}: {odd[0]} {what}")
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise UserError(f"{folder / WEIGHTS}: {name} is empty; the save did not gather it from all processes")
        if not torch.isfinite(tensor).all():
            raise UserError(f"{folder / WEIGHTS}: {name} is not finite; lower train.learning_rate")
        if ".lora_B." in name and not tensor.any():
            raise UserError(f"{folder / WEIGHTS}: {name} is zero after training: it received no gradient")
