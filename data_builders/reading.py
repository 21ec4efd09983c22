"""First stage: each piece of a corpus is read, its rows admitted as requests, keyed and held against the benchmarks.

A piece leaves its files in the step's partial folder, hidden, each whole under its name or not there: so a killed build
goes on from the pieces that are done, and who did them makes no difference.

    .read/00012.parquet   the requests, with their cuts
    .read/00012.keys      rank, exact key and buckets of each
    .read/00012.text      their words, as duplicates are compared
    .read/00012.jsonl     counts, and the rows that were dropped or repaired
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_builders import corpora, duplicates, rules
from data_builders.contamination import Index
from data_builders.corpora.protocol import Unusable
from data_builders.cuts import Cut, cuts
from data_builders.rules import Rules
from data_builders.sources import Piece, Unreadable, rows
from headstart.request import Message, Request
from recipes.schema import Data

FOLDER = ".read"
HEAD = 200  # characters of a dropped row that are kept for review; a row that holds a benchmark's task is kept whole
KEYS = np.dtype(
    [
        ("rank", "u8"),
        ("group", "u8"),
        ("exact", "u8"),
        ("buckets", "u8", (duplicates.BANDS,)),
        ("cuts", "u4"),
        ("text", "u8"),
    ]
)
_TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sentences", pa.list_(pa.string())),
        ("history", _TURNS),
        ("reference", pa.string()),
        ("extra", pa.string()),
        ("cuts", pa.list_(pa.int32())),
        ("kinds", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Settings:
    """What decides a request; sent to each worker once."""

    data: Data
    seed: int
    rules: Rules
    index: Index | None


@dataclass(frozen=True)
class Drawn:
    """A request with its cuts."""

    request: Request
    cuts: tuple[Cut, ...]


def read_piece(settings: Settings, piece: Piece, number: int, folder: Path) -> None:
    """Read a piece and write its files, the counts last: their name says that the piece is done."""
    reader = _Reader(settings, piece)
    name = f"{number:05d}"
    table = pq.ParquetWriter(folder / f".{name}.parquet", _SCHEMA, compression="zstd")
    with table, (folder / f".{name}.text").open("wb") as texts:
        for batch in reader.batches():
            table.write_table(pa.Table.from_pylist([_row(drawn) for drawn in batch], schema=_SCHEMA))
            reader.key(batch, texts)
    _write(folder / f"{name}.keys", np.array(reader.keys, dtype=KEYS).tobytes())
    for kind in ("parquet", "text"):
        (folder / f".{name}.{kind}").rename(folder / f"{name}.{kind}")
    lines = [{"counts": dict(sorted(reader.counts.items()))}, *reader.review]
    _write(folder / f"{name}.jsonl", "".join(_line(line) for line in lines).encode())


def is_read(folder: Path, number: int) -> bool:
    """Whether a piece is done."""
    return (folder / f"{number:05d}.jsonl").exists()


def keys(folder: Path, number: int) -> NDArray[Any]:
    """A piece's keys, one a request: dtype KEYS. `group` ranks what is held out together (a task of the seed corpus,
    else the request itself), `text` is where its words end in the piece's text."""
    return np.fromfile(folder / f"{number:05d}.keys", dtype=KEYS)


