"""Training rows from pairs: the renderer's ids and labels, so that a row's prompt is the evaluator's prompt."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from headstart.prompt import IGNORED, Renderer, Row
from recipes.errors import UserError

COLUMNS = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])


@dataclass(frozen=True)
class Rows:
    """`dataset` has the columns input_ids and labels; `too_long` has id and length (tokens) of each dropped pair."""

    dataset: Dataset
    too_long: list[dict[str, Any]]
    supervised_tokens: int


def training_rows(data: Path, renderer: Renderer, max_length: int) -> Rows:
    """Render the pairs of a data folder, in their order, in memory (no cache that several processes would share).

    Raises UserError where there are none, where one cannot be rendered, or where none fits `max_length` tokens.
    """
    shards = sorted(data.glob("pairs-*.parquet"))
    if not shards:
        raise UserError(f"{data}: holds no pairs-*.parquet; build the data with data_builders/build.py")
    tables, too_long, supervised = [], [], 0
    for batch in _batches(shards):
        fitting = []
        for pair in batch:
            row = render(pair, renderer)
            if len(row.ids) > max_length:
                too_long.append({"id": pair["id"], "tokens": len(row.ids)})
            else:
                fitting.append({"input_ids": row.ids, "labels": row.labels})
                supervised += sum(label != IGNORED for label in row.labels)
        tables.append(pa.Table.from_pylist(fitting, schema=COLUMNS))
    dataset = Dataset(pa.concat_tables([COLUMNS.empty_table(), *tables]))
    if not len(dataset):
        raise UserError(f"{data}: none of {len(too_long)} pairs fits train.max_length={max_length} tokens")
    return Rows(dataset, too_long, supervised)


def in_order(dataset: Dataset, steps: int, batch: int, seed: int) -> Dataset:
    """The rows as training reads them: `steps` x `batch`, every epoch shuffled anew.

    Laid out beforehand, so that a step has the same rows however many processes share it, and so that no step at an
    epoch's end is smaller than the others.
    """
    draw, order = random.Random(seed), list[int]()
    while len(order) < steps * batch:
        epoch = list(range(len(dataset)))
        draw.shuffle(epoch)
        order += epoch
    return dataset.select(order[: steps * batch])


def render(pair: dict[str, Any], renderer: Renderer) -> Row:
    """One pair in TRL's prompt-completion format as a row. Raises UserError, with the pair's id, where it has none."""
    try:
        return renderer.pair(pair)
    except UserError as error:
        raise UserError(f"pair {pair['id']}: {error}") from error


def write_dropped(rows: Rows, folder: Path) -> None:
    """Keep the ids of dropped pairs for review, one file a reason."""
    if rows.too_long:
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.too_long)
        (folder / "too-long.jsonl").write_text(text)


def _batches(shards: list[Path]) -> Iterator[list[dict[str, Any]]]:
    for shard in shards:
        for batch in pq.ParquetFile(shard).iter_batches(batch_size=1000):
            yield batch.to_pylist()
