"""What a dry run of training says and checks, and the memory that it foresees."""

import json
import re
from dataclasses import replace

import bench_memory
import pytest
import tiny_run
import torch
from conftest import FAMILIES as NAMES
from conftest import tiny_config, tiny_model
from peft import get_peft_model
from tiny_run import byte_tokenizer, multimodal_gemma, rows, trained, write_recipe

from data_builders import build
from headstart import model as loading
from headstart.family import FAMILIES
from headstart.prompt import prove, renderer
from recipes.errors import UserError
from recipes.loader import resolve
from recipes.schema import Train
from train import memory, preflight, sft
from train.adapter import lora_config
from train.agreement import Launch, agree, read_launch
from train.memory import Shape
from train.preflight import micro_batches
from train.rows import in_order, training_rows
from train.trainer import CHUNK

ONE = Launch("one process", 0)
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
AUTOMATIC = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(scope="module")
def base():
    """A base that trains in no time."""
    return tiny_run.small_base()


def dry_run(recipe, capsys, *overrides):
    """What a dry run prints."""
    assert sft.main([f"recipe={recipe}", *overrides, "--dry-run"]) == 0
    return capsys.readouterr().out


# what is drawn


def test_a_dry_run_shows_what_training_will_meet_and_writes_nothing(base, tmp_path, capsys):
    pairs = rows(10)
    pairs[3]["completion"][0]["content"] = "word " * 200
    recipe = write_recipe(tmp_path, base, "smollm2", pairs, steps=4, effective_batch=4, micro_batch=2, max_length=400)
    before = sorted(tmp_path.rglob("*"))
    said = dry_run(recipe, capsys, "train.tokens_per_second=10")
    assert sorted(tmp_path.rglob("*")) == before
    rendering = renderer(byte_tokenizer(), FAMILIES["smollm2"])
    for promise in prove(rendering):
        assert f"- {promise}" in said
    assert f"renderer {rendering.fingerprint}, family smollm2" in said
    adapted = get_peft_model(tiny_model("smollm2", len(byte_tokenizer())), lora_config(Train(), FAMILIES["smollm2"]))
    count = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert f"{count:,} trainable parameters" in said
    assert "on 8 modules" in said
    assert re.search(r"over 400\W+1\W+dropped; no row is ever cut", said)
    settings = resolve(str(recipe)).recipe.train
    read = in_order(training_rows(tmp_path / "run" / "data", rendering, settings, 0).dataset, settings, 0)
    tokens = sum(len(ids) for ids in read["input_ids"])
    labels = sum(label != -100 for row in read["labels"] for label in row)
    assert f"{tokens:,} in all, {tokens / 4:,.0f} a step" in said
    assert f"{labels / 4:,.0f} tokens a step, {labels / tokens:.1%} of all" in said
    widest = sum(2 * max(len(a), len(b)) for a, b in zip(*[iter(read["input_ids"])] * 2, strict=True))
    assert f"{1 - tokens / widest:.1%} of what the model reads" in said
    assert f"{tokens / 10 / 60:.0f} minutes at train.tokens_per_second=10" in said
    assert "sdpa" in said
    for row in read.select(range(2)):
        answer = rendering.text([label for label in row["labels"] if label != -100])
        assert answer in said.replace("\n", "")
    assert said.count("tokens supervised") == 2
    assert "4 steps of 4 rows = 1.78 epochs" in said


