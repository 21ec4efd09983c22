"""Made-up evidence of an evaluation, deterministic and plausible, for the tests of figures and report."""

import json
import random
from pathlib import Path
from typing import Any

SCRIPT = "</script><img src=x onerror=\"document.documentElement.dataset.owned='1'\">"
HOSTILE = f"{SCRIPT}\u2028<b>&amp;</b>\ud800 ünïcode 日本 🎉"
HASHES = {"data": "d1", "renderer": "r1", "sentence_rule": "s1", "weights": "w1"}
SETTINGS = {
    "arm": "message",
    "acceptance": "greedy",
    "tau": 0.5,
    "max_new_tokens": 128,
    "dtype": "float32",
    "limit": 40,
}


def answer(tokens: list[int], limit: int, note: str = "") -> dict[str, Any]:
    """Tokens as an answer; token 0 is the end of turn, and a token's text is one short word."""
    text = "".join(f" w{t}" for t in tokens if t) + note
    return {"tokens": tokens, "text": text, "stop": "end" if tokens and tokens[-1] == 0 else "length"}


def record(rng: random.Random, name: str, benchmark: str, skill: float, limit: int = 128) -> dict[str, Any]:
    """One request whose counts obey design.md: residual = max(1, N - k), draft and stream share k tokens."""
    sentences = [f"Write f{rng.randrange(99)}. ", "It takes a list. ", f"Example: {'x' * rng.randrange(5, 60)}"]
    length = rng.randrange(20, limit + 20)
    tokens = [rng.randrange(1, 500) for _ in range(min(length, limit))]
    if length < limit:
        tokens[-1] = 0
    n = len(tokens)
    kept = rng.choices([0, rng.randrange(n), n], [1 - skill, 0.2, skill * 0.4])[0]
    wasted = 0 if kept == n else rng.randrange(1, 30)
    draft = tokens[:kept] + [501 + i for i in range(wasted)]
    if rng.random() < 0.08:
        kept, draft = 0, [0]
    base, stream = answer(tokens, limit), answer(tokens, limit)
    held = answer(draft, limit)
    return {
        "id": name,
        "benchmark": benchmark,
        "sentences": sentences,
        "draft": held,
        "base": base,
        "stream": stream,
        "base_passes": n,
        "stream_passes": max(1, n - kept),
        "stream_passes_paper": 1 + n - kept,
        "draft_tokens": 0 if draft == [0] else len(draft),
        "kept_tokens": kept,
        "updates": updates(sentences, held, stream, kept, max(1, n - kept)),
        "total_passes": len(draft) + 1 + max(1, n - kept),
        "base_score": float(passed := rng.random() < 0.3),
        "stream_score": float(passed),
        "score_note": None,
        "excluded": None,
    }


def updates(sentences: list[str], draft: dict, stream: dict, kept: int, passes: int) -> list[dict[str, Any]]:
    """A first draft, kept whole by the second sentence, then the submitted answer."""
    text, size = draft["text"], len(draft["tokens"])
    kept_text = "".join(f" w{t}" for t in stream["tokens"][:kept] if t)
    step = {"draft_tokens": size, "tokens": draft["tokens"], "text": text}
    return [
        step | {"passes": size, "kept_tokens": 0, "kept_text": "", "dropped_text": ""},
        step | {"passes": 1, "kept_tokens": size, "kept_text": text, "dropped_text": ""},
        {
            "passes": passes,
            "draft_tokens": len(stream["tokens"]),
            "kept_tokens": kept,
            "tokens": stream["tokens"],
            "text": stream["text"],
            "kept_text": kept_text,
            "dropped_text": text[len(kept_text) :],
        },
    ]


def left_out(name: str, benchmark: str, reason: str) -> dict[str, Any]:
    """An excluded request: counts and scores are null."""
    keys = "draft base_passes stream_passes stream_passes_paper draft_tokens kept_tokens updates total_passes"
    empty = dict.fromkeys([*keys.split(), "base_score", "stream_score", "score_note"])
    sides = {"base": answer([0], 128), "stream": answer([0], 128)}
    return {"id": name, "benchmark": benchmark, "sentences": ["One."], "excluded": reason} | sides | empty


