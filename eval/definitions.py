"""What each figure is: its name in the result contract, what it is computed from, and the line that explains it."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "times", "passes", "seconds", "tokens", "characters"]
Estimator = Literal["mean", "median", "ratio", "ratio_of_medians", "losers"]


@dataclass(frozen=True)
class Figure:
    """One figure of a set of requests.

    `columns` are columns of `metrics.table`: numerator and denominator for a ratio of sums or of medians, else one.
    `losers` is the median of the values below 1. Requests for which a column is undefined do not enter the figure, and
    its n says so. `crossed` marks the figures that rest on the base side's cost, so that an after-figure has a second
    form, against the base of before; of a crossed share the higher value must be the less flattering one.
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
    Figure("passes_removed_share", "Passes removed, pooled", "ratio", ("passes_removed", "base_passes"), "share",
           "sum of base passes - residual passes / sum of base passes: the waiting that streaming takes away"),
    *_speedups("speedup_passes_paper", "Speedup in passes, paper's count",
               "base passes / residual passes as the paper counts them, 1 + N - k", "speedup_passes_paper"),
    *_speedups("speedup_seconds", "Speedup in seconds",
               "base seconds / seconds after the last sentence, no cache at hand on either side (cold against cold)",
               "speedup_seconds"),
    _crossed("speedup_seconds_pooled", "Speedup in seconds, pooled", "ratio", ("base_seconds", "stream_seconds_cold"),
             "times", "sum of base seconds / sum of seconds after the last sentence, cold against cold"),
    *_speedups("speedup_seconds_session", "Session speedup in seconds",
               "base seconds (cold) / seconds after the last sentence with the session's cache at hand (warm)",
               "speedup_seconds_session"),
    _crossed("below_1x_share", "Below 1x in seconds", "mean", ("below_1x",), "share",
             "share of timed requests whose speedup in seconds (cold against cold) is below 1"),
)  # fmt: skip

CEILING = (
    _one("ceiling_median", "Ceiling of the speedup in passes", "median", "ceiling", "times",
         "median over requests of base passes / the least that an answer kept whole can cost, one pass"),
    Figure("ceiling_reached", "Ceiling reached", "ratio_of_medians", ("speedup_passes", "ceiling"), "share",
           "median speedup in passes / median ceiling"),
)  # fmt: skip

RISK = (
    _crossed("below_09x_share", "Below 0.9x in seconds", "mean", ("below_09x",), "share",
             "share of timed requests whose speedup in seconds (cold against cold) is below 0.9"),
    _crossed("below_08x_share", "Below 0.8x in seconds", "mean", ("below_08x",), "share",
             "share of timed requests whose speedup in seconds (cold against cold) is below 0.8"),
    _crossed("losers_median", "Median of the losers, in seconds", "losers", ("speedup_seconds",), "times",
             "median speedup in seconds (cold against cold) of the timed requests below 1x; n counts those alone"),
    _crossed("below_1x_share_paper", "Below 1x, paper's count", "mean", ("below_1x_paper",), "share",
             "share of requests whose speedup in passes as the paper counts them, N / (1 + N - k), is below 1"),
    _crossed("below_09x_share_paper", "Below 0.9x, paper's count", "mean", ("below_09x_paper",), "share",
             "share of requests whose speedup in passes as the paper counts them is below 0.9"),
    _crossed("below_08x_share_paper", "Below 0.8x, paper's count", "mean", ("below_08x_paper",), "share",
             "share of requests whose speedup in passes as the paper counts them is below 0.8"),
    _crossed("losers_median_paper", "Median of the losers, paper's count", "losers", ("speedup_passes_paper",), "times",
             "median speedup in passes as the paper counts them of the requests below 1x; n counts those alone"),
    _one("turned_wrong_share", "Turned wrong by streaming", "mean", "turned_wrong", "share",
         "share of scored requests with a right base answer and a wrong streamed one; of F1, lower by at least 0.1"),
    _one("turned_right_share", "Turned right by streaming", "mean", "turned_right", "share",
         "share of scored requests with a wrong base answer and a right streamed one; of F1, higher by at least 0.1"),
    _one("fast_but_wrong_share", "Fast but wrong", "mean", "fast_but_wrong", "share",
         "share of scored requests that streaming turned wrong at a speedup in passes of at least 2"),
    Figure("wrong_among_fast_share", "Turned wrong among the fast", "ratio", ("fast_but_wrong", "fast"), "share",
           "scored requests that are fast but wrong / scored requests with a speedup in passes of at least 2"),
)  # fmt: skip

