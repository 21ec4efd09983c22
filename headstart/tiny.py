"""`model.tiny=true`: a tiny random model of the family's architecture, with the real tokenizer, for trials on a CPU.

It is made once, in the user's cache, as a plain transformers folder; everything else treats it as any other model. Its
head knows a few dozen words and the end of turn, so that its answers differ from prompt to prompt and end by
themselves, as the steps after it expect of a model.
"""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from headstart.family import Family, token_id
from recipes.run_folder import digest

VERSION = "1"  # changes whenever what is made does
LAYERS = 2
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 8192,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WORDS = " a the list of words value return first and number it is not with for each in as to be yes x y 1 2 é ."
SEED = 2
SPREAD = 8.0  # of the weights: so large that answers depend on the prompt
END = 3.0  # how much more likely than a word the end of turn is made


def tiny_folder(tokenizer: Any, family: Family) -> Path:
    """The folder of the family's tiny model with this tokenizer; made where it is not there yet."""
    kind = digest([VERSION, family.name, family.model_types, sorted(tokenizer.get_vocab().items())])
    folder = Path(platformdirs.user_cache_dir("headstart")) / f"tiny-{family.name}-{kind}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True) as partial:
        tokenizer.save_pretrained(partial)
        tiny_model(tokenizer, family).save_pretrained(partial)
        with contextlib.suppress(OSError):  # another process, making it at the same time, was first
            Path(partial).rename(folder)
    return folder


def tiny_model(tokenizer: Any, family: Family) -> Any:
    """The random float32 model, the same for the same tokenizer whenever it is made."""
    config = tiny_config(tokenizer, family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    end = token_id(tokenizer, family.end_of_turn)
    spoken = {token for word in WORDS.split() for token in tokenizer.encode(f" {word}", add_special_tokens=False)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SPREAD)
        head = model.get_output_embeddings().weight
        silent = torch.ones(len(head), dtype=torch.bool)
        silent[[*spoken, end]] = False
        head[silent] = 0
        head[end] *= END
    return model.eval()


def tiny_config(tokenizer: Any, family: Family) -> Any:
    """The family's config, tiny; that of Gemma-3 has a vision tower and a sliding window, as the real one does."""
    ends = [token_id(tokenizer, token) for token in family.stop_tokens if token in tokenizer.get_added_vocab()]
    text = {**SIZES, "vocab_size": len(tokenizer), "tie_word_embeddings": False, "pad_token_id": tokenizer.pad_token_id}
    model_type = family.model_types[0]
    if model_type != "gemma3":
        return AutoConfig.for_model(model_type, **text, eos_token_id=ends)
    text |= {"num_hidden_layers": 6, "sliding_window": 64, "query_pre_attn_scalar": SIZES["head_dim"]}
    image = {name: tokenizer.get_vocab().get(token, 0) for name, token in IMAGE_TOKENS.items()}
    own = {"text_config": text, "vision_config": VISION, "mm_tokens_per_image": 4, "tie_word_embeddings": False}
    return AutoConfig.for_model(model_type, **own, eos_token_id=ends, **image)


IMAGE_TOKENS = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
