"""What training is for, while it goes on: how much of a draft survives, on held-out requests, and what that costs.

At step 0 and every `train.watch_every` steps the adapter as it stands drafts from each request without its last
sentence and answers the whole one, as `eval/run.py eval.arm=adapter` would. Under `greedy` base and streamed answer are
one and the same, in float32 token for token, and what is kept of a draft is what it has in common with that answer: so
each is decoded once, from the answers of the look before, and the passes follow from their lengths. Drift is how far
the adapted model, with the message, is from the plain base on whole requests.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from headstart.acceptance import Rule, greedy, rule
from headstart.autoregressive import common_prefix
from headstart.batch import BatchDecoder
from headstart.decoder import Answer
from headstart.decoders import OneByOne, batch_decoder, walk
from headstart.prompt import Renderer
from headstart.request import Message, Request
from headstart.residual import kept_share, residual, speedup
from headstart.sentences import split
from recipes.errors import UserError
from recipes.run_folder import digest
from recipes.schema import Recipe, Slots, Train
from train.distill import kl_divergence
from train.trainer import CHUNK, labelled_logits, padded

TOGETHER = 4  # requests whose logits are held at once for the drift


@dataclass(frozen=True)
class Watched:
    """One look at the adapter after `step` optimizer steps, over the `n` of the watched requests that are not excluded.

    Requests of one sentence and those with an empty answer are excluded, as in evaluation. `kept_share` is the mean
    over requests of kept tokens / draft tokens (None where no request has a draft), the speedups are mean and median
    over requests of base passes / residual passes (None where all are excluded). `drift` is the mean over the plain
    base's answer tokens of KL(base || adapted) in nats; at step 0 it is what the message alone does. `seconds` is what
    the look took.
    """

    step: int
    n: int
    kept_share: float | None
    speedup_passes_mean: float | None
    speedup_passes_median: float | None
    drift: float
    seconds: float


@dataclass(frozen=True)
class Seen:
    """One request in a look: None for what an excluded request, or one without a draft, does not have."""

    kept_share: float | None
    speedup: float | None
    divergence: float
    tokens: int


class Watcher:
    """Watches the requests of `heldout`, shared out over the processes of the launch."""

    def __init__(self, recipe: Recipe, renderer: Renderer, stop_ids: frozenset[int], heldout: Path) -> None:
        state, settings = PartialState(), recipe.train
        self.renderer, self.stop_ids, self.recipe = renderer, stop_ids, recipe
        self.limit, self.system = settings.watch_max_new_tokens, recipe.prompt.system_message
        found = watched_requests(heldout, settings.watch_requests, recipe.run.seed)
        requests = [r for r in found if len(self._prompt(r, len(r.sentences))) <= settings.max_length]
        if not requests:
            raise UserError(
                f"{heldout}: no request to watch fits train.max_length={settings.max_length} tokens; "
                "raise it, or set train.watch_every=0"
            )
        size = min(recipe.eval.batch_size, -(-len(requests) // state.num_processes))
        groups = [requests[i : i + size] for i in range(0, len(requests), size)]
        self.groups = groups[state.process_index :: state.num_processes]
        self.batch_size = size
        self.answers: dict[str, Answer] = {}  # the plain base's, by request
        self.seen: dict[tuple[str, int], Answer] = {}  # of the last look, by request and sentences left out

    def look(self, adapted: Any, step: int) -> Watched:
        """Watch the PeftModel as it stands; every process has to call this. Leaves its mode and random states alone."""
        began = time.monotonic()
        with _at_rest(adapted):
            mine = [seen for group in self.groups for seen in self._look_at(adapted, group)]
        return watched(gather_object(mine), step, time.monotonic() - began)

    def _look_at(self, adapted: Any, requests: Sequence[Request]) -> list[Seen]:
        model, ends = adapted.get_base_model(), self.stop_ids
        decoder = batch_decoder(model, self.renderer, ends, self.limit, self.batch_size, *self._rule())
        if fresh := [request for request in requests if request.id not in self.answers]:
            with adapted.disable_adapter():
                plain = decoder.advance([self.renderer.prompt(r.text, r.history) for r in fresh])
            self.answers |= {r.id: found.answer for r, found in zip(fresh, plain, strict=True)}
        if isinstance(decoder, BatchDecoder):
            found = self._streamed(decoder, requests)
        else:
            found = self._walked(decoder, requests)
        parts = [requests[i : i + TOGETHER] for i in range(0, len(requests), TOGETHER)]
        divergences = [divergence for part in parts for divergence in self._drift(adapted, part)]
        lengths = [len(self.answers[request.id].tokens) for request in requests]
        together = zip(found, divergences, lengths, strict=True)
        return [Seen(share, times, divergence, tokens) for (share, times), divergence, tokens in together]

    def _rule(self) -> tuple[Slots, Rule]:
        """Slots and acceptance rule: an autoregressive model is watched under `greedy`."""
        autoregressive = self.renderer.family.decoder == "autoregressive"
        return self.recipe.slots, greedy if autoregressive else rule(self.recipe.eval)

    def _walked(self, decoder: OneByOne, requests: Sequence[Request]) -> list[tuple[float | None, float | None]]:
        """Kept share and speedup of each request, walked sentence by sentence, by the hook's counts."""
        paths = [[self._prompt(r, i) for i in range(1, 1 + len(r.sentences))] for r in requests]
        base, steps = decoder.advance([path[-1] for path in paths]), walk(decoder, paths)
        return [
            self._figures(path[-2].answer, path[-1].answer, path[-1].kept, plain.passes, path[-1].passes)
            for plain, path in zip(base, steps, strict=True)
        ]

    def _streamed(self, decoder: BatchDecoder, requests: Sequence[Request]) -> list[tuple[float | None, float | None]]:
        """Kept share and speedup of each request: from its draft and its answer, each decoded once."""
        drafts = self._answers(decoder, requests, 1, [Answer()] * len(requests))
        streams = self._answers(decoder, requests, 0, drafts)
        found = []
        for draft, stream in zip(drafts, streams, strict=True):
            whole, kept = len(stream.tokens), common_prefix(draft.tokens, stream.tokens)  # what one pass would keep
            found.append(self._figures(draft, stream, kept, residual(whole, 0), residual(whole, kept)))
        return found

    def _answers(
        self, decoder: BatchDecoder, requests: Sequence[Request], unseen: int, otherwise: Sequence[Answer]
    ) -> list[Answer]:
        """Greedy answers to all but the last `unseen` sentences.

        Those of the last look are verified and decoded on from, in the first look `otherwise`: this changes no answer.
        """
        prompts = [self._prompt(request, len(request.sentences) - unseen) for request in requests]
        held = [self.seen.get((r.id, unseen), answer) for r, answer in zip(requests, otherwise, strict=True)]
        found = decoder.advance(prompts, held)
        self.seen |= {(r.id, unseen): advance.answer for r, advance in zip(requests, found, strict=True)}
        return [advance.answer for advance in found]

    def _figures(
        self, draft: Answer, stream: Answer, kept: int, base_passes: int, stream_passes: int
    ) -> tuple[float | None, float | None]:
        if not self.renderer.text(stream.written).strip():
            return None, None
        written = bool(draft.written)
        share = kept_share(len(draft.tokens) * written, kept * written)
        return share, speedup(base_passes, stream_passes)

    @torch.inference_mode()
    def _drift(self, adapted: Any, requests: Sequence[Request]) -> list[float]:
        """Each request's divergence, summed over the plain base's answer tokens."""
        answers = [self.answers[request.id].tokens for request in requests]
        lengths = [len(answer) for answer in answers]
        plain = self._logits(adapted, [self.renderer.prompt(r.text, r.history) for r in requests], answers, off=True)
        moved = self._logits(adapted, [self._prompt(r, len(r.sentences)) for r in requests], answers)
        pairs = zip(plain.split(CHUNK), moved.split(CHUNK), strict=True)
        each = torch.cat([kl_divergence(base, now) for base, now in pairs])
        return [float(part.sum()) for part in each.split(lengths)]

    def _logits(
        self, adapted: Any, prompts: Sequence[list[int]], answers: Sequence[tuple[int, ...]], off: bool = False
    ) -> torch.Tensor:
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        ids, mask, labels = (x.to(adapted.device) for x in padded(rows, [len(answer) for answer in answers], 0))
        if off:
            with adapted.disable_adapter():
                return labelled_logits(adapted, ids, mask, labels)[0]
        return labelled_logits(adapted, ids, mask, labels)[0]

    def _prompt(self, request: Request, sentences: int) -> list[int]:
        return self.renderer.prompt(request.prefix(sentences), request.history, self.system)


