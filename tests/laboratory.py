"""Small models that are good at a small world, made in minutes on two cores: what claims about decoding are tested on.

The weights of the paper's diffusion models cannot be had here. So three kinds of request of the paper's shape (section
6.3) are made up, and models are trained on them from nothing, with our own trainers:

spec   the specification comes first and decides the answer, examples follow
late   words come first, what to do with them comes last
free   one of many wordings is right, and a last sentence may ask for a tone

`slots` is a slot-diffusion model (Qwen3's architecture), `bidirectional` a masked-diffusion one (Gemma-3's, attending
both ways). They see whole requests only, of which some have one sentence. Each is trained in a process of its own.
Made once into the user's cache, anew when this file or the trainers change.

    python tests/laboratory.py        # makes it, prints where it lies
"""

import contextlib
import itertools
import json
import multiprocessing
import random
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import torch
from datasets import Dataset
from masked import MaskedCollator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig

from headstart.family import FAMILIES
from headstart.prompt import renderer
from recipes.run_folder import digest
from recipes.schema import Slots
from train.slots import SlotCollator, SlotTrainer, counted

KINDS = ("spec", "late", "free")
PLACES = 32  # places of an answer
HELD_OUT = 300  # requests of each kind
PAIRS = 500  # requests of each kind for adaptation, apart from those the models are made of
STEPS = {"slots": 2500, "bidirectional": 5000}
BATCH = 16
DECODING = Slots(slot_size=4, serial_blocks=4, slot_threshold=0.9, token_threshold=0.4)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")

OPERATIONS = {
    "double": ("x = x + x", lambda x: x + x),
    "square": ("x = x * x", lambda x: x * x),
    "negate": ("x = 0 - x", lambda x: -x),
    "invert": ("x = 9 - x", lambda x: 9 - x),
    "triple": ("x = 3 * x", lambda x: 3 * x),
    "advance": ("x = x + 1", lambda x: x + 1),
    "retreat": ("x = x - 1", lambda x: x - 1),
    "raise": ("x = x max 5", lambda x: max(x, 5)),
    "limit": ("x = x min 5", lambda x: min(x, 5)),
}
ORDER = ("first", "second", "third")
NAMES = ("value", "step", "price", "score", "level", "count", "total", "rate")
WORDS = ("red", "blue", "fox", "cat", "tree", "lamp", "rain", "moon", "salt", "door", "bird", "sand")
TASKS = {
    "Write them backwards.": lambda words: words[::-1],
    "Sort them by the alphabet.": sorted,
    "Write each of them twice.": lambda words: [word for word in words for _ in range(2)],
    "Write the first and the last.": lambda words: [words[0], words[-1]],
}
TONES = ("Keep it friendly.", "Keep it short.", "Keep it formal.")
THINGS = ("fox", "cat", "moon", "tree", "bird", "rain", "lamp", "door", "river", "cloud", "stone", "garden")
REGIONS = ("forest", "harbour", "market", "valley", "village", "desert")
OPENINGS = {"": ("", "Well , "), TONES[0]: ("Well , ", "Oh , "), TONES[1]: ("",), TONES[2]: ("Indeed , ", "")}
VERBS, PRAISE = ("are", "seem"), ("lovely", "splendid", "fine", "grand")


@dataclass(frozen=True)
class Made:
    """One request of the small world: its sentences, and an answer that is right."""

    kind: str
    sentences: tuple[str, ...]
    answer: str

    @property
    def text(self) -> str:
        return "".join(self.sentences)


def request(kind: str, draw: random.Random) -> Made:
    """A request of a kind."""
    return {"spec": _spec, "late": _late, "free": _free}[kind](draw)


def _spec(draw: random.Random) -> Made:
    name, chosen = draw.choice(NAMES), draw.sample(sorted(OPERATIONS), len(ORDER))
    steps = ", ".join(f"{when} {operation}" for when, operation in zip(ORDER, chosen, strict=True))
    lines = "".join(f" {OPERATIONS[operation][0]} ;" for operation in chosen)
    examples = []
    for _ in range(draw.randint(0, 3)):
        value = given = draw.randint(1, 9)
        for operation in chosen:
            value = OPERATIONS[operation][1](value)
        examples.append(f" For example, {given} becomes {value}.")
    return Made("spec", (f"Write {name}: {steps}.", *examples), f"def {name} ( x ) :{lines} return x")


def _late(draw: random.Random) -> Made:
    words, task = draw.sample(WORDS, draw.randint(4, 7)), draw.choice(sorted(TASKS))
    return Made("late", (f"Here are words: {' '.join(words)}.", f" {task}"), " ".join(TASKS[task](words)))


