"""Training rows from pairs: the renderer's ids and labels, so that a row's prompt is the evaluator's prompt."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars

from headstart.prompt import IGNORED, Renderer, Row
from headstart.request import Message
from recipes.errors import UserError


@dataclass(frozen=True)
class Rows:
    """`dataset` has the columns input_ids and labels; `too_long` rows were dropped."""

    dataset: Dataset
    pairs: int
    too_long: int
    supervised_tokens: int


def training_rows(data: Path, renderer: Renderer, max_length: int) -> Rows:
    """Render the pairs of a data folder. Raises UserError where there are none, or none fits `max_length`."""
    shards = sorted(str(path) for path in data.glob("pairs-*.parquet"))
    if not shards:
        raise UserError(f"{data}: holds no pairs-*.parquet; build the data with data_builders/build.py")
    disable_progress_bars()
    pairs = Dataset.from_parquet(shards)
    # Never from datasets' cache: its key does not see the renderer's code.
    rendered = pairs.map(
        lambda pair: _columns(render(pair, renderer)), remove_columns=pairs.column_names, load_from_cache_file=False
    )
    fitting = rendered.filter(lambda row: len(row["input_ids"]) <= max_length, load_from_cache_file=False)
    if not len(fitting):
        raise UserError(f"{data}: all {len(pairs)} pairs are longer than train.max_length={max_length} tokens")
    supervised = sum(sum(label != IGNORED for label in row["labels"]) for row in fitting)
    return Rows(fitting, len(pairs), len(pairs) - len(fitting), supervised)


def render(pair: dict[str, Any], renderer: Renderer) -> Row:
    """One pair in TRL's prompt-completion format as a row."""
    messages = pair["prompt"]
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns = messages[1:] if system is not None else messages
    history = [Message(turn["role"], turn["content"]) for turn in turns[:-1]]
    return renderer.row(turns[-1]["content"], pair["completion"][0]["content"], history, system)


def _columns(row: Row) -> dict[str, list[int]]:
    return {"input_ids": row.ids, "labels": row.labels}
