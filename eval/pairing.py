"""Which two arms may be compared, and on which requests."""

from collections.abc import Mapping
from typing import Any

from eval.evidence import Arm
from eval.metrics import Line, included
from recipes.errors import UserError

Pair = tuple[Line, Line]
Pairs = dict[str, list[Pair]]

MUST_AGREE = ("data", "renderer", "sentence_rule")
# How much is run, what is shown and how it is batched do not change a request's figures; the arm is what is compared.
MAY_DIFFER = ("arm", "benchmarks", "limit", "timed", "replay", "batch_size", "allow_code_execution")


def check_comparable(before: Arm, after: Arm) -> None:
    """Raises UserError unless data, renderer, sentence rule and the settings behind the counts are the same."""
    if before.folder.resolve() == after.folder.resolve():
        raise UserError(f"{before.folder}: before and after are the same folder; set report.before or report.after")
    differing = [
        f"{key} hash ({_short(a)} before, {_short(b)} after)"
        for key in MUST_AGREE
        if (a := before.summary["hashes"].get(key)) != (b := after.summary["hashes"].get(key)) or a is None
    ]
    left, right = _settings(before), _settings(after)
    differing += [
        f"{key} ({_short(left.get(key))} before, {_short(right.get(key))} after)"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not _one_without_message(key, left, right)
    ]
    if before.timings and after.timings and before.summary["device"] != after.summary["device"]:
        differing.append(f"device ({before.summary['device']} before, {after.summary['device']} after)")
    if differing:
        raise UserError(
            f"{before.folder} and {after.folder} cannot be compared: they differ in {'; '.join(differing)}; "
            "run eval/run.py again for one of them"
        )


def paired(before: Arm, after: Arm) -> Pairs:
    """By benchmark, the requests that are included in both arms, in the after arm's order.

    Raises UserError where a request's sentences differ.
    """
    earlier = {(r["benchmark"], r["id"]): r for r in included(before.records)}
    pairs: Pairs = {}
    for record in included(after.records):
        other = earlier.get((record["benchmark"], record["id"]))
        if other is None:
            continue
        if other["sentences"] != record["sentences"]:
            raise UserError(
                f"{after.folder}: the sentences of {record['id']} differ from those in {before.folder}; "
                "run eval/run.py again for one of them"
            )
        pairs.setdefault(record["benchmark"], []).append((other, record))
    return pairs


def unpaired(pairs: Pairs, before: Arm, after: Arm) -> dict[str, list[str]]:
    """The ids that only one of the arms includes."""
    shared = {a["id"] for group in pairs.values() for _, a in group}
    return {
        "before": [r["id"] for r in included(before.records) if r["id"] not in shared],
        "after": [r["id"] for r in included(after.records) if r["id"] not in shared],
    }


def _settings(arm: Arm) -> dict[str, Any]:
    settings = {k: v for k, v in _flat(arm.summary["settings"]).items() if k.split(".")[-1] not in MAY_DIFFER}
    rule = next((v for k, v in settings.items() if k.split(".")[-1] == "acceptance"), None)
    unused = {"tau": "threshold", "top_k": "top_k"}
    return {k: v for k, v in settings.items() if unused.get(k.split(".")[-1], rule) == rule}


def _one_without_message(key: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """The `plain` arm has no system message for incomplete requests; two messages must be the same."""
    return key.split(".")[-1] == "system_message" and not (left.get(key) and right.get(key))


def _flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
