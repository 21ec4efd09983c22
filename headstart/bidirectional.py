"""The decoder of bidirectional masked-diffusion models (LLaDA, Dream): enough to evaluate and to audit them.

Every place sees every other, so a cache is no use and each pass reads prompt and answer whole. Undecoded places hold
mask tokens; in a block, each pass commits the tokens that are probable enough, at least one (LLaDA, arXiv 2502.09992;
by confidence as in Fast-dLLM, arXiv 2505.22618).

Such a model judges a draft token that it can see, and confirms it (paper, section 6.5). `hide` is what can be tried
against that: hide the whole draft, which takes away the context, or each token in turn, which costs a pass a token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.acceptance import Rule, leading_run
from headstart.decoder import Answer, Verified
from headstart.family import context_length
from headstart.slot_diffusion import Call, block_length
from recipes.errors import UserError
from recipes.schema import Slots

TOGETHER = 8  # copies of the text that are read abreast where each token is hidden in turn


class BidirectionalDecoder:
    """Implements `decoder.Decoder` for a masked-diffusion model in evaluation mode, one request at a time.

    `limit` is the number of answer places that it is shown. With `shifted` the logits of a place are those of the one
    before it (Dream). `calls` lists every pass since it was last emptied; where each token is hidden in turn a pass
    reads several copies of the text, and each copy counts as a pass.
    """

    def __init__(
        self, model: Any, stop_ids: frozenset[int], mask_id: int, limit: int, settings: Slots, rule: Rule, shifted: bool
    ) -> None:
        self.model, self.stop_ids, self.mask_id = model, stop_ids, mask_id
        self.limit, self.settings, self.rule, self.shifted = limit, settings, rule, shifted
        self.context = context_length(model.config)
        self.block = block_length(by_token(settings), limit)
        self.calls: list[Call] = []
        self.claimed = False

    def forget(self) -> None:
        """Nothing is held between calls."""

    def prefill(self, prompt: Sequence[int]) -> None:
        """Nothing of a prompt can be held: each pass reads it anew."""

    def verify(self, prompt: Sequence[int], draft: Answer) -> Verified:
        """Keep the leading run of the draft that passes; with an empty draft nothing is read. See `decoder.Decoder`."""
        if len(prompt) + self.limit > self.context:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {self.limit} more exceed the context of {self.context}"
            )
        if not draft.tokens:
            return Verified(0, Answer())
        kept = leading_run(self.rule(*self.scores(prompt, draft)))
        return Verified(kept, draft if kept == len(draft.tokens) else Answer(draft.tokens[:kept]))

    @torch.inference_mode()
    def scores(self, prompt: Sequence[int], draft: Answer) -> tuple[Tensor, Tensor]:
        """Logits that judge each draft token, (draft tokens, vocabulary), and the tokens.

        In one pass, the draft seen or hidden whole; or in a pass a token, that token hidden (`settings.hide`).
        """
        count, start = len(draft.tokens), len(prompt)
        drafted = torch.tensor(draft.tokens, dtype=torch.long, device=self.model.device)
        if self.settings.hide != "each":
            shown = [self.mask_id] * count if self.settings.hide == "draft" else list(draft.tokens)
            return self._read([[*prompt, *shown]])[0, start:], drafted
        copies = [[*prompt, *draft.tokens] for _ in range(count)]
        for at, copy in enumerate(copies):
            copy[start + at] = self.mask_id
        rows = []
        for begin in range(0, count, TOGETHER):
            logits = self._read(copies[begin : begin + TOGETHER])
            rows += [logits[at, start + begin + at] for at in range(len(logits))]
        return torch.stack(rows), drafted

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], answer: Answer, stopped: Callable[[], bool] = lambda: False) -> Answer:
        """Decode the places behind the tokens of `answer`. Stopped, it returns the leading run of what is committed."""
        if answer.stop is not None:
            return answer
        places: list[int | None] = [*answer.tokens, *[None] * (self.limit - len(answer.tokens))]
        while (done := self._finished(places)).stop is None and not stopped():
            self._step(prompt, places)
        return done

    def _step(self, prompt: Sequence[int], places: list[int | None]) -> None:
        """One pass: commit the probable tokens of the block that holds the first open place, at least one."""
        shown = [self.mask_id if token is None else token for token in places]
        logits = self._read([[*prompt, *shown]])[0, len(prompt) :].float()
        first = places.index(None)
        end = min(len(places), (first // self.block + 1) * self.block)
        logits[:, self.mask_id] = -torch.inf
        probability, tokens = logits.softmax(dim=-1).max(dim=-1)
        open_ = [at for at in range(first, end) if places[at] is None]
        sure = [at for at in open_ if float(probability[at]) > self.settings.token_threshold]
        for at in sure or [max(open_, key=lambda place: float(probability[place]))]:
            places[at] = int(tokens[at])

    def _finished(self, places: Sequence[int | None]) -> Answer:
        """The leading run of committed tokens, up to its first end token."""
        answer = Answer()
        for token in places:
            if token is None or answer.stop is not None:
                break
            answer = answer.extended(token, self.stop_ids, self.limit)
        return answer

    def _read(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits of every place, (rows, tokens, vocabulary), as many passes as rows."""
        ids = torch.tensor([list(row) for row in rows], device=self.model.device)
        self.calls += [Call("predict", 1, ids.shape[1], 0)] * len(rows)
        logits: Tensor = self.model(input_ids=ids).logits
        return torch.cat([logits[:, :1], logits[:, :-1]], dim=1) if self.shifted else logits


def by_token(settings: Slots) -> Slots:
    """The settings with slots of one token: such a model commits token by token."""
    return settings.model_copy(update={"slot_size": 1})