def watched(seen: Sequence[Seen], step: int, seconds: float) -> Watched:
    """The figures of a look."""
    speedups = [one.speedup for one in seen if one.speedup is not None]
    shares = [one.kept_share for one in seen if one.kept_share is not None]
    return Watched(
        step=step,
        n=len(speedups),
        kept_share=statistics.fmean(shares) if shares else None,
        speedup_passes_mean=statistics.fmean(speedups) if speedups else None,
        speedup_passes_median=statistics.median(speedups) if speedups else None,
        drift=sum(one.divergence for one in seen) / sum(one.tokens for one in seen),
        seconds=seconds,
    )


def watched_requests(heldout: Path, count: int, seed: int) -> list[Request]:
    """`count` requests of data/heldout.jsonl, drawn by `seed`, in the file's order; those of one sentence are left out.

    Raises UserError where there is none.
    """
    lines = heldout.read_text(encoding="utf-8").split("\n") if heldout.is_file() else []
    requests = [request for request in map(_request, filter(None, lines)) if len(request.sentences) > 1]
    if not requests:
        raise UserError(f"{heldout}: no request of two sentences to watch; set data.heldout, or train.watch_every=0")
    drawn = {request.id for request in sorted(requests, key=lambda r: digest([seed, "watch", r.id]))[:count]}
    return [request for request in requests if request.id in drawn]


