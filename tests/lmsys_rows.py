"""Made-up conversations in LMSYS-Chat-1M's schema, as many as wanted: the gated rows may not be passed on.

Lengths are about those of the corpus (arXiv 2309.11998: two exchanges, 70 tokens asked and 215 answered). The words
are those of Python's own help texts, so that they are words of a language; what they say is random. Stated shares of
rows are flagged, redacted, in other languages, broken in their roles, without an answer, or duplicates.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "self-harm", "self-harm/instructions"),
    *("self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic"),
)
LANGUAGES = ("English", "Chinese", "Portuguese", "German", "unknown")
GROUP = 5_000  # rows of a row group


class Speech:
    """Random sentences."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        found = " ".join(topics.topics.values()).split()
        self.words = [word for word in found if word.isalpha() and word.isascii()]
        self.pool = [self.sentence() for _ in range(60_000)]

    def sentence(self) -> str:
        """Six to eighteen words; more sentences exist than any corpus draws."""
        said = self.draw.choices(self.words, k=self.draw.randint(6, 18))
        return f"{said[0].capitalize()} {' '.join(said[1:])}{self.draw.choice('.....?!')}"

    def text(self, sentences: int) -> str:
        """Sentences with a few words of their own among them, so that no two texts are alike by chance."""
        said = self.draw.choices(self.pool, k=sentences)
        own = " ".join(self.draw.choices(self.words, k=6))
        return " ".join([*said[:-1], f"{own.capitalize()}.", said[-1]] if sentences > 1 else said)


def conversations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows without their moderation, which `write` adds; "flagged" says what it has to say."""
    speech = Speech(seed)
    draw = speech.draw
    earlier: list[list[dict[str, str]]] = []
    for _ in range(count):
        kind = draw.random()
        turns = [
            {"content": speech.text(draw.choice(n)), "role": role}
            for _exchange in range(draw.choice((1, 1, 1, 2, 2, 3, 4)))
            for role, n in (("user", (1, 2, 3, 4, 5, 6, 8)), ("assistant", (6, 9, 12, 16)))
        ]
        if kind < 0.03 and earlier:
            turns = draw.choice(earlier)
        elif kind < 0.05 and earlier:  # near: a word more
            turns = [dict(turn) for turn in draw.choice(earlier)]
            turns[-2]["content"] += f" {draw.choice(speech.words).capitalize()}."
        elif kind < 0.06:
            turns[-1]["content"] = ""
        elif kind < 0.065:
            turns[0]["role"] = "tool"
        elif kind < 0.07:
            turns.append({"content": "And then?", "role": "user"})
        elif kind < 0.08:
            turns[-2]["content"] = turns[-2]["content"].replace(" ", "\r\n", 1) + "\x00"
        if len(earlier) < 5_000:
            earlier.append(turns)
        elif draw.random() < 0.02:
            earlier[draw.randrange(len(earlier))] = turns
        yield {
            "conversation_id": f"{draw.getrandbits(128):032x}",
            "model": "vicuna-13b",
            "conversation": turns,
            "turn": len(turns) // 2,
            "language": draw.choices(LANGUAGES, (70, 10, 5, 10, 5))[0],
            "redacted": draw.random() < 0.1,
            "flagged": draw.random() < 0.05,
        }


def write(folder: Path, count: int, seed: int = 0, files: int = 4) -> None:
    """Write the corpus as Parquet files with row groups of GROUP rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = conversations(count, seed)
    numbers = np.random.default_rng(seed)
    share = -(-count // files)
    left = count
    for file in range(files):
        mine, writer = min(share, left), None
        path = folder / f"train-{file:05d}-of-{files:05d}.parquet"
        while mine:
            table = _table([next(rows) for _ in range(min(GROUP, mine))], numbers)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            mine, left = mine - len(table), left - len(table)
        if writer is not None:
            writer.close()


def _table(rows: list[dict[str, Any]], numbers: np.random.Generator) -> pa.Table:
    lengths = [len(row["conversation"]) for row in rows]
    total = sum(lengths)
    names = [pa.field(name, pa.bool_()) for name in CATEGORIES]
    flagged = np.repeat([row.pop("flagged") for row in rows], lengths)
    categories = pa.StructArray.from_arrays([pa.array(np.zeros(total, bool)) for _ in CATEGORIES], fields=names)
    scores = pa.StructArray.from_arrays(
        [pa.array(numbers.random(total) * 1e-4) for _ in CATEGORIES],
        fields=[pa.field(name, pa.float64()) for name in CATEGORIES],
    )
    entries = pa.StructArray.from_arrays(
        [categories, scores, pa.array(flagged)], names=["categories", "category_scores", "flagged"]
    )
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    table = pa.Table.from_pylist(rows)
    return table.append_column("openai_moderation", pa.ListArray.from_arrays(offsets, entries))
