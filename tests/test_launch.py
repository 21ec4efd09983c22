"""Launching on several processes: the files in configs/, and real launches on two CPU processes."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from conftest import tiny_model
from tiny_models import REQUESTS, arguments, talker_folder
from tiny_run import byte_tokenizer, distance, save_base, small_base, train, weights, write_recipe
from torch.distributed.fsdp import StateDictType
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from eval import run
from headstart import launch as launching
from headstart.family import FAMILIES
from headstart.model import load_model
from headstart.prompt import renderer
from recipes.loader import resolve
from train import agreement, merge, merging

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "accelerate"
SETTINGS = {"steps": 6, "dropout": 0.0, "save_every": 2, "max_grad_norm": 0.2, "schedule": "cosine"}
LIMIT = 280  # seconds; DeepSpeed compiles its CPU communication once, in a minute or two


FILES = ("cpu", "ddp", "ddp_cpu", "fsdp", "single", "zero2", "zero2_cpu", "zero3", "zero3_cpu")


def test_the_launch_files_are_these():
    assert sorted(path.stem for path in CONFIGS.iterdir()) == sorted(FILES)
    assert sorted(path.name for path in (ROOT / "configs" / "deepspeed").iterdir()) == ["zero2.json", "zero3.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_launch_file_is_read_by_accelerate_and_leaves_precision_to_the_recipe(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.mixed_precision in ("no", None)
    assert config.num_processes == {"cpu": 1, "single": 1}.get(name, 2 if name.endswith("_cpu") else 4)
    assert config.use_cpu == name.endswith("cpu")
    kinds = {"cpu": "NO", "single": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP"}
    assert config.distributed_type == kinds.get(name.removesuffix("_cpu"), "DEEPSPEED")


def environment_of(name, *options):
    """What the launcher would tell the processes, from its own parser and its own code."""
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / f"{name}.yaml"), *options, "x.py"])
    args, defaults, precision_given = _validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_given else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args) if args.multi_gpu or args.use_fsdp else prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("recipe", ["qwen3", "llama3", "gemma3", "smollm2"])
def test_every_launch_file_agrees_with_every_recipe(name, recipe):
    environment = environment_of(name, "--main_process_port", "0")
    world = load_config_from_file(str(CONFIGS / f"{name}.yaml")).num_processes
    settings = resolve(recipe, ["train.micro_batch=1"]).recipe
    launched = agreement.read_launch(environment, world)
    assert launched.stage == {"z": int(name[4:5] or 0) if name.startswith("zero") else 0, "f": 3}.get(name[0], 0)
    agreed = agreement.agree(settings, launched, settings.train.effective_batch // world, environment)
    assert len(agreed) == (5 if name.startswith("zero") else 1)


def test_accelerate_makes_fsdp2_of_its_file(monkeypatch):
    """All that can be seen of it without a GPU."""
    for key, value in environment_of("fsdp", "--main_process_port", "0").items():
        if key.startswith(("FSDP", "ACCELERATE")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, False)
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    plugin.set_auto_wrap_policy(tiny_model("qwen3"))
    assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {Qwen3DecoderLayer}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")


# --- the Slurm template ---

SBATCH = ROOT / "configs" / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  SLURM_NODEID=$node "$@" &
done
wait -n && wait
"""


