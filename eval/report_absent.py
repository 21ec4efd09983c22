"""Why a figure has no value, in a few words."""

from collections.abc import Mapping
from typing import Any

NOT_TIMED = "no request was timed (eval.timed=0)"
NOT_SCORED = "no request was scored"
NOT_RECYCLED = "only with eval.recycle=true"
NOT_FULL = "only with eval.replay=full"
NO_DRAFT = "no request has a draft"
NO_SUCH = "no such request"
NO_LOSER = "no request is below 1×"
_OF_SECONDS = ("below_1x_share", "below_09x_share", "below_08x_share", "losers_median")


def why(name: str, figures: Mapping[str, Any]) -> str:
    """The reason for a missing figure of one benchmark, or of all requests.

    Args:
        name: the figure's.
        figures: `n`, `n_timed`, `n_scored` and the figures themselves, as `metrics.summarise` gives them.
    """
    if not figures["n"]:
        return "no request is included"
    if ("seconds" in name or name in _OF_SECONDS) and not figures["n_timed"]:
        return NOT_TIMED
    if name.startswith("losers_median"):
        return NO_LOSER
    return _by_name(name)


def why_paired(name: str) -> str:
    """The reason for a missing change of a figure: no request has it in both arms."""
    if "seconds" in name or (name.startswith(_OF_SECONDS) and "paper" not in name):
        return "no request was timed in both arms"
    return _by_name(name)


def _by_name(name: str) -> str:
    if name.startswith(("quality", "turned_", "fast_but_wrong")):
        return NOT_SCORED
    if name.startswith("total_"):
        return NOT_FULL
    if "lookup" in name or "recycle" in name:
        return NOT_RECYCLED
    if name.startswith("kept_share"):
        return NO_DRAFT
    if name.startswith("wrong_among_fast"):
        return "no scored request is at least 2× as fast"
    return "not in this evidence"
