"""Replay one arm's requests sentence by sentence, score the answers, and write the evidence.

    python eval/run.py recipe=smollm2 eval.arm=message     # before (also: plain)
    python eval/run.py recipe=smollm2 eval.arm=merged      # after (also: adapter)
    python eval/run.py recipe=smollm2 eval.gold=true       # no model: are the references scored as right?
    accelerate launch eval/run.py recipe=qwen3 eval.arm=merged

Writes <run>/eval/<arm>: requests.jsonl, summary.json, timings.jsonl where something is timed, and sweep.jsonl under
eval.sweep. A killed run resumes.

Several processes share out the requests, in the batches that one process would make: so requests.jsonl does not depend
on their number, and a killed run resumes with any number. Timing, and eval.gold, are the main process' alone.
"""

import json
import sys
import time

from accelerate import PartialState

from eval import arms, gold, metrics, shards, suite, timing
from eval.lines import read_whole_lines
from eval.sweep import frontier
from eval.typing_time import time_to_draft
from headstart import decoders, launch
from headstart import model as loading
from headstart.prompt import renderer
from headstart.request import Request
from headstart.sentences import RULE_VERSION
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, is_main_process, run_script
from recipes.schema import Report

LEAVING = 2.0  # seconds in which the other processes end, before anything is timed


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, evaluate)


def evaluate(invocation: Invocation) -> None:
    if not invocation.recipe.eval.gold:
        state = launch.processes(invocation.recipe.model, apart=True)
        with launch.main_prints(state):
            replay_arm(invocation, state)
    elif is_main_process():
        score_known(invocation)


def replay_arm(invocation: Invocation, state: PartialState) -> None:
    """Replay, score and time one arm, and write its folder."""
    recipe, arm_name = invocation.recipe, invocation.recipe.eval.arm
    with launch.main_first(state):
        found = suite.load(invocation)
        requests = found.requests
        decoders.check(recipe, requests)
        sandbox = suite.check_scoring(recipe.eval)
        tokenizer = loading.load_tokenizer(recipe.model)
        weights = arms.needed(invocation)
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
        "weights": weights,
        **decoders.settings_of(recipe),
        **hashes,
    }
    folder = invocation.run_dir / "eval" / arm_name
    if invocation.dry_run:
        if state.is_main_process:
            what = ", ".join(f"{len(rows)} of {name}" for name, rows in requests.items())
            run_folder.say_plan(folder, settings, f"would replay {what} into {folder}; {sandbox}")
        return
    with launch.shared_step(state, invocation, folder, settings) as step:
        if step is not None:
            fill(step, requests, hashes, sandbox, state)


def score_known(invocation: Invocation) -> None:
    """`eval.gold=true`: write eval/gold and print what was not as it must be."""
    found = suite.load(invocation)
    sandbox = suite.check_scoring(invocation.recipe.eval)
    settings = {"eval": invocation.recipe.eval.model_dump(mode="json"), "data": found.data_hash}
    folder = invocation.run_dir / "eval" / "gold"
    if invocation.dry_run:
        run_folder.say_plan(
            folder, settings, f"would score the references of {', '.join(found.requests)} into {folder}"
        )
        return
    with run_folder.step(invocation, folder, settings) as step:
        if step is not None:
            scored = list(gold.lines(found.requests, invocation.recipe.eval))
            judged = gold.summarise(scored)
            summary = {"sandbox": sandbox, "benchmarks": judged}
            run_folder.write_atomically(step.partial / "scores.jsonl", gold.dump(scored))
            run_folder.write_atomically(step.partial / "summary.json", json.dumps(summary, indent=1) + "\n")
            run_folder.finish(step)
            print(gold.say(judged))


def fill(
    step: run_folder.Step, requests: dict[str, list[Request]], hashes: dict[str, str], sandbox: str, state: PartialState
) -> None:
    """Replay this process' share; the main process then writes requests.jsonl, timings.jsonl and the summary."""
    recipe = step.invocation.recipe
    arm = arms.load(step.invocation)
    if arm.renderer.fingerprint != hashes["renderer"]:
        raise UserError(f"arm {arm.name}: its tokenizer or chat template renders otherwise than the base's; merge anew")
    ends = arm.renderer.tokenizer.convert_ids_to_tokens(sorted(arm.stop_ids))
    print(f"arm {arm.name}; end tokens: {', '.join(ends)}; greedy, whatever generation_config says")
    shards.share(shards.replayed, arm, requests, step.partial / "requests.jsonl", state)
    if recipe.eval.sweep:
        shards.share(shards.swept, arm, requests, step.partial / "sweep.jsonl", state)
    if not state.is_main_process:
        return  # and end: what is timed has the machine to itself, however long it takes
    lines = {line["id"]: line for line in read_whole_lines(step.partial / "requests.jsonl")}
    if state.num_processes > 1 and recipe.eval.timed != 0:
        time.sleep(LEAVING)
    timings = timing.time_all(arm, requests, lines, step.partial / "timings.jsonl")
    by_benchmark = {name: [lines[r.id] for r in rows] for name, rows in requests.items()}
    standard = Report()  # a summary's intervals are always these; the report computes its own
    how = (standard.confidence, standard.bootstrap, recipe.run.seed)
    decoding = {
        "decoding": "greedy; generation_config's sampling values and penalties are not used",
        "end_tokens": ends,
    }
    summary = {
        "arm": arm.name,
        **metrics.summarise(by_benchmark, timings, *how),
        "typing": time_to_draft(by_benchmark, timings, recipe.eval.chars_per_second, *how),
        "frontier": frontier(read_whole_lines(step.partial / "sweep.jsonl"), *how),
        "settings": {
            **{key: step.settings[key] for key in ("eval", "model", "prompt", "seed", "slots") if key in step.settings},
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
    run_folder.write_atomically(step.partial / "summary.json", json.dumps(summary, indent=1) + "\n")
    run_folder.finish(step)


if __name__ == "__main__":
    sys.exit(main())
