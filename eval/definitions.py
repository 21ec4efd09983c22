"""What each figure is: its name in the result contract, what it is computed from, and the line that explains it."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "times", "passes", "seconds", "tokens", "characters"]
Estimator = Literal["mean", "median", "ratio"]


@dataclass(frozen=True)
class Figure:
    """One figure of a set of requests.

    `columns` are columns of `metrics.table`: one for a mean or a median, numerator and denominator for a ratio of
    sums. Requests for which a column is undefined do not enter the figure, and its n says so. `crossed` marks the
    figures that rest on the base side's cost, so that an after-figure has a second form: against the base of before.
    """

    name: str
    label: str
    estimator: Estimator
    columns: tuple[str, ...]
    unit: Unit
    definition: str
    crossed: bool = False


def _one(name: str, label: str, estimator: Estimator, column: str, unit: Unit, definition: str) -> Figure:
    return Figure(name, label, estimator, (column,), unit, definition)


def _crossed(
    name: str, label: str, estimator: Estimator, columns: tuple[str, ...], unit: Unit, definition: str
) -> Figure:
    return Figure(name, label, estimator, columns, unit, definition, crossed=True)


def _speedups(stem: str, label: str, definition: str, column: str) -> tuple[Figure, Figure]:
    return (
        _crossed(f"{stem}_mean", f"{label}, mean", "mean", (column,), "times", f"mean over requests of {definition}"),
        _crossed(
            f"{stem}_median", f"{label}, median", "median", (column,), "times", f"median over requests of {definition}"
        ),
    )


QUALITY = (
    _one("quality_stream", "Quality, stream", "mean", "stream_score", "share",
         "mean score of the streamed answers (pass@1 or F1), over the requests that were scored on both sides"),
    _one("quality_base", "Quality, base", "mean", "base_score", "share",
         "mean score of the answers decoded from nothing, over the same requests"),
)  # fmt: skip

SPEED = (
    *_speedups("speedup_passes", "Speedup in passes", "base passes / residual passes, residual = max(1, N - k)",
               "speedup_passes"),
    _crossed("speedup_passes_pooled", "Speedup in passes, pooled", "ratio", ("base_passes", "stream_passes"), "times",
             "sum of base passes / sum of residual passes (a ratio of sums, not a mean of ratios)"),
    *_speedups("speedup_passes_paper", "Speedup in passes, paper's count",
               "base passes / residual passes as the paper counts them, 1 + N - k", "speedup_passes_paper"),
    *_speedups("speedup_seconds", "Speedup in seconds",
               "base seconds / seconds after the last sentence, no cache at hand on either side (cold against cold)",
               "speedup_seconds"),
    *_speedups("speedup_seconds_session", "Session speedup in seconds",
               "base seconds (cold) / seconds after the last sentence with the session's cache at hand (warm)",
               "speedup_seconds_session"),
    _crossed("below_1x_share", "Below 1x in seconds", "mean", ("below_1x",), "share",
             "share of timed requests whose speedup in seconds (cold against cold) is below 1"),
)  # fmt: skip

COST = (
    _one("stream_passes_median", "Residual passes, median", "median", "stream_passes", "passes",
         "median over requests of the forward passes after the last sentence"),
    _one("stream_passes_mean", "Residual passes, mean", "mean", "stream_passes", "passes",
         "mean over requests of the forward passes after the last sentence"),
    _one("base_passes_median", "Base passes, median", "median", "base_passes", "passes",
         "median over requests of the forward passes of decoding the whole request from nothing"),
    _one("base_passes_mean", "Base passes, mean", "mean", "base_passes", "passes",
         "mean over requests of the forward passes of decoding the whole request from nothing"),
    _one("stream_seconds_cold_median", "Seconds after the last sentence, cold, median", "median",
         "stream_seconds_cold", "seconds", "median over timed requests, no cache at hand"),
    _one("stream_seconds_median", "Seconds after the last sentence, warm, median", "median", "stream_seconds",
         "seconds", "median over timed requests, the session's cache at hand"),
    _one("base_seconds_median", "Base seconds, median", "median", "base_seconds", "seconds",
         "median over timed requests of decoding the whole request from nothing"),
    Figure("total_passes_over_base", "All passes over base passes", "ratio", ("total_passes", "base_passes"), "times",
           "sum of the passes of all updates / sum of base passes: what the latency was bought with (replay=full)"),
)  # fmt: skip

REUSE = (
    _one("kept_share", "Kept share, mean of shares", "mean", "kept_share", "share",
         "mean over requests with a draft of kept tokens / draft tokens, of the last draft"),
    Figure("kept_share_pooled", "Kept share, pooled", "ratio", ("kept_tokens", "draft_tokens"), "share",
           "sum of kept tokens / sum of draft tokens (a ratio of sums: long drafts weigh more)"),
    _one("kept_tokens_mean", "Kept tokens, mean", "mean", "kept_tokens", "tokens",
         "mean over requests of the draft tokens kept; 0 where there is no draft"),
    _one("one_pass_share", "Done in one pass", "mean", "one_pass", "share",
         "share of requests with one residual pass"),
    _one("keeps_nothing_share", "Keeps nothing", "mean", "keeps_nothing", "share",
         "share of requests that have a draft and keep none of it"),
    _one("no_draft_share", "No draft", "mean", "no_draft", "share",
         "share of requests for which the model wrote no draft (apart from those that keep nothing)"),
)  # fmt: skip

ANSWERS = (
    _one("ends_by_itself_share", "Ends by itself", "mean", "ends", "share",
         "share of requests whose base and streamed answers both reach their end of turn within the limit"),
    _one("answer_tokens_mean", "Answer length, mean", "mean", "answer_tokens", "tokens",
         "mean over requests of the streamed answer's tokens, end of turn included"),
)  # fmt: skip

UNSEEN = (
    _one("unseen_characters_median", "Unseen characters, median", "median", "unseen_characters", "characters",
         "median over requests of the characters of the last sentence, unseen when the last draft was made"),
    _one("unseen_share_mean", "Unseen share of the request, mean", "mean", "unseen_share", "share",
         "mean over requests of the last sentence's characters / the final turn's characters"),
)  # fmt: skip

FIGURES = (*QUALITY, *SPEED, *COST, *REUSE, *ANSWERS, *UNSEEN)
BY_NAME = {figure.name: figure for figure in FIGURES}
AGAINST_BEFORE = "_against_before"
