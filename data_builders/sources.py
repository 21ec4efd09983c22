"""Where rows come from: the files of a corpus, in pieces that one worker reads, as a stream.

A corpus' hub repository is fetched into the hub's own cache; a local file or folder of the same schema takes its place.
The pieces depend on the files alone, not on who reads them: whole row groups of a Parquet file, whole lines of a .jsonl
file, and a .jsonl.gz file in one. A row that cannot be read as its file's kind is a value here (`Unreadable`), never
the end of a build.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_builders.corpora.protocol import Origin
from eval.benchmarks.rows import SUFFIXES
from recipes.errors import UserError

ROWS = 5_000  # about so many in a piece
_BLOCK = 1 << 22
_DAMAGE = (OSError, EOFError, zlib.error, pa.ArrowException)


@dataclass(frozen=True)
class Piece:
    """Row groups (Parquet) or bytes (.jsonl) `begin` to `end` of a file; `first` is the number of its first row.

    `corpus` is the name in data.corpora; the file "" stands for rows that come with headstart.
    """

    corpus: str
    file: str
    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class Unreadable:
    """What stands in the place of a row that is not JSON, or not an object."""

    fault: str


def files(name: str, origin: Origin, path: str | None) -> list[Path]:
    """The files of a corpus, by name: those at `path`, or the hub's.

    Raises UserError that names the dataset and what to do where they cannot be had.
    """
    if path is None and origin.hub is None:
        raise UserError(f"data.corpora: {name} is not on the hub; give its file: data.paths.{name}=PATH")
    place = Path(path) if path is not None else _fetched(name, origin)
    if path is not None and not place.exists():
        key = "data.corpora" if name == path else f"data.paths.{name}"
        raise UserError(f"{key}: {place} is not there; give a file or folder of the corpus' rows")
    inside = sorted(f for f in place.rglob("*") if f.name.endswith(SUFFIXES) and f.is_file())
    found = [place] if place.is_file() else inside
    if path is None:  # others, of the same commit, may lie in the cache
        found = [f for f in found if any(fnmatch(f.relative_to(place).as_posix(), kind) for kind in origin.files)]
    if not found:
        raise UserError(_without_rows(name, place, str(place) if path is not None else str(origin.hub)))
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"{file}: give a file that ends in {', '.join(SUFFIXES)}")
    return found


def plan(corpus: str, file: Path) -> Iterator[Piece]:
    """The pieces of a file, in order. Raises UserError where it cannot be opened."""
    try:
        yield from _groups(corpus, file) if file.suffix == ".parquet" else _lines(corpus, file)
    except _DAMAGE as error:
        raise UserError(f"{file}: cannot be read ({_said(error)}); give a whole file") from None


def rows(piece: Piece, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | Unreadable]]:
    """The rows of a piece with their numbers, from 1. Raises UserError where the file itself is damaged."""
    path = Path(piece.file)
    try:
        yield from _parquet_rows(piece, columns) if path.suffix == ".parquet" else _json_rows(piece)
    except _DAMAGE as error:
        raise UserError(f"{path}, from row {piece.first}: cannot be read ({_said(error)}); give a whole file") from None


def _groups(corpus: str, file: Path) -> Iterator[Piece]:
    with pq.ParquetFile(file) as table:
        sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    begin, held, first = 0, 0, 1
    for group, size in enumerate(sizes, 1):
        held += size
        if held >= ROWS or group == len(sizes):
            yield Piece(corpus, str(file), begin, group, first)
            begin, held, first = group, 0, first + held


def _lines(corpus: str, file: Path) -> Iterator[Piece]:
    if file.suffix == ".gz":
        with gzip.open(file) as packed:
            packed.read(1)
        yield Piece(corpus, str(file), 0, file.stat().st_size, 1)
        return
    begin, position, held, first = 0, 0, 0, 1
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            at = block.find(b"\n")
            while at >= 0:
                held += 1
                if held == ROWS:
                    yield Piece(corpus, str(file), begin, position + at + 1, first)
                    begin, held, first = position + at + 1, 0, first + held
                at = block.find(b"\n", at + 1)
            position += len(block)
    if position > begin:
        yield Piece(corpus, str(file), begin, position, first)


def _parquet_rows(piece: Piece, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | Unreadable]]:
    number = piece.first
    with pq.ParquetFile(piece.file) as table:
        wanted = _present(table, columns)
        for batch in table.iter_batches(batch_size=500, row_groups=range(piece.begin, piece.end), columns=wanted):
            for row in _as_rows(batch):
                yield number, row
                number += 1


def _present(table: pq.ParquetFile, columns: Sequence[str]) -> list[str] | None:
    """Those of `columns` that the file has; a nested one by its first name, where its own is spelt otherwise (the
    elements of a list have several names, by the writer's age)."""
    if not columns:
        return None
    paths = {table.metadata.schema.column(i).path for i in range(len(table.metadata.schema))}
    tops = {column: column.partition(".")[0] for column in columns}
    return [column if column in paths else top for column, top in tops.items() if top in table.schema_arrow.names]


def _as_rows(batch: pa.RecordBatch) -> list[dict[str, Any] | Unreadable]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # a string that is not UTF-8: only its own row is lost
        found: list[dict[str, Any] | Unreadable] = []
        for at in range(batch.num_rows):
            try:
                found += batch.slice(at, 1).to_pylist()
            except UnicodeDecodeError as error:
                found.append(Unreadable(f"not UTF-8 ({error.reason})"))
        return found


def _json_rows(piece: Piece) -> Iterator[tuple[int, dict[str, Any] | Unreadable]]:
    opener = gzip.open if piece.file.endswith(".gz") else open
    with opener(piece.file, "rb") as lines:
        left = piece.end - piece.begin
        if not piece.file.endswith(".gz"):
            lines.seek(piece.begin)
        for number, line in enumerate(lines, piece.first):
            if not piece.file.endswith(".gz"):
                if left <= 0:
                    return
                left -= len(line)
            if line.strip():
                yield number, _parsed(line)


def _parsed(line: bytes) -> dict[str, Any] | Unreadable:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Unreadable(f"not UTF-8 ({error.reason})")
    except json.JSONDecodeError as error:
        return Unreadable(f"not JSON ({error.msg})")
    except ValueError:
        return Unreadable("a number of too many digits")
    except RecursionError:
        return Unreadable("nested too deeply")
    return found if isinstance(found, dict) else Unreadable(f"an object is due, here is {type(found).__name__}")


def _fetched(name: str, origin: Origin) -> Path:
    import huggingface_hub  # slow to import, and not needed for local rows

    try:
        kinds = [*origin.files, "*.py"]
        return Path(huggingface_hub.snapshot_download(str(origin.hub), repo_type="dataset", allow_patterns=kinds))
    except Exception as error:  # whatever the hub, the network or the cache raises
        raise UserError(_refused(name, origin, error)) from None


def _refused(name: str, origin: Origin, error: Exception) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    where = f"https://huggingface.co/datasets/{origin.hub}"
    local = f"or give a local file of the same schema: data.paths.{name}=PATH"
    cause = error if isinstance(error, HfHubHTTPError) else error.__cause__ or error  # "not in the cache either"
    if not isinstance(cause, HfHubHTTPError):
        said = f"the hub cannot be reached ({_said(cause)}); try again"
    elif cause.response.status_code in (401, 403):
        said = f"access refused; accept its terms on {where} and set a token (`hf auth login`, or HF_TOKEN)"
    else:
        said = f"the hub does not give it ({_said(cause)}); look at {where}"
    return f"{origin.hub}: {said}, {local}"


def _said(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _without_rows(name: str, place: Path, what: str) -> str:
    if any(place.rglob("*.py")):
        return (
            f"{what}: holds a loading script and no rows; scripts are not run. Take the Parquet files of its branch "
            f"refs/convert/parquet and give them: data.paths.{name}=PATH"
        )
    return f"{what}: holds no file that ends in {', '.join(SUFFIXES)}; give one: data.paths.{name}=PATH"
