"""Rows of a benchmark: from the hub by default, or from a local file or folder of the same schema.

A benchmark declares its row as a pydantic model, so that a row of another shape is one clear line and not a crash
in the middle of a run.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


class Row(BaseModel):
    """Base of a benchmark's row: typed strictly; columns that are not declared are left out."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Hub:
    """Where a benchmark lives on the hub. A local `path` in the recipe takes its place."""

    id: str
    split: str
    config: str | None = None


def read(schema: type[R], hub: Hub, path: str | None) -> Iterator[R]:
    """The rows in their order, one at a time: those at `path`, or the hub's where it is None.

    Raises UserError where nothing can be read, and, with file and line, for a row that the schema refuses.
    """
    return read_local(schema, path) if path else _checked(schema, _hub(hub))


def read_local(schema: type[R], path: str) -> Iterator[R]:
    """As `read`, of a .jsonl, .jsonl.gz or .parquet file, or of a folder's files of these kinds, by name."""
    return _checked(schema, _local(Path(path)))


def _checked(schema: type[R], found: Iterator[tuple[str, Any]]) -> Iterator[R]:
    for where, row in found:
        try:
            yield schema.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the row"
            raise UserError(f"{where}: {key}: {first['msg']}; see the row's schema in {schema.__module__}") from None


def _hub(hub: Hub) -> Iterator[tuple[str, Any]]:
    import datasets  # slow to import, and not needed for local rows

    try:
        loaded = datasets.load_dataset(hub.id, hub.config, split=hub.split, streaming=True)
        for number, row in enumerate(loaded, 1):
            yield f"{hub.id}, row {number}", row
    except Exception as error:  # whatever the hub, the network or the cache raise
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{hub.id} cannot be read from the hub ({said}); give a local file of its rows: eval.paths or data.paths"
        ) from None


def _local(path: Path) -> Iterator[tuple[str, Any]]:
    files = sorted(f for f in path.iterdir() if f.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: holds no file that ends in {', '.join(SUFFIXES)}")
    for file in files:
        try:
            yield from _parquet(file) if file.suffix == ".parquet" else _lines(file)
        except (OSError, EOFError, UnicodeDecodeError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(file) as table:
        rows = (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{file}, row {number}", row


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8", newline="\n") as lines:  # only a line feed ends a line
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"{file}, line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{file}, line {number}: not JSON ({error.msg})") from None
                except RecursionError:
                    raise UserError(f"{file}, line {number}: nested too deeply") from None
