"""What training costs beside stock TRL, in speed and memory; what self_distill and watching cost. Run by `make bench`.

SmolLM2-135M, the same pairs, LoRA, batch and steps, on one machine in turn, each in a process of its own: `trl sft`
with its defaults (which recompute activations), `trl sft` with our dtype and without checkpointing, and train/sft.py
without checkpointing, with it, and a pair at a time (the same batch, accumulated: here it saves about as much memory
as recomputation, for less time). The steps are one epoch, so all see the same supervised tokens. Seconds are the
trainers' own, from the first step to the last; peak memory is the process' largest resident set, libraries included.
Exits with 1 where a bound is missed.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import torch

from headstart import model as loading
from headstart.prompt import IGNORED, renderer
from recipes.loader import resolve
from recipes.schema import Train
from train.rows import in_order, padding_share, row_lengths, training_rows

ROOT = Path(__file__).resolve().parents[1]
PAIRS, BATCH, ROUNDS = 64, 8, 2
STEPS = PAIRS // BATCH
BIN = Path(sys.executable).parent
# Stock TRL's settings, ours that stand beside them, the least ratio of speeds and the largest of peak memories.
STOCK: dict[str, tuple[str, ...]] = {
    "its defaults": (),
    "our dtype, no checkpointing": ("--dtype", "bfloat16", "--bf16", "False", "--gradient_checkpointing", "False"),
}
BESIDE = {"its defaults": ("sft, one pair at a time", 1.5, 0.6), "our dtype, no checkpointing": ("sft", 1.25, 0.8)}
DISTILL, RETAIN_SHARE = 1.8, 0.25
WATCHED, WATCH_STEPS, WATCH_EVERY = 0.05, 1000, 250  # the most that looks may take of a recipe of so many steps
OURS: dict[str, tuple[str, ...]] = {
    "sft": (),
    "sft, checkpointing": ("train.gradient_checkpointing=true",),
    "sft, one pair at a time": ("train.micro_batch=1",),
    "sft, watched": (f"train.watch_every={STEPS}",),
    "self_distill": ("train.objective=self_distill", "train.retain=1.0", f"train.retain_share={RETAIN_SHARE}"),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of the trainer's loop, peak resident set in MiB, and seconds of a look at the held-out requests.

    The first look decodes the base's answers too.
    """

    seconds: float
    memory: float
    first_look: float = 0.0
    look: float = 0.0


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="headstart-bench-") as place:
        folder = Path(place)
        recipe = build(folder)
        supervised = describe(folder, recipe)
        costs: dict[str, list[Cost]] = {name: [] for name in (*STOCK, *OURS)}
        for number in range(ROUNDS):  # in turn, so that drift of the machine meets all alike
            for name in STOCK:
                costs[name].append(trl(folder, name, number))
            for name in OURS:
                costs[name].append(headstart(folder, recipe, name, number))
        faults = report({name: best(found) for name, found in costs.items()}, supervised)
    if faults:
        raise SystemExit("; ".join(faults))


def build(folder: Path) -> Path:
    """A recipe and its data: the seed corpus' own answers. TRL renders the pairs with the model's own template."""
    path = folder / "bench.yaml"
    path.write_text(
        "base: smollm2\n"
        f"run: {{dir: {folder / 'run'}}}\n"
        f"data: {{pairs: {PAIRS}, heldout: 24, benchmarks: []}}\n"
        f"train: {{steps: {STEPS}, effective_batch: {BATCH}, micro_batch: {BATCH}, length_window: {STEPS}, "
        f"save_every: {STEPS + 1}, log_every: {STEPS}}}\n"
    )
    run([BIN / "python", ROOT / "data_builders" / "build.py", f"recipe={path}"], folder / "build.log")
    return path


def describe(folder: Path, recipe: Path) -> int:
    """Print the pairs' lengths and the padding of both orders; returns the supervised tokens of the epoch."""
    given = resolve(str(recipe)).recipe
    rendering = renderer(loading.load_tokenizer(given.model), loading.family(given.model))
    rows = training_rows(folder / "run" / "data", rendering, given.train, 0).dataset
    assert len(rows) == PAIRS, f"{len(rows)} pairs, not {PAIRS}"
    supervised = sum(label != IGNORED for labels in rows["labels"] for label in labels)
    plain = padding_share(row_lengths(rows), BATCH)
    sorted_ = padding_share(row_lengths(in_order(rows, given.train, 0)), BATCH)
    tokens = sum(row_lengths(rows))
    print(f"{PAIRS} pairs, {tokens} tokens, {supervised} of them supervised; batches of {BATCH}, {STEPS} steps")
    print(f"padding: {plain:.1%} of the tokens fed as the pairs come, {sorted_:.1%} with length_window={STEPS}")
    assert Train.model_fields["length_window"].default == 1
    return supervised


