"""Training that is killed or cannot go on: the same command resumes, and what failed is one clear line."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run
from test_sources import with_hub
from tiny_run import killed_after, train, weights, write_recipe

from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import resolve
from train import checkpoints, merge, sft
from train.adapter import prove_adapter

ROOT = Path(__file__).parents[1]
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base():
    """A base that trains in no time."""
    return tiny_run.small_base()


def start(recipe, **options):
    """Begin to train in a process of its own, as a user does."""
    return subprocess.Popen(
        [sys.executable, "train/sft.py", f"recipe={recipe}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def one_line(error):
    """The one line of stderr that says what is wrong."""
    assert "Traceback" not in error, error
    lines = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, error
    return lines[0]


def test_a_run_killed_at_a_random_moment_resumes_and_ends_as_if_it_had_not_been(base, tmp_path, capsys):
    settings = {"steps": 60, "save_every": 3, "dropout": 0.1, "schedule": "cosine", "micro_batch": 4}
    recipe = write_recipe(tmp_path / "killed", base, "smollm2", **settings)
    run = resolve(str(recipe)).run_dir
    process = start(recipe)
    while not list(run.glob(".adapter.partial/.checkpoints/*/whole")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    delay = random.SystemRandom().uniform(0, 0.8)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    print(f"killed {delay:.2f} s after the first checkpoint")
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed: give it more steps"
    assert not (run / "adapter").exists()
    capsys.readouterr()
    resumed = train(recipe)
    printed = capsys.readouterr().out
    assert "continuing what a killed run left" in printed
    first = int(re.search(r"step (\d+)/60", printed)[1])
    assert first > 1
    assert first % 3 == 1
    prove_adapter(resumed, tiny_run.card(resumed)["adapted_modules"])
    whole = train(write_recipe(tmp_path / "whole", base, "smollm2", **settings))
    assert (resumed / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    assert (resumed / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()


@pytest.mark.parametrize("name", ["optimizer.pt", "adapter_model.safetensors", "rng_state.pth", "scheduler.pt"])
@pytest.mark.parametrize("what", ["missing", "cut"])
def test_a_checkpoint_that_has_lost_something_is_passed_over(base, tmp_path, capsys, monkeypatch, name, what):
    recipe = write_recipe(tmp_path, base, "smollm2", steps=6, save_every=2)
    with monkeypatch.context() as patch:
        killed_after(patch, 4)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe)
    last = resolve(str(recipe)).run_dir / ".adapter.partial" / ".checkpoints" / "checkpoint-4"
    (last / name).unlink() if what == "missing" else (last / name).write_bytes((last / name).read_bytes()[:-1])
    capsys.readouterr()
    resumed = train(recipe)
    printed = capsys.readouterr().out
    assert f"checkpoint-4: {name} is missing or cut; removed, the one before it serves" in printed
    assert re.search(r"step (\d+)/6", printed)[1] == "3"
    prove_adapter(resumed, tiny_run.card(resumed)["adapted_modules"])


def test_a_killed_runs_checkpoints_are_not_thrown_away_by_another_setting(base, tmp_path, monkeypatch, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2", steps=4, save_every=2)
    with monkeypatch.context() as patch:
        patch.delattr("train.sft.prove_adapter")
        with pytest.raises(NameError):
            train(recipe)
    capsys.readouterr()
    for options in ([], ["--dry-run"]):
        assert sft.main([f"recipe={recipe}", "train.log_every=2", *options]) == 2
        said = one_line(capsys.readouterr().err)
        assert "a killed run of other settings can be resumed here (train.log_every: 1 there, 2 here); give" in said
    assert train(recipe)


def limited(size):
    """No file of the process may grow beyond `size` bytes: to a program, as a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@pytest.mark.parametrize(("size", "what"), [(4_000, "the adapter in a checkpoint"), (12_000, "the optimizer's state")])
def test_a_full_disk_is_one_line_and_the_same_command_resumes(base, tmp_path, size, what):
    recipe = write_recipe(tmp_path, base, "smollm2", steps=4, save_every=2)
    process = start(recipe, preexec_fn=lambda: limited(size))
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2, error
    run = tmp_path / "run"
    said = one_line(error)
    assert said.startswith(f"error: {run / 'adapter'}: cannot be written ("), what
    assert said.endswith("make room there, then the same command resumes")
    assert not (run / "adapter").exists()
    assert not list(run.glob(".adapter.partial/.checkpoints/*/whole")), "a half-written checkpoint is not marked whole"
    resumed = train(recipe)
    assert len(weights(resumed)) == 16
    run_folder.need(resumed, "")


@pytest.mark.parametrize("size", [4_000, 60_000])
def test_a_full_disk_while_merging_is_one_line_and_leaves_nothing(base, tmp_path, size):
    recipe = write_recipe(tmp_path, base, "smollm2", steps=2, save_every=2)
    train(recipe)
    process = subprocess.run(
        [sys.executable, "train/merge.py", f"recipe={recipe}"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: limited(size), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 2, process.stderr
    merged = tmp_path / "run" / "merged"
    assert one_line(process.stderr).startswith(f"error: {merged}: cannot be written (")
    assert not merged.exists()
    assert not (tmp_path / "run" / ".merged.partial").exists()
    assert merge.main([f"recipe={recipe}"]) == 0


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_checkpoint_of_another_zero_stage_is_refused(tmp_path, monkeypatch, before, after):
    """DeepSpeed cuts the optimizer's state to the stage. Two processes under each are in test_launch."""
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    monkeypatch.setattr(checkpoints, "zero_stage", lambda: before)
    (checkpoint / checkpoints.WHOLE).write_text(json.dumps({"layout": checkpoints.layout(), "sizes": {}}))
    assert checkpoints.last_whole(tmp_path) == str(checkpoint)
    monkeypatch.setattr(checkpoints, "zero_stage", lambda: after)
    with pytest.raises(UserError, match=f"written under .* ZeRO-{before}, this launch has .* ZeRO-{after}; launch as"):
        checkpoints.last_whole(tmp_path)


def test_a_refused_model_is_one_line(tmp_path):
    """A gated model without a token, from a stand-in of the hub."""
    recipe = write_recipe(tmp_path, "meta-llama/Llama-3.1-8B-Instruct", "llama3")
    for flag in ([], ["--dry-run"]):
        done = with_hub("403 gated", tmp_path / "home", "train/sft.py", f"recipe={recipe}", *flag)
        assert done.returncode == 2, done.stderr
        line = one_line(done.stderr)
        assert line.startswith("error: meta-llama/Llama-3.1-8B-Instruct: access refused; accept its terms")
        assert "hf auth login" in line
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {"data", "recipe.yaml", ".data.lock"}


def test_a_gpu_that_is_not_there_is_one_line(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = write_recipe(tmp_path, base, "smollm2")
    capsys.readouterr()
    for flag in ([], ["--dry-run"]):
        assert sft.main([f"recipe={recipe}", "model.device=cuda", *flag]) == 2
        assert one_line(capsys.readouterr().err) == (
            "error: model.device=cuda: torch sees no GPU; set model.device=auto or mend the CUDA installation"
        )
    assert not (tmp_path / "run" / "adapter").exists()
