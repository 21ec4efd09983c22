"""A tiny Gemma-3 as google/gemma-3-12b-it lies on the hub: multimodal, tied, two stop ids, a processor, older names."""

import json
from pathlib import Path
from typing import Any

import torch
from conftest import SIZES
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "size": {"height": 28, "width": 28},
}
GENERATION = {"eos_token_id": [1, 106], "cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95}
SCALE = 4.0  # of the language layers' weights, so that answers vary


def save_multimodal(folder: Path, tokens: Any, **text: Any) -> Path:
    """A random model for the tokenizer `tokens`; `text` changes the config of its language layers."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config(tokens, **text))
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SCALE)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    older = {name_on_hub(name): tensor for name, tensor in load_file(weights).items()}
    save_file(older, weights, metadata={"format": "pt"})
    tokens.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text('{"processor_class": "Gemma3Processor", "image_seq_length": 4}')
    return folder


def config(tokens: Any, **text: Any) -> Gemma3Config:
    """The config, with the tokenizer's ids of the tokens around an image."""
    image = {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>"}
    image["eoi_token_index"] = "<end_of_image>"
    language = {**SIZES, "vocab_size": len(tokens), "num_hidden_layers": 6, "sliding_window": 8, **text}
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Gemma3Config(
        text_config={**language, "query_pre_attn_scalar": language["head_dim"]},
        vision_config={**vision, "image_size": 28, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        eos_token_id=GENERATION["eos_token_id"],
        **{name: tokens.convert_tokens_to_ids(token) for name, token in image.items()},
    )


def name_on_hub(name: str) -> str:
    """The name of a tensor in the checkpoints on the hub, which have a module more around the vision tower."""
    return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
