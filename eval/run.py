"""Replay one arm's requests sentence by sentence, score the answers, and write the evidence.

    python eval/run.py recipe=smollm2 eval.arm=message     # before (also: plain)
    python eval/run.py recipe=smollm2 eval.arm=merged      # after (also: adapter)

Writes <run>/eval/<arm>: requests.jsonl, timings.jsonl, summary.json. A killed run resumes.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import arms, metrics, suite, timing
from eval.replay import replay
from headstart import model as loading
from headstart.prompt import renderer
from headstart.request import Request
from headstart.sentences import RULE_VERSION
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Report

Requests = dict[str, list[Request]]


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, evaluate)


def evaluate(invocation: Invocation) -> None:
    recipe, arm_name = invocation.recipe, invocation.recipe.eval.arm
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("eval/run.py runs as one process; launch it with --num_processes 1")
    found = suite.load(invocation)
    requests = found.requests
    sandbox = suite.check_scoring(recipe.eval)
    tokenizer = loading.load_tokenizer(recipe.model)
    hashes = {
        "data": found.data_hash,
        "renderer": renderer(tokenizer, loading.family(recipe.model)).fingerprint,
        "sentence_rule": RULE_VERSION,
    }
    settings = {
        "eval": recipe.eval.model_dump(mode="json"),
        "model": recipe.model.model_dump(),
        "prompt": recipe.prompt.model_dump(),
        "seed": recipe.run.seed,
        "weights": arms.needed(invocation),
        **hashes,
    }
    folder = invocation.run_dir / "eval" / arm_name
    if invocation.dry_run:
        what = ", ".join(f"{len(rows)} of {name}" for name, rows in requests.items())
        run_folder.say_plan(folder, settings, f"would replay {what} into {folder}; {sandbox}")
        return
    with run_folder.step(invocation, folder, settings) as step:
        if step is not None:
            summary = fill(step, requests, hashes, sandbox)
            run_folder.write_atomically(step.partial / "summary.json", json.dumps(summary, indent=1) + "\n")
            run_folder.finish(step)


def fill(step: run_folder.Step, requests: Requests, hashes: dict[str, str], sandbox: str) -> dict[str, Any]:
    """Write requests.jsonl and timings.jsonl; returns the summary."""
    recipe = step.invocation.recipe
    arm = arms.load(step.invocation)
    if arm.renderer.fingerprint != hashes["renderer"]:
        raise UserError(f"arm {arm.name}: its tokenizer or chat template renders otherwise than the base's; merge anew")
    ends = arm.renderer.tokenizer.convert_ids_to_tokens(sorted(arm.stop_ids))
    print(f"arm {arm.name}; end tokens: {', '.join(ends)}; greedy, whatever generation_config says")
    lines = replay_all(arm, requests, step.partial / "requests.jsonl")
    timings = time_all(arm, requests, lines, step.partial / "timings.jsonl")
    by_benchmark = {name: [lines[r.id] for r in rows] for name, rows in requests.items()}
    standard = Report()  # a summary's intervals are always these; the report computes its own
    figures = metrics.summarise(by_benchmark, timings, standard.confidence, standard.bootstrap, recipe.run.seed)
    decoding = {
        "decoding": "greedy; generation_config's sampling values and penalties are not used",
        "end_tokens": ends,
    }
    return {
        "arm": arm.name,
        **figures,
        "settings": {
            **{key: step.settings[key] for key in ("eval", "model", "prompt", "seed")},
            **decoding,
            "end_tokens": ends,
        },
        "hashes": {**hashes, "weights": arm.weights},
        "versions": run_folder.versions(),
        "commit": run_folder.provenance()["commit"],
        "device": arms.device_name(arm.model.device),
        "noise_floor": timing.noise_floor(lines, timings, recipe.model.dtype),
        "sandbox": sandbox,
        "ids": {name: [request.id for request in rows] for name, rows in requests.items()},
    }


def replay_all(arm: arms.Arm, requests: Requests, path: Path) -> dict[str, dict[str, Any]]:
    """Replay and score, a batch at a time; whole batches that a killed run left are taken over."""
    done = {line["id"]: line for line in read_whole_lines(path)}
    for name, rows in requests.items():
        began = time.monotonic()
        for begin in range(0, len(rows), arm.recipe.eval.batch_size):
            part = rows[begin : begin + arm.recipe.eval.batch_size]
            if any(request.id not in done for request in part):
                fresh = replay(arm, part)
                suite.score(name, part, fresh, arm.recipe.eval)
                fresh = [{**line, "benchmark": name} for line in fresh]
                append(path, [line for line in fresh if line["id"] not in done])
                done |= {line["id"]: line for line in fresh}
            print(progress(name, [done[r.id] for r in rows[: begin + len(part)]], len(rows), began), flush=True)
    return done


def time_all(arm: arms.Arm, requests: Requests, lines: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Time the first `eval.timed` requests of each benchmark (all where it is not given), the excluded apart."""
    timings = read_whole_lines(path)
    done = {timing["id"] for timing in timings}
    warm = False
    for name, rows in requests.items():
        # By place in the benchmark, not by outcome: so that all arms time the same requests.
        chosen = [request for request in rows[: arm.recipe.eval.timed] if lines[request.id]["excluded"] is None]
        for i, request in enumerate(chosen):
            if request.id in done:
                continue
            if not warm:
                timing.warm_up(arm, request)
                warm = True
            taken = timing.time_request(arm, request, lines[request.id], stream_first=bool(i % 2))
            append(path, [taken])
            timings.append(taken)
            print(f"{name}: timed {i + 1}/{len(chosen)}", flush=True)
    return timings


def progress(name: str, lines: Sequence[dict[str, Any]], total: int, began: float) -> str:
    """How far, with the running median speedup in passes."""
    speedups = [line["base_passes"] / line["stream_passes"] for line in lines if line["excluded"] is None]
    median = f", median speedup {statistics.median(speedups):.2f}x in passes" if speedups else ""
    return f"{name}: {len(lines)}/{total}{median}, {time.monotonic() - began:.0f} s"


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that a killed run may have left; what follows the last line end is cut off."""
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")  # bytes: a kill may have cut a character
    path.write_bytes(b"".join(line + b"\n" for line in whole))
    return [json.loads(line) for line in whole]


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append JSON lines in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
