"""What a dry run of train/sft.py draws: can this recipe be trained under this launch, at what cost. Writes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from transformers import AutoModelForCausalLM

from headstart import model as loading
from headstart.family import check_model
from headstart.prompt import IGNORED, Renderer, Row, prove
from recipes.schema import Recipe
from train import base, memory
from train.adapter import adapted_modules
from train.agreement import Launch
from train.memory import ALLOWANCE, Memory, Shape
from train.rows import Rows, row_lengths

BINS = 10
WIDTH = 40  # characters of a bar
GIB = 1024**3


@dataclass(frozen=True)
class Facts:
    """What training reads: micro-batches in their order, of all processes, and the tokens of each row of the data."""

    shapes: Sequence[Shape]
    lengths: Sequence[int]

    @property
    def padding(self) -> float:
        """Share of the tokens that the model reads that are padding."""
        return 1 - sum(shape.filled for shape in self.shapes) / sum(shape.fed for shape in self.shapes)


def show_model(recipe: Recipe, rendering: Renderer, launch: Launch, agreed: Sequence[str], world: int) -> None:
    """Draw what needs no data: model, prompt, adapter, attention, launch. Raises UserError where one is amiss."""
    config = loading.load_config(recipe.model)
    family = loading.family(recipe.model)
    with torch.device("meta"):
        frozen: Any = AutoModelForCausalLM.from_config(config)
    check_model(family, frozen)
    modules = adapted_modules(frozen, family)
    model = memory.adapted(recipe, config)
    every, trained = sum(parameter.numel() for parameter in model.parameters()), memory.trainable(model)
    kernel, why = base.attention(recipe)
    table = _grid()
    table.add_row("model", f"{recipe.model.name}: config and tokenizer are there; type {config.model_type}")
    table.add_row("", f"{every - trained:,} parameters in {'4 bits' if recipe.train.base_4bit else recipe.model.dtype}")
    table.add_row("adapter", f"{trained:,} trainable parameters ({trained / every:.2%}) on {len(modules)} modules:")
    table.add_row("", f"q, k, v, o of {len(modules) // 4} layers, rank {recipe.train.rank}, alpha {recipe.train.alpha}")
    table.add_row("attention", f"{kernel}: {why}")
    table.add_row("prompt", f"renderer {rendering.fingerprint}, family {family.name}; it holds that")
    for promise in prove(rendering):
        table.add_row("", f"- {promise}")
    table.add_row("launch", f"{launch.kind}, {world} process(es){f', {launch.file}' if launch.file else ''}; agree:")
    for line in agreed:
        table.add_row("", f"- {line}")
    Console().print(table)


def show_training(
    recipe: Recipe, rendering: Renderer, rows: Rows, ordered: Dataset, launch: Launch, world: int
) -> None:
    """Draw what the data decides: lengths, padding, supervised tokens, time, memory, and two rows.

    `ordered` is the rows of all steps as training reads them.
    """
    shapes = micro_batches(ordered, recipe.train.micro_batch)
    lengths = row_lengths(rows.dataset)
    console = Console()
    console.print(histogram(lengths, [row["tokens"] for row in rows.too_long], recipe.train.max_length))
    console.print(cost(recipe, Facts(shapes, lengths)))
    config = loading.load_config(recipe.model)
    console.print(memory_table(memory.estimate(recipe, config, shapes, launch, world), launch, world))
    for row in ordered.select(range(min(2, len(ordered)))):
        show_row(console, rendering, Row(row["input_ids"], row["labels"]))


def micro_batches(ordered: Dataset, micro_batch: int) -> list[Shape]:
    """The micro-batches of all processes: each takes `micro_batch` rows in turn."""
    found = []
    for begin in range(0, len(ordered), micro_batch):
        part = ordered[begin : begin + micro_batch]
        labels = [sum(label != IGNORED for label in row) for row in part["labels"]]
        read, asked, teacher = list(part["input_ids"]), sum(labels), None
        if "teacher_ids" in part:
            teacher = _shape(part["teacher_ids"], sum(labels), None)
            retained = [(ids, count) for ids, count in zip(part["retained_ids"], labels, strict=True) if ids]
            read += [ids for ids, _ in retained]
            asked += sum(count for _, count in retained)
        found.append(_shape(read, asked, teacher))
    return found


def _shape(rows: Sequence[Sequence[int]], labels: int, teacher: Shape | None) -> Shape:
    lengths = [len(row) for row in rows]
    return Shape(len(rows), max(lengths), sum(lengths), labels, teacher)


def histogram(lengths: Sequence[int], dropped: Sequence[int], limit: int) -> Table:
    """Row lengths in tokens, and what is dropped."""
    table = Table(title=f"tokens of a row: median {sorted(lengths)[len(lengths) // 2]}, longest {max(lengths)}")
    for heading in ("tokens", "rows", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    size = max(1, -(-(max(lengths) + 1) // BINS))
    counts = [0] * BINS
    for length in lengths:
        counts[length // size] += 1
    for i, count in enumerate(counts):
        bar = "█" * round(WIDTH * count / max(counts)) or ("▏" if count else "")
        table.add_row(f"{i * size} to {(i + 1) * size - 1}", str(count), bar)
    table.add_row(f"over {limit}", str(len(dropped)), "dropped; no row is ever cut" if dropped else "none dropped")
    return table


def cost(recipe: Recipe, facts: Facts) -> Table:
    """Steps, epochs, tokens, padding and time."""
    settings = recipe.train
    read = sum(shape.filled + (shape.teacher.filled if shape.teacher else 0) for shape in facts.shapes)
    labels = sum(shape.labels for shape in facts.shapes)
    table = _grid()
    epochs = settings.steps * settings.effective_batch / len(facts.lengths)
    table.add_row("training", f"{settings.steps} steps of {settings.effective_batch} rows, {epochs:.2f} epochs")
    table.add_row("tokens", f"{read:,} in all, {read / settings.steps:,.0f} a step, padding apart")
    table.add_row("supervised", f"{labels / settings.steps:,.0f} tokens a step, {labels / read:.1%} of all")
    table.add_row("padding", f"{facts.padding:.1%} of what the model reads, in the order of training")
    if settings.tokens_per_second:
        seconds = read / settings.tokens_per_second
        table.add_row("time", f"{_hours(seconds)} at train.tokens_per_second={settings.tokens_per_second:g}")
    else:
        table.add_row("time", "set train.tokens_per_second to see it; training prints its own when it ends: try it")
        table.add_row("", "in another folder (train.steps=20 run.dir=...)")
    return table


def memory_table(found: Memory, launch: Launch, world: int) -> Table:
    """The estimate, part by part."""
    table = Table(title=f"memory of each of {world} device(s) under {launch.kind}, estimated")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for field in fields(found):
        table.add_row(MEANING[field.name], f"{getattr(found, field.name) / GIB:.2f}")
    table.add_row("sum", f"{found.total / GIB:.2f}", style="bold")
    table.add_row("beside it, on a GPU: CUDA, NCCL, workspaces (a guess)", f"{ALLOWANCE / GIB:.2f}")
    table.add_row("not covered: what is freed but kept. On a GPU leave a tenth free. On a CPU the C library keeps", "")
    table.add_row("up to two thirds of the sum; started with MALLOC_MMAP_THRESHOLD_=65536, it gives it back", "")
    return table


MEANING = {
    "base": "frozen base",
    "adapter": "adapter",
    "gradients": "its gradients",
    "states": "Adam's states",
    "gathered": "weights and gradients under way between devices",
    "activations": "activations and logits of the widest micro-batch",
}


def show_row(console: Console, rendering: Renderer, row: Row) -> None:
    """One training row: what is shown, then what is supervised."""
    shown = next((i for i, label in enumerate(row.labels) if label != IGNORED), len(row.labels))
    console.print(Rule(f"a training row: {shown} tokens shown", characters="-"))
    console.print(rendering.preview(Row(row.ids[:shown], row.labels[:shown])))
    console.print(Rule(f"{len(row.ids) - shown} tokens supervised", characters="-"))
    console.print(rendering.preview(Row(row.ids[shown:], row.labels[shown:])))


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
