"""Launching on several processes: the files in configs/, and real launches on two CPU processes."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from tiny_models import REQUESTS, arguments, talker_folder
from tiny_run import byte_tokenizer, distance, small_base, train, weights, write_recipe

from eval import run
from headstart import launch as launching
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
    process = start(training(recipe), *file("zero2_cpu"))
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