def test_the_histogram_counts_every_row_once(base, tmp_path, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2", rows(30))
    said = dry_run(recipe, capsys)
    counts = re.findall(r"\d+ to \d+\W+(\d+)", said)
    assert len(counts) == preflight.BINS
    assert sum(map(int, counts)) == 30


def test_a_dry_run_without_data_checks_the_model_and_names_the_command(base, tmp_path, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2")
    assert sft.main([f"recipe={recipe}", f"run.dir={tmp_path / 'other'}", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "trainable parameters" in printed.out
    assert f"not there yet; first run: python data_builders/build.py recipe={recipe} run.dir=" in printed.err
    assert not (tmp_path / "other").exists()


def test_a_dry_run_of_a_finished_run_says_that_there_is_nothing_to_do(capsys):
    assert "complete; nothing would be done" in dry_run(trained("smollm2"), capsys)


def shown(family, config, monkeypatch, capsys, *overrides):
    """What is drawn of a model that is nothing but a config."""
    recipe = resolve("smollm2", [f"model.family={family}", *overrides]).recipe
    monkeypatch.setattr(loading, "load_config", lambda settings: config)
    preflight.show_model(recipe, renderer(byte_tokenizer(family), FAMILIES[family]), ONE, [], 1)
    return " ".join(capsys.readouterr().out.split())


def test_every_family_is_counted_from_its_config_alone(family, monkeypatch, capsys):
    config = tiny_config(family)
    said = shown(family, config, monkeypatch, capsys)
    layers = config.num_hidden_layers
    assert f"on {4 * layers} modules: q, k, v, o of {layers} layers" in said
    assert f"{layers * 8 * 2 * ((32 + 32) + (32 + 16)):,} trainable parameters" in said


def test_a_vision_tower_has_no_adapter_in_the_count(monkeypatch, capsys):
    said = shown("gemma3", multimodal_gemma().config, monkeypatch, capsys)
    assert "on 8 modules: q, k, v, o of 2 layers" in said


def test_a_model_of_another_family_is_refused(monkeypatch, capsys):
    with pytest.raises(UserError, match="expects a model of type qwen3"):
        shown("qwen3", tiny_config("llama3"), monkeypatch, capsys)


def test_micro_batches_are_what_the_loader_makes(base, tmp_path):
    settings = resolve(str(write_recipe(tmp_path, base, "smollm2", effective_batch=4))).recipe.train
    rendering = renderer(byte_tokenizer(), FAMILIES["smollm2"])
    ordered = in_order(training_rows(tmp_path / "run" / "data", rendering, settings, 0).dataset, settings, 0)
    found = micro_batches(ordered, 4)
    lengths = [len(ids) for ids in ordered["input_ids"]]
    labels = [sum(label != -100 for label in row) for row in ordered["labels"]]
    assert [shape.tokens for shape in found] == [max(lengths[i : i + 4]) for i in (0, 4, 8)]
    assert [shape.filled for shape in found] == [sum(lengths[i : i + 4]) for i in (0, 4, 8)]
    assert [shape.labels for shape in found] == [sum(labels[i : i + 4]) for i in (0, 4, 8)]
    teacher = {"teacher_ids": [[1] * 9] * 12, "retained_ids": [[], [1] * 300] * 6}
    for name, column in teacher.items():
        ordered = ordered.add_column(name, column)
    distilled = micro_batches(ordered, 4)[0]
    assert (distilled.rows, distilled.tokens, distilled.filled) == (6, 300, sum(lengths[:4]) + 600)
    assert distilled.labels == sum(labels[:4]) + labels[1] + labels[3]
    assert distilled.teacher == Shape(4, 9, 36, sum(labels[:4]))


# the launch and the recipe


def said_by(environment, accumulation=2, world=2, **changes):
    recipe = resolve("smollm2", [f"{key}={value}" for key, value in changes.items()]).recipe
    launch = read_launch(environment, world)
    return launch, agree(recipe, launch, accumulation, environment)


def deepspeed_file(tmp_path, **changes):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({key: value for key, value in {**AUTOMATIC, **changes}.items() if value is not None}))
    return {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


def test_a_launch_is_read_from_what_the_launcher_says(tmp_path):
    assert said_by({}, world=1)[0] == ONE
    assert said_by({})[0] == Launch("data parallel", 0)
    assert said_by({"ACCELERATE_USE_FSDP": "true"})[0] == Launch("FSDP", 3)
    assert said_by({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})[0].stage == 3
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 7}
    launch, _ = said_by(deepspeed_file(tmp_path, zero_optimization=zero))
    assert (launch.kind, launch.stage, launch.bucket, launch.live) == ("DeepSpeed ZeRO-3", 3, None, 7)


def test_a_launch_that_leaves_it_to_the_recipe_agrees(tmp_path):
    _, agreed = said_by(deepspeed_file(tmp_path))
    assert agreed == [
        "precision: model.dtype=bfloat16, no autocast",
        "gradient_accumulation_steps: 2 (the recipe's batches)",
        "gradient_clipping: 1 (train.max_grad_norm)",
        "train_micro_batch_size_per_gpu: 4 (train.micro_batch)",
        "train_batch_size: 8 (train.effective_batch)",
    ]
    same = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
    }
    assert said_by(deepspeed_file(tmp_path, **same))[1] == agreed
    assert said_by({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "1.0"})[1] == agreed[:3]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("train_batch_size", 16, "train_batch_size: 16, but train.effective_batch is 8"),
        ("train_micro_batch_size_per_gpu", 1, "train_micro_batch_size_per_gpu: 1, but train.micro_batch is 4"),
        ("gradient_accumulation_steps", 4, "gradient_accumulation_steps: 4, but the recipe's batches is 2"),
        ("gradient_clipping", 0.5, "gradient_clipping: 0.5, but train.max_grad_norm is 1"),
        ("gradient_clipping", "none", "gradient_clipping: none, but train.max_grad_norm is 1"),
        ("gradient_clipping", None, 'gradient_clipping is missing, train.max_grad_norm is 1; set it to "auto"'),
        ("gradient_accumulation_steps", None, "gradient_accumulation_steps is missing"),
        ("bf16", {"enabled": True}, "bf16.enabled: true, the recipe model.dtype=bfloat16"),
        ("fp16", {"enabled": True}, "fp16.enabled: true, the recipe model.dtype=bfloat16"),
        ("optimizer", {"type": "AdamW"}, "optimizer: section train of the recipe decides"),
        ("scheduler", {"type": "WarmupLR"}, "scheduler: section train of the recipe decides"),
        ("zero_optimization", None, "has no zero_optimization"),
    ],
)
def test_a_deepspeed_file_that_says_otherwise_is_an_error(tmp_path, key, value, says):
    with pytest.raises(UserError) as caught:
        said_by(deepspeed_file(tmp_path, **{key: value}))
    assert str(caught.value).startswith(f"{tmp_path / 'zero.json'}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision: bf16, the recipe model.dtype=bfloat16"),
        ({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "gradient_clipping: 0.5, but train.max_grad_norm is 1"),
        (
            {**DEEPSPEED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"},
            "the accelerate file: gradient_accumulation_steps: 1, but the recipe's batches is 2",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "True"}, "FSDP, which needs GPUs"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "fsdp_activation_checkpointing: true, the recipe train.gradient_checkpointing=False",
        ),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "no.json"}, "no.json: not a readable DeepSpeed file"),
    ],
)
def test_an_accelerate_file_that_says_otherwise_is_an_error(environment, says):
    with pytest.raises(UserError, match=re.escape(says)):
        said_by(environment)