COST = (
    _one("stream_passes_median", "Residual passes, median", "median", "stream_passes", "passes",
         "median over requests of the forward passes after the last sentence"),
    _one("stream_passes_mean", "Residual passes, mean", "mean", "stream_passes", "passes",
         "mean over requests of the forward passes after the last sentence"),
    _one("stream_passes_paper_median", "Residual passes, paper's count, median", "median", "stream_passes_paper",
         "passes", "median over requests of the passes after the last sentence as the paper counts them, 1 + N - k"),
    _one("base_passes_median", "Base passes, median", "median", "base_passes", "passes",
         "median over requests of the forward passes of decoding the whole request from nothing"),
    _one("base_passes_mean", "Base passes, mean", "mean", "base_passes", "passes",
         "mean over requests of the forward passes of decoding the whole request from nothing"),
    _one("stream_seconds_cold_median", "Seconds after the last sentence, cold, median", "median",
         "stream_seconds_cold", "seconds",
         "median over timed requests, no cache at hand; an untimed warm-up comes first"),
    _one("stream_seconds_median", "Seconds after the last sentence, warm, median", "median", "stream_seconds",
         "seconds", "median over timed requests, the session's cache at hand; an untimed warm-up comes first"),
    _one("base_seconds_median", "Base seconds, median", "median", "base_seconds", "seconds",
         "median over timed requests of decoding the whole request from nothing; an untimed warm-up comes first"),
    Figure("total_passes_over_base", "All passes over base passes", "ratio", ("total_passes", "base_passes"), "times",
           "sum of the passes of all updates / sum of base passes: what the latency was bought with (replay=full)"),
    _one("total_over_base_mean", "All passes over base passes, mean", "mean", "total_over_base", "times",
         "mean over requests of the passes of all updates / base passes (replay=full)"),
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
    _one("one_pass_share_paper", "Done in one pass, paper's count", "mean", "one_pass_paper", "share",
         "share of requests with one residual pass as the paper counts them: the whole answer is kept"),
    _one("keeps_nothing_share", "Keeps nothing", "mean", "keeps_nothing", "share",
         "share of requests that have a draft and keep none of it"),
    _one("keeps_some_share", "Keeps some", "mean", "keeps_some", "share",
         "share of requests that keep a part of their draft"),
    _one("keeps_all_share", "Keeps all", "mean", "keeps_all", "share",
         "share of requests that have a draft and keep all of it"),
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
    _one("unseen_tokens_median", "Unseen tokens, median", "median", "unseen_tokens", "tokens",
         "median over requests of the tokens that the last sentence adds to the final turn"),
    _one("unseen_tokens_share", "Unseen share of the request in tokens, mean", "mean", "unseen_tokens_share", "share",
         "mean over requests of the tokens that the last sentence adds / the final turn's tokens"),
)  # fmt: skip

RECYCLE = (
    _one("speedup_passes_lookup_median", "Speedup in passes against a base with look-up, median", "median",
         "speedup_passes_lookup", "times",
         "median over requests of base passes with look-up in its prompt / residual passes without (eval.recycle)"),
    _one("speedup_passes_recycle_median", "Speedup in passes with look-up on both sides, median", "median",
         "speedup_passes_recycle", "times",
         "median over requests of base passes with look-up in its prompt / residual passes with the rejected rest of "
         "the draft offered again (eval.recycle)"),
    _one("lookup_gain_median", "What look-up gains base, median", "median", "lookup_gain", "times",
         "median over requests of base passes / base passes with look-up in its prompt (eval.recycle)"),
)  # fmt: skip

FIGURES = (*QUALITY, *SPEED, *CEILING, *RISK, *COST, *REUSE, *ANSWERS, *UNSEEN, *RECYCLE)
BY_NAME = {figure.name: figure for figure in FIGURES}
AGAINST_BEFORE = "_against_before"