def best(looks: Sequence[Watched], settings: Train) -> Watched | None:
    """The look that `train.keep=best` keeps: the highest median speedup, then mean, among the steps whose drift is at
    most `max_drift` above that of step 0; None where there is none."""
    within = [look for look in looks[1:] if look.drift <= looks[0].drift + settings.max_drift and look.n]
    return max(within, key=lambda look: (look.speedup_passes_median or 0, look.speedup_passes_mean or 0), default=None)


def line(look: Watched) -> str:
    """A look for the screen."""
    kept = "no draft" if look.kept_share is None else f"kept {look.kept_share:.1%}"
    times = "no answer"
    if look.speedup_passes_median is not None:
        times = f"speedup in passes median {look.speedup_passes_median:.2f}x mean {look.speedup_passes_mean:.2f}x"
    where = f"watch at step {look.step}: {kept}, {times}"
    return f"{where}, drift {look.drift:.3f} nats a token; n {look.n}, {look.seconds:.0f} s"


@contextmanager
def _at_rest(model: Any) -> Iterator[None]:
    """In evaluation mode, and back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _request(text: str) -> Request:
    """A line of data/heldout.jsonl as data_builders writes it: sentences, or messages with the turn to stream last."""
    row = json.loads(text)
    if "sentences" in row:
        return Request(row["id"], "heldout", tuple(row["sentences"]))
    *history, last = (Message(turn["role"], turn["content"]) for turn in row["messages"])
    return Request(row["id"], "heldout", tuple(split(last.content)), tuple(history))