def trl(folder: Path, name: str, number: int) -> Cost:
    """`trl sft` on the same pairs."""
    out = folder / f"trl-{number}-{name[:3]}"
    command = [BIN / "trl", "sft", "--model_name_or_path", loading.embedded_folder()]
    command += ["--dataset_name", folder / "run" / "data", "--output_dir", out, "--max_steps", STEPS]
    command += ["--per_device_train_batch_size", BATCH, "--learning_rate", "1e-3", "--use_cpu", "--report_to", "none"]
    command += ["--use_peft", "--lora_r", 8, "--lora_alpha", 16, "--lora_dropout", 0.05, "--save_strategy", "no"]
    command += ["--lora_target_modules", "q_proj", "k_proj", "v_proj", "o_proj", "--max_length", 2048]
    command += STOCK[name]
    memory = run(command, folder / f"{out.name}.log")
    text = (folder / f"{out.name}.log").read_text()
    return Cost(float(text.rpartition("'train_runtime': ")[2].split(",")[0].strip("'\"")), memory)


def headstart(folder: Path, recipe: Path, name: str, number: int) -> Cost:
    """train/sft.py."""
    place = folder / f"ours-{number}-{list(OURS).index(name)}"
    place.mkdir()
    (place / "data").symlink_to(folder / "run" / "data")
    command = [BIN / "python", ROOT / "train" / "sft.py", f"recipe={recipe}", f"run.dir={place}", *OURS[name]]
    memory = run(command, folder / f"{place.name}.log")
    text = (folder / f"{place.name}.log").read_text()
    looks = [float(line.split()[-2]) for line in text.splitlines() if line.startswith("watch at step")]
    return Cost(float(text.rpartition("trained in ")[2].split(" ")[0]), memory, *looks)


def run(command: list[object], log: Path) -> float:
    """Run a command to its end; returns the largest resident set of it and its children together, MiB.

    All get the same threads: accelerate's launcher, which `trl sft` starts itself by, would leave it one.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    peak = 0.0
    with log.open("w") as file:
        started = subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=environment)
        watched = psutil.Process(started.pid)
        done = threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.is_set():
                try:
                    tree = [watched, *watched.children(recursive=True)]
                    peak = max(peak, sum(process.memory_info().rss for process in tree) / 2**20)
                except psutil.NoSuchProcess:
                    pass
                time.sleep(0.02)

        thread = threading.Thread(target=sample)
        thread.start()
        code = started.wait()
        done.set()
        thread.join()
    if code:
        raise SystemExit(f"{command[:2]} failed:\n{log.read_text()[-3000:]}")
    return peak


def best(costs: list[Cost]) -> Cost:
    """The least of the rounds: whatever else ran on the machine only ever added."""
    return Cost(*(min(column) for column in zip(*map(astuple, costs), strict=True)))


def report(found: dict[str, Cost], supervised: int) -> list[str]:
    """Print the table; returns the bounds that are missed."""
    for name, cost in found.items():
        rate = supervised / cost.seconds
        print(f"{name:>30}: {cost.seconds:6.1f} s, {rate:6.1f} supervised tokens/s, {cost.memory:6.0f} MiB at most")
    faults = []
    for name, (ours, least, most) in BESIDE.items():
        faster, smaller = found[name].seconds / found[ours].seconds, found[ours].memory / found[name].memory
        print(f"{ours} against trl sft with {name}: {faster:.2f}x the tokens per second, {smaller:.2f}x the memory")
        if faster < least:
            faults.append(f"{faster:.2f}x the throughput of trl sft with {name}, less than {least}x")
        if smaller > most:
            faults.append(f"{smaller:.2f}x the memory of trl sft with {name}, more than {most}x")
    costs = found["self_distill"].seconds / found["sft"].seconds
    print(f"self_distill with retention on {RETAIN_SHARE:.0%} of the rows: {costs:.2f}x a step of sft")
    if costs > DISTILL:
        faults.append(f"self_distill costs {costs:.2f}x sft a step, more than {DISTILL}x")
    later, step, watched = WATCH_STEPS // WATCH_EVERY, found["sft"].seconds / STEPS, found["sft, watched"]
    took = watched.first_look + later * watched.look
    share = took / (took + WATCH_STEPS * step)
    print(
        f"the first look takes {watched.first_look:.0f} s, a later one {watched.look:.0f} s, a step {step:.1f} s: "
        f"{1 + later} looks in {WATCH_STEPS} steps are {share:.1%}"
    )
    if share > WATCHED:
        faults.append(f"watching takes {share:.1%} of the time, more than {WATCHED:.0%}")
    return faults


if __name__ == "__main__":
    main()
