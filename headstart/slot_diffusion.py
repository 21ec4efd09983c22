"""The slot-diffusion decoder (ReFusion): slots of tokens in parallel, by one causal network with two readings.

A slot is some consecutive places of the answer. The network attends causally over the order in which tokens are fed,
and takes their true places from `position_ids`; a mask token at a place predicts the token of that place, a token
predicts its right neighbour. A step of decoding shows masks for all open slots of a block, chooses the confident ones
by their first token, and verifies the guesses by next-token reading in a second pass: what is right from the front is
committed as it stands, else the chosen slots are completed side by side (github.com/ML-GSAI/ReFusion, generate.py).

A draft is verified in one pass. The first token of a slot was never a next-token target in training, so it is read as
training showed it: from a mask token at its place that sees the prompt and the draft to its left. What is kept is final
for this request; the rest is decoded anew, in slots that begin right behind the kept run.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.acceptance import Rule, leading_run
from headstart.decoder import Answer, Verified, scored
from headstart.family import context_length
from recipes.errors import UserError
from recipes.schema import Slots

Phase = Literal["verify_draft", "predict", "verify_all", "draft", "verify_rows"]
Placed = tuple[int, int]  # token, position


@dataclass(frozen=True)
class Call:
    """One forward pass: what for, rows, tokens a row, and tokens that were cached before it."""

    phase: Phase
    rows: int
    tokens: int
    cached: int


@dataclass(frozen=True)
class Step:
    """One step of decoding: the slots that were open and chosen (first places), by which path, and what it left.

    `committed` are places in the order in which they were committed, `closed` first places of slots no longer open.
    """

    open: tuple[int, ...]
    chosen: tuple[int, ...]
    fallback: bool
    path: Literal["prefix", "rows"]
    committed: tuple[int, ...]
    closed: tuple[int, ...]


@dataclass(frozen=True)
class Filled:
    """What decoding committed: (token, place in the answer), in order, the tokens kept at its start among them."""

    committed: tuple[Placed, ...]
    steps: tuple[Step, ...]


@dataclass
class _Outcome:
    """What one step does: tokens to commit, the slots that stay open, whether an end token is among the tokens."""

    path: Literal["prefix", "rows"]
    commit: list[Placed]
    stay: list[range]
    ended: bool


class SlotDiffusionDecoder:
    """Implements `decoder.Decoder` for a slot-diffusion model in evaluation mode, one request at a time.

    Under `settings.keep="every"` the tokens that pass behind the leading run stay too, and `decode`, called next, fills
    the gaps around them.

    `limit` is the largest number of answer tokens. `calls` lists every forward pass since it was last emptied. Under
    `settings.compat="reference"` the faults of the reference are kept: an end token that is found in parallel rows
    closes the wrong slots, text behind the first end token stays, the mask token may be chosen, and places behind the
    last whole block are never decoded.

    Raises UserError where the settings cannot be: blocks that are no whole number of slots.
    """

    def __init__(
        self, model: Any, stop_ids: frozenset[int], mask_id: int, limit: int, settings: Slots, rule: Rule
    ) -> None:
        self.model, self.stop_ids, self.mask_id = model, stop_ids, mask_id
        self.limit, self.settings, self.rule = limit, settings, rule
        self.context = context_length(model.config)
        self.reference = settings.compat == "reference"
        self.block = block_length(settings, limit)
        self.calls: list[Call] = []
        self.claimed = False
        self.forget()

    def forget(self) -> None:
        """Drop the cache: the next pass starts from nothing."""
        self._cache = DynamicCache()
        self._held: list[Placed] = []
        self._plain: float = math.inf  # what is held behind so many tokens was completed side by side, and saw less
        self._apart: list[Placed] = []  # kept behind the leading run by the last `verify`

    @torch.inference_mode()
    def verify(self, prompt: Sequence[int], draft: Answer) -> Verified:
        """One pass over what of `prompt` is not in the cache, and the draft. See `decoder.Decoder`.

        With an empty draft nothing is fed: the prompt goes in with the first pass of `decode`. Raises UserError where
        prompt and answer would not fit the model's context.
        """
        self._fit(prompt)
        self._apart = []
        if not draft.tokens:
            return Verified(0, Answer())
        passes = self.rule(*self.scores(prompt, draft))
        kept = self._settled(leading_run(passes), draft)
        self._keep(len(prompt) + min(kept, len(scored(draft))))
        if kept == len(draft.tokens):
            return Verified(kept, draft)
        if self.settings.keep == "every":
            self._apart = [(draft.tokens[at], at) for at in range(kept, len(draft.tokens)) if passes[at]]
        apart = tuple(place for _, place in self._apart)
        return Verified(kept + len(apart), Answer(draft.tokens[:kept]), apart)

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], answer: Answer, stopped: Callable[[], bool] = lambda: False) -> Answer:
        """Decode on behind the tokens of `answer`. Stopped, it returns the leading run of what is committed."""
        if answer.stop is not None:
            return answer
        kept, self._apart = [*zip(answer.tokens, range(self.limit), strict=False), *self._apart], []
        return self._answer(self.fill(prompt, kept, stopped))

    @torch.inference_mode()
    def fill(
        self, prompt: Sequence[int], kept: Sequence[Placed], stopped: Callable[[], bool] = lambda: False
    ) -> Filled:
        """Decode every place of the answer that `kept`, (token, place) in rising order, does not hold."""
        self._fit(prompt)
        start = len(prompt)
        whole = [*_placed(prompt), *((token, start + place) for token, place in kept)]
        self._keep(self._reusable(whole))
        waiting, committed, steps, ended = whole[len(self._held) :], list(kept), list[Step](), False
        for block in self._blocks(kept):
            left = block
            while left and not stopped():
                guesses, confidence = self._predict(waiting, start, left)
                waiting = []
                chosen, fallback = self._choose(confidence)
                outcome = self._advance(start, left, chosen, [guesses[at] for at in chosen])
                committed += outcome.commit
                ended |= outcome.ended
                steps.append(_step(left, chosen, fallback, outcome))
                left = outcome.stay
            if ended or stopped():
                break
        return Filled(tuple(committed), tuple(steps))

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> None:
        """Put a prompt into the cache (what a session holds after an update), in one pass."""
        self._keep(self._reusable(_placed(prompt)))
        if rest := _placed(prompt)[len(self._held) :]:
            self._forward("predict", [rest], 1)

    @torch.inference_mode()
    def scores(self, prompt: Sequence[int], draft: Answer) -> tuple[Tensor, Tensor]:
        """Logits that judge each draft token from what stands to its left, (draft tokens, vocabulary), and the tokens.

        One pass. Fed are what of `prompt` is not in the cache, the draft, and behind it a mask token for each first
        token of a slot, which sees what is left of it.
        """
        self._keep(min(self._reusable(_placed(prompt)), len(prompt) - 1))
        fed, start, cached = scored(draft), len(prompt), len(self._held)
        rest = [*_placed(prompt)[cached:], *zip(fed, range(start, start + len(fed)), strict=True)]
        firsts = range(0, len(draft.tokens), self.settings.slot_size) if self.settings.scoring == "mask" else range(0)
        queries = [(self.mask_id, start + first) for first in firsts]
        width = len(rest) + len(queries)
        sees = torch.ones(width, cached + width, dtype=torch.bool).tril(cached)
        for row, first in enumerate(firsts, start=len(rest)):
            sees[row, start + first : cached + row] = False
        logits = self._forward("verify_draft", [[*rest, *queries]], 1 + len(fed) + len(queries), sees)[0]
        judged = logits[: len(draft.tokens)].clone()
        judged[list(firsts)] = logits[1 + len(fed) :]
        return judged, torch.tensor(draft.tokens, dtype=torch.long, device=logits.device)

    def _settled(self, run: int, draft: Answer) -> int:
        """Tokens that are kept of a leading run that passed."""
        whole, size = run == len(draft.tokens), self.settings.slot_size
        if whole and self.settings.paper_floor:
            return (run - 1) // size * size
        if not whole and self.settings.half_kept == "drop":
            return run // size * size
        return run

    def _predict(self, waiting: Sequence[Placed], start: int, slots: Sequence[range]) -> tuple[list[list[int]], Tensor]:
        """Guesses for every place of `slots`, and the probability of each slot's first one, (slots,)."""
        masks = [(self.mask_id, start + place) for slot in slots for place in slot]
        logits = self._forward("predict", [[*waiting, *masks]], len(masks))[0]
        self._keep(len(self._held) - len(masks))
        guesses, sizes = self._chosen(logits), [len(slot) for slot in slots]
        firsts = torch.tensor([0, *sizes[:-1]], device=logits.device).cumsum(0)
        probability = _probability(logits[firsts], guesses[firsts])
        return [part.tolist() for part in guesses.split(sizes)], probability

    def _choose(self, confidence: Tensor) -> tuple[list[int], bool]:
        """The confident slots, by place in the list; without any, the most confident one (then True)."""
        sure = (confidence > self.settings.slot_threshold).nonzero()[:, 0].tolist()
        return (sure, False) if sure else ([int(confidence.argmax())], True)

    def _advance(self, start: int, left: Sequence[range], chosen: Sequence[int], guesses: list[list[int]]) -> _Outcome:
        """Verify the guesses for the chosen slots among those that are left, and commit what that leads to."""
        slots = [left[at] for at in chosen]
        flat = [
            (token, place)
            for row, slot in zip(guesses, slots, strict=True)
            for token, place in zip(row, slot, strict=False)
        ]
        cached = len(self._held)
        logits = self._forward("verify_all", [_at(start, flat)], len(flat))[0]
        runs = self._next_token_runs(logits, guesses)
        accepted = _leading(run == len(slot) for run, slot in zip(runs, slots, strict=True))
        passed = sum(len(slot) for slot in slots[:accepted]) + (runs[accepted] if accepted < len(slots) else 0)
        end = next((at for at in range(passed) if flat[at][0] in self.stop_ids), None)
        if end is not None:
            self._keep(cached + end + 1)
            ending = next(slot for slot in slots if flat[end][1] in slot)
            stay = [slot for slot in left if slot not in slots and slot.start < ending.start]
            return _Outcome("prefix", flat[: end + 1], stay, True)
        if accepted:
            size = sum(len(slot) for slot in slots[:accepted])
            self._keep(cached + size)
            return _Outcome("prefix", flat[:size], [slot for slot in left if slot not in slots[:accepted]], False)
        self._keep(cached)
        return self._complete(start, left, chosen, guesses, runs)

    def _complete(
        self, start: int, left: Sequence[range], chosen: Sequence[int], guesses: list[list[int]], runs: Sequence[int]
    ) -> _Outcome:
        """Complete the chosen slots side by side, a row each; rows do not see each other.

        A round drafts what is not good yet from masks and verifies it: of each row the leading run that passes is good,
        at least one token more than before. A row that has an end token takes the rows behind it out.
        """
        slots = [left[at] for at in chosen]
        rows = _Rows.of(slots, guesses, runs, self.mask_id)
        cached, done, last = len(self._held), 0, None
        self._cache.batch_repeat_interleave(len(slots))
        while not rows.good.all():
            rows.tokens = self._drafted(start, rows, done)
            accepted = self._verified(start, rows, done)
            rows.good[:, done:] = accepted.long().cumprod(dim=1).bool() | rows.padding[:, done:]
            ending = [at for at in range(len(rows.slots)) if self._ends(rows, at, done)]
            if ending:
                last = ending[0]
                rows = rows.first(last + 1)
                rows.good[last] = True
                self._cache.batch_select_indices(torch.arange(last + 1, device=self.model.device))
            done += _step_of(rows.good[:, done:], again=self.reference)
            self._cache.crop(cached + done - self._cache.get_seq_length())
        commit = rows.flat()
        end = next((at for at, (token, _) in enumerate(commit) if token in self.stop_ids), None)
        commit = commit if end is None else commit[: end + 1]
        self._join(rows, cached, start, commit)
        stay = [slot for slot in left if slot not in slots]
        if end is not None and last is not None:
            stay = [slot for slot in stay if self._before(slot, slots[last], left, last)]
        return _Outcome("rows", commit, stay, end is not None)

    def _before(self, slot: range, ending: range, left: Sequence[range], row: int) -> bool:
        """Whether an open slot is left open by an end token in `ending`, the slot of this row."""
        return left.index(slot) < row if self.reference else slot.start < ending.start

    def _drafted(self, start: int, rows: "_Rows", done: int) -> Tensor:
        """The rows' tokens with each that is not good replaced by what its mask predicts; the cache as it was."""
        shown = torch.where(rows.good, rows.tokens, self.mask_id)
        length = self._cache.get_seq_length()
        logits = self._rows_forward("draft", start, rows, shown, done)
        self._cache.crop(length - self._cache.get_seq_length())
        tokens = rows.tokens.clone()
        tokens[:, done:] = torch.where(rows.good[:, done:], tokens[:, done:], self._chosen(logits).cpu())
        return tokens

    def _verified(self, start: int, rows: "_Rows", done: int) -> Tensor:
        """Which tokens from column `done` on pass: (rows, columns left), bool."""
        logits = self._rows_forward("verify_rows", start, rows, rows.tokens, done)
        scores = _probability(logits[:, :-1], rows.tokens[:, done + 1 :].to(logits.device)).cpu()
        passes = rows.good[:, done:].clone()
        passes[:, 0] = True
        passes[:, 1:] |= (scores > self.settings.token_threshold) | rows.good[:, done:-1]
        return passes

    def _ends(self, rows: "_Rows", at: int, done: int) -> bool:
        return any(
            good and token in self.stop_ids
            for good, token in zip(rows.good[at, done:].tolist(), rows.tokens[at, done:].tolist(), strict=True)
        )

    def _rows_forward(self, phase: Phase, start: int, rows: "_Rows", tokens: Tensor, done: int) -> Tensor:
        """Logits of the columns from `done` on, (rows, columns left, vocabulary)."""
        fed = [
            [(token, start + slot.start + column) for column, token in enumerate(row[done:], start=done)]
            for row, slot in zip(tokens.tolist(), rows.slots, strict=True)
        ]
        return self._forward(phase, fed, tokens.shape[1] - done)

    def _join(self, rows: "_Rows", cached: int, start: int, commit: Sequence[Placed]) -> None:
        """The rows' own keys and values behind those that all share, in one row, as many as are committed."""
        joined = DynamicCache()
        for number, layer in enumerate(self._cache.layers):
            own: Any = layer
            parts: list[list[Tensor]] = []
            for held in (own.keys, own.values):
                tails = [held[at : at + 1, :, cached : cached + len(slot)] for at, slot in enumerate(rows.slots)]
                parts.append([held[:1, :, :cached], *tails])
            keys, values = (torch.cat(part, dim=2)[:, :, : cached + len(commit)] for part in parts)
            joined.update(keys, values, number)
        self._cache = joined
        self._held += _at(start, commit)
        self._plain = min(self._plain, cached)

    def _next_token_runs(self, logits: Tensor, guesses: Sequence[Sequence[int]]) -> list[int]:
        """How many leading tokens of each slot pass: its first always, the others by the token before them."""
        tokens = torch.tensor([token for row in guesses for token in row], device=logits.device)
        passes = torch.ones_like(tokens, dtype=torch.bool)
        passes[1:] = _probability(logits[:-1], tokens[1:]) > self.settings.token_threshold
        runs, begin = [], 0
        for row in guesses:
            runs.append(1 + leading_run(passes[begin + 1 : begin + len(row)]))
            begin += len(row)
        return runs

    def _blocks(self, kept: Sequence[Placed]) -> list[list[range]]:
        """The open slots of each block: places before a kept end token that are not kept themselves, in slots."""
        size, count = self.settings.slot_size, self.settings.serial_blocks
        end = self.block * count if self.reference else self.limit
        end = min([end, *(place for token, place in kept if token in self.stop_ids)])
        held = {place for _, place in kept}
        missing = [place for place in range(end) if place not in held]
        blocks: list[list[range]] = [[] for _ in range(count)]
        at = 0
        while at < len(missing):
            run = _leading(place - missing[at] == step for step, place in enumerate(missing[at : at + size]))
            slot = range(missing[at], missing[at] + run)
            blocks[min((slot.start - missing[0]) // self.block, count - 1)].append(slot)
            at += run
        return blocks

    def _answer(self, filled: Filled) -> Answer:
        """The tokens by place: up to the first end token, or up to the first place that is missing."""
        tokens = {place: token for token, place in filled.committed}
        if self.reference:
            inside = [token for _, token in sorted(tokens.items())]
            return Answer(tuple(inside), "end" if inside[-1:] and inside[-1] in self.stop_ids else "length")
        answer = Answer()
        while answer.stop is None and len(answer.tokens) in tokens:
            answer = answer.extended(tokens[len(answer.tokens)], self.stop_ids, self.limit)
        return answer

    def _chosen(self, logits: Tensor) -> Tensor:
        """The most likely token of each row; the mask token is none, but under compat=reference."""
        if not self.reference:
            logits = logits.clone()
            logits[..., self.mask_id] = -torch.inf
        return logits.argmax(dim=-1)

    def _forward(
        self, phase: Phase, rows: Sequence[Sequence[Placed]], wanted: int, sees: Tensor | None = None
    ) -> Tensor:
        """Append tokens to the cache; logits of each row's last `wanted` of them, (rows, wanted, vocabulary).

        `sees`, (tokens, cached + tokens), says what each token attends to where that is not all to its left.
        """
        device = self.model.device
        self.calls.append(Call(phase, len(rows), len(rows[0]), self._cache.get_seq_length()))
        mask = None
        if sees is not None:
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.zeros(sees.shape, dtype=self.model.dtype).masked_fill(~sees, lowest)[None, None].to(device)
        output = self.model(
            input_ids=torch.tensor([[token for token, _ in row] for row in rows], device=device),
            position_ids=torch.tensor([[place for _, place in row] for row in rows], device=device),
            attention_mask=mask,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=wanted,
        )
        if len(rows) == 1 and phase not in ("draft", "verify_rows"):
            self._held += rows[0]
        logits: Tensor = output.logits
        return logits

    def _keep(self, length: int) -> None:
        """Roll the cache back to its first `length` tokens."""
        if length < len(self._held):
            self._cache.crop(length - len(self._held))
            del self._held[length:]
        if length <= self._plain:
            self._plain = math.inf

    def _reusable(self, tokens: Sequence[Placed]) -> int:
        """How many of the first `tokens` the cache holds as one pass over them would."""
        return int(min(_common(self._held, tokens), self._plain))

    def _fit(self, prompt: Sequence[int]) -> None:
        if len(prompt) + self.limit > self.context:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {self.limit} more exceed the context of {self.context}"
            )


@dataclass
class _Rows:
    """The chosen slots side by side: tokens, which are good and which padding, (rows, columns), on the CPU.

    A shorter slot has mask tokens behind its end, which count as good and are seen by nothing that counts.
    """

    slots: list[range]
    tokens: Tensor
    good: Tensor
    padding: Tensor

    @classmethod
    def of(cls, slots: Sequence[range], guesses: Sequence[Sequence[int]], runs: Sequence[int], pad: int) -> "_Rows":
        width = max(map(len, slots))
        tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in guesses])
        columns = torch.arange(width)
        lengths, passed = (torch.tensor(counts)[:, None] for counts in ([len(slot) for slot in slots], list(runs)))
        padding = columns >= lengths
        return cls(list(slots), tokens, (columns < passed) | padding, padding)

    def first(self, count: int) -> "_Rows":
        return _Rows(self.slots[:count], self.tokens[:count], self.good[:count], self.padding[:count])

    def flat(self) -> list[Placed]:
        """(token, place in the answer), row after row."""
        rows = zip(self.tokens.tolist(), self.slots, strict=True)
        return [pair for row, slot in rows for pair in zip(row, slot, strict=False)]


