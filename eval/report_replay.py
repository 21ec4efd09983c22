"""What the page needs to step through a request: each sentence arriving, the draft, what was kept and thrown away."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from eval.benchmarks import own
from eval.evidence import Arm
from eval.metrics import Line
from eval.suite import BENCHMARKS
from headstart.residual import speedup


def replays(arms: Mapping[str, Arm], limit: int) -> list[dict[str, Any]]:
    """The first `limit` included requests of each benchmark, in its order: no picking.

    Args:
        arms: role ("before", "after") -> arm.

    Returns:
        [{"name", "metric", "total", "requests": [{"id", "sentences", "arms": [{"role", "label", "steps", "final"}]}]}]
    """
    lines = {role: {(r["benchmark"], r["id"]): r for r in arm.records} for role, arm in arms.items()}
    result = []
    for name, records in next(iter(arms.values())).by_benchmark().items():
        shown = [r for r in records if r["excluded"] is None]
        requests = [_request(r, arms, lines) for r in shown[:limit]]
        if requests:
            result.append({"name": name, "metric": _metric(name), "total": len(shown), "requests": requests})
    return result


def embedded(data: Any) -> str:
    """JSON that is safe inside a <script> block: the characters that could end it are escaped, half a surrogate pair
    becomes U+FFFD (Chromium aborts on writing one out)."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _metric(benchmark: str) -> str:
    """How its answers are scored; a benchmark that is none of ours is a file of the user's own."""
    return BENCHMARKS.get(benchmark, own).METRIC


def _request(record: Line, arms: Mapping[str, Arm], lines: Mapping[str, Mapping[Any, Line]]) -> dict[str, Any]:
    key = record["benchmark"], record["id"]
    there = [(role, arm, lines[role].get(key)) for role, arm in arms.items()]
    return {
        "id": record["id"],
        "sentences": record["sentences"],
        "arms": [
            {"role": role, "label": arm.label, "steps": _steps(line), "final": _final(line)}
            for role, arm, line in there
            if line is not None and line["excluded"] is None
        ],
    }


def _steps(record: Line) -> list[dict[str, Any]]:
    updates = record["updates"]
    if updates is None:
        return _last_two(record)
    drafts = [0, *(u["draft_tokens"] for u in updates)]
    return [
        _step(i, u["text"], u["kept_text"], u["dropped_text"], u["kept_tokens"], drafts[i - 1], u["passes"])
        for i, u in enumerate(updates, start=1)
    ]


def _last_two(record: Line) -> list[dict[str, Any]]:
    """replay=last: the last draft, and the streamed answer, split where their texts part ways."""
    draft, stream, n = record["draft"], record["stream"], len(record["sentences"])
    same = len(_common(draft["tokens"], stream["tokens"]))
    kept = draft["text"][: len(_common(draft["text"], stream["text"]))] if same else ""
    dropped = draft["text"][len(kept) :]
    held = record["draft_tokens"]
    return [
        _step(n - 1, draft["text"], "", "", 0, 0, None),
        _step(n, stream["text"], kept, dropped, min(same, record["kept_tokens"]), held, record["stream_passes"]),
    ]


def _step(
    seen: int, text: str, kept: str, dropped: str, kept_tokens: int, held_tokens: int, passes: int | None
) -> dict[str, Any]:
    """`kept` + `dropped` is the draft held before this sentence, `kept` + `written` the answer after it."""
    whole = len(_common(kept, text))
    return {
        "seen": seen,
        "kept": text[:whole],
        "dropped": kept[whole:] + dropped,
        "written": text[whole:],
        "keptTokens": kept_tokens,
        "heldTokens": held_tokens,
        "passes": passes,
    }


def _final(record: Line) -> dict[str, Any]:
    names = ("base_passes", "stream_passes", "stream_passes_paper", "total_passes", "draft_tokens", "kept_tokens")
    return {name: record[name] for name in (*names, "base_score", "stream_score", "score_note")} | {
        "speedup": speedup(record["base_passes"], record["stream_passes"]),
        "stop": record["stream"]["stop"],
        "same": record["base"]["tokens"] == record["stream"]["tokens"],
        "base": record["base"]["text"],
    }


def _common(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """The longest common leading run."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
