"""The figures of one request, as pure functions of its counts.

Words and counts are those of "Answering While You Type" (arXiv 2610.26296, section 3), but for one thing: the paper
charges the verification pass and takes nothing from it, while here its next token counts as decoded.
"""

from collections.abc import Iterable


def residual(answer_tokens: int, kept_tokens: int) -> int:
    """Forward passes after the last sentence: max(1, N - k).

    `answer_tokens` N and `kept_tokens` k count the end of turn where there is one. The verification pass already
    yields the token after the kept run, and an answer that is kept whole still costs that one pass.

    Raises:
        ValueError: unless 0 <= k <= N and 1 <= N.
    """
    _check(answer_tokens, kept_tokens)
    return max(1, answer_tokens - kept_tokens)


def residual_paper(answer_tokens: int, kept_tokens: int) -> int:
    """The paper's count of the same passes: 1 + N - k, where the verification yields no token of its own.

    Raises:
        ValueError: unless 0 <= k <= N and 1 <= N.
    """
    _check(answer_tokens, kept_tokens)
    return 1 + answer_tokens - kept_tokens


def residual_paper_slots(passes: int) -> int:
    """The paper's count of a slot-diffusion model's residual passes: never fewer than three (section 6.3)."""
    return max(3, passes)


def speedup(base: float, stream: float) -> float | None:
    """Cost of decoding the whole request from nothing / residual cost, both in passes or both in seconds.

    None where the residual cost is zero: such a request has no speedup, and whoever aggregates has to count it.
    """
    return base / stream if stream > 0 else None


def kept_share(draft_tokens: int, kept_tokens: int) -> float | None:
    """Kept tokens / draft tokens, in [0, 1]; None where the model wrote no draft.

    Raises:
        ValueError: unless 0 <= kept_tokens <= draft_tokens.
    """
    if not 0 <= kept_tokens <= draft_tokens:
        raise ValueError(f"{kept_tokens} tokens kept out of a draft of {draft_tokens}")
    return kept_tokens / draft_tokens if draft_tokens else None


def total_passes(update_passes: Iterable[int]) -> int:
    """What the latency was bought with: the passes of every update, the one after the last sentence included."""
    return sum(update_passes)


def _check(answer_tokens: int, kept_tokens: int) -> None:
    if answer_tokens < 1 or not 0 <= kept_tokens <= answer_tokens:
        raise ValueError(f"{kept_tokens} tokens kept in an answer of {answer_tokens}")
