"""The report's charts, a panel a benchmark: per-request speedups (the paper's Figures 1 and 2), kept shares, frontier.

Each chart is saved whole (`<name>.png`, `<name>.svg`); the page gets its panels one by one, so that they can stack on
a narrow screen, in the page's own colours.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from eval.metrics import Table
from eval.resampling import Array

KEPT_LABELS = ("no draft", "none", "<25%", "25-50%", "50-75%", "75-99%", "all")
_INK = "#101214"  # this and the fills are replaced by the page's own colours where a panel is set into it
_FILLS = {"#8d96a0": "var(--before)", "#2f7fc1": "var(--after)", "#c2541d": "var(--strict)"}
_BEFORE, _AFTER, _STRICT = _FILLS
# The first line is broad, so that one that runs upon it hides nothing.
_LINES: tuple[dict[str, Any], ...] = (
    {"color": _BEFORE, "linewidth": 4, "markersize": 7},
    {"color": _AFTER, "linewidth": 1.5, "markersize": 3.5},
)
_PANEL = (4.6, 2.9)  # inches
_STEPS = 3  # bins between two powers of two
_LOOK: Any = {
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are text, a dollar sign in one is no formula
}
Draw = Callable[[Axes], None]
Tables = Mapping[str, tuple[Table, Table, Table]]  # benchmark -> before, after, after against the base of before


@dataclass(frozen=True)
class Panel:
    """One benchmark's part of a chart, for the page. `alt` says in words what it shows."""

    svg: str
    alt: str


def edges(values: Array) -> Array:
    """Bins of equal width on a log scale, 1 among their edges: a request that gains nothing falls right of it."""
    low = min(-2, math.floor(_STEPS * math.log2(values.min()))) if len(values) else -2
    high = max(6, math.floor(_STEPS * math.log2(values.max())) + 1) if len(values) else 6
    return 2.0 ** (np.arange(low, high + 1) / _STEPS)


def kept_shares(kept: Array) -> Array:
    """Share of requests in each bin of KEPT_LABELS; NaN is no draft."""
    inner = np.digitize(kept, (0.25, 0.5, 0.75))
    places = np.select([np.isnan(kept), kept == 0, kept == 1], [0, 1, 6], default=inner + 2)
    return np.bincount(places.astype(int), minlength=len(KEPT_LABELS)) / max(1, len(kept))


def distributions(tables: Tables, column: str, names: Sequence[str], folder: Path, name: str) -> dict[str, Panel]:
    """How a speedup (a column of the tables) spreads over requests; benchmarks without a value have no panel."""
    known = {key: [_known(table[column]) for table in three] for key, three in tables.items()}
    known = {key: three for key, three in known.items() if any(map(len, three))}
    draws = {key: _histogram(three, names) for key, three in known.items()}
    said = {key: f"{key}: median {_medians(three, names)}" for key, three in known.items()}
    return _saved(draws, said, folder, name, "speedup of one request (log scale)", "% of requests")


def kept(tables: Tables, names: Sequence[str], folder: Path, name: str) -> dict[str, Panel]:
    """How much of the last draft each request keeps."""
    shares = {key: [kept_shares(t["kept_share"]) for t in three[:2]] for key, three in tables.items()}
    draws = {key: _bars(two, names) for key, two in shares.items()}
    said = {key: f"{key}: {_shares(two, names)}" for key, two in shares.items()}
    return _saved(draws, said, folder, name, "kept tokens / draft tokens", "% of requests")


def frontier(found: Mapping[str, Mapping[str, Any]], folder: Path, name: str) -> dict[str, Panel]:
    """Quality against speedup over tau; `found` is benchmark -> arm -> [(tau, speedup, quality)]."""
    draws = {key: _curves(by_arm) for key, by_arm in found.items()}
    said = {key: f"{key}: quality against speedup at each tau; the table has the numbers" for key in found}
    return _saved(draws, said, folder, name, "speedup in passes, median", "quality, stream, %")


def over_typing(
    found: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], ylabel: str, folder: Path, name: str
) -> dict[str, Panel]:
    """A figure over the typing speed; `found` is benchmark -> arm -> [(words a minute, value as drawn)]."""
    draws = {key: _lines(by_arm) for key, by_arm in found.items()}
    said = {key: f"{key}: {ylabel} at each typing speed; the table has the numbers" for key in found}
    return _saved(draws, said, folder, name, "words typed a minute", ylabel)


def _saved(
    draws: Mapping[str, Draw], said: Mapping[str, str], folder: Path, name: str, xlabel: str, ylabel: str
) -> dict[str, Panel]:
    if not draws:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_LOOK | {"svg.hashsalt": name}):
        _whole(draws, folder / name, xlabel, ylabel)
        return {
            key: Panel(_panel(key, draw, f"{name}-{place}", xlabel, ylabel), said[key])
            for place, (key, draw) in enumerate(draws.items())
        }


