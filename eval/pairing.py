"""Which two arms may be compared, and on which requests."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from eval.evidence import Arm, flat
from eval.metrics import Line, included
from recipes.errors import UserError

Pair = tuple[Line, Line]
Pairs = dict[str, list[Pair]]

MUST_AGREE = ("data", "renderer", "sentence_rule")
# How much is run, what is shown and how it is batched do not change a request's figures; the arm is what is compared.
MAY_DIFFER = {
    "arm", "preset", "paths", "limit", "timed", "replay", "recycle", "sweep", "batch_size",
    "gold", "allow_code_execution", "chars_per_second",
}  # fmt: skip
# What another model brings with it: runs of other models stand side by side in a report and are not compared.
OF_THE_MODEL = {"name", "revision", "family", "dtype", "device", "end_tokens", "system_message"}


def check_comparable(before: Arm, after: Arm, force: bool = False) -> list[str]:
    """What data, renderer, sentence rule and the settings behind the counts differ in: nothing, unless forced.

    Raises UserError where they differ and `force` is false, or where both are the same folder.
    """
    if before.folder.resolve() == after.folder.resolve():
        raise UserError(f"{before.folder}: before and after are the same folder; set report.before or report.after")
    differing = _hashes(before, after, MUST_AGREE) + _differences(before, after, set())
    if before.timings and after.timings and before.summary["device"] != after.summary["device"]:
        differing.append(f"device ({before.summary['device']} before, {after.summary['device']} after)")
    if differing and not force:
        raise UserError(
            f"{before.folder} and {after.folder} cannot be compared: they differ in {'; '.join(differing)}; "
            "run eval/run.py again for one of them, or set report.force=true"
        )
    return [f"{before.label} and {after.label} differ in {what}" for what in differing]


def check_together(first: Arm, other: Arm, force: bool = False) -> list[str]:
    """The same for the after arms of two runs that are shown in one report. Models, and what they bring, may differ."""
    one_model = first.setting("family") == other.setting("family") and first.setting("name") == other.setting("name")
    keys = MUST_AGREE if one_model else tuple(key for key in MUST_AGREE if key != "renderer")
    differing = _hashes(first, other, keys) + _differences(first, other, set() if one_model else OF_THE_MODEL)
    if differing and not force:
        raise UserError(
            f"{first.folder} and {other.folder} do not belong in one report: they differ in {'; '.join(differing)}; "
            "leave one out of report.runs, or set report.force=true"
        )
    return [f"{first.label} and {other.label} differ in {what}" for what in differing]


def paired(before: Arm, after: Arm, force: bool = False) -> Pairs:
    """By benchmark, the requests that are included in both arms, in the after arm's order.

    Raises UserError where a request's sentences differ. With `force` it is enough that its text is the same, and a
    request whose text differs is in no pair.
    """
    earlier = {(r["benchmark"], r["id"]): r for r in included(before.records)}
    pairs: Pairs = {}
    for record in included(after.records):
        other = earlier.get((record["benchmark"], record["id"]))
        if other is None or (force and "".join(other["sentences"]) != "".join(record["sentences"])):
            continue
        if not force and other["sentences"] != record["sentences"]:
            raise UserError(
                f"{after.folder}: the sentences of {record['id']} differ from those in {before.folder}; "
                "run eval/run.py again for one of them, or set report.force=true"
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


def _hashes(before: Arm, after: Arm, keys: Iterable[str]) -> list[str]:
    found = [(key, before.summary["hashes"].get(key), after.summary["hashes"].get(key)) for key in keys]
    return [f"{key} hash ({_short(a)} before, {_short(b)} after)" for key, a, b in found if a != b or a is None]


def _differences(before: Arm, after: Arm, ignored: Set[str]) -> list[str]:
    left, right = _settings(before, ignored), _settings(after, ignored)
    return [
        f"{key} ({_short(left.get(key))} before, {_short(right.get(key))} after)"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and not _one_without_message(key, left, right)
    ]


def _settings(arm: Arm, ignored: Set[str]) -> dict[str, Any]:
    """The settings that decide a count or a score; `tau` and `top_k` only under the rule that reads them."""
    passed_over = MAY_DIFFER | ignored
    found = {k: v for k, v in flat(arm.summary["settings"]).items() if not passed_over.intersection(k.split("."))}
    rule = arm.setting("acceptance")
    unused = {"tau": "threshold", "top_k": "top_k"}
    return {k: v for k, v in found.items() if unused.get(k.split(".")[-1], rule) == rule}


def _one_without_message(key: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """The `plain` arm has no system message for incomplete requests; two messages must be the same."""
    return key.split(".")[-1] == "system_message" and not (left.get(key) and right.get(key))


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