def test_training_holds_the_launch_against_the_recipe_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert sft.main(["recipe=smollm2", "model.name=nowhere"]) == 2
    assert "error: the launch has mixed_precision: fp16" in capsys.readouterr().err


# memory


VOCABULARY, HIDDEN = 8192, 256
CONFIG = tiny_config(
    "smollm2",
    VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=512,
    head_dim=64,
    num_hidden_layers=4,
    tie_word_embeddings=True,
)
LAYER = 2 * HIDDEN * (HIDDEN + 128) + 3 * HIDDEN * 512  # q, o and k, v; the three of the MLP
WIDE = Shape(4, 256, 900, 400)


def foreseen(shape, launch=ONE, world=1, **changes):
    recipe = resolve("smollm2", [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]).recipe
    return memory.estimate(recipe, CONFIG, [shape], launch, world)


@pytest.fixture(scope="module")
def plain():
    """A small model in bfloat16, four rows of 256 tokens, one process."""
    return foreseen(WIDE)


def test_the_parts_of_one_process_are_weights_gradients_and_adams_states(plain):
    adapter = 4 * 8 * 2 * ((HIDDEN + HIDDEN) + (HIDDEN + 128)) * 4  # q and o, k and v: rank x (in + out), float32
    assert plain.base == pytest.approx(2 * (4 * LAYER + VOCABULARY * HIDDEN), rel=0.002)
    assert (plain.adapter, plain.gradients, plain.states, plain.gathered) == (adapter, adapter, 2 * adapter, 0)
    assert plain.total == plain.base + 4 * adapter + plain.activations


