"""The preflight's memory estimate against the peak of real training runs. Run by `make bench`, on Linux.

SmolLM2-135M trains for a few steps on pairs of the seed corpus, each setting in processes of its own. On a CPU the peak
is the kernel's own high-water mark of resident memory, reset right before the model is loaded, less what was resident
then: nothing is sampled, so nothing is missed, and the libraries' buffers are in it. The C library is told to give back
what is freed, so that the mark is of what is in use; what it takes without being told is measured and printed too, for
some settings. On a GPU the peak is the most that torch's allocator handed out. Exits with 1 where an estimate is off by
more than a quarter.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data_builders import build
from headstart import model as loading
from headstart.prompt import renderer
from recipes.loader import parse
from train import memory, sft
from train.agreement import read_launch
from train.preflight import micro_batches
from train.rows import in_order, training_rows

ROOT = Path(__file__).resolve().parents[1]
BOUND = 0.25
MIB = 1024**2
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes; read by glibc: a larger block is returned once it is freed
COMMON = ("recipe=smollm2", "train.steps=2", "train.effective_batch=8", "train.save_every=1000")
SETTINGS = [
    (None, f"model.dtype={dtype}", f"train.micro_batch={rows}", f"train.gradient_checkpointing={recomputed}")
    for dtype in ("float32", "bfloat16")
    for rows in (1, 4, 8)
    for recomputed in ("false", "true")
] + [(name, "model.dtype=float32", "train.micro_batch=4") for name in ("ddp_cpu", "zero2_cpu", "zero3_cpu")]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = f"run.dir={folder}"
        assert build.main([*COMMON, run]) == 0
        missed = [setting for setting in SETTINGS if not compare(run, *setting)]
        for launch, *settings in SETTINGS[2:4] + SETTINGS[8:10]:
            kept = measured_peak(launch, [*COMMON, run, *settings], {})
            print(f"{' '.join(settings)}, the C library as it is: measured {kept / MIB:.0f} MiB", flush=True)
    if missed:
        raise SystemExit(f"off by more than {BOUND:.0%}: {missed}")


def compare(run: str, launch: str | None, *settings: str) -> bool:
    """Train under one setting; print both figures; whether they agree."""
    arguments = [*COMMON, run, *settings]
    measured, found = measured_peak(launch, arguments, GIVEN_BACK), estimated(launch, arguments)
    off = found / measured - 1
    figures = f"measured {measured / MIB:.0f} MiB, estimated {found / MIB:.0f} ({off:+.0%})"
    print(f"{' '.join(settings)} {launch or ''}: {figures}", flush=True)
    return abs(off) <= BOUND


def estimated(launch: str | None, arguments: Sequence[str]) -> int:
    """What the preflight says, for the same steps."""
    invocation = parse(arguments)
    recipe, world = invocation.recipe, 2 if launch else 1
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    message = recipe.prompt.system_message
    rows = training_rows(invocation.run_dir / "data", rendering, recipe.train, recipe.run.seed, message)
    ordered = in_order(rows.dataset, recipe.train, recipe.run.seed)
    environment = {}
    if launch and launch.startswith("zero"):
        file = ROOT / "configs" / "deepspeed" / f"{launch.removesuffix('_cpu')}.json"
        environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    shapes = micro_batches(ordered, recipe.train.micro_batch)
    config = loading.load_config(recipe.model)
    return memory.estimate(recipe, config, shapes, read_launch(environment, world), world).total


def measured_peak(launch: str | None, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Bytes; of several processes the one that took most."""
    shutil.rmtree(parse(arguments).run_dir / "adapter", ignore_errors=True)
    launcher = []
    if launch:
        file = f"configs/accelerate/{launch}.yaml"
        launcher = ["-m", "accelerate.commands.launch", "--config_file", file, "--main_process_port", "0"]
    done = subprocess.run(
        [sys.executable, *launcher, "tests/bench_memory.py", "--measured", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}")
    return max(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak "))


def train_measured(arguments: Sequence[str]) -> None:
    """Train in this process and print its peak."""
    load, before = loading.load_model, list[int]()

    def load_model(*given: Any, **named: Any) -> Any:
        before.append(resident("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        return load(*given, **named)

    loading.load_model = load_model
    if code := sft.main(list(arguments)):
        raise SystemExit(code)
    on_gpu = torch.cuda.is_available() and torch.cuda.max_memory_allocated()
    print(f"peak {on_gpu or resident('VmHWM') - before[0]}", flush=True)


def resident(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measured"]:
        train_measured(sys.argv[2:])
    else:
        main()
