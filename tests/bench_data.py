"""The data builder on a million made-up conversations of LMSYS-Chat-1M's schema, and beside `datasets.map`.

    python tests/bench_data.py [ROWS]

1. 50,000 rows: the builder, and the same functions row by row through `datasets.map`, a map a stage, with the same
   number of processes; rows per second, in turn, in one run.
2. A tenth of ROWS and ROWS (1,000,000 when not given) rows, from Parquet files to finished pairs with every filter on:
   time, rows per second of each stage, and the peak of the memory of all processes together (PSS: a page that processes
   share counts once).

Benchmarks' rows come from HEADSTART_SHARED; without it only HumanEval is looked for, and the output says so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import datasets
import lmsys_rows
import psutil

from data_builders import contamination, corpora, duplicates, inputs, reading, rules, workers
from data_builders.corpora.protocol import Conversation, Unusable
from data_builders.cuts import Cut, cuts
from data_builders.making import Maker
from headstart.request import Message, Request
from recipes.loader import parse

ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("HEADSTART_SHARED", "nowhere")) / "data"
PLACES = {
    "mbpp": "mbpp/mbpp.jsonl",
    "canitedit": "canitedit/canitedit.jsonl",
    "ds1000": "ds1000/test.jsonl.gz",
    "coedit": "coedit/validation_subset.jsonl",
    "chat": "ultrachat_200k/train_sft_sample.jsonl.gz",
    "mtbench": "mt_bench",
}
SMALL = 50_000


def settings(rows: Path, run: Path) -> list[str]:
    """A build with the corpus' answers and every filter that needs no model."""
    found = {name: SHARED / place for name, place in PLACES.items() if SHARED.is_dir()}
    return [
        "recipe=smollm2",
        f"run.dir={run}",
        "data.corpora=[lmsys]",
        "data.answers=corpus",
        "data.cuts=2",
        "data.whole=false",
        "data.duplicates=near",
        "data.languages=[English,unknown]",
        f"data.benchmarks=[{','.join(['humaneval', *found])}]",
        f"data.paths.lmsys={rows}",
        *(f"data.paths.{name}={place}" for name, place in found.items()),
    ]


