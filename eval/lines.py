"""Files of JSON lines that a killed run may leave: whole lines are kept, a file is whole or not there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that a killed run may have left; what follows the last line end is cut off."""
    if not path.exists():
        return []
    *whole, cut = path.read_bytes().split(b"\n")  # bytes: a kill may have cut a character
    if cut:
        path.write_bytes(b"".join(line + b"\n" for line in whole))
    return [json.loads(line) for line in whole]


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append JSON lines in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A file of JSON lines that is there as a whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    append(partial, rows)
    partial.rename(path)
