"""Reads one arm's evaluation folder back: requests.jsonl, timings.jsonl, summary.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.metrics import Line
from recipes.errors import UserError

_REQUEST_KEYS = (
    "id", "benchmark", "sentences", "draft", "base", "stream", "base_passes", "stream_passes", "stream_passes_paper",
    "draft_tokens", "kept_tokens", "updates", "total_passes", "base_score", "stream_score", "score_note", "excluded",
)  # fmt: skip
_TIMING_KEYS = ("id", "base_seconds", "stream_seconds", "stream_seconds_cold")
_SUMMARY_KEYS = ("arm", "settings", "hashes", "device")


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


def read_arms(*folders: Path) -> list[Arm]:
    """Reads several folders; arms of one name are told apart by their run's name.

    Raises:
        UserError: where a file is missing, a line is broken, or a key or an id is missing or there twice.
    """
    summaries = [_read_summary(folder) for folder in folders]
    names = [str(summary["arm"]) for summary in summaries]
    labels = [
        name if names.count(name) == 1 else f"{name} ({folder.resolve().parent.parent.name}/{folder.name})"
        for name, folder in zip(names, folders, strict=True)
    ]
    return [
        Arm(
            label,
            folder,
            _read_lines(folder / "requests.jsonl", _REQUEST_KEYS),
            _read_lines(folder / "timings.jsonl", _TIMING_KEYS) if (folder / "timings.jsonl").exists() else (),
            summary,
        )
        for label, folder, summary in zip(labels, folders, summaries, strict=True)
    ]


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    if not path.is_file():
        raise UserError(f"{path}: not there; run eval/run.py for this arm first")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); run eval/run.py for this arm again") from error
    _need_keys(summary, _SUMMARY_KEYS, str(path))
    return summary


def _read_lines(path: Path, keys: tuple[str, ...]) -> tuple[Line, ...]:
    if not path.is_file():
        raise UserError(f"{path}: not there; run eval/run.py for this arm first")
    lines: dict[str, Line] = {}
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON ({error}); run eval/run.py for this arm again") from error
            _need_keys(line, keys, where)
            if line["id"] in lines:
                raise UserError(f"{where}: id {line['id']} is there twice; run eval/run.py for this arm again")
            lines[line["id"]] = line
    return tuple(lines.values())


def _need_keys(line: Any, keys: tuple[str, ...], where: str) -> None:
    missing = [key for key in keys if key not in line] if isinstance(line, dict) else list(keys)
    if missing:
        raise UserError(f"{where}: {', '.join(missing)} missing; run eval/run.py for this arm again")
