"""Acceptance rules: which draft tokens pass, from the scores that one verification pass gave them.

Each rule takes `logits`, shape (k, vocabulary): row j scores draft token j from its left context alone, and `draft`,
shape (k,), int64; it returns a bool tensor of shape (k,). What is kept is the leading run (paper, section 3).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from recipes.schema import Eval

Rule = Callable[[Tensor, Tensor], Tensor]
Rules = Callable[[int, Tensor, Tensor], Sequence[Tensor]]  # several at once, of a request by its place: a mask each


def greedy(logits: Tensor, draft: Tensor) -> Tensor:
    """The draft token is the argmax."""
    return logits.argmax(dim=-1) == draft


def threshold(logits: Tensor, draft: Tensor, tau: float) -> Tensor:
    """The draft token's probability (softmax in float32, no temperature) is at least `tau`."""
    return thresholds(logits, draft, (tau,))[0]


def thresholds(logits: Tensor, draft: Tensor, taus: Sequence[float]) -> list[Tensor]:
    """`threshold` for each of `taus`, from one softmax."""
    probability = _scores(logits.float().log_softmax(dim=-1), draft).exp()
    return [probability >= tau for tau in taus]


def top_k(logits: Tensor, draft: Tensor, k: int) -> Tensor:
    """Fewer than `k` tokens score higher than the draft token."""
    return (logits > _scores(logits, draft).unsqueeze(-1)).sum(dim=-1) < k


def everything(logits: Tensor, draft: Tensor) -> Tensor:
    """Every token passes: to decode on from tokens that are settled."""
    return torch.ones_like(draft, dtype=torch.bool)


def leading_run(passes: Tensor) -> int:
    """Length of the leading run of True in a (k,) tensor."""
    return int(passes.long().cumprod(dim=0).sum()) if passes.numel() else 0


def rule(settings: Eval) -> Rule:
    """The rule that a recipe names."""
    if settings.acceptance == "threshold":
        return partial(threshold, tau=settings.tau)
    if settings.acceptance == "top_k":
        return partial(top_k, k=settings.top_k)
    return greedy


def _scores(logits: Tensor, draft: Tensor) -> Tensor:
    return torch.gather(logits, -1, draft.unsqueeze(-1)).squeeze(-1)
