"""Launching on several processes: the files in configs/, and real launches on two CPU processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from tiny_run import byte_tokenizer, distance, small_base, train, weights, write_recipe

from headstart.family import FAMILIES
from headstart.model import load_model
from headstart.prompt import renderer
from recipes.loader import resolve
from train import merge, merging

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "accelerate"
SETTINGS = {"steps": 6, "dropout": 0.0, "save_every": 2, "max_grad_norm": 0.2, "schedule": "cosine"}
LIMIT = 280  # seconds; DeepSpeed compiles its CPU communication once, in a minute or two


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_launch_file_is_read_by_accelerate_and_leaves_precision_to_the_recipe(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    assert config.num_processes > 1
    assert config.use_cpu == path.stem.endswith("_cpu")
    assert (config.distributed_type == "DEEPSPEED") == path.stem.startswith("zero2")


def test_the_launch_files_are_these():
    assert sorted(path.stem for path in CONFIGS.iterdir()) == ["ddp", "ddp_cpu", "zero2", "zero2_cpu"]


def start(recipe, *options):
    """Begin `accelerate launch train/sft.py`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *options]
    return subprocess.Popen(
        [*command, "train/sft.py", f"recipe={recipe}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill(process):
    """SIGKILL to the launcher and to the workers, which it puts into sessions of their own."""
    for each in [*psutil.Process(process.pid).children(recursive=True), process]:
        each.kill()
    return process.communicate()[0]


def launch(recipe, *options):
    """Launch to the end; returns exit code and output."""
    process = start(recipe, *options)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done in {LIMIT} s: {kill(process)}")
    return process.returncode, output


def launched(name, recipe):
    """Launch with one of the files in configs/; returns the adapter's folder."""
    code, output = launch(recipe, "--config_file", str(CONFIGS / f"{name}.yaml"))
    assert code == 0, output
    assert "2 process(es) x 2 rows x 2 accumulated" in output
    return resolve(str(recipe)).run_dir / "adapter"


@pytest.fixture(scope="module")
def base():
    """A base that trains in no time."""
    return small_base()


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The recipe of the same training in one process, done."""
    recipe = write_recipe(tmp_path_factory.mktemp("alone"), base, "smollm2", **SETTINGS)
    train(recipe)
    return recipe


@pytest.fixture(scope="module")
def zero2(base, tmp_path_factory):
    """The recipe of the same training under ZeRO-2, done."""
    recipe = write_recipe(tmp_path_factory.mktemp("zero2"), base, "smollm2", **SETTINGS, micro_batch=2)
    launched("zero2_cpu", recipe)
    return recipe


def greedy(recipe):
    """Merge, and answer the self-check prompts with the merged model."""
    assert merge.main([f"recipe={recipe}"]) == 0
    invocation = resolve(str(recipe))
    model = load_model(invocation.recipe.model, invocation.run_dir / "merged")
    rendering = renderer(byte_tokenizer(), FAMILIES["smollm2"])
    return merging.self_check(model, invocation.recipe, rendering).answers


def assert_same(recipe, alone):
    adapters = [weights(resolve(str(each)).run_dir / "adapter") for each in (alone, recipe)]
    assert distance(*adapters) < 1e-3
    assert greedy(recipe) == greedy(alone)


@pytest.mark.slow
def test_two_processes_under_ddp_train_the_adapter_of_one(base, alone, tmp_path):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS, micro_batch=2)
    launched("ddp_cpu", recipe)
    assert_same(recipe, alone)


@pytest.mark.slow
def test_two_processes_under_zero2_train_the_adapter_of_one(zero2, alone):
    assert_same(zero2, alone)


@pytest.mark.slow
def test_a_launch_killed_under_zero2_resumes_and_ends_bit_identical(base, zero2, tmp_path, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS, micro_batch=2)
    partial = resolve(str(recipe)).run_dir / ".adapter.partial"
    process = start(recipe, "--config_file", str(CONFIGS / "zero2_cpu.yaml"))
    deadline = time.monotonic() + LIMIT
    while not list(partial.glob(".checkpoints/*/whole")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, kill(process)
        time.sleep(0.02)
    kill(process)
    assert partial.is_dir()
    assert list(partial.glob(".checkpoints/*/global_step*"))  # DeepSpeed wrote it: it was really in use
    assert merge.main([f"recipe={recipe}"]) == 2
    assert "first run: accelerate launch train/sft.py" in capsys.readouterr().err
    adapter = launched("zero2_cpu", recipe)
    whole = resolve(str(zero2)).run_dir / "adapter"
    name = "adapter_model.safetensors"
    assert (adapter / name).read_bytes() == (whole / name).read_bytes()
    assert (adapter / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()


@pytest.mark.slow
def test_a_launch_that_starts_fewer_processes_than_asked_for_is_an_error(base, tmp_path):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS)
    code, output = launch(recipe, "--cpu", "--num_processes", "2")
    assert code != 0
    assert "error: several processes were asked for, one was started" in output
    assert not (tmp_path / "run" / "adapter").exists()