def slurm(folder, *arguments, **tools):
    """Run the template with stand-ins for Slurm's own commands: two nodes, which are both this machine."""
    tools = {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\necho other\n", **tools}
    (folder / "bin").mkdir()
    for name, text in tools.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    given = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2"}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = {"SLURM_GPUS_ON_NODE": "1", "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        ["bash", str(SBATCH), *arguments],
        cwd=ROOT,
        env={**os.environ, **given, **run, "CONFIG": "configs/accelerate/zero2_cpu.yaml"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return end(process)


def test_the_slurm_template_launches_every_node_with_its_rank(tmp_path):
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    says = "#!/bin/bash\nIFS=$'\\037'\necho \"$*\"\n"
    code, output = slurm(tmp_path, "recipe=qwen3", "run.dir=/shared/a b", accelerate=says)
    assert code == 0, output
    nodes = [line.split("\x1f") for line in output.splitlines()]
    assert all(node[0] == "launch" for node in nodes)
    parsed = [launch_command_parser().parse_args(node[1:]) for node in nodes]
    assert sorted(each.machine_rank for each in parsed) == [0, 1]
    for each in parsed:
        assert (each.num_machines, each.num_processes, each.main_process_ip) == (2, 2, "127.0.0.1")
        assert each.training_script == "train/sft.py"
        assert each.training_script_args == ["recipe=qwen3", "run.dir=/shared/a b"]
    assert len({each.main_process_port for each in parsed}) == 1
    assert "#SBATCH --requeue" in SBATCH.read_text()


def test_the_slurm_template_wants_a_folder_that_all_nodes_see(tmp_path):
    assert slurm(tmp_path, "recipe=qwen3") == (2, "error: give run.dir=, a folder on a disk that all nodes see\n")


@pytest.mark.slow
def test_the_slurm_template_trains_on_two_nodes(base, alone, tmp_path):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS, micro_batch=2)
    code, output = slurm(tmp_path, f"recipe={recipe}", f"run.dir={tmp_path / 'run'}")
    assert code == 0, output
    assert "2 process(es) x 2 rows x 2 accumulated" in output
    assert_same(recipe, alone)


def start(script, *options):
    """Begin `accelerate launch`; `script` is the script and its arguments."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *options]
    return subprocess.Popen(
        [*command, *script],
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


def launch(script, *options):
    """Launch to the end; returns exit code and output."""
    return end(start(script, *options))


def end(process):
    """Exit code and output of a launch that ends in time."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done in {LIMIT} s: {kill(process)}")
    return process.returncode, output


def file(name):
    """The option that names one of the files in configs/."""
    return "--config_file", str(CONFIGS / f"{name}.yaml")


def training(recipe):
    return "train/sft.py", f"recipe={recipe}"


