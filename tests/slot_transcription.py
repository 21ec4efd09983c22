"""The described steps of slot decoding written down plainly: no cache, every pass reads everything anew.

What our decoder is checked and timed against (`test_slot_decoder`). Tokens that were completed side by side
did not see each other when they were committed, and do not in later passes: hence the groups in the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.schema import Slots


@dataclass(frozen=True)
class Token:
    """A token at its position; of two tokens of one group, those of other rows are not seen."""

    id: int
    position: int
    group: int = -1
    row: int = -1


class Transcription:
    """One decoding. `passes` counts forward passes as the decoder does: rows side by side are one."""

    def __init__(self, model: Any, stop_ids: frozenset[int], mask_id: int, settings: Slots) -> None:
        self.model, self.stop_ids, self.mask_id, self.settings = model, stop_ids, mask_id, settings
        self.passes = 0

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The answer's tokens, up to the first end token."""
        size, count, start = self.settings.slot_size, self.settings.serial_blocks, len(prompt)
        block = -(-limit // size) * size // count
        done = [Token(token, place) for place, token in enumerate(prompt)]
        for number in range(count):
            end = limit if number == count - 1 else (number + 1) * block
            left = [range(at, min(at + size, end)) for at in range(number * block, end, size)]
            while left:
                left = self._step(done, left, start)
            if any(token.id in self.stop_ids for token in done[start:]):
                break
        answer: list[int] = []
        for token in sorted(done[start:], key=lambda one: one.position):
            answer.append(token.id)
            if token.id in self.stop_ids:
                break
        return answer

    def _step(self, done: list[Token], left: list[range], start: int) -> list[range]:
        masks = [Token(self.mask_id, start + place) for slot in left for place in slot]
        chances = self._chances([[*done, *masks]], len(masks))[0]
        best = self._best(chances)
        guesses, confidence, at = [], [], 0
        for slot in left:
            guesses.append(best[at : at + len(slot)])
            confidence.append(float(chances[at, best[at]]))
            at += len(slot)
        chosen = [i for i, sure in enumerate(confidence) if sure > self.settings.slot_threshold]
        chosen = chosen or [confidence.index(max(confidence))]
        slots = [left[i] for i in chosen]
        flat = [Token(t, start + p) for i in chosen for t, p in zip(guesses[i], left[i], strict=True)]
        chances = self._chances([[*done, *flat]], len(flat))[0]
        passed = [
            at == 0 or flat[at].position in {start + s.start for s in slots}
            or float(chances[at - 1, flat[at].id]) > self.settings.token_threshold
            for at in range(len(flat))
        ]  # fmt: skip
        accepted = passed.index(False) if False in passed else len(flat)
        ends = [token for token in flat[:accepted] if token.id in self.stop_ids]
        if ends:
            done += flat[: flat.index(ends[0]) + 1]
            return [s for s in left if s not in slots and start + s.stop <= ends[0].position]
        whole = [slot for slot in slots if start + slot.stop - 1 <= (flat[accepted - 1].position)]
        if whole[:1] == slots[:1]:
            done += [token for token in flat[:accepted] if any(token.position - start in slot for slot in whole)]
            return [slot for slot in left if slot not in whole]
        return self._rows(done, left, slots, [guesses[i] for i in chosen], passed, start)

    def _rows(
        self,
        done: list[Token],
        left: list[range],
        slots: list[range],
        tokens: list[list[int]],
        passed: list[bool],
        start: int,
    ) -> list[range]:
        good, at = [], 0
        for slot in slots:
            run = passed[at : at + len(slot)]
            good.append(run.index(False) if False in run else len(slot))
            at += len(slot)
        ending: int | None = None
        while any(run < len(slot) for run, slot in zip(good, slots, strict=True)):
            width = max(map(len, slots))
            shown = [
                [t if c < run else self.mask_id for c, t in enumerate(row)]
                for row, run in zip(tokens, good, strict=True)
            ]
            chances = self._side_by_side(done, slots, shown, start, width)
            for row, run in enumerate(good):
                fresh = self._best(chances[row])
                tokens[row] = [t if c < run else fresh[c] for c, t in enumerate(tokens[row])]
            chances = self._side_by_side(done, slots, tokens, start, width)
            for row, run in enumerate(good):
                while run < len(slots[row]) and (
                    run == good[row] or float(chances[row, run - 1, tokens[row][run]]) > self.settings.token_threshold
                ):
                    run += 1
                good[row] = run
            found = [r for r, run in enumerate(good) if any(t in self.stop_ids for t in tokens[r][:run])]
            if found:
                ending = found[0]
                slots_left = slots[: ending + 1]
                tokens, good = tokens[: ending + 1], good[: ending + 1]
                good[ending] = len(slots_left[ending])
                dropped, slots = slots[ending + 1 :], slots_left
                left = [s for s in left if s not in dropped]
        group, committed = len(done), list[Token]()
        for row, (slot, kept) in enumerate(zip(slots, tokens, strict=True)):
            for token, place in zip(kept, slot, strict=True):
                committed.append(Token(token, start + place, group, row))
                if token in self.stop_ids:
                    done += committed
                    return [s for s in left if s not in slots and s.start < slots[row].start]
        done += committed
        return [s for s in left if s not in slots]

    def _side_by_side(
        self, done: list[Token], slots: list[range], tokens: list[list[int]], start: int, width: int
    ) -> Tensor:
        rows = []
        for slot, row in zip(slots, tokens, strict=True):
            filled = [*row, *[self.mask_id] * (width - len(row))]
            rows.append([*done, *(Token(t, start + slot.start + c) for c, t in enumerate(filled))])
        return self._chances(rows, width)

    def _best(self, chances: Tensor) -> list[int]:
        allowed = chances.clone()
        allowed[:, self.mask_id] = -1
        found: list[int] = allowed.argmax(dim=-1).tolist()
        return found

    def _chances(self, rows: list[list[Token]], wanted: int) -> Tensor:
        """Probabilities at the last `wanted` tokens of each row, from a pass over all of it."""
        self.passes += 1
        groups, numbers = (torch.tensor([getattr(token, name) for token in rows[0]]) for name in ("group", "row"))
        apart = (groups[:, None] == groups) & (groups[:, None] >= 0) & (numbers[:, None] != numbers)
        hidden = apart | ~torch.ones_like(apart).tril()
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        logits: Tensor = self.model(
            input_ids=torch.tensor([[token.id for token in row] for row in rows]),
            position_ids=torch.tensor([[token.position for token in row] for row in rows]),
            attention_mask=mask[None, None].expand(len(rows), 1, -1, -1),
            use_cache=False,
        ).logits
        return logits[:, -wanted:].float().softmax(dim=-1)
