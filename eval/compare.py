"""Before against after, paired on the requests that both have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.definitions import AGAINST_BEFORE, BY_NAME, FIGURES, Figure
from eval.evidence import Arm
from eval.metrics import Table, columns_of, ends_by_itself, excluded, table, with_speedups
from eval.pairing import Pair, Pairs, check_comparable, paired, unpaired
from eval.resampling import (
    Array,
    Estimate,
    average,
    estimate,
    interval,
    mcnemar_p,
    permutation_p,
    seed_for,
    swapped,
)
from recipes.errors import UserError

QUALITY_SERVED = Figure(
    "quality_served",
    "Quality, base before to stream after",
    "mean",
    ("served_score",),
    "share",
    "mean score of the before model's base answers against the after model's streamed answers: what a user is served",
)


_BASE_COST = ("base_passes", "base_seconds")


@dataclass(frozen=True)
class Resampling:
    """How intervals are made."""

    confidence: float
    samples: int
    seed: int


@dataclass(frozen=True)
class Change:
    """One figure on paired requests. `null` (samples,) is its change with the arms swapped at random per request."""

    before: Estimate
    after: Estimate
    draws: Array | None
    null: Array | None
    exact_p: float | None

    @property
    def value(self) -> float | None:
        """After minus before; None where either is undefined."""
        if self.before.value is None or self.after.value is None:
            return None
        return self.after.value - self.before.value


def compare(
    before: Arm,
    after: Arm,
    quality_before: Arm | None,
    confidence: float,
    samples: int,
    seed: int,
    force: bool = False,
) -> dict[str, Any]:
    """The paired changes of every figure, per benchmark, macro and pooled.

    Speed is `before` against `after`; the verdict on quality is `quality_before` against `after` (`before` where it
    is None). Each entry of `figures` holds before, after and change ({"value", "low", "high"} each, on the same
    requests), n, p and the test behind it. A figure that rests on the base side's cost comes twice: by its own name
    against the after model's base, and with `_against_before` against the before model's base on the same request.
    `headline` names the form with the lower after-value. `ends_by_itself` repeats it all on the requests whose
    answers end by themselves on both sides. Where `quality_before` and `after` share no request, `quality` has no
    benchmarks and its figures are None. `forced` says what the arms differ in that must be the same, where `force`
    lets it pass.

    Raises:
        UserError: where the arms cannot be compared, or `before` and `after` share no request; the line names why.
    """
    reference = quality_before or before
    forced = [what for arm in (before, reference) for what in check_comparable(arm, after, force)]
    pairs = paired(before, after, force)
    if not pairs:
        raise UserError(f"{before.folder} and {after.folder} share no included request; evaluate the same benchmarks")
    quality_pairs = paired(reference, after, force)
    how = Resampling(confidence, samples, seed)
    return {
        "before": before.label,
        "after": after.label,
        "quality_before": reference.label,
        "confidence": confidence,
        "samples": samples,
        "forced": list(dict.fromkeys(forced)),
        **_scopes(pairs, before, after, lambda p, name: _sections(p, before, after, name, how), how),
        "quality": _scopes(quality_pairs, reference, after, lambda p, name: _quality(p, name, how), how),
    }


def changes(before: Table, after: Table, selected: Sequence[Figure], samples: int, seed: Sequence[int]) -> dict:
    """name -> Change of each figure, on the rows where both tables define it."""
    return {f.name: _change(f, columns_of(before, f), columns_of(after, f), samples, seed) for f in selected}


def against_before(before: Table, after: Table) -> Table:
    """The after table with the before model's base cost: the second form of every after-figure."""
    return with_speedups(after | {key: before[key] for key in _BASE_COST})


def _change(figure: Figure, before: Array, after: Array, samples: int, seed: Sequence[int]) -> Change:
    defined = ~(np.isnan(before).any(axis=0) | np.isnan(after).any(axis=0))
    before, after = before[:, defined], after[:, defined]
    one = estimate(figure.estimator, before, samples, seed)
    two = estimate(figure.estimator, after, samples, seed)
    if one.draws is None or two.draws is None:
        return Change(one, two, None, None, None)
    null = swapped(figure.estimator, before, after, samples, seed)
    binary = figure.estimator == "mean" and np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all()
    return Change(one, two, two.draws - one.draws, null, mcnemar_p(before[0], after[0]) if binary else None)


def _sections(
    pairs: Sequence[Pair], before: Arm, after: Arm, name: str, how: Resampling
) -> dict[str, dict[str, Change]]:
    """The changes on all pairs, and on those whose answers end by themselves on both sides."""
    ending = [(b, a) for b, a in pairs if ends_by_itself(b) and ends_by_itself(a)]
    return {
        "figures": _both_forms(pairs, before, after, name, how),
        "ends_by_itself": _both_forms(ending, before, after, name, how),
    }