def launched(name, recipe):
    """Launch with one of the files in configs/; returns the adapter's folder."""
    code, output = launch(training(recipe), *file(name))
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
    family = invocation.recipe.model.family
    rendering = renderer(byte_tokenizer(family), FAMILIES[family])
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


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A tiny Qwen3, and the recipe of its training in one process, done."""
    folder = tmp_path_factory.mktemp("qwen3")
    made = save_base(folder / "base", "qwen3", byte_tokenizer("qwen3"))
    recipe = write_recipe(folder, made, "qwen3", **SETTINGS)
    train(recipe)
    return made, recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2_cpu", "zero3_cpu"])
def test_qwen3_trained_by_two_processes_is_qwen3_trained_by_one(qwen3, tmp_path, name):
    made, alone = qwen3
    recipe = write_recipe(tmp_path, made, "qwen3", **SETTINGS, micro_batch=2)
    adapter = launched(name, recipe)
    assert all(tensor.numel() for tensor in weights(adapter).values())
    assert len(weights(adapter)) == 16
    assert_same(recipe, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2_cpu", "zero3_cpu"])
def test_a_bfloat16_base_and_recomputed_activations_train_under(name, qwen3, tmp_path):
    """The adapter is float32 all the same, and every part of it moves."""
    made, _ = qwen3
    recipe = write_recipe(tmp_path, made, "qwen3", **SETTINGS, micro_batch=2, gradient_checkpointing=True)
    text = recipe.read_text().replace("dtype: float32", "dtype: bfloat16")
    assert "bfloat16" in text
    recipe.write_text(text)
    tensors = weights(launched(name, recipe))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


@pytest.mark.slow
def test_a_launch_killed_under_zero3_resumes_or_says_how(base, tmp_path):
    """As under ZeRO-2; and another number of processes is refused, with what to do."""
    recipe = write_recipe(tmp_path / "killed", base, "smollm2", **SETTINGS, micro_batch=2)
    kill_after_a_checkpoint(recipe, "zero3_cpu")
    code, output = launch(training(recipe), *file("ddp_cpu"))
    assert code != 0
    assert re.search(r"error: .*written under 2 process\(es\), DEEPSPEED.*launch as before, or remove", output)
    adapter = launched("zero3_cpu", recipe)
    other = launched("zero3_cpu", write_recipe(tmp_path / "whole", base, "smollm2", **SETTINGS, micro_batch=2))
    assert (adapter / "adapter_model.safetensors").read_bytes() == (other / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_cpu", "zero2_cpu", "zero3_cpu"])
def test_a_dry_run_of_a_launch_draws_once_and_writes_nothing(base, tmp_path, name):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS, micro_batch=2)
    before = sorted(tmp_path.rglob("*"))
    code, output = launch([*training(recipe), "--dry-run"], *file(name))
    assert code == 0, output
    assert output.count("trainable parameters") == 1
    assert f"memory of each of 2 device(s) under {'data parallel' if name == 'ddp_cpu' else 'DeepSpeed'}" in output
    assert "2 process(es) x 2 rows x 2 accumulated" in output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_launch_that_contradicts_the_recipe_ends_before_anything_is_loaded(base, tmp_path):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS, micro_batch=2)
    code, output = launch(training(recipe), *file("ddp_cpu"), "--mixed_precision", "bf16")
    assert code != 0
    assert "error: the launch has mixed_precision: bf16, the recipe model.dtype=float32, which decides" in output
    assert not (tmp_path / "run" / "adapter").exists()


def kill_after_a_checkpoint(recipe, name):
    """Launch, and kill every process right after the first checkpoint is whole."""
    partial = resolve(str(recipe)).run_dir / ".adapter.partial"
    process = start(training(recipe), *file(name))
    deadline = time.monotonic() + LIMIT
    while not list(partial.glob(".checkpoints/*/whole")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, kill(process)
        time.sleep(0.02)
    kill(process)
    assert partial.is_dir()


@pytest.mark.slow
def test_a_launch_killed_under_zero2_resumes_and_ends_bit_identical(base, zero2, tmp_path, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2", **SETTINGS, micro_batch=2)
    kill_after_a_checkpoint(recipe, "zero2_cpu")
    partial = resolve(str(recipe)).run_dir / ".adapter.partial"
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
    code, output = launch(training(recipe), "--cpu", "--num_processes", "2")
    assert code != 0
    assert "error: several processes were asked for, one was started" in output
    assert not (tmp_path / "run" / "adapter").exists()


# --- evaluation ---


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return talker_folder(tmp_path_factory.mktemp("talker") / "tiny")


def evaluation(talker, folder, *overrides):
    """The arguments of an evaluation in many small batches, with some requests timed."""
    own = talker.parent / "own.jsonl"  # one file: its path is in the evidence
    own.write_text("".join(json.dumps({"id": r.id, "text": "".join(r.sentences)}) + "\n" for r in REQUESTS))
    settings = (f"eval.benchmarks=[{own}]", "eval.replay=full", "eval.max_new_tokens=100", "eval.batch_size=1")
    return arguments(talker, folder, *settings, "eval.timed=2", *overrides)


def evidence(folder):
    """The bytes of requests.jsonl; that the step is whole, timed, and left nothing behind."""
    step = folder / "eval" / "message"
    assert {path.name for path in step.iterdir()} == {
        "requests.jsonl",
        "timings.jsonl",
        "summary.json",
        "step.json",
        "recipe.yaml",
    }
    assert len((step / "timings.jsonl").read_text().splitlines()) == 2
    return (step / "requests.jsonl").read_bytes()


@pytest.fixture(scope="module")
def evaluated(talker, tmp_path_factory):
    """The evidence of one process."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    assert run.main(evaluation(talker, folder)) == 0
    return evidence(folder)


