"""One frozen row per model family, chosen by name in the recipe and checked against the loaded model.

A family is never guessed from a file. Everything that differs between families is a value in its row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from recipes.errors import UserError

ATTENTION_PROJECTIONS = r"(model\.)?(language_model\.)?(model\.)?layers\.\d+\.self_attn\.(q|k|v|o)_proj"
"""Attention projections of the language layers; a vision tower's `encoder.layers` does not match in full."""


@dataclass(frozen=True)
class Family:
    """What headstart has to know of a model family.

    `system_role`: where the template puts a system message: in a turn of its own, or in front of the first user turn.
    `template_arguments`: passed to every call of the chat template (thinking off, a pinned date).
    `control`: added tokens that steer the model though the tokenizer does not mark them as special.
    `lora_target`: a pattern that module names match in full (PEFT's `target_modules` as a string).
    `decoder`: how its answers come about; a diffusion model has a `mask_token` for what is not decoded yet.
    `shifted`: the logits of a place are those of the place before it. `own_code`: the model is not one of transformers'
    own, but code in its repository.
    """

    name: str
    model_types: tuple[str, ...]
    system_role: Literal["turn", "first user turn"]
    end_of_turn: str
    stop_tokens: tuple[str, ...]
    bos: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    control: tuple[str, ...] = ()
    lora_target: str = ATTENTION_PROJECTIONS
    decoder: Literal["autoregressive", "slot-diffusion", "bidirectional"] = "autoregressive"
    mask_token: str | None = None
    shifted: bool = False
    own_code: bool = False


_SMOLLM2 = Family(
    name="smollm2",
    model_types=("llama",),
    system_role="turn",
    end_of_turn="<|im_end|>",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
)
_QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    system_role="turn",
    end_of_turn="<|im_end|>",
    stop_tokens=("<|im_end|>", "<|endoftext|>"),
    template_arguments=MappingProxyType({"enable_thinking": False}),
    control=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        row.name: row
        for row in (
            _SMOLLM2,
            _QWEN3,
            replace(_QWEN3, name="refusion", decoder="slot-diffusion", mask_token="<|mask|>"),
            Family(
                name="llada",
                model_types=("llada",),
                system_role="turn",
                end_of_turn="<|eot_id|>",
                stop_tokens=("<|eot_id|>", "<|endoftext|>"),
                bos="<|startoftext|>",
                decoder="bidirectional",
                mask_token="<|mdm_mask|>",
                own_code=True,
            ),
            replace(
                _SMOLLM2,
                name="dream",
                model_types=("Dream",),
                decoder="bidirectional",
                mask_token="<|mask|>",
                shifted=True,
                own_code=True,
            ),
            replace(  # a model of transformers' own that attends both ways: the laboratory's
                _SMOLLM2,
                name="bidirectional",
                model_types=("gemma3_text",),
                decoder="bidirectional",
                mask_token="<|mask|>",
            ),
            Family(
                name="llama3",
                model_types=("llama",),
                system_role="turn",
                end_of_turn="<|eot_id|>",
                stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
                bos="<|begin_of_text|>",
                template_arguments=MappingProxyType({"date_string": "26 Jul 2024"}),
            ),
            Family(
                name="gemma3",
                model_types=("gemma3", "gemma3_text"),
                system_role="first user turn",
                end_of_turn="<end_of_turn>",
                stop_tokens=("<end_of_turn>", "<eos>"),
                bos="<bos>",
            ),
        )
    }
)


def check_model(family: Family, model: Any) -> None:
    """Raise UserError where the loaded model is not of this family, or keeps a state that cannot be rolled back."""
    found = model.config.model_type
    if found not in family.model_types:
        raise UserError(
            f"model.family={family.name} expects a model of type {' or '.join(family.model_types)}, "
            f"but {model.config.name_or_path or 'the loaded model'} is of type {found}"
        )
    if family.name == "bidirectional" and not model.config.use_bidirectional_attention:
        raise UserError("model.family=bidirectional: the config's use_bidirectional_attention is off; it sees one way")
    if getattr(model, "_is_stateful", False):  # a model with code of its own need not say
        raise UserError(
            f"{type(model).__name__} keeps a recurrent state, which cannot be rolled back to a shorter text"
        )


def stop_ids(family: Family, tokenizer: Any, model: Any) -> frozenset[int]:
    """Union of all end tokens declared anywhere: family row, tokenizer, model config, generation config."""
    known = tokenizer.get_added_vocab()
    declared: set[int | None] = {known[token] for token in family.stop_tokens if token in known}
    generation = model.generation_config if model.can_generate() else None
    configs = (model.config, model.config.get_text_config(), generation)
    # A multimodal config need not have the attribute.
    in_configs = (config.to_dict().get("eos_token_id") for config in configs if config is not None)
    for value in (tokenizer.eos_token_id, *in_configs):
        declared |= set(value if isinstance(value, list | tuple) else [value])
    return frozenset(token for token in declared if token is not None)


def context_length(config: Any) -> int:
    """The most tokens that a model reads, by its config: LLaDA's own code calls it max_sequence_length.

    Raises UserError where the config says it in neither way.
    """
    known = config.get_text_config().to_dict()
    for name in ("max_position_embeddings", "max_sequence_length"):
        if known.get(name):
            return int(known[name])
    raise UserError(f"{config.name_or_path}: config.json has no max_position_embeddings; add the context's length")


def token_id(tokenizer: Any, token: str) -> int:
    """The id of a control token. Raises UserError where the tokenizer has no such token."""
    found = tokenizer.get_added_vocab().get(token)
    if found is None:
        raise UserError(f"{tokenizer.name_or_path or 'the tokenizer'}: has no token {token!r}; is model.family right?")
    return int(found)
