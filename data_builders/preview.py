"""Draws pairs of a finished data folder, so that a reader sees what is asked, what is held back and what is learnt."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headstart.prompt import Renderer


def preview(folder: Path, count: int, rendering: Renderer, seed: int) -> None:
    """Print `count` pairs, drawn by the seed, as the model sees them: prompt dim, supervised tokens green."""
    console = Console(highlight=False, soft_wrap=True)
    for row in _drawn(folder, count, seed):
        console.rule(f"[bold]{escape(row['id'])}", align="left")
        console.print(
            f"{row['kind']}, cut: {row['cut']}, {row['cut_sentences']} of {row['sentences']} sentences, answer of "
            f"{row['answer_source']}",
            style="cyan",
        )
        console.print(drawing(row, rendering))
        console.print(Text("held back: ", "bold"), Text(row["rest"] or "nothing", "yellow"), sep="")
        if row["draft"] is not None:
            shown = f"draft ({row['draft_fate']}, from {row['draft_sentences']} sentences): "
            console.print(Text(shown, "bold"), Text(row["draft"], "magenta"), sep="")


def drawing(row: dict[str, Any], rendering: Renderer) -> Text:
    """The ids that training reads, as text: the prompt dim, what is supervised bold and green."""
    return rendering.preview(rendering.pair(row))


def _drawn(folder: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    shards = sorted(folder.glob("pairs-*.parquet"))
    sizes = [pq.read_metadata(shard).num_rows for shard in shards]
    chosen = sorted(random.Random(seed).sample(range(sum(sizes)), min(count, sum(sizes))))
    begin = 0
    for shard, size in zip(shards, sizes, strict=True):
        mine = [at - begin for at in chosen if begin <= at < begin + size]
        if mine:
            yield from pq.read_table(shard).take(mine).to_pylist()
        begin += size
