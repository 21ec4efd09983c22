"""Scores answers whose verdict is known before any model is trusted: the references, and programs that must fail."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval import suite
from eval.benchmarks.protocol import Known
from eval.sandbox import SandboxError
from headstart.request import Request
from recipes.errors import UserError
from recipes.schema import Eval

BATCH = 64


def lines(requests: Mapping[str, Sequence[Request]], settings: Eval) -> Iterable[dict[str, Any]]:
    """One line a known answer: id, benchmark, name, expected, value and note; `note` alone for an unfit request.

    Raises UserError where the sandbox fails.
    """
    for name, rows in requests.items():
        unfit = suite.unfit(name)
        fit = []
        for request in rows:
            if reason := unfit(request):
                yield {"id": request.id, "benchmark": name, "name": "unfit", "note": reason}
            else:
                fit += [(request, known) for known in suite.benchmark(name).known(request)]
        for begin in range(0, len(fit), BATCH):
            yield from _scored(name, fit[begin : begin + BATCH], settings)
            print(f"{name}: {min(begin + BATCH, len(fit))}/{len(fit)} known answers", flush=True)


def _scored(name: str, pairs: Sequence[tuple[Request, Known]], settings: Eval) -> Iterable[dict[str, Any]]:
    answers = [known.answer for _, known in pairs]
    try:
        scores = suite.benchmark(name).score([request for request, _ in pairs], answers, suite.limits(settings))
    except SandboxError as error:
        raise UserError(f"scoring stopped, the sandbox failed ({error}); run the same command again") from error
    for (request, known), score in zip(pairs, scores, strict=True):
        head = {"id": request.id, "benchmark": name, "name": known.name, "expected": known.expected}
        yield {**head, "value": score.value, "note": score.note}


def summarise(scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per benchmark: n and how many were as expected for each kind of answer, the surprises, and what was unfit."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(line["benchmark"] for line in scored):
        mine = [line for line in scored if line["benchmark"] == name]
        judged = [line for line in mine if line["name"] != "unfit"]
        total, right = (
            Counter(line["name"] for line in judged),
            Counter(line["name"] for line in judged if _right(line)),
        )
        found[name] = {
            **{kind: {"n": total[kind], "as_expected": right[kind]} for kind in total},
            "surprises": [{"id": x["id"], "name": x["name"], "note": x["note"]} for x in judged if not _right(x)],
            "unfit": Counter(line["note"] for line in mine if line["name"] == "unfit"),
        }
    return found


def _right(line: Mapping[str, Any]) -> bool:
    return bool(line["value"] == line["expected"])


def say(summary: Mapping[str, Any]) -> str:
    """The summary, a line or two a benchmark."""
    text = []
    for name, part in summary.items():
        kinds = [
            f"{kind} {part[kind]['as_expected']}/{part[kind]['n']}" for kind in ("reference", "before") if kind in part
        ]
        unfit = [f"{count} left out: {reason}" for reason, count in sorted(part["unfit"].items())]
        text.append(f"{name}: {', '.join([*kinds, *unfit]) or 'no known answers'}")
        text += [f"  {x['id']} ({x['name']}): {x['note']}" for x in part["surprises"]]
    return "\n".join(text)


def dump(scored: Iterable[Mapping[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in scored)
