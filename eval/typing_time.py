"""Time to draft: are drafts finished before the next sentence is typed, and what is lost where they are not?

The paper assumes that a draft is made and revised faster than the user types the next sentence, and leaves that
untested ("Answering While You Type", arXiv 2610.26296, section 3). Here it is worked out after the fact, from the full
replay and the measured seconds of each update.

The model. Sentence i has c_i characters and is typed evenly at v characters a second, without a pause. Once it is
there, update i verifies the draft at hand and decodes on until sentence i + 1 is there, c_(i+1) / v seconds later. It
goes at a constant rate: a pass takes the measured seconds of update i / its measured passes, the verification is one of
them, and each pass adds one token after the kept run. Where the former draft was cut at e tokens, min(k_i, e) of them
are kept instead of the measured k_i, and update i needs max(1, T_i - min(k_i, e)) passes for its T_i tokens. A draft is
finished where these fit into the time; else it is cut at its kept run and one token for each whole pass. Of the last
draft, cut at e tokens, min(k, e) are kept at submission, and the residual is max(1, N - min(k, e)) passes.

What is approximated:

- A verification is taken to last as long as any other pass, though it reads the prompt's new part and the draft too:
  a draft that is cut early has somewhat fewer tokens than said here. The seconds of a whole update are as measured.
- A pass that is under way when the next sentence comes is lost and costs no waiting; a session lets it finish.
- An update that is stopped before its first pass is through leaves the tokens that its verification would have kept.
- Draft i and the answer have the same tokens whatever was left of the draft before. That is exact under `greedy` in
  float32, where they depend on the text alone; under other rules, and where near-ties flip, it is not.
- Tokens and passes are those of requests.jsonl, made many abreast; seconds are those of one request walked by itself.
- Nobody types evenly. Pauses and corrections give a draft more time than it has here, a pasted sentence gives none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.metrics import Line, included
from eval.resampling import estimate, interval, seed_for
from headstart.residual import residual
from recipes.errors import UserError

CHARACTERS_A_WORD = 5  # as typing speeds are counted, the blank among them
WORDS_A_MINUTE = (20, 40, 60, 80, 100, 120)
Walk = tuple[Line, Sequence[float]]  # a line of requests.jsonl and the seconds of its updates


@dataclass(frozen=True)
class Typed:
    """One request typed at one speed: its drafts, how many were finished, and the speedup in passes that is left."""

    drafts: int
    finished: int
    last_finished: bool
    speedup: float


def time_to_draft(
    records_by_benchmark: Mapping[str, Sequence[Line]],
    timings: Iterable[Line],
    chars_per_second: float,
    confidence: float,
    samples: int,
    seed: int,
) -> dict[str, Any]:
    """What typing speeds of 20 to 120 words a minute, and `chars_per_second`, leave of the drafts and the speedup.

    It rests on the included requests that were walked in full and timed (`eval.replay=full`, `eval.timed`).

    Returns:
        `benchmarks` and `pooled`, each {"n", "n_drafts", "reason", "measured", "speeds"}. `speeds` is a list, slowest
        first, of {"chars_per_second", "words_a_minute", "own" (whether it is the recipe's)} and the figures
        `drafts_finished_share` (finished drafts / drafts, the last sentence's answer not among them),
        `last_draft_finished_share` (requests whose last draft is finished), `speedup_passes_mean` and
        `speedup_passes_median`, each {"value", "low", "high"} from a bootstrap over requests. `measured` has the same
        figures where every draft is waited for. Without such requests both are None, and `reason` says why.

    Raises:
        UserError: where the updates of a request and their seconds differ in number.
    """
    seconds = {t["id"]: t.get("update_seconds") for t in timings}
    everything = [record for records in records_by_benchmark.values() for record in records]

    def section(name: str, records: Sequence[Line]) -> dict[str, Any]:
        return _section(records, seconds, chars_per_second, confidence, samples, seed_for(seed, name))

    return {
        "benchmarks": {name: section(name, records) for name, records in records_by_benchmark.items()},
        "pooled": section("pooled", everything),
    }


def typed(walk: Walk, chars_per_second: float) -> Typed:
    """The module's model, on one request; at 0 characters a second every draft is waited for."""
    record, update_seconds = walk
    updates, sentences = record["updates"], record["sentences"]
    held, finished = 0, []
    for update, seconds, following in zip(updates[:-1], update_seconds[:-1], sentences[1:], strict=True):
        kept = min(update["kept_tokens"], held)
        needed = residual(update["draft_tokens"], kept)
        passes = _whole_passes(_typing(following, chars_per_second), seconds / update["passes"], needed)
        finished.append(passes == needed)
        held = update["draft_tokens"] if finished[-1] else kept + passes
    left = residual(len(record["stream"]["tokens"]), min(record["kept_tokens"], held))
    return Typed(len(finished), sum(finished), finished[-1], record["base_passes"] / left)


def speeds(chars_per_second: float) -> list[tuple[float, bool]]:
    """Typing speeds in characters a second, slowest first, and whether each is the given one, which is among them."""
    usual = [words * CHARACTERS_A_WORD / 60 for words in WORDS_A_MINUTE]
    others = [(speed, False) for speed in usual if not math.isclose(speed, chars_per_second)]
    return sorted([*others, (chars_per_second, True)])


def _section(
    records: Sequence[Line],
    seconds: Mapping[str, Sequence[float] | None],
    own: float,
    confidence: float,
    samples: int,
    seed: Sequence[int],
) -> dict[str, Any]:
    walks = _walks(records, seconds)
    if not walks:
        return {"n": 0, "n_drafts": 0, "reason": _reason(records), "measured": None, "speeds": None}
    return {
        "n": len(walks),
        "n_drafts": sum(len(record["updates"]) - 1 for record, _ in walks),
        "reason": None,
        "measured": _figures(walks, 0.0, confidence, samples, seed),
        "speeds": [
            {"chars_per_second": speed, "words_a_minute": speed * 60 / CHARACTERS_A_WORD, "own": is_own}
            | _figures(walks, speed, confidence, samples, seed)
            for speed, is_own in speeds(own)
        ],
    }


def _walks(records: Sequence[Line], seconds: Mapping[str, Sequence[float] | None]) -> list[Walk]:
    walks = []
    for record in included(records):
        taken = seconds.get(record["id"])
        if taken is None or record["updates"] is None:
            continue
        if not len(taken) == len(record["updates"]) == len(record["sentences"]):
            raise UserError(
                f"timings.jsonl: {record['id']} has the seconds of {len(taken)} updates, requests.jsonl has "
                f"{len(record['updates'])} for {len(record['sentences'])} sentences; run eval/run.py for this arm again"
            )
        walks.append((record, taken))
    return walks


def _reason(records: Sequence[Line]) -> str:
    inside = included(records)
    if not inside:
        return "no request is included"
    if all(record["updates"] is None for record in inside):
        return "only the last draft was made; it needs eval.replay=full"
    return "no request was timed; it needs eval.timed above 0"


def _figures(walks: Sequence[Walk], speed: float, confidence: float, samples: int, seed: Sequence[int]) -> Any:
    runs = [typed(walk, speed) for walk in walks]
    drafts, finished = [run.drafts for run in runs], [run.finished for run in runs]
    last, speedups = [run.last_finished for run in runs], [run.speedup for run in runs]
    wanted: dict[str, tuple[str, list[Any]]] = {
        "drafts_finished_share": ("ratio", [finished, drafts]),
        "last_draft_finished_share": ("mean", [last]),
        "speedup_passes_mean": ("mean", [speedups]),
        "speedup_passes_median": ("median", [speedups]),
    }
    result = {}
    for name, (statistic, columns) in wanted.items():
        found = estimate(statistic, np.array(columns, dtype=np.float64), samples, seed)
        result[name] = interval(found.value, found.draws, confidence)
    return result


def _typing(sentence: str, chars_per_second: float) -> float:
    return len(sentence) / chars_per_second if chars_per_second else math.inf


def _whole_passes(window: float, seconds_a_pass: float, needed: int) -> int:
    """Whole passes of `needed` that fit into `window` seconds; a time that is exactly enough is enough."""
    if not seconds_a_pass:
        return needed
    return math.floor(min(needed, window / seconds_a_pass + 1e-9))