@pytest.mark.slow
def test_two_processes_write_the_evidence_of_one(talker, evaluated, tmp_path):
    code, output = launch(["eval/run.py", *evaluation(talker, tmp_path / "run")], *file("ddp_cpu"))
    assert code == 0, output
    assert evidence(tmp_path / "run") == evaluated
    own = talker.parent / "own.jsonl"
    assert f"{own}: timed 2/2" in output
    assert output.count(f"{own}: timed ") == 2
    assert output.count(f"requests {own} ") == 12  # the main process' half of the 24 batches
    again, output = launch(["eval/run.py", *evaluation(talker, tmp_path / "run")], *file("ddp_cpu"))
    assert (again, output.count("nothing to do")) == (0, 1), output


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_evaluation_killed_in_the_middle_resumes_with_any_number_of_processes(talker, evaluated, tmp_path, after):
    argv = evaluation(talker, tmp_path / "run")
    partial = tmp_path / "run" / "eval" / ".message.partial"
    process = start(["eval/run.py", *argv], *file("ddp_cpu"))
    while len({path.name for path in partial.glob(".requests-*")}) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    kill(process)
    parts = launching.Parts(partial, 0, "requests")
    parts.refresh()
    assert 2 <= len(parts.done) < len(REQUESTS)
    if after == 1:
        assert run.main(argv) == 0
    else:
        code, output = launch(["eval/run.py", *argv], *file("ddp_cpu"), "--num_processes", str(after))
        assert code == 0, output
    assert evidence(tmp_path / "run") == evaluated


@pytest.mark.slow
def test_two_machines_write_the_evidence_of_one_process(talker, evaluated, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = ["eval/run.py", *evaluation(talker, tmp_path / "run")]
    where = ("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1")
    nodes = [
        start(script, *file("ddp_cpu"), *where, "--main_process_port", port, "--machine_rank", rank) for rank in "01"
    ]
    for node in nodes:
        code, output = end(node)
        assert code == 0, output
    assert evidence(tmp_path / "run") == evaluated


BROKEN = """
import os, sys
from eval import run

def score(name, requests, lines, settings):
    if os.environ["RANK"] == "{rank}":
        raise run.UserError("no bwrap any more")

run.suite.score = score
sys.exit(run.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_ends_the_launch(talker, tmp_path, rank):
    """It is said once, nothing hangs, and what the other one has done is kept."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(rank=rank))
    code, output = launch([str(script), *evaluation(talker, tmp_path / "run")], *file("ddp_cpu"))
    assert code != 0
    assert output.count("error: no bwrap any more") == 1, output
    assert "Traceback" not in output.split("error: no bwrap any more")[0]
    assert not (tmp_path / "run" / "eval" / "message").exists()


@pytest.mark.slow
def test_bad_input_of_a_launch_is_said_once(talker, tmp_path):
    argv = evaluation(talker, tmp_path / "run", "eval.benchmarks=[humanevil]")
    code, output = launch(["eval/run.py", *argv], *file("ddp_cpu"))
    assert code != 0
    assert output.count("error: eval.benchmarks: no benchmark 'humanevil'") == 1, output


def barrier(seconds):
    """A script whose second process comes to the barrier so much later than the first."""
    return f"""
import datetime, time, torch
from headstart import launch
from recipes.schema import Model
launch.PATIENCE = datetime.timedelta(seconds=4)
state = launch.processes(Model(device="cpu"), apart=True)
time.sleep({seconds} * state.process_index)
launch.wait(state)
print(f"process {{state.process_index}} passed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "passed"), [(1, 2), (30, 0)])
def test_a_wait_has_the_patience_that_it_is_given(tmp_path, seconds, passed):
    (tmp_path / "barrier.py").write_text(barrier(seconds))
    began = time.monotonic()
    _, output = launch([str(tmp_path / "barrier.py")], *file("ddp_cpu"))
    assert output.count("passed") == passed, output
    assert time.monotonic() - began < 30