def review(folder: Path, number: int) -> Iterator[dict[str, Any]]:
    """A piece's counts, then its rows that were dropped or repaired."""
    with (folder / f"{number:05d}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def requests(folder: Path, number: int, source: str, chosen: NDArray[np.bool_]) -> Iterator[tuple[int, Drawn]]:
    """The chosen requests of a piece with their places, in order; `chosen` has one value a request."""
    at = 0
    with pq.ParquetFile(folder / f"{number:05d}.parquet") as table:
        for batch in table.iter_batches(batch_size=500):
            mask = chosen[at : at + batch.num_rows]
            if mask.any():
                for place, row in zip(
                    np.flatnonzero(mask).tolist(), batch.filter(pa.array(mask)).to_pylist(), strict=True
                ):
                    yield at + place, _drawn(row, source)
            at += batch.num_rows


def ids(folder: Path, firsts: NDArray[np.int64], rows: NDArray[np.int64]) -> Iterator[tuple[int, str]]:
    """The ids of some requests, counted over all pieces, which begin at `firsts`; `rows` is sorted."""
    for number in np.unique(np.searchsorted(firsts, rows, side="right") - 1).tolist():
        mine = rows[(rows >= firsts[number]) & (rows < firsts[number + 1])]
        column = pq.read_table(folder / f"{number:05d}.parquet", columns=["id"])["id"]
        yield from zip(mine.tolist(), column.take(mine - firsts[number]).to_pylist(), strict=True)


class Texts:
    """The words of all requests, as duplicates compare them, read from where they lie when they are asked for."""

    def __init__(self, folder: Path, pieces: Sequence[NDArray[Any]]) -> None:
        self.firsts = np.cumsum([0, *(len(piece) for piece in pieces)])
        self.ends = [piece["text"] for piece in pieces]
        self.files = [os.open(folder / f"{number:05d}.text", os.O_RDONLY) for number in range(len(pieces))]

    def __call__(self, row: int) -> str:
        """The words of request `row`, counted over all pieces."""
        piece = int(np.searchsorted(self.firsts, row, side="right")) - 1
        at = row - int(self.firsts[piece])
        begin = int(self.ends[piece][at - 1]) if at else 0
        return os.pread(self.files[piece], int(self.ends[piece][at]) - begin, begin).decode()

    def close(self) -> None:
        for file in self.files:
            os.close(file)


class _Reader:
    """One piece on its way: what was counted, what goes to review, the keys."""

    def __init__(self, settings: Settings, piece: Piece) -> None:
        self.settings = settings
        self.piece = piece
        self.corpus: ModuleType = corpora.module(piece.corpus)
        self.counts: Counter[str] = Counter()
        self.review: list[dict[str, Any]] = []
        self.keys: list[tuple[Any, ...]] = []
        self.written = 0

    def batches(self) -> Iterator[list[Drawn]]:
        """The admitted requests, some hundred at a time."""
        batch: list[Drawn] = []
        for number, row in self._rows():
            self.counts["rows"] += 1
            try:
                batch.append(self._admitted(number, row))
            except Unusable as why:
                self._drop(number, row, why)
            if len(batch) == 500:
                yield batch
                batch = []
        if batch:
            yield batch

    def key(self, batch: Sequence[Drawn], texts: Any) -> None:
        """Write each request's words and note its keys."""
        near = self.settings.data.duplicates == "near"
        none = np.zeros(duplicates.BANDS, dtype=np.uint64)
        for drawn in batch:
            normal = duplicates.normal(drawn.request)
            self.written += texts.write(normal.encode())
            request, seed = drawn.request, self.settings.seed
            rank = duplicates.rank(request.id, seed)
            group = duplicates.rank(request.extra["task"], seed) if "task" in request.extra else rank
            buckets = duplicates.bands(normal) if near else none
            exact = duplicates.exact_key(normal)
            self.keys.append((rank, group, exact, buckets, len(drawn.cuts), self.written))

    def _rows(self) -> Iterator[tuple[int, dict[str, Any] | Unreadable]]:
        if self.piece.file:
            return rows(self.piece, self.corpus.COLUMNS)
        return enumerate(self.corpus.rows(), 1)

    def _admitted(self, number: int, row: dict[str, Any] | Unreadable) -> Drawn:
        if isinstance(row, Unreadable):
            raise Unusable("malformed row", row.fault)
        found = self.corpus.conversation(row)
        request, repairs = rules.admit(found, self.corpus.NAME, self.settings.rules)
        if self.settings.index is not None:
            said = [*(message.content for message in request.history), request.text, request.reference or ""]
            if hits := self.settings.index.find(said):
                raise Contaminated([asdict(hit) for hit in hits], found.turns)
        data = self.settings.data
        drawn = Drawn(request, tuple(cuts(request, data.cuts, data.cut, self.settings.seed)))
        if not drawn.cuts and not data.whole:
            raise Unusable("no place to cut")
        self.counts.update({f"repaired: {repair}": 1 for repair in repairs})
        if repairs:
            self.review.append({**self._where(number), "id": request.id, "repaired": sorted(set(repairs))})
        return drawn

    def _drop(self, number: int, row: dict[str, Any] | Unreadable, why: Unusable) -> None:
        self.counts[f"dropped: {why.reason}"] += 1
        line: dict[str, Any] = {**self._where(number), "dropped": why.reason}
        if isinstance(why, Contaminated):
            line |= {"tasks": why.tasks, "turns": why.turns}
        else:
            line |= {"detail": why.detail, "head": str(row)[:HEAD]}
        self.review.append(line)

    def _where(self, number: int) -> dict[str, Any]:
        return {"corpus": corpora.shown(self.piece.corpus), "file": Path(self.piece.file).name, "row": number}


class Contaminated(Unusable):
    """A row that holds tasks of benchmarks; its turns are kept whole, so that the finding can be judged."""

    def __init__(self, tasks: list[dict[str, str]], turns: Sequence[tuple[str, str]]) -> None:
        super().__init__("holds a benchmark's task")
        self.tasks = tasks
        self.turns = [list(turn) for turn in turns]


def _row(drawn: Drawn) -> Mapping[str, Any]:
    request = drawn.request
    return {
        "id": request.id,
        "sentences": request.sentences,
        "history": [{"role": message.role, "content": message.content} for message in request.history],
        "reference": request.reference,
        "extra": json.dumps(dict(request.extra), ensure_ascii=False),
        "cuts": [len(cut.prefix) for cut in drawn.cuts],
        "kinds": [cut.kind for cut in drawn.cuts],
    }


def _drawn(row: Mapping[str, Any], source: str) -> Drawn:
    history = tuple([Message(turn["role"], turn["content"]) for turn in row["history"]])
    extra = json.loads(row["extra"])
    request = Request(row["id"], source, tuple(row["sentences"]), history, row["reference"], extra)
    text, found = request.text, []
    for place, kind in zip(row["cuts"], row["kinds"], strict=True):
        whole, left = 0, place
        while left >= len(request.sentences[whole]):
            left -= len(request.sentences[whole])
            whole += 1
        found.append(Cut(text[:place], whole, kind))
    return Drawn(request, tuple(found))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def _write(path: Path, content: bytes) -> None:
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(content)
    hidden.rename(path)
