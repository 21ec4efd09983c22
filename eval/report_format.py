"""Figures as a reader sees them."""

from collections.abc import Mapping
from typing import Any

from eval.definitions import Unit

NOT_THERE = "n/a"
_SUFFIX: dict[Unit, str] = {
    "share": "%", "times": "×", "passes": "", "seconds": " s", "tokens": "", "characters": "",
}  # fmt: skip
_DIGITS: dict[Unit, int] = {"share": 1, "times": 2, "passes": 1, "seconds": 3, "tokens": 1, "characters": 0}


def number(value: float | None, unit: Unit) -> str:
    """12.3%, 1.50×, 0.840 s; "n/a" where there is no value."""
    return NOT_THERE if value is None else f"{_scaled(value, unit)}{_SUFFIX[unit]}"


def bounds(estimate: Mapping[str, float | None], unit: Unit) -> str:
    """The interval in brackets, or an empty string."""
    low, high = estimate["low"], estimate["high"]
    return "" if low is None or high is None else f"[{_scaled(low, unit)}, {_scaled(high, unit)}]"


def with_bounds(estimate: Mapping[str, float | None], unit: Unit) -> str:
    """Value and interval."""
    return f"{number(estimate['value'], unit)} {bounds(estimate, unit)}".rstrip()


def signed(value: float | None, unit: Unit) -> str:
    """A change: +12.3 points, -0.40×."""
    if value is None:
        return NOT_THERE
    return f"{_scaled(value, unit, '+')}{' points' if unit == 'share' else _SUFFIX[unit]}"


def signed_bounds(estimate: Mapping[str, float | None], unit: Unit) -> str:
    """The interval of a change, in brackets, or an empty string."""
    low, high = estimate["low"], estimate["high"]
    return "" if low is None or high is None else f"[{_scaled(low, unit, '+')}, {_scaled(high, unit, '+')}]"


def p_value(p: float | None) -> str:
    """A p-value to two digits."""
    if p is None:
        return ""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.995 else "1"


def evidence(entry: Mapping[str, Any], unit: Unit) -> str:
    """What stands behind a changed figure: (+0.4 points [-1.0, +1.9], p = 0.4, n = 164)."""
    change = entry["change"]
    parts = [f"{signed(change['value'], unit)} {signed_bounds(change, unit)}".rstrip()]
    p = p_value(entry["p"])
    parts += [f"p {p}" if p.startswith("<") else f"p = {p}"] if p else []
    return f"({', '.join(parts)}, n = {entry['n']})"


def _scaled(value: float, unit: Unit, sign: str = "") -> str:
    text = format(100 * value if unit == "share" else value, f"{sign}.{_DIGITS[unit]}f")
    return text.replace("-", "") if sign == "" and float(text) == 0 else text