def records(seed: int, skill: float, n: int = 40, benchmark: str = "humaneval") -> list[dict[str, Any]]:
    """n requests, of which one is excluded and one has hostile text; two have no score."""
    found = [record(random.Random(f"{seed} {benchmark} {i}"), f"{benchmark}/{i}", benchmark, skill) for i in range(n)]
    for line, other in zip(found, range(n), strict=True):
        line["sentences"] = record(random.Random(f"text {benchmark} {other}"), "", "", 0.5)["sentences"]
    found[1]["sentences"][1] = HOSTILE + ". "
    found[1]["stream"]["text"] += HOSTILE
    found[1]["updates"][-1]["text"] += HOSTILE
    found[3] = left_out(found[3]["id"], benchmark, "single sentence")
    found[5] |= {"base_score": None, "stream_score": None, "score_note": "base: harness error: no bwrap; stream: same"}
    found[6] |= {"base_score": None, "stream_score": None, "score_note": "no reference"}
    found[7] |= {"updates": None, "total_passes": None}
    return found


def timings(found: list[dict[str, Any]], every: int = 2) -> list[dict[str, Any]]:
    """Seconds in keeping with the passes, for each `every`-th included request."""
    return [
        {
            "id": r["id"],
            "base_seconds": 0.02 * r["base_passes"],
            "stream_seconds": 0.02 * r["stream_passes"] + 0.001,
            "stream_seconds_cold": 0.02 * r["stream_passes"] + 0.03,
            "update_seconds": None,
        }
        for r in [r for r in found if r["excluded"] is None][::every]
    ]


def write_arm(folder: Path, arm: str, found: list[dict[str, Any]], **changed: Any) -> Path:
    """An eval/<arm> folder; `changed` replaces keys of the summary."""
    folder.mkdir(parents=True)
    clock = timings(found)
    (folder / "requests.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    (folder / "timings.jsonl").write_text("".join(json.dumps(t) + "\n" for t in clock))
    summary = {
        "arm": arm,
        "settings": SETTINGS | {"arm": arm},
        "hashes": HASHES | {"weights": arm},
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "noise_floor": None,
        "sandbox": "bubblewrap",
    }
    (folder / "summary.json").write_text(json.dumps(summary | changed))
    return folder


def write_run(
    folder: Path, benchmarks: tuple[str, ...] = ("humaneval",), n: int = 40, **changed: dict[str, Any]
) -> tuple[Path, Path, Path]:
    """The message, merged and plain arms of one run; `changed` replaces keys of an arm's summary, by its name."""
    skills = (("message", 1, 0.3), ("merged", 2, 0.8), ("plain", 3, 0.25))
    made = [
        write_arm(
            folder / "eval" / arm,
            arm,
            [r for b in benchmarks for r in records(seed, skill, n, b)],
            **changed.get(arm, {}),
        )
        for arm, seed, skill in skills
    ]
    return made[0], made[1], made[2]


def looked_up(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests, evaluated with eval.recycle=true."""
    return [
        r
        if r["excluded"]
        else r
        | {
            "base_passes_lookup": 1 + r["base_passes"] // 2,
            "stream_passes_recycle": 1 + r["stream_passes"] // 3,
            "recycle_differs": ["base"] if r["id"].endswith("/2") else [],
        }
        for r in found
    ]


def swept(benchmarks: tuple[str, ...], taus: tuple[float, ...] = (0.3, 0.6, 0.9)) -> list[dict[str, Any]]:
    """A summary's frontier: the higher tau, the slower and the better."""

    def figures(tau: float) -> dict[str, Any]:
        shown = {"value": 1 - tau / 2, "low": 0.9 - tau / 2, "high": 1.0}
        names = ("speedup_passes_mean", "speedup_passes_median", "kept_share", "one_pass_share")
        return {"n": 39, "quality_stream": shown | {"value": tau}} | dict.fromkeys(names, shown)

    return [
        {"tau": tau, **figures(tau), "macro": figures(tau), "benchmarks": {b: figures(tau) for b in benchmarks}}
        for tau in taus
    ]
