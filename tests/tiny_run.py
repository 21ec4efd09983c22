"""Whole runs on tiny random models with real tokenizers: what the tests of training, merging and launching share."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
import yaml
from conftest import SIZES, real_tokenizer, tiny_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from data_builders.cuts import Cut
from data_builders.pairs import Shard, pair
from headstart.request import Request
from recipes import run_folder
from recipes.loader import resolve
from train import sft
from train.checkpoints import Checkpoints

MESSAGE = "The request may be unfinished. Answer at once."
TASKS = ("Add 2 to x.", "Name a colour.", "Sort the list.", "Say yes.", "Count to three.", "Greet Ann.")
ANSWERS = ("x + 2", "Blue", "sorted(x)", "Yes", "1, 2, 3", "Hello, Ann!")


def request(text, number=0):
    """A request of two sentences, of which the first is `text`."""
    return Request(f"tiny/{number}", "tiny", (text, " Be quick."))


def rows(count=10):
    """Short pairs, as data_builders writes them."""
    made = []
    for n in range(count):
        task = TASKS[n % len(TASKS)]
        made.append(
            pair(
                request(task, n),
                Cut(task, 1, "sentence"),
                ANSWERS[n % len(ANSWERS)] + "!" * (n // 6),
                MESSAGE,
                "corpus",
            )
        )
    return made


@cache
def tokenizer(family):
    """The family's real tokenizer, shared: not to be changed."""
    return real_tokenizer(family)


@cache
def byte_tokenizer(family="smollm2"):
    """The family's control tokens and chat template over single bytes: a vocabulary that trains in no time."""
    real = tokenizer(family)
    added = [token for _, token in sorted(real.added_tokens_decoder.items())]
    pieces = [*map(str, added), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    names = {name: getattr(real, name) for name in ("bos_token", "eos_token", "pad_token", "chat_template")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save_base(folder, family, tokens=None, dtype=None, **changes):
    """A tiny model of the family's architecture and a tokenizer (the real one), as a plain transformers folder."""
    tokens = tokens or tokenizer(family)
    model = tiny_model(family, len(tokens), **changes)
    (model.to(dtype) if dtype else model).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def small_base(family="smollm2"):
    """A base of the family with the small vocabulary. Not to be changed."""
    return _small_base(family)


@cache
def _small_base(family):
    return save_base(_folder(f"small-{family}"), family, byte_tokenizer(family))


def multimodal_gemma(vocabulary=97):
    """A tiny Gemma-3 with a vision tower, whose attention has q, k and v projections too."""
    text = {**SIZES, "vocab_size": vocabulary, "num_hidden_layers": 2, "sliding_window": 8, "query_pre_attn_scalar": 8}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    tokens = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, eos_token_id=[1, 106], **tokens)
    return Gemma3ForConditionalGeneration(config)


def write_pairs(pairs, folder):
    """One shard of pairs, as data_builders writes it."""
    with Shard(folder / "pairs-00000.parquet") as shard:
        shard.add(list(pairs))


def heldout(count=5):
    """Requests that are never trained on, as data_builders writes them."""
    return [
        {"id": f"held/{n}", "sentences": [task, " Be quick."], "reference": None}
        for n, task in enumerate(TASKS[:count])
    ]


def write_recipe(folder, base, family, pairs=None, **train):
    """A recipe file with its run's data in place; returns the file's path."""
    settings = {"steps": 3, "effective_batch": 8, "micro_batch": 8, "learning_rate": 1e-3, "warmup_steps": 0}
    recipe = {
        "run": {"dir": str(folder / "run")},
        "model": {"name": str(base), "family": family, "dtype": "float32", "device": "cpu"},
        "prompt": {"system_message": MESSAGE},
        "train": {**settings, "log_every": 1, "schedule": "constant", **train},
        "merge": {"max_new_tokens": 8},
    }
    if family == "refusion":
        recipe["train"]["objective"] = "slot_diffusion"
        recipe["eval"] = {"replay": "full", "acceptance": "threshold", "tau": 0.01}
        recipe["slots"] = {"slot_size": 4, "serial_blocks": 1, "slot_threshold": 0.05, "token_threshold": 0.02}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe))
    invocation = resolve(str(path))
    made_by = {
        "data": invocation.recipe.data.deciding(),
        "system_message": MESSAGE,
        "seed": invocation.recipe.run.seed,
    }
    with run_folder.step(invocation, invocation.run_dir / "data", made_by) as step:
        if step is not None:
            write_pairs(rows() if pairs is None else pairs, step.partial)
            lines = "".join(json.dumps(row) + "\n" for row in heldout())
            (step.partial / "heldout.jsonl").write_text(lines)
            run_folder.finish(step)
    return path


def train(recipe, *overrides):
    """Run train/sft.py in this process; returns the adapter's folder."""
    assert sft.main([f"recipe={recipe}", *overrides]) == 0
    return resolve(str(recipe), overrides).run_dir / "adapter"


def killed_after(monkeypatch, step):
    """Make the process die right after the checkpoint of `step` is whole."""
    saved = Checkpoints.on_save

    def on_save(self, args, state, control, **rest):
        saved(self, args, state, control, **rest)
        if state.global_step == step:
            raise RuntimeError("killed")

    monkeypatch.setattr(Checkpoints, "on_save", on_save)


@cache
def trained(family):
    """A finished run of the family: its recipe's path, with base, data and adapter in place. Trained once a session."""
    folder = _folder(family)
    base = save_base(folder / "base", family)
    recipe = write_recipe(folder, base, family, steps=2, effective_batch=2, micro_batch=2)
    train(recipe)
    return recipe


@cache
def _session():
    return tempfile.TemporaryDirectory(prefix="headstart-tiny-")  # removed when the session ends


def _folder(name):
    folder = Path(_session().name) / name
    folder.mkdir()
    return folder


def reseal(folder):
    """Record a step folder's content anew: a test changed it, and means a step that made it so."""
    record = run_folder.read_step(folder) | {"content": run_folder.content_hash(folder)}
    (folder / run_folder.STEP_FILE).write_text(json.dumps(record))


def weights(folder):
    """The tensors of an adapter folder."""
    return load_file(folder / "adapter_model.safetensors")


def distance(one, other):
    """Norm of the difference of two adapters over the norm of the first one's `lora_B`, which starts from zero."""
    apart = sum(float((one[name] - other[name]).square().sum()) for name in one)
    moved = sum(float(one[name].square().sum()) for name in one if ".lora_B." in name)
    return (apart / moved) ** 0.5


def card(folder: Path):
    """What sft.py writes beside the adapter."""
    return json.loads((folder / "headstart.json").read_text())


def losses(folder: Path):
    """The loss of each step of a run that logs every one."""
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
