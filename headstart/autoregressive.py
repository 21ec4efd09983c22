"""The autoregressive decoder: one request at a time, with a key-value cache that rolls back.

The cache is a `DynamicCache` without a config: it keeps every position in every layer, so that sliding-window layers
(Gemma-3) can be cropped any number of times; the window is applied by the mask.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.acceptance import Rule, greedy, leading_run
from headstart.decoder import Answer, Verified, scored, settle
from headstart.family import context_length
from recipes.errors import UserError


class AutoregressiveDecoder:
    """Implements `decoder.Decoder` for a causal language model in evaluation mode.

    `limit` is the largest number of answer tokens, counted from the answer's start. Decoding is greedy: sampling values
    and penalties of the model's generation config are not used, in base and stream alike.
    """

    def __init__(self, model: Any, stop_ids: frozenset[int], limit: int, rule: Rule = greedy) -> None:
        self.model = model
        self.stop_ids = stop_ids
        self.limit = limit
        self.rule = rule
        self.context = context_length(model.config)
        self.claimed = False
        self.forget()

    def forget(self) -> None:
        """Drop the cache: the next pass starts from nothing."""
        self._cache = DynamicCache()
        self._held: list[int] = []

    @torch.inference_mode()
    def verify(self, prompt: Sequence[int], draft: Answer) -> Verified:
        """One pass over what of `prompt` is not in the cache, and the draft. See `decoder.Decoder`.

        With an empty draft this is the prefill of plain decoding. Raises UserError where prompt and answer would not
        fit the model's context.
        """
        tokens = scored(draft)
        if len(prompt) + self.limit > self.context:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {self.limit} more exceed the context of {self.context}"
            )
        self._keep(min(common_prefix(self._held, prompt), len(prompt) - 1))
        logits = self._forward([*prompt[len(self._held) :], *tokens], positions=len(tokens) + 1)
        drafted = torch.tensor(draft.tokens, dtype=torch.long, device=logits.device)
        kept = leading_run(self.rule(logits[: len(drafted)], drafted))
        following = int(logits[min(kept, len(tokens))].argmax())
        self._keep(len(prompt) + min(kept, len(tokens)))
        return Verified(kept, settle(draft, kept, following, self.stop_ids, self.limit))

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], answer: Answer, stopped: Callable[[], bool] = lambda: False) -> Answer:
        """Decode on, one token a pass, right after `verify` of the same prompt gave `answer`."""
        while answer.stop is None and not stopped():
            token = int(self._forward(answer.tokens[-1:], positions=1)[0].argmax())
            answer = answer.extended(token, self.stop_ids, self.limit)
        return answer

    def prefill(self, prompt: Sequence[int]) -> None:
        """Put a prompt into the cache (what a session holds after an update), in one pass."""
        self.verify(prompt, Answer())

    def _forward(self, tokens: Sequence[int], positions: int) -> Tensor:
        """Append `tokens` to the cache; logits of the last `positions` of them, shape (positions, vocabulary)."""
        start, device = len(self._held), self.model.device
        output = self.model(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=torch.arange(start, start + len(tokens), device=device).unsqueeze(0),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=positions,
        )
        self._held += tokens
        return output.logits[0]

    def _keep(self, length: int) -> None:
        """Roll the cache back to its first `length` tokens."""
        if length < len(self._held):
            self._cache.crop(length - len(self._held))
            del self._held[length:]


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix, of tokens or of characters."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