def test_zero_shares_out_what_its_stage_says(plain):
    adapter = plain.gradients
    two = foreseen(WIDE, Launch("DeepSpeed ZeRO-2", 2, 1000, 0), world=4)
    assert two.base == plain.base
    assert (two.gradients, two.states) == (adapter // 4, adapter // 2)
    assert two.gathered == 4000
    three = foreseen(WIDE, Launch("DeepSpeed ZeRO-3", 3, None, 10**9), world=4)
    assert three.base == pytest.approx(plain.base / 4, abs=1)
    assert three.gathered == pytest.approx(4 * HIDDEN**2 + plain.base, rel=0.01)  # so small a base is gathered whole
    few = foreseen(WIDE, Launch("DeepSpeed ZeRO-3", 3, 1000, 10**5), world=4)
    assert few.gathered < three.gathered / 10
    assert two.activations == three.activations == plain.activations


def test_activations_grow_with_the_batch_and_shrink_by_checkpointing(plain):
    double = foreseen(replace(WIDE, rows=8, filled=1800, labels=800))
    assert 1.7 < double.activations / plain.activations < 2  # a chunk's float32 logits stay what they were
    recomputed = foreseen(WIDE, train__gradient_checkpointing="true")
    assert recomputed.activations < plain.activations / 2
    exact = foreseen(WIDE, model__dtype="float32")
    assert exact.base == pytest.approx(2 * plain.base, rel=0.001)
    assert exact.activations > 1.2 * plain.activations  # the adapter's part is float32 in both


def test_logits_are_counted_where_labels_are_and_float32_in_chunks():
    few, many = (foreseen(replace(WIDE, labels=labels), train__gradient_checkpointing="true") for labels in (400, 800))
    logits = 400 * VOCABULARY * 2
    assert 0.9 * logits < many.activations - few.activations < 2.5 * logits  # the logits, and their gradient


def test_a_teacher_adds_its_logits(plain):
    taught = foreseen(replace(WIDE, teacher=Shape(4, 256, 900, 400)))
    logits = 400 * VOCABULARY * 2
    chunk = CHUNK * VOCABULARY * 4
    assert logits < taught.activations - plain.activations < logits + 4 * chunk


def test_a_base_in_four_bits_is_that_but_for_the_embedding():
    quantised = foreseen(WIDE, train__base_4bit="true")
    assert quantised.base == pytest.approx(4 * LAYER * 0.516 + VOCABULARY * HIDDEN * 2, rel=0.01)


def test_an_estimate_allocates_nothing():
    """The shape of an 8B model, for which this machine need not have the memory."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    recipe = resolve("qwen3").recipe
    found = memory.estimate(recipe, config, [Shape(1, 2048, 2048, 512)], ONE, 1)
    assert found.base == pytest.approx(2 * 8.19e9, rel=0.01)
    assert found.activations > 37 * 2048 * 4096 * 2 + 512 * 151936 * 2 * 2  # the layers' inputs, logits, their gradient
    assert found.total < 20 * 2**30


@pytest.fixture(scope="module")
def pairs_of_smollm2(tmp_path_factory):
    """`run.dir=` of a folder with pairs of the seed corpus."""
    run = f"run.dir={tmp_path_factory.mktemp('memory')}"
    assert build.main([*bench_memory.COMMON, run]) == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("setting", bench_memory.SETTINGS[3::4], ids=str)
def test_the_estimate_is_within_a_quarter_of_the_measured_peak(pairs_of_smollm2, setting):
    """Every fourth setting of `make bench`, of which one is a launch of two processes."""
    assert bench_memory.compare(pairs_of_smollm2, *setting)


def test_the_names_of_all_parts_are_drawn():
    assert preflight.MEANING.keys() == memory.Memory.__dataclass_fields__.keys()
    assert set(NAMES) <= set(FAMILIES)
    assert torch.float32.itemsize == memory.FLOAT32