def _both_forms(pairs: Sequence[Pair], before: Arm, after: Arm, name: str, how: Resampling) -> dict[str, Change]:
    earlier = table([b for b, _ in pairs], before.timings)
    later = table([a for _, a in pairs], after.timings)
    own = changes(earlier, later, FIGURES, how.samples, seed_for(how.seed, name))
    crossed = [f for f in FIGURES if f.crossed]
    strict = changes(earlier, against_before(earlier, later), crossed, how.samples, seed_for(how.seed, name))
    return own | {f"{key}{AGAINST_BEFORE}": change for key, change in strict.items()}


def _quality(pairs: Sequence[Pair], name: str, how: Resampling) -> dict[str, dict[str, Change]]:
    earlier, later = table([b for b, _ in pairs], ()), table([a for _, a in pairs], ())
    earlier["served_score"], later["served_score"] = earlier["base_score"], later["stream_score"]
    selected = (BY_NAME["quality_stream"], BY_NAME["quality_base"], QUALITY_SERVED)
    return {"figures": changes(earlier, later, selected, how.samples, seed_for(how.seed, name))}


def _scopes(
    pairs: Pairs,
    before: Arm,
    after: Arm,
    sections: Callable[[Sequence[Pair], str], dict[str, dict[str, Change]]],
    how: Resampling,
) -> dict[str, Any]:
    """Per benchmark, macro (each benchmark resampled on its own, then averaged) and pooled."""
    parts = {name: sections(group, name) for name, group in pairs.items()}
    everything = [pair for group in pairs.values() for pair in group]
    whole = sections(everything, "pooled") if len(parts) != 1 else next(iter(parts.values()))
    macro = {
        key: {name: _averaged([part[key][name] for part in parts.values()]) for name in whole[key]} for key in whole
    }
    return {
        "benchmarks": {name: _rendered(part, pairs[name], how.confidence) for name, part in parts.items()},
        "macro": _rendered(macro, everything, how.confidence),
        "pooled": _rendered(whole, everything, how.confidence),
        "unpaired": unpaired(pairs, before, after),
        "excluded": {"before": excluded(before.records), "after": excluded(after.records)},
    }


def _averaged(parts: Sequence[Change]) -> Change:
    """The macro change, over the benchmarks that have one."""
    there = [c for c in parts if c.value is not None]
    return Change(
        average([c.before for c in there]),
        average([c.after for c in there]),
        _mean_draws([c.draws for c in there]),
        _mean_draws([c.null for c in there]),
        there[0].exact_p if len(parts) == 1 and there else None,
    )


def _mean_draws(draws: Sequence[Array | None]) -> Array | None:
    whole = [d for d in draws if d is not None]
    return np.mean(whole, axis=0) if whole and len(whole) == len(draws) else None


def _rendered(part: Mapping[str, Mapping[str, Change]], pairs: Sequence[Pair], confidence: float) -> dict[str, Any]:
    result: dict[str, Any] = {"n": len(pairs)}
    for section, found in part.items():
        entries = {name: _entry(change, confidence) for name, change in found.items()}
        if section == "ends_by_itself":
            ending = sum(ends_by_itself(b) and ends_by_itself(a) for b, a in pairs)
            result[section] = {"n": ending, "figures": entries, "headline": _headline(entries)}
        else:
            result |= {section: entries, "headline": _headline(entries)}
    return result


def _entry(change: Change, confidence: float) -> dict[str, Any]:
    p, test = None, None
    if change.exact_p is not None:
        p, test = change.exact_p, "exact McNemar"
    elif change.null is not None and change.value is not None:
        p, test = permutation_p(change.value, change.null), "paired permutation"
    return {
        "before": interval(change.before.value, change.before.draws, confidence),
        "after": interval(change.after.value, change.after.draws, confidence),
        "change": interval(change.value, change.draws, confidence),
        "n": min(change.before.n, change.after.n),
        "p": p,
        "test": test,
    }


def _headline(entries: Mapping[str, Any]) -> dict[str, str]:
    """For each figure with two forms the name of the stricter one: the less flattering after-value."""
    chosen = {}
    for figure in FIGURES:
        crossed = f"{figure.name}{AGAINST_BEFORE}"
        if crossed in entries:
            own, strict = (entries[name]["after"]["value"] for name in (figure.name, crossed))
            own_is_lower = own is not None and strict is not None and own < strict
            own_is_stricter = own_is_lower == (figure.unit == "times") and own != strict
            chosen[figure.name] = figure.name if own_is_stricter else crossed
    return chosen
