"""What the evaluation costs beside the paper's protocol, on SmolLM2-135M and MBPP in float32. Run by `make bench`.

The protocol: one request at a time, a draft at every sentence, every prefix prefilled anew, then base from nothing.
Only its decoding is on the clock. `eval/run.py` is started as a user starts it, and all that it does is on the clock:
imports, loading, replaying, scoring, timing and writing. Ratios are taken side by side in one run, and the counts of
both have to agree; exits with 1 where they do not, or where a bound is missed.

MBPP is read from HEADSTART_SHARED/data/mbpp, or from the hub where that variable is not set.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import arms, suite
from eval.arms import Arm
from eval.lines import read_whole_lines
from headstart.decoder import Answer, PassCounter
from headstart.request import Request
from recipes.errors import UserError
from recipes.loader import parse

ROOT = Path(__file__).resolve().parents[1]
REQUESTS, LIMIT, ABREAST = 32, 96, 64
TIMED = REQUESTS // 4
# (eval.replay, eval.timed) and the least ratio. `last`, the default, has the same residual counts from fewer drafts;
# `full` makes every draft, as the protocol does: printed only.
RUNS = (("last", 0, 8.0), ("last", TIMED, 4.0), ("full", 0, None))


@dataclass(frozen=True)
class Cost:
    """One request under the protocol. `updates` has (passes, kept tokens, draft tokens) of each sentence."""

    base_passes: int
    updates: tuple[tuple[int, int, int], ...]
    base: tuple[int, ...]


def main() -> None:
    settings = [
        *("recipe=smollm2", "model.dtype=float32", "eval.benchmarks=[mbpp]", f"eval.limit={REQUESTS}"),
        *(f"eval.max_new_tokens={LIMIT}", f"eval.batch_size={ABREAST}", *paths()),
    ]
    try:
        requests = suite.load(parse(settings)).requests["mbpp"]
    except UserError as error:
        print(f"the cost beside the paper's protocol is left out: {error}")
        return
    costs, paper = protocol(settings, requests)
    drafts = sum(len(cost.updates) for cost in costs.values())
    print(f"paper's protocol: {paper:.1f} s for {len(costs)} requests, {drafts} updates, {LIMIT} tokens at most")
    faults = []
    for replay, timed, bound in RUNS:
        lines, seconds = evaluated(settings, replay, timed)
        ratio, wanted = paper / seconds, f" (at least {bound:g})" if bound else ""
        print(f"eval/run.py eval.replay={replay} eval.timed={timed}: {seconds:.1f} s, {ratio:.1f}x less{wanted}")
        if bound and ratio < bound:
            faults.append(f"eval.replay={replay} eval.timed={timed} is {ratio:.1f}x cheaper, not {bound:g}x")
        faults += differences(costs, lines, replay)
    if faults:
        raise SystemExit("\n".join(faults))


def paths() -> list[str]:
    """The setting that names the local rows, where there are any."""
    shared = os.environ.get("HEADSTART_SHARED")
    return [f"eval.paths.mbpp={Path(shared) / 'data' / 'mbpp'}"] if shared else []


def protocol(settings: Sequence[str], requests: Sequence[Request]) -> tuple[dict[str, Cost], float]:
    """What each request costs under the paper's protocol, by id, and the seconds that all of it took."""
    arm = arms.load(parse(settings))
    walk(arm, requests[0], sentences=1)  # warm-up
    began = time.perf_counter()
    costs = {request.id: walk(arm, request, len(request.sentences)) for request in requests}
    return costs, time.perf_counter() - began


def walk(arm: Arm, request: Request, sentences: int) -> Cost:
    """Verify the former draft under the new prefix, keep its leading run, decode on; at last base from nothing."""
    decoder, draft, updates = arm.decoder(), Answer(), []
    with PassCounter(arm.model) as counter:
        for i in range(1, 1 + sentences):
            decoder.forget()
            prompt, before = arm.prompt(request, i), counter.calls
            verified = decoder.verify(prompt, draft)
            draft = decoder.decode(prompt, verified.answer)
            updates.append((counter.calls - before, verified.kept, len(draft.tokens)))
        decoder.forget()
        before = counter.calls
        base = decoder.decode(prompt, decoder.verify(prompt, Answer()).answer)
        return Cost(counter.calls - before, tuple(updates), base.tokens)


def evaluated(settings: Sequence[str], replay: str, timed: int) -> tuple[list[dict[str, Any]], float]:
    """The lines of requests.jsonl, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        mode = (f"eval.replay={replay}", f"eval.timed={timed}", f"run.dir={folder}/run")
        command = [sys.executable, str(ROOT / "eval" / "run.py"), *settings, *mode]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return read_whole_lines(Path(folder) / "run" / "eval" / "message" / "requests.jsonl"), seconds


def differences(costs: dict[str, Cost], lines: Sequence[dict[str, Any]], replay: str) -> list[str]:
    """Where a line counts otherwise than the protocol; prints how many were compared."""
    faults = []
    compared = [line for line in lines if line["excluded"] is None]
    for line in compared:
        cost = costs[line["id"]]
        last, draft = cost.updates[-1], cost.updates[-2]
        ours = [line[key] for key in ("base_passes", "stream_passes", "kept_tokens")]
        theirs = [cost.base_passes, last[0], last[1]]
        if replay == "full":
            ours += [
                [[u["passes"], u["kept_tokens"], u["draft_tokens"]] for u in line["updates"]],
                line["total_passes"],
            ]
            theirs += [[list(update) for update in cost.updates], sum(update[0] for update in cost.updates)]
        ours += [line["base"]["tokens"], len(line["draft"]["tokens"])]
        theirs += [list(cost.base), draft[2]]
        if ours != theirs:
            faults.append(f"{line['id']} under eval.replay={replay}: counted {ours}, under the protocol {theirs}")
    what = "every update and the total" if replay == "full" else "the last sentence"
    print(f"  counts of {what}: {len(compared) - len(faults)} of {len(compared)} requests the same")
    if {line["id"] for line in lines} != set(costs):
        faults.append(f"eval.replay={replay}: other requests than the protocol's")
    return faults


if __name__ == "__main__":
    main()
