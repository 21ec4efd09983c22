"""What a build leaves: shards of pairs, the held-out requests, what was dropped, and the counts of it all."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from data_builders import choosing, reading
from data_builders.choosing import HELDOUT, Choice
from data_builders.making import Made, Maker
from data_builders.pairs import Shard
from data_builders.reading import Drawn
from headstart.request import Message, Request
from recipes import run_folder

NONE_EXPECTED = np.uint32(2**32 - 1)  # of a request that was asked about and gave no pair: it is told why
PIECES = 4  # that one shard is made of: some 20,000 rows


@dataclass(frozen=True)
class Plan:
    """A shard: its number, its pieces with the corpus' name of each, and how many pairs each request may give."""

    number: int
    pieces: tuple[tuple[int, str], ...]
    most: tuple[NDArray[np.uint32], ...]

    def digest(self) -> str:
        """A hash of what it holds: a killed build may resume with other answers, and so with other shards."""
        return run_folder.digest([self.pieces, [most.tolist() for most in self.most]])


def plans(choice: Choice, most: NDArray[np.uint32], sources: Sequence[str]) -> list[Plan]:
    """The shards that hold a pair. `most` has one value a request, `sources` one a piece."""
    found: list[Plan] = []
    for begin in range(0, len(sources), PIECES):
        numbers = range(begin, min(begin + PIECES, len(sources)))
        parts = tuple(most[choice.firsts[n] : choice.firsts[n + 1]] for n in numbers)
        if any(part.any() for part in parts):
            found.append(Plan(len(found), tuple((n, sources[n]) for n in numbers), parts))
    return found


def shard_path(folder: Path, plan: Plan) -> Path:
    """Where a shard lies once it is whole."""
    return folder / f"pairs-{plan.number:05d}.parquet"


def requests(folder: Path, plan: Plan) -> Iterator[tuple[Drawn, int]]:
    """A shard's requests, in order, with the number of pairs that each may give."""
    for (number, source), most in zip(plan.pieces, plan.most, strict=True):
        for place, drawn in reading.requests(folder / reading.FOLDER, number, source, most > 0):
            yield drawn, int(most[place])


def write_shard(folder: Path, plan: Plan, made: Iterator[tuple[Made, int]], maker: Maker) -> None:
    """Write a shard, and beside it, hidden, what it holds and lacks: that is how one that is done is known."""
    counts: Counter[str] = Counter()
    dropped: list[dict[str, str]] = []
    with Shard(shard_path(folder, plan)) as shard:
        for one, most in made:
            shard.add(one.pairs[:most])
            dropped += one.dropped
            counts["requests"] += bool(one.pairs)
            for pair in one.pairs[:most]:
                counts[f"pairs: {pair['kind']}"] += 1
                counts[f"cut: {pair['cut']}"] += 1
                counts["hold a control string"] += maker.holds_control(pair)
                if pair["draft_fate"]:
                    counts[f"draft: {pair['draft_fate']}"] += 1
    record = json.dumps({"plan": plan.digest(), "counts": counts, "dropped": dropped}, ensure_ascii=False)
    hidden = folder / f".shard-{plan.number:05d}.{os.getpid()}"
    hidden.write_text(record, encoding="utf-8")
    hidden.rename(folder / f".shard-{plan.number:05d}.json")


def is_written(folder: Path, plan: Plan) -> bool:
    """Whether a shard is done, and of this plan."""
    record = folder / f".shard-{plan.number:05d}.json"
    return record.exists() and json.loads(record.read_text(encoding="utf-8"))["plan"] == plan.digest()


def clear_others(folder: Path, plans: Sequence[Plan]) -> None:
    """Remove shards that are of none of the plans."""
    own = {shard_path(folder, plan) for plan in plans if is_written(folder, plan)}
    for path in folder.glob("pairs-*.parquet"):
        if path not in own:
            path.unlink()


def shard_of_corpus(maker: Maker, folder: Path, plan: Plan) -> None:
    """A worker's task: a shard with the corpus' answers."""
    found = list(requests(folder, plan))
    write_shard(
        folder, plan, zip(maker.of_corpus(drawn for drawn, _ in found), (n for _, n in found), strict=True), maker
    )


def shard_counts(folder: Path, plans: Sequence[Plan]) -> tuple[Counter[str], list[dict[str, str]]]:
    """What all shards hold, and what was dropped on the way."""
    counts: Counter[str] = Counter()
    dropped: list[dict[str, str]] = []
    for plan in plans:
        record = json.loads((folder / f".shard-{plan.number:05d}.json").read_text(encoding="utf-8"))
        counts.update(record["counts"])
        dropped += record["dropped"]
    return counts, dropped


def write_heldout(folder: Path, choice: Choice, sources: Sequence[str]) -> None:
    """heldout.jsonl: requests that are never trained on, for evaluation.

    Those with tests are rows of eval's benchmark `heldout`, others of `own`: eval.benchmarks=[RUN/data/heldout.jsonl].
    """
    with (folder / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for number, source in enumerate(sources):
            chosen = choice.of_piece(number, HELDOUT)
            for _, drawn in reading.requests(folder / reading.FOLDER, number, source, chosen) if chosen.any() else ():
                file.write(json.dumps(_heldout(drawn.request), ensure_ascii=False) + "\n")


def _heldout(request: Request) -> dict[str, Any]:
    if "tests" in request.extra:
        row = {"id": request.id, "sentences": request.sentences, "reference": request.reference}
        return {**row, "extra": dict(request.extra)}
    turns = [*request.history, Message("user", request.text)]
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return {"id": request.id, "messages": messages, "reference": request.reference}


class Review:
    """dropped/: one file a reason, and repaired.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TextIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Review":
        self.folder.mkdir()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a row that was dropped (`dropped` is the reason) or repaired."""
        reason = str(line.get("dropped", "repaired"))
        if reason not in self._files:
            name = "".join(char if char.isalnum() else "-" for char in reason)
            path = self.folder / f"{name}.jsonl"
            self._files[reason] = self._stack.enter_context(path.open("a", encoding="utf-8", errors="backslashreplace"))
        self._files[reason].write(json.dumps(line, ensure_ascii=False) + "\n")


def certificate(folder: Path, pieces: int) -> list[dict[str, Any]]:
    """The benchmark tasks that were found: benchmark, id, method, and in how many rows each."""
    found: Counter[tuple[str, str, str]] = Counter()
    for number in range(pieces):
        for line in reading.review(folder / reading.FOLDER, number):
            found.update((task["benchmark"], task["id"], task["method"]) for task in line.get("tasks", ()))
    return [
        {"benchmark": benchmark, "id": task, "method": method, "rows": rows}
        for (benchmark, task, method), rows in sorted(found.items())
    ]


def read_counts(folder: Path, corpora: Sequence[int], choice: Choice) -> dict[int, dict[str, int]]:
    """For each corpus what became of its rows: those read, dropped and repaired, and the fates of its requests."""
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for number, corpus in enumerate(corpora):
        counts[corpus].update(next(reading.review(folder / reading.FOLDER, number))["counts"])
    whole: dict[int, dict[str, int]] = {}
    for corpus, found in counts.items():
        ordered = {"rows": found["rows"]}
        ordered |= {name: found[name] for name in sorted(found) if name != "rows"}
        fates = choice.counts(corpus)
        ordered |= {name if name == "held out" else f"dropped: {name}": fates[name] for name in sorted(fates)}
        whole[corpus] = ordered | {
            "to train on": int(((choice.fates == choosing.TRAIN) & (choice.corpora == corpus)).sum())
        }
    return whole
