"""The report's two charts: the distribution of per-request speedups, and of kept shares."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.metrics import Table
from eval.resampling import Array

SPEEDUP_EDGES = (1, 1.5, 2, 4, 8, 16, 32, 64)
SPEEDUP_LABELS = ("<1", "1", "1-1.5", "1.5-2", "2-4", "4-8", "8-16", "16-32", "32-64", ">64")
KEPT_LABELS = ("no draft", "none", "<25%", "25-50%", "50-75%", "75-99%", "all")
_INK = "#101214"  # replaced by the page's own ink where the chart is set into it
_FILLS = (("#9aa3ad", ""), ("#2f7fc1", ""), ("#7db8e8", "////"))
_LOOK: Any = {
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are text, a dollar sign in one is no formula
}


def speedup_shares(speedups: Array) -> Array:
    """Share of requests in each bin of SPEEDUP_LABELS: below 1, exactly 1, then half-open (low, high]."""
    known = speedups[~np.isnan(speedups)]
    places = np.where(known < 1, 0, np.searchsorted(SPEEDUP_EDGES, known, side="left") + 1)
    return np.bincount(places, minlength=len(SPEEDUP_LABELS)) / max(1, len(known))


def kept_shares(kept: Array) -> Array:
    """Share of requests in each bin of KEPT_LABELS; NaN is no draft."""
    inner = np.digitize(kept, (0.25, 0.5, 0.75))
    places = np.select([np.isnan(kept), kept == 0, kept == 1], [0, 1, 6], default=inner + 2)
    return np.bincount(places.astype(int), minlength=len(KEPT_LABELS)) / max(1, len(kept))


def chart(
    panels: Mapping[str, Sequence[Array]], names: Sequence[str], ticks: Sequence[str], title: str, xlabel: str
) -> Figure:
    """Grouped bars, a panel a benchmark; `panels` holds one array of shares a series."""
    figure, axes = plt.subplots(len(panels), 1, figsize=(8.2, 2.9 * len(panels) + 0.5), squeeze=False)
    for axis, (panel, series) in zip(axes[:, 0], panels.items(), strict=True):
        _panel(axis, panel, series, names, ticks)
    axes[-1, 0].set_xlabel(xlabel)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes[0, 0].legend(frameon=False, fontsize=9, loc="upper right")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    return figure


def save(figure: Figure, folder: Path, name: str) -> str:
    """Writes `name`.png and `name`.svg; returns the SVG to set into a page, in the page's own ink."""
    folder.mkdir(parents=True, exist_ok=True)
    out = io.StringIO()
    with matplotlib.rc_context(_LOOK | {"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return _for_page(out.getvalue(), name)


def drawn(tables: Mapping[str, tuple[Table, Table, Table]], before: str, after: str, folder: Path) -> dict[str, str]:
    """Both charts, saved; `tables` holds before, after and after-against-before's-base of each benchmark."""
    with matplotlib.rc_context(_LOOK):
        speed = chart(
            {name: [speedup_shares(t["speedup_passes"]) for t in three] for name, three in tables.items()},
            (f"before ({before})", f"after ({after}), own base", f"after ({after}), base of before"),
            SPEEDUP_LABELS,
            "Speedup in passes of each request",
            "base passes / residual passes",
        )
        kept = chart(
            {name: [kept_shares(t["kept_share"]) for t in three[:2]] for name, three in tables.items()},
            (f"before ({before})", f"after ({after})"),
            KEPT_LABELS,
            "Share of the last draft that each request keeps",
            "kept tokens / draft tokens",
        )
        return {"speedup": save(speed, folder, "speedup"), "kept": save(kept, folder, "kept")}


def _panel(axis: Axes, panel: str, series: Sequence[Array], names: Sequence[str], ticks: Sequence[str]) -> None:
    width = 0.8 / len(series)
    for place, (name, shares) in enumerate(zip(names, series, strict=True)):
        x = np.arange(len(shares)) + (place - (len(series) - 1) / 2) * width
        fill, hatch = _FILLS[place]
        axis.bar(x, 100 * shares, width, label=name, linewidth=0.5, facecolor=fill, hatch=hatch, edgecolor=_INK)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_title(panel, loc="left", fontsize=10)
    axis.set_ylabel("% of requests")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.4, alpha=0.25)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9)


def _for_page(svg: str, name: str) -> str:
    """Without prolog, name spaces and metadata; sized by the page; ids of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = svg.replace("xlink:href", "href").replace(_INK, "currentColor")
    svg = re.sub(r'id="', f'id="{name}-', svg).replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    return svg.strip()