def _free(draw: random.Random) -> Made:
    one, two = draw.sample(THINGS, 2)
    place, tone = draw.choice(REGIONS), draw.choice(("", *TONES))
    first, second = draw.sample(PRAISE, 2)
    rest = "" if tone == "Keep it short." else f" and {second} in the {place}"
    answer = f"{draw.choice(OPENINGS[tone])}the {one} and the {two} {draw.choice(VERBS)} {first}{rest}"
    asked = f"Tell me about the {one} and the {two} in the {place}."
    return Made("free", (asked, f" {tone}") if tone else (asked,), answer)


def requests(part: str, count: int) -> list[Made]:
    """`count` different requests of each kind for a part of the world: "made of", "adapted on" or "held out"."""
    found: list[Made] = []
    for kind in KINDS:
        different = {one.text: one for one in itertools.islice(_drawn(part, (kind,)), 4 * count)}
        found += list(different.values())[:count]
    return found


def _drawn(part: str, kinds: Sequence[str]) -> Iterator[Made]:
    """Requests of a part, without end. The first sentence decides the part: none is in two."""
    draw = random.Random(f"{part}:{kinds}")
    while True:
        one = request(draw.choice(kinds), draw)
        if _part(one) == part:
            yield one


def _part(one: Made) -> str:
    return {0: "held out", 1: "adapted on"}.get(zlib.crc32(one.sentences[0].encode()) % 8, "made of")


def folder() -> Path:
    """The laboratory's folder, made where it is not there yet: `slots/`, `bidirectional/`, and the requests' files."""
    here, code = (
        Path(__file__).parent,
        ("laboratory.py", "masked.py", "../train/slots.py", "../train/trainer.py"),
    )
    kind = digest([(here / name).read_text() for name in code])
    made = Path(platformdirs.user_cache_dir("headstart")) / f"laboratory-{kind}"
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=made.parent, ignore_cleanup_errors=True) as unfinished:
            _make(Path(unfinished))
            with contextlib.suppress(OSError):  # another process, making it at the same time, was first
                Path(unfinished).rename(made)
    return made


def _make(into: Path) -> None:
    held = requests("held out", HELD_OUT)
    for kind in KINDS:
        rows = [
            {"text": one.text, "reference": one.answer} for one in held if one.kind == kind and len(one.sentences) > 1
        ]
        _write(into / f"{kind}.jsonl", rows)
    adapted = requests("adapted on", PAIRS)
    _write(into / "pairs.jsonl", [{"text": one.text, "reference": one.answer} for one in adapted])
    with ProcessPoolExecutor(len(STEPS), multiprocessing.get_context("spawn")) as side_by_side:
        for said in side_by_side.map(partial(_model, into), STEPS):
            print(said, flush=True)


def _model(into: Path, name: str) -> str:
    """Train and save a model on one core; says what it took."""
    torch.set_num_threads(1)
    began, known = time.monotonic(), tokenizer()
    model = _trained(name, known)
    model.save_pretrained(into / name)
    known.save_pretrained(into / name)
    return f"laboratory: {name}, {model.num_parameters():,} parameters, {time.monotonic() - began:.0f} s"


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the world's own words: nearly a token a word."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator((f"{one.text}\n{one.answer}" for one in requests("made of", 400)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def _config(name: str, vocabulary: int) -> Any:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "slots":
        return Qwen3Config(**sizes)
    both = {"use_bidirectional_attention": True, "sliding_window": 512, "query_pre_attn_scalar": 32}
    return Gemma3TextConfig(**sizes, **both)


def _trained(name: str, known: PreTrainedTokenizerFast) -> Any:
    """A model of the world, trained from nothing on `STEPS[name]` x `BATCH` requests, as they are drawn."""
    rendering = renderer(known, FAMILIES["refusion" if name == "slots" else "bidirectional"])
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(_config(name, len(known)), dtype=torch.float32)
    rows = [
        rendering.row(one.text, one.answer)
        for one, _ in zip(_drawn("made of", KINDS), range(STEPS[name] * BATCH), strict=False)
    ]
    data = Dataset.from_list([{"input_ids": row.ids, "labels": row.labels} for row in rows])
    mask = int(known.convert_tokens_to_ids("<|mask|>"))
    words = range(len(SPECIAL), len(known))
    collator = SlotCollator(0, mask, BATCH, 0) if name == "slots" else MaskedCollator(0, mask, words, PLACES, BATCH, 0)
    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            scratch,
            max_steps=STEPS[name],
            per_device_train_batch_size=BATCH,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=100,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            activation_checkpointing=False,
            max_length=None,
            logging_steps=250,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        )
        SlotTrainer(
            model=model,
            args=settings,
            train_dataset=counted(data, BATCH, 0),
            data_collator=collator,
            processing_class=known,
        ).train()
    return model.eval()


if __name__ == "__main__":
    print(folder())