def _whole(draws: Mapping[str, Draw], path: Path, xlabel: str, ylabel: str) -> None:
    """All panels in one picture, with a legend."""
    across = min(2, len(draws))
    down = math.ceil(len(draws) / across)
    size = (_PANEL[0] * across, _PANEL[1] * down + 0.5)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for axis, (key, draw) in zip(axes.flat, draws.items(), strict=False):
        _dressed(axis, key, draw, xlabel, ylabel)
    for axis in list(axes.flat)[len(draws) :]:
        axis.set_axis_off()
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper left", frameon=False, ncols=3)
    figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _panel(key: str, draw: Draw, name: str, xlabel: str, ylabel: str) -> str:
    figure, axis = plt.subplots(figsize=_PANEL, layout="constrained")
    _dressed(axis, key, draw, xlabel, ylabel)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return _for_page(out.getvalue(), name)


def _dressed(axis: Axes, key: str, draw: Draw, xlabel: str, ylabel: str) -> None:
    draw(axis)
    axis.set_title(key, loc="left", fontsize=10)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.4, alpha=0.25)
    axis.set_axisbelow(True)


def _histogram(three: Sequence[Array], names: Sequence[str]) -> Draw:
    def draw(axis: Axes) -> None:
        bins = edges(np.concatenate(three)).tolist()
        looks: tuple[dict[str, Any], ...] = (
            {"histtype": "stepfilled", "color": _BEFORE, "alpha": 0.55},
            {"histtype": "step", "color": _AFTER, "linewidth": 1.8},
            {"histtype": "step", "color": _STRICT, "linewidth": 1.2, "linestyle": "--"},
        )
        for values, name, look in zip(three, names, looks, strict=True):
            weights = np.full(len(values), 100 / max(1, len(values)))
            axis.hist(values, bins, weights=weights, label=name, **look)
        axis.axvline(1, color=_INK, linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        ticks = _ticks(bins[0], bins[-1])
        axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
        axis.minorticks_off()

    return draw


def _ticks(low: float, high: float) -> list[float]:
    """Powers of two in reach, at most nine."""
    powers = [2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    every = math.ceil(len(powers) / 9)
    return [p for p in powers if int(math.log2(p)) % every == 0]


def _bars(series: Sequence[Array], names: Sequence[str]) -> Draw:
    def draw(axis: Axes) -> None:
        width = 0.8 / len(series)
        for place, (name, shares, fill) in enumerate(zip(names, series, (_BEFORE, _AFTER), strict=False)):
            x = np.arange(len(shares)) + (place - (len(series) - 1) / 2) * width
            axis.bar(x, 100 * shares, width, label=name, color=fill)
        axis.set_xticks(range(len(KEPT_LABELS)), KEPT_LABELS, fontsize=8)

    return draw


def _curves(by_arm: Mapping[str, Sequence[tuple[float, float, float]]]) -> Draw:
    def draw(axis: Axes) -> None:
        for (arm, points), look in zip(by_arm.items(), _LINES, strict=False):
            axis.plot([p[1] for p in points], [100 * p[2] for p in points], "o-", label=arm, **look)
            for tau, speed, quality in points:
                axis.annotate(f"{tau:g}", (speed, 100 * quality), xytext=(3, 4), textcoords="offset points", fontsize=7)

    return draw


def _lines(by_arm: Mapping[str, Sequence[tuple[float, float]]]) -> Draw:
    def draw(axis: Axes) -> None:
        for (arm, points), look in zip(by_arm.items(), _LINES, strict=False):
            axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=arm, **look)
        axis.set_ylim(bottom=0)

    return draw


def _known(values: Array) -> Array:
    return values[np.isfinite(values) & (values > 0)]


def _medians(three: Sequence[Array], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {np.median(v):.2f}×" for v, name in zip(three, names, strict=True) if len(v))


def _shares(two: Sequence[Array], names: Sequence[str]) -> str:
    return "; ".join(f"{n} keeps none {s[1]:.0%}, all {s[-1]:.0%}" for s, n in zip(two, names, strict=False))


def _for_page(svg: str, name: str) -> str:
    """Without prolog, name spaces and metadata; sized and coloured by the page; ids of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = svg.replace("xlink:href", "href").replace(_INK, "currentColor")
    for fill, variable in _FILLS.items():
        svg = svg.replace(fill, variable)
    svg = re.sub(r'id="', f'id="{name}-', svg).replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    return svg.strip()
