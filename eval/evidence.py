"""Reads one arm's evaluation folder back: requests.jsonl, timings.jsonl, summary.json."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.metrics import Line
from recipes import run_folder
from recipes.errors import UserError

Kinds = Mapping[str, Any]  # key -> the types that its value may have

_AGAIN = "run eval/run.py for this arm again"
_ANSWER: Kinds = {"tokens": list, "text": str, "stop": str}
_REQUEST: Kinds = {
    "id": str,
    "benchmark": str,
    "sentences": list,
    "excluded": str | None,
    **dict.fromkeys(("draft", "base", "stream"), dict),
    **dict.fromkeys(("base_passes", "stream_passes", "stream_passes_paper", "draft_tokens", "kept_tokens"), int),
    **dict.fromkeys(("base_score", "stream_score"), int | float | None),
    "updates": list | None,
    "total_passes": int | None,
    "score_note": str | None,
}
_LATER: Kinds = dict.fromkeys(  # older runs lack them
    ("base_passes_lookup", "stream_passes_recycle", "unseen_tokens", "turn_tokens"), int | None
)
_IDENTITY = ("id", "benchmark", "sentences")
_EXCLUDED: Kinds = {key: kind if key in _IDENTITY else kind | None for key, kind in _REQUEST.items()}
_TIMING: Kinds = {
    "id": str,
    **dict.fromkeys(("base_seconds", "stream_seconds", "stream_seconds_cold"), int | float | None),
}
_SUMMARY: Kinds = {"arm": str, "settings": dict, "hashes": dict, "device": str}


@dataclass(frozen=True)
class Arm:
    """One arm's evidence. `label` tells it apart from the other arms of a report."""

    label: str
    folder: Path
    records: tuple[Line, ...]
    timings: tuple[Line, ...]
    summary: Mapping[str, Any]

    def by_benchmark(self) -> dict[str, list[Line]]:
        """The requests of each benchmark, in the file's order."""
        groups: dict[str, list[Line]] = {}
        for record in self.records:
            groups.setdefault(record["benchmark"], []).append(record)
        return groups

    def setting(self, name: str) -> Any:
        """A setting by the last part of its name; None where the evidence has none."""
        found = flat(self.summary["settings"])
        return next((value for key, value in found.items() if key.split(".")[-1] == name), None)


def flat(settings: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted key; what is None is left out."""
    if not isinstance(settings, Mapping):
        return {} if settings is None else {path: settings}
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{path}.{key}" if path else str(key))
    return found


def one_of_each(folders: Iterable[Path]) -> dict[Path, Path]:
    """Each folder -> the first one of the same arm, made by the same weights, data and settings on the same device.

    Raises UserError where a summary is missing or broken.
    """
    first: dict[str, Path] = {}
    return {folder: first.setdefault(_made_of(folder), folder) for folder in folders}


def _made_of(folder: Path) -> str:
    summary = _read_summary(folder)
    return run_folder.digest([summary[key] for key in ("arm", "hashes", "settings", "device")])


def read_arms(*folders: Path) -> list[Arm]:
    """Reads several folders; arms of one name are told apart by their run's name.

    Raises:
        UserError: where a file is missing or broken, a key is missing or of another type, or an id is there twice.
    """
    summaries = [_read_summary(folder) for folder in folders]
    names = _labels([str(summary["arm"]) for summary in summaries], folders)
    return [
        Arm(label, folder, _read_requests(folder), _read_timings(folder), summary)
        for label, folder, summary in zip(names, folders, summaries, strict=True)
    ]


def _labels(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The names, and beside those that are there twice as much of the path as tells them apart."""
    labels = list(names)
    for depth in range(1, 1 + max(len(folder.resolve().parts) for folder in folders)):
        if len(set(labels)) == len(labels):
            break
        places = ["/".join((*f.resolve().parent.parent.parts[-depth:], f.name)) for f in folders]
        labels = [n if names.count(n) == 1 else f"{n} ({place})" for n, place in zip(names, places, strict=True)]
    return labels


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return _checked(_parsed(_bytes_of(path), str(path)), _SUMMARY, str(path))


def _read_requests(folder: Path) -> tuple[Line, ...]:
    path = folder / "requests.jsonl"
    lines = _read_lines(path)
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        whole = line.get("excluded") is None
        _checked(line, _REQUEST if whole else _EXCLUDED, where)
        _checked({key: line.get(key) for key in _LATER}, _LATER, where)
        for side in ("draft", "base", "stream") if whole else ():
            _checked(line[side], _ANSWER, f"{where}, {side}")
    return lines


def _read_timings(folder: Path) -> tuple[Line, ...]:
    path = folder / "timings.jsonl"
    lines = _read_lines(path) if path.exists() else ()
    for number, line in enumerate(lines, start=1):
        _checked(line, _TIMING, f"{path}, line {number}")
    return lines


def _read_lines(path: Path) -> tuple[Line, ...]:
    """The file's objects, each with an id of its own."""
    lines: dict[str, Line] = {}
    for number, text in enumerate(_bytes_of(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        line = _checked(_parsed(text, where), {"id": str}, where)
        if line["id"] in lines:
            raise UserError(f"{where}: id {line['id']} is there twice; {_AGAIN}")
        lines[line["id"]] = line
    return tuple(lines.values())


def _bytes_of(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"{path}: not there; run eval/run.py for this arm first")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from error


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); {_AGAIN}") from error


def _checked(line: Any, kinds: Kinds, where: str) -> dict[str, Any]:
    """The object itself, once it is known to have these keys with values of these types."""
    if not isinstance(line, dict):
        raise UserError(f"{where}: not an object but {type(line).__name__}; {_AGAIN}")
    if missing := [key for key in kinds if key not in line]:
        raise UserError(f"{where}: {', '.join(missing)} missing; {_AGAIN}")
    for key, kind in kinds.items():
        if not isinstance(line[key], kind):
            raise UserError(f"{where}: {key} cannot be {type(line[key]).__name__}; {_AGAIN}")
    return line
