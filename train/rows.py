"""Training rows from pairs: the renderer's ids and labels, so that a row's prompt is the evaluator's prompt."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from headstart.prompt import IGNORED, Renderer, Row
from recipes.errors import UserError
from recipes.schema import Train

IDS = pa.list_(pa.int32())
COLUMNS = pa.schema([("input_ids", IDS), ("labels", IDS)])
SLOTTED = pa.schema([*COLUMNS, ("draft_ids", IDS)])
DISTILLED = pa.schema([*COLUMNS, ("teacher_ids", IDS), ("retained_ids", IDS)])


@dataclass(frozen=True)
class Rows:
    """What is trained on, and the pairs that are not.

    `dataset` has the columns input_ids and labels. Under objective=self_distill also teacher_ids, the whole request
    without the message and the answer, and retained_ids, the whole request with the message and the answer where the
    pair has the retention loss too, else empty. The answer's ids end all of them alike. Under objective=slot_diffusion
    also draft_ids, those of the draft that the pair shows, empty where it shows none. `too_long` has id and length
    (tokens, of the longest of them) of each dropped pair.
    """

    dataset: Dataset
    too_long: list[dict[str, Any]]
    supervised_tokens: int


def training_rows(data: Path, renderer: Renderer, settings: Train, seed: int, message: str | None = None) -> Rows:
    """Render the pairs of a data folder, in their order, in memory (no cache that several processes would share).

    `message` is the system message that the pairs were built with: a teacher reads the request without it.
    Raises UserError where there are none, where one cannot be rendered, or where none fits `max_length` tokens.
    """
    shards = sorted(data.glob("pairs-*.parquet"))
    if not shards:
        raise UserError(f"{data}: holds no pairs-*.parquet; build the data with data_builders/build.py")
    schema = {"sft": COLUMNS, "self_distill": DISTILLED, "slot_diffusion": SLOTTED}[settings.objective]
    tables, too_long, supervised = [], [], 0
    for batch in _batches(shards):
        fitting = []
        for pair in batch:
            row = _columns(pair, renderer, settings, seed, message)
            longest = max(len(ids) for name, ids in row.items() if name != "draft_ids")
            if longest > settings.max_length:
                too_long.append({"id": pair["id"], "tokens": longest})
            else:
                fitting.append(row)
                supervised += sum(label != IGNORED for label in row["labels"])
        tables.append(pa.Table.from_pylist(fitting, schema=schema))
    dataset = Dataset(pa.concat_tables([schema.empty_table(), *tables]))
    if not len(dataset) and not too_long:
        raise UserError(f"{data}: holds no pairs; build the data anew with data_builders/build.py")
    if not len(dataset):
        raise UserError(f"{data}: none of {len(too_long)} pairs fits train.max_length={settings.max_length} tokens")
    return Rows(dataset, too_long, supervised)


def in_order(dataset: Dataset, settings: Train, seed: int) -> Dataset:
    """The rows as training reads them: `steps` x `effective_batch`, every epoch shuffled anew.

    Laid out beforehand, so that a step has the same rows however many processes share it, and so that no step at an
    epoch's end is smaller than the others. The rows of `length_window` steps are sorted by length and cut into steps
    again, which are shuffled: so the rows of a forward pass are of like length. With a window of 1 a step has the rows
    that it would have had, and only their order inside it differs, which changes no gradient.
    """
    steps, batch = settings.steps, settings.effective_batch
    draw, order = random.Random(seed), list[int]()
    while len(order) < steps * batch:
        epoch = list(range(len(dataset)))
        draw.shuffle(epoch)
        order += epoch
    lengths = row_lengths(dataset)
    span, laid = settings.length_window * batch, list[int]()
    for begin in range(0, steps * batch, span):
        window = sorted(order[begin : min(begin + span, steps * batch)], key=lambda at: -lengths[at])
        cut = [window[i : i + batch] for i in range(0, len(window), batch)]
        draw.shuffle(cut)
        laid += [at for step in cut for at in step]
    return dataset.select(laid)


def row_lengths(dataset: Dataset, name: str = "input_ids") -> list[int]:
    """Tokens of each row in a column."""
    column = dataset.with_format("arrow")[name]
    lengths: list[int] = pa.chunked_array([chunk.value_lengths() for chunk in column[:].chunks]).to_pylist()
    return lengths


def tokens_read(dataset: Dataset, since: int) -> int:
    """Tokens that training reads of the rows from `since` on: as student, as teacher and for the retention loss."""
    columns = [name for name in ("input_ids", "teacher_ids", "retained_ids") if name in dataset.column_names]
    return sum(sum(row_lengths(dataset, name)[since:]) for name in columns)


def padding_share(lengths: Sequence[int], micro_batch: int) -> float:
    """Share of the tokens fed that are padding, where every `micro_batch` rows in turn are padded to the longest."""
    parts = [lengths[i : i + micro_batch] for i in range(0, len(lengths), micro_batch)]
    return 1 - sum(lengths) / sum(max(part) * len(part) for part in parts)


def render(pair: dict[str, Any], renderer: Renderer) -> Row:
    """One pair in TRL's prompt-completion format as a row. Raises UserError, with the pair's id, where it has none."""
    try:
        return renderer.pair(pair)
    except UserError as error:
        raise UserError(f"pair {pair['id']}: {error}") from error


def whole_request(pair: dict[str, Any], without: str | None = None) -> dict[str, Any]:
    """The pair with all of its request: the prefix and the rest that was held back; `without` the message, if given.

    A system message of the request's own, which stands behind it, stays.
    """
    *before, last = pair["prompt"]
    turns = [*before, {**last, "content": last["content"] + pair["rest"]}]
    first = turns[0]
    if without is not None and first["role"] == "system" and first["content"].startswith(without):
        own = first["content"].removeprefix(without).removeprefix("\n\n")
        turns = [*([{**first, "content": own}] if own else []), *turns[1:]]
    return {**pair, "prompt": turns}


def write_dropped(rows: Rows, folder: Path) -> None:
    """Keep the ids of dropped pairs for review, one file a reason."""
    if rows.too_long:
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.too_long)
        (folder / "too-long.jsonl").write_text(text)


def _columns(
    pair: dict[str, Any], renderer: Renderer, settings: Train, seed: int, message: str | None
) -> dict[str, list[int]]:
    row = render(pair, renderer)
    columns = {"input_ids": row.ids, "labels": row.labels}
    if settings.objective == "slot_diffusion":
        columns["draft_ids"] = renderer.answer(pair["draft"]) if pair["draft"] else []
    if settings.objective == "self_distill":
        columns["teacher_ids"] = render(whole_request(pair, without=message), renderer).ids
        drawn = random.Random(f"{seed}:retained:{pair['id']}").random() < settings.retain_share
        retained = settings.retain > 0 and pair["rest"] != "" and drawn
        columns["retained_ids"] = render(whole_request(pair), renderer).ids if retained else []
    return columns


def _batches(shards: list[Path]) -> Iterator[list[dict[str, Any]]]:
    for shard in shards:
        for batch in pq.ParquetFile(shard).iter_batches(batch_size=1000):
            yield batch.to_pylist()
