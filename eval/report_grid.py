"""A table of the report: the same cells on the page, in Markdown and in a CSV file, and a reason where one is empty."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from eval.definitions import Unit
from eval.report_format import NOT_THERE, bounds, number

Source = Literal["measured", "paper"]


@dataclass(frozen=True)
class Column:
    """`key` heads the column in the CSV file; on the page `label` does, below `group` where there is one. `unit` is
    None for text and counts."""

    key: str
    label: str
    unit: Unit | None = None
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """What one cell says. `reason` is why there is no value; `raw` holds value, low and high, unrounded."""

    text: str
    range: str = ""
    reason: str = ""
    raw: tuple[float | None, float | None, float | None] = (None, None, None)


@dataclass(frozen=True)
class Line:
    """One row. `source` tells our rows from the paper's."""

    cells: tuple[Cell, ...]
    source: Source = "measured"


@dataclass(frozen=True)
class Grid:
    """`name` is the CSV file's, `title` the caption, `notes` stand below the table."""

    name: str
    title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """Why cells are empty, each reason once; their places number the marks in the table."""
        return list(dict.fromkeys(cell.reason for line in self.lines for cell in line.cells if cell.reason))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The upper heads, each with the number of columns that it spans."""
        return [(name, len(list(columns))) for name, columns in groupby(self.columns, key=lambda c: c.group)]


def text(value: Any) -> Cell:
    """A name or a count."""
    return Cell(str(value))


def missing(reason: str) -> Cell:
    """A cell without a value."""
    return Cell(NOT_THERE, reason=reason)


def estimate(found: Mapping[str, float | None], unit: Unit, reason: str) -> Cell:
    """`{"value", "low", "high"}` with its interval; `reason` where there is no value."""
    if found["value"] is None:
        return missing(reason)
    return Cell(number(found["value"], unit), bounds(found, unit), "", (found["value"], found["low"], found["high"]))


def printed(value: float | None, unit: Unit, digits: int | None = None) -> Cell:
    """A number as the paper prints it; shares come in percent, as it gives them."""
    if value is None:
        return missing("not given in the paper")
    scaled = value / 100 if unit == "share" else float(value)
    shown = number(scaled, unit) if digits is None else f"{value:.{digits}f}"
    return Cell(shown, raw=(scaled, None, None))


def as_csv(grid: Grid) -> str:
    """The table for a spreadsheet: shares in percent, the ends of an interval in columns of their own, and the reasons
    of all "n/a" in the last column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header(grid), "reason"])
    for line in grid.lines:
        pairs = list(zip(grid.columns, line.cells, strict=True))
        reasons = [f"{column.key}: {cell.reason}" for column, cell in pairs if cell.reason]
        if any(cell.raw[0] is not None and cell.raw[1] is None for cell in line.cells):
            reasons.append("intervals: " + ("none in the paper" if line.source == "paper" else "too few requests"))
        writer.writerow([value for column, cell in pairs for value in _values(column, cell)] + ["; ".join(reasons)])
    return out.getvalue()


def header(grid: Grid) -> list[str]:
    """The CSV file's columns but for the last."""
    return [f"{c.key}{end}" for c in grid.columns for end in (("", "_low", "_high") if c.unit else ("",))]


def _values(column: Column, cell: Cell) -> list[str]:
    if column.unit is None:
        return [_harmless(cell.text)]
    scale, digits = (100, 2) if column.unit == "share" else (1, 4)
    return [NOT_THERE if value is None else str(round(scale * value, digits)) for value in cell.raw]


def _harmless(name: str) -> str:
    """A name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r") else name
