"""Statistics over requests with their bootstrap and permutation distributions, vectorised and seeded."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

Array = NDArray[np.float64]
_BLOCK = 2_000_000


def _mean(x: Array) -> Array:
    return x.mean(axis=-1)


def _median(x: Array) -> Array:
    return np.median(x, axis=-1)


def _ratio(numerator: Array, denominator: Array) -> Array:
    return _quotient(numerator.sum(axis=-1), denominator.sum(axis=-1))


def _ratio_of_medians(numerator: Array, denominator: Array) -> Array:
    return _quotient(_median(numerator), _median(denominator))


def _losers(x: Array) -> Array:
    """The median of the values below 1; NaN where there is none."""
    lost = x < 1
    count = np.asarray(lost.sum(axis=-1))
    ordered = np.sort(np.where(lost, x, np.inf), axis=-1)
    middle = [
        np.take_along_axis(ordered, np.expand_dims(np.maximum(place, 0), -1), axis=-1)[..., 0]
        for place in ((count - 1) // 2, count // 2)
    ]
    return np.where(count > 0, (middle[0] + middle[1]) / 2, np.nan)


def _quotient(numerator: Array, denominator: Array) -> Array:
    """NaN where the denominator is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = numerator / denominator
    return np.where(np.isfinite(quotient), quotient, np.nan)


STATISTICS: dict[str, Callable[..., Array]] = {
    "mean": _mean,
    "median": _median,
    "ratio": _ratio,
    "ratio_of_medians": _ratio_of_medians,
    "losers": _losers,
}


@dataclass(frozen=True)
class Estimate:
    """A statistic over n requests. `draws` (samples,) are its resampled values; None below two requests.

    A draw is NaN where the statistic is undefined for its resample (a denominator of zero, no value below 1).
    """

    value: float | None
    draws: Array | None
    n: int


def seed_for(seed: int, name: str) -> tuple[int, int]:
    """A seed of its own for each benchmark, so that their resamples are independent of one another."""
    return seed, zlib.crc32(name.encode("utf-8", "replace"))


def estimate(statistic: str, columns: Array, samples: int, seed: Sequence[int]) -> Estimate:
    """Bootstraps a statistic over requests: the whole statistic is computed anew on each resample.

    Equal n and equal seed give equal resamples: estimates of two arms on the same requests are paired, and the
    difference of their draws is the paired bootstrap of their difference. For "losers" all requests are resampled, and
    the estimate's n counts those below 1.

    Args:
        statistic: "mean", "median", "ratio" (of sums), "ratio_of_medians" or "losers" (median of the values below 1).
        columns: (1, n), or (2, n) for a ratio; no NaN.
    """
    compute = STATISTICS[statistic]
    size = columns.shape[1]
    n = int(np.sum(columns[0] < 1)) if statistic == "losers" else size
    if n == 0:
        return Estimate(None, None, 0)
    value = _plain(compute(*columns))
    if n < 2 or value is None:
        return Estimate(value, None, n)
    rng = np.random.default_rng(seed)
    blocks = (rng.integers(0, size, size=(rows, size)) for rows in _blocks(samples, size))
    return Estimate(value, np.concatenate([compute(*columns[:, rows]) for rows in blocks]), n)


def swapped(statistic: str, before: Array, after: Array, samples: int, seed: Sequence[int]) -> Array:
    """The change's distribution when before and after are swapped at random within each request: (samples,)."""
    compute = STATISTICS[statistic]
    n = before.shape[1]
    rng = np.random.default_rng(seed)
    draws = []
    for rows in _blocks(samples, n):
        swap = rng.integers(0, 2, size=(rows, n), dtype=np.int8).astype(bool)
        first = np.where(swap, after[:, None, :], before[:, None, :])
        second = np.where(swap, before[:, None, :], after[:, None, :])
        draws.append(compute(*second) - compute(*first))
    return np.concatenate(draws)


def permutation_p(change: float, null: Array) -> float:
    """Two-sided p-value of a change under its null draws; the observed labelling counts as one draw."""
    null = null[np.isfinite(null)]
    return float((1 + np.sum(np.abs(null) >= abs(change) - 1e-12)) / (1 + len(null)))


def mcnemar_p(before: Array, after: Array) -> float:
    """Exact two-sided McNemar test of paired 0/1 outcomes, (n,) each: a binomial test on the discordant pairs."""
    lost = int(np.sum((before == 1) & (after == 0)))
    won = int(np.sum((before == 0) & (after == 1)))
    return float(binomtest(lost, lost + won, 0.5).pvalue) if lost + won else 1.0


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The macro figure: the mean of the benchmarks' values, each resampled within its own benchmark."""
    there = [e for e in estimates if e.value is not None]
    if not there:
        return Estimate(None, None, 0)
    draws = [e.draws for e in there if e.draws is not None]
    whole = np.mean(draws, axis=0) if len(draws) == len(there) else None
    return Estimate(float(np.mean([e.value for e in there])), whole, sum(e.n for e in there))


def interval(value: float | None, draws: Array | None, confidence: float) -> dict[str, float | None]:
    """`{"value", "low", "high"}`, the percentile interval of the draws that are defined; low and high None without."""
    low = high = None
    if draws is not None and np.isfinite(draws).any():
        tail = 100 * (1 - confidence) / 2
        low, high = (float(x) for x in np.nanpercentile(draws, [tail, 100 - tail]))
    return {"value": value, "low": low, "high": high}


def _blocks(samples: int, n: int) -> Iterator[int]:
    """Rows of each block, so that a block of resamples stays within some tens of megabytes."""
    rows = max(1, _BLOCK // n)
    for start in range(0, samples, rows):
        yield min(rows, samples - start)


def _plain(value: Array) -> float | None:
    return float(value) if np.isfinite(value) else None
