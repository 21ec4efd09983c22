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
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_builders import corpora, duplicates, rules
from data_builders.contamination import Hit, Index
from data_builders.corpora.protocol import Conversation, Unusable
from data_builders.cuts import Cut, cuts
from data_builders.rules import Rules
from data_builders.sources import Piece, Unreadable, rows
from headstart.request import Message, Request
from recipes.schema import Data

FOLDER = ".read"
BATCH = 100  # rows that are held against the benchmarks together
CONTAMINATED = "holds a benchmark's task"
OPEN = 256  # files
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
    table = pq.ParquetWriter(_hidden(folder / f"{name}.parquet"), _SCHEMA, compression="lz4")
    with table, _hidden(folder / f"{name}.text").open("wb") as texts:
        for batch in reader.batches():
            table.write_table(pa.Table.from_pylist([_row(drawn) for drawn in batch], schema=_SCHEMA))
            reader.key(batch, texts)
    _write(folder / f"{name}.keys", np.array(reader.keys, dtype=KEYS).tobytes())
    for kind in ("parquet", "text"):
        _hidden(folder / f"{name}.{kind}").rename(folder / f"{name}.{kind}")
    lines = [{"counts": dict(sorted(reader.counts.items()))}, *reader.review]
    _write(folder / f"{name}.jsonl", "".join(_line(line) for line in lines).encode())


def is_read(folder: Path, number: int) -> bool:
    """Whether a piece is done."""
    return (folder / f"{number:05d}.jsonl").exists()


def keys(folder: Path, number: int) -> NDArray[Any]:
    """A piece's keys, one a request: dtype KEYS. `group` ranks what is held out together (a task of the seed corpus,
    else all requests of the same words), `text` is where its words end in the piece's text."""
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
        self.folder = folder
        self.files: OrderedDict[int, int] = OrderedDict()

    def __call__(self, row: int) -> str:
        """The words of request `row`, counted over all pieces."""
        piece = int(np.searchsorted(self.firsts, row, side="right")) - 1
        at = row - int(self.firsts[piece])
        begin = int(self.ends[piece][at - 1]) if at else 0
        return os.pread(self._file(piece), int(self.ends[piece][at]) - begin, begin).decode()

    def close(self) -> None:
        for file in self.files.values():
            os.close(file)

    def _file(self, piece: int) -> int:
        """The descriptor of a piece's file; only so many are open at a time."""
        if piece not in self.files:
            if len(self.files) == OPEN:
                os.close(self.files.popitem(last=False)[1])
            self.files[piece] = os.open(self.folder / f"{piece:05d}.text", os.O_RDONLY)
        self.files.move_to_end(piece)
        return self.files[piece]


@dataclass(frozen=True)
class _Admitted:
    """A row of which a request is made, unless a benchmark forbids it."""

    number: int
    found: Conversation
    request: Request
    repairs: list[str]

    def said(self) -> list[str]:
        """All turns, the request and its answer first: of a very long row they are looked at whatever comes before."""
        history = [message.content for message in self.request.history]
        return [self.request.text, self.request.reference or "", *history]


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
        """The admitted requests, up to BATCH at a time."""
        batch: list[_Admitted] = []
        for number, row in self._rows():
            self.counts["rows"] += 1
            found = None
            try:
                found = self._understood(row)
                batch.append(_Admitted(number, found, *rules.admit(found, self.corpus.NAME, self.settings.rules)))
            except Unusable as why:
                self._drop(number, found.turns if found else row, why)
            if len(batch) == BATCH:
                yield self._checked(batch)
                batch = []
        if batch:
            yield self._checked(batch)

    def key(self, batch: Sequence[Drawn], texts: Any) -> None:
        """Write each request's words and note its keys."""
        near = self.settings.data.duplicates == "near"
        none = np.zeros(duplicates.BANDS, dtype=np.uint64)
        for drawn in batch:
            normal = duplicates.normal(drawn.request)
            self.written += texts.write(normal.encode())
            request, seed = drawn.request, self.settings.seed
            rank = duplicates.rank(request.id, seed)
            exact = duplicates.exact_key(normal)
            group = duplicates.rank(request.extra.get("task", f"{exact:016x}"), seed)
            buckets = duplicates.bands(normal) if near else none
            self.keys.append((rank, group, exact, buckets, len(drawn.cuts), self.written))

    def _rows(self) -> Iterator[tuple[int, dict[str, Any] | Unreadable]]:
        if self.piece.file:
            return rows(self.piece, self.corpus.COLUMNS)
        return enumerate(self.corpus.rows(), 1)

    def _understood(self, row: dict[str, Any] | Unreadable) -> Conversation:
        if isinstance(row, Unreadable):
            raise Unusable("malformed row", row.fault)
        found = cast(Conversation, self.corpus.conversation(row))
        if self.corpus is corpora.jsonl:  # two files of one's own may use the same ids
            return replace(found, id=f"{corpora.stem(self.piece.corpus)}/{found.id.partition('/')[2]}")
        return found

    def _checked(self, batch: Sequence[_Admitted]) -> list[Drawn]:
        """The requests that hold no benchmark's task and have a place to cut."""
        hits: Sequence[Sequence[Hit]] = [()] * len(batch)
        if self.settings.index is not None:
            hits = self.settings.index.find_all([admitted.said() for admitted in batch])
        return [drawn for admitted, found in zip(batch, hits, strict=True) if (drawn := self._drawn(admitted, found))]

    def _drawn(self, admitted: _Admitted, hits: Sequence[Hit]) -> Drawn | None:
        data, number = self.settings.data, admitted.number
        if hits:
            self._drop(number, None, Unusable(CONTAMINATED), tasks=list(map(asdict, hits)), turns=admitted.found.turns)
            return None
        made = tuple(cuts(admitted.request, data.cuts, data.cut, self.settings.seed))
        if not made and not data.whole:
            self._drop(number, admitted.found.turns, Unusable("no place to cut"))
            return None
        self.counts.update({f"repaired: {repair}": 1 for repair in admitted.repairs})
        if admitted.repairs:
            repaired = sorted(set(admitted.repairs))
            self.review.append({**self._where(number), "id": admitted.request.id, "repaired": repaired})
        return Drawn(admitted.request, made)

    def _drop(self, number: int, shown: Any, why: Unusable, **more: Any) -> None:
        """Count a row and keep it for review: its head, or what `more` has."""
        self.counts[f"dropped: {why.reason}"] += 1
        head = shown[-2:] if isinstance(shown, tuple) else shown  # of a conversation its last exchange
        more = more or {"detail": why.detail, "head": str(head)[:HEAD]}
        self.review.append({**self._where(number), "dropped": why.reason, **more})

    def _where(self, number: int) -> dict[str, Any]:
        return {"corpus": corpora.shown(self.piece.corpus), "file": Path(self.piece.file).name, "row": number}


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
    _hidden(path).write_bytes(content)
    _hidden(path).rename(path)


def _hidden(path: Path) -> Path:
    """What a file is called until it is whole: no two processes write one of one name."""
    return path.with_name(f".{path.name}.{os.getpid()}")