def block_length(settings: Slots, limit: int) -> int:
    """Places of a block. Raises UserError where that is no positive whole number of slots."""
    size, count = settings.slot_size, settings.serial_blocks
    whole = -(-limit // size) * size
    if not whole or whole // count == 0 or (whole // count) % size:
        raise UserError(
            f"slots: {limit} tokens in slots of {size} make {whole} places, whose {count} blocks of {whole // count} "
            f"are no whole number of slots; change slots.slot_size or slots.serial_blocks"
        )
    return whole // count


def _step(left: Sequence[range], chosen: Sequence[int], fallback: bool, outcome: _Outcome) -> Step:
    return Step(
        open=tuple(slot.start for slot in left),
        chosen=tuple(left[at].start for at in chosen),
        fallback=fallback,
        path=outcome.path,
        committed=tuple(place for _, place in outcome.commit),
        closed=tuple(slot.start for slot in left if slot not in outcome.stay),
    )


def _step_of(good: Tensor, again: bool) -> int:
    """Columns that are done in all rows of `good`, (rows, columns). `again`: feed the last of them once more."""
    columns = good.shape[1]
    done = int(good.long().cumprod(dim=1).sum(dim=1).min())
    return done if done == columns or not again else done - 1


def _probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Softmax probability, in float32, of each token under its row of logits."""
    return logits.float().log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0].exp()


def _placed(prompt: Sequence[int]) -> list[Placed]:
    return list(zip(prompt, range(len(prompt)), strict=True))


def _at(start: int, tokens: Sequence[Placed]) -> list[Placed]:
    return [(token, start + place) for token, place in tokens]


def _common(a: Sequence[Placed], b: Sequence[Placed]) -> int:
    return _leading(x == y for x, y in zip(a, b, strict=False))


def _leading(passes: Iterable[bool]) -> int:
    """Length of the leading run of True."""
    count = 0
    for passed in passes:
        if not passed:
            break
        count += 1
    return count