class Memory(threading.Thread):
    """Watches the PSS of a process and all below it; `peak` is the largest sum, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.over = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            try:
                tree = [self.process, *self.process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            total = 0
            for process in tree:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak = max(self.peak, total)


def built(rows: Path, run: Path) -> tuple[float, int, dict[str, Any], dict[str, float]]:
    """Seconds in all, peak bytes, the manifest, and the seconds of each stage as the builder timed it."""
    command = [sys.executable, str(ROOT / "data_builders" / "build.py"), *settings(rows, run)]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    watch = Memory(process.pid)
    watch.start()
    said, _ = process.communicate()
    seconds = time.monotonic() - began
    watch.over.set()
    if process.returncode:
        sys.exit(f"the build ended with {process.returncode}")
    timed = re.findall(r"^(\w.*): ([\d.]+) s$", said, re.MULTILINE)
    stages = {name: float(took) for name, took in timed}
    return seconds, watch.peak, json.loads((run / "data" / "manifest.json").read_text()), stages


def show(stages: dict[str, float], count: int) -> None:
    """Rows per second of each stage."""
    for name, took in stages.items():
        print(f"  {name}: {took} s, {count / max(took, 0.1):,.0f} rows/s")


def mapped(rows: Path, run: Path) -> tuple[float, int]:
    """Seconds and pairs of the same functions through `datasets.map`: rules; keys; benchmarks; cuts and pairs."""
    invocation = parse(settings(rows, run))
    recipe = invocation.recipe
    tasks = [task for found in inputs.find_inputs(recipe).tasks.values() for task in found]
    index, rule = contamination.Index(tasks), rules.rules(recipe.data)
    maker = Maker(recipe.data, recipe.prompt.system_message, recipe.run.seed)
    processes = workers.cores()
    began = time.monotonic()
    data = datasets.load_dataset("parquet", data_files=[str(path) for path in sorted(rows.iterdir())], split="train")

    def admit(row: dict[str, Any]) -> dict[str, Any]:
        try:
            found: Conversation = corpora.lmsys.conversation(row)
            request, repairs = rules.admit(found, "lmsys", rule)
        except Unusable as why:
            return {"kept": False, "reason": why.reason, "request": None}
        return {"kept": True, "reason": ",".join(repairs), "request": packed(request)}

    def keys(row: dict[str, Any]) -> dict[str, Any]:
        normal = duplicates.normal(unpacked(row["request"]))
        exact = (
            f"{duplicates.exact_key(normal):016x}"  # a number of 64 bits without a sign is too large for Arrow's guess
        )
        return {"normal": normal, "exact": exact, "buckets": duplicates.bands(normal)}

    def look(batch: dict[str, Any]) -> list[bool]:
        requests = [unpacked(row) for row in batch["request"]]
        said = [[*(turn.content for turn in r.history), r.text, r.reference or ""] for r in requests]
        return [not hits for hits in index.find_all(said)]

    def pairs(batch: dict[str, Any]) -> dict[str, Any]:
        made = []
        for packed_request in batch["request"]:
            request = unpacked(packed_request)
            found: list[Cut] = cuts(request, recipe.data.cuts, recipe.data.cut, recipe.run.seed)
            made += [maker.pair(request, cut, request.reference or "") for cut in found]
        return {name: [pair[name] for pair in made] for name in made[0]} if made else {}

    data = data.map(admit, num_proc=processes, remove_columns=data.column_names)
    data = data.filter(lambda row: row["kept"], num_proc=processes)
    data = data.map(keys, num_proc=processes)
    data = data.filter(look, batched=True, batch_size=reading.BATCH, num_proc=processes)
    data = data.map(pairs, batched=True, num_proc=processes, remove_columns=data.column_names)
    data.to_parquet(run / "pairs.parquet")
    return time.monotonic() - began, len(data)


def packed(request: Request) -> dict[str, Any]:
    history = [{"role": message.role, "content": message.content} for message in request.history]
    return {"id": request.id, "sentences": request.sentences, "history": history, "reference": request.reference}


def unpacked(row: dict[str, Any]) -> Request:
    history = tuple(Message(turn["role"], turn["content"]) for turn in row["history"])
    return Request(row["id"], "lmsys", tuple(row["sentences"]), history, row["reference"])


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    looked_for = "all" if SHARED.is_dir() else "HumanEval only, HEADSTART_SHARED is not set"
    print(f"{workers.cores()} cores; benchmarks that are looked for: {looked_for}")
    with tempfile.TemporaryDirectory(prefix="headstart-bench-") as name:
        place = Path(name)
        os.environ["HF_HOME"] = str(place / "hf")
        datasets.config.HF_DATASETS_CACHE = place / "hf" / "datasets"
        beside(place)
        for rows in (count // 10, count):
            whole(place, rows)


def beside(place: Path) -> None:
    """The builder and `datasets.map` on the same rows."""
    lmsys_rows.write(place / "small", SMALL, seed=1)
    (place / "mapped").mkdir()
    theirs, their_pairs = mapped(place / "small", place / "mapped")
    ours, _, manifest, stages = built(place / "small", place / "ours")
    print(f"{SMALL:,} rows, datasets.map: {theirs:.1f} s, {SMALL / theirs:,.0f} rows/s, {their_pairs:,} pairs")
    pairs, own = manifest["counts"]["pairs"], sum(stages.values())
    print(f"{SMALL:,} rows, the builder: {own:.1f} s, {SMALL / own:,.0f} rows/s, {pairs:,} pairs (duplicates are out)")
    show(stages, SMALL)
    print(f"(both without the start: imports, tokenizer, the benchmarks' rows; with it the builder took {ours:.1f} s)")
    print(f"builder against datasets.map, rows per second: {theirs / own:.2f}x", flush=True)


def whole(place: Path, rows: int) -> None:
    """A build from end to end."""
    began = time.monotonic()
    lmsys_rows.write(place / "rows", rows, seed=2)
    size = sum(path.stat().st_size for path in (place / "rows").iterdir())
    print(f"\n{rows:,} rows written in {time.monotonic() - began:.0f} s, {size / 2**30:.2f} GiB of Parquet", flush=True)
    seconds, peak, manifest, stages = built(place / "rows", place / "run")
    print(f"{rows:,} rows: {seconds:.1f} s, {rows / seconds:,.0f} rows/s, peak PSS {peak / 2**30:.2f} GiB")
    show(stages, rows)
    print(json.dumps(manifest["corpora"]["lmsys"]["counts"]), json.dumps(manifest["counts"]), flush=True)
    shutil.rmtree(place / "rows")
    shutil.rmtree(place / "run")


if __name__ == "__main__":
    main()
