"""The verifier audit's drafts, and what the verifier says about each of their tokens (paper, section 6.5).

Each request gets four drafts: the model's own answer to it (the control), its own answer to the prefix before the last
sentence, its own answer to another question, and random tokens. A draft's tokens are right for as long as they are the
control's. Under `greedy` a verifier that judges a token without seeing it keeps the right ones and stops at the first
wrong one; a verifier that sees the token can confirm whatever stands there.

The probabilities alone do not tell the two apart: once the opening of an answer stands there, a causal model too finds
its rest likely, whatever was asked. The first wrong token does.
"""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eval.arms import Arm
from eval.replay import counted, reasons_against
from headstart.acceptance import greedy
from headstart.autoregressive import common_prefix
from headstart.decoder import Answer
from headstart.request import Request

KINDS: Mapping[str, str] = {
    "control": "own answer",
    "stale": "stale draft",
    "unrelated": "answer to another question",
    "random": "random tokens",
}


@dataclass(frozen=True)
class Offer:
    """A draft for a request. Its first `right` tokens are the model's own answer's, the next one (if any) is not."""

    request: Request
    kind: str
    tokens: tuple[int, ...]
    right: int
    taken_from: str | None


@dataclass(frozen=True)
class Judged:
    """What a verification says about a draft of n tokens.

    `kept` and `kept_threshold`: leading tokens that `greedy` and the threshold rule keep. `top`: tokens anywhere in the
    draft that are the most likely one in their place. `probabilities`: (n,), softmax in float32, no temperature.
    `passes`: what it cost.
    """

    kept: int
    kept_threshold: int
    top: int
    probabilities: tuple[float, ...]
    passes: int


def audit(arm: Arm, requests: Mapping[str, Sequence[Request]]) -> list[dict[str, Any]]:
    """The lines of audit.jsonl for the requests of each benchmark, in their order.

    A request is excluded for the reasons that exclude it from a replay: one sentence, no room for an answer, an empty
    answer. Of the drafts, `stale` is null where the model wrote nothing for the prefix, and `unrelated` where no
    other question got another answer.
    """
    everything = [request for rows in requests.values() for request in rows]
    reasons = reasons_against(arm, everything, lambda request: None)
    fit = [request for request in everything if reasons[request.id] is None]
    own = _answers(arm, fit, 0, "own answers")
    reasons |= {request.id: "empty answer (base)" for request in fit if not _written(arm, own[request.id])}
    fit = [request for request in fit if reasons[request.id] is None]
    stale = _answers(arm, fit, 1, "answers to the prefix")
    offered = sorted(offers(arm, fit, own, stale), key=lambda offer: list(KINDS).index(offer.kind))
    judged = judge(arm, offered)
    found: dict[str, dict[str, Any]] = {request.id: dict.fromkeys(KINDS) for request in fit}
    for offer, verdict in zip(offered, judged, strict=True):
        found[offer.request.id][offer.kind] = _record(arm, offer, verdict)
    return [
        {"id": r.id, "benchmark": name, "drafts": found.get(r.id), "excluded": reasons[r.id]}
        for name, rows in requests.items()
        for r in rows
    ]


def offers(
    arm: Arm, requests: Sequence[Request], own: Mapping[str, Answer], stale: Mapping[str, Answer]
) -> Iterator[Offer]:
    """The drafts of each request, from the answers to it and to its prefix, by id."""
    words = vocabulary(arm)
    for place, request in enumerate(requests):
        control = own[request.id].tokens
        other = another(place, requests, own)
        drafts = {
            "control": control,
            "stale": stale[request.id].tokens if _written(arm, stale[request.id]) else (),
            "unrelated": own[other].tokens if other is not None else (),
            "random": random_draft(words, len(control), arm.recipe.run.seed, request.id),
        }
        for kind, tokens in drafts.items():
            if tokens:
                source = other if kind == "unrelated" else None
                yield Offer(request, kind, tokens, common_prefix(tokens, control), source)


def another(place: int, requests: Sequence[Request], own: Mapping[str, Answer]) -> str | None:
    """Id of the next request in the list, in a circle, whose text and whose answer differ from this one's.

    Two questions with one answer would offer a draft that is right.
    """
    mine = requests[place]
    for other in (*requests[place + 1 :], *requests[:place]):
        if other.text != mine.text and own[other.id].tokens != own[mine.id].tokens:
            return other.id
    return None


def vocabulary(arm: Arm) -> list[int]:
    """The ids that random drafts are made of: all that the model knows but end and control tokens."""
    known = arm.model.config.get_text_config().vocab_size
    apart = arm.stop_ids | set(arm.renderer.control_ids.values())
    return sorted(i for i in arm.renderer.tokenizer.get_vocab().values() if i < known and i not in apart)


def random_draft(words: Sequence[int], length: int, seed: int, request_id: str) -> tuple[int, ...]:
    """`length` ids out of `words`, the same for the same seed and request."""
    return tuple(random.Random(f"{seed}:{request_id}").choices(words, k=length))


def judge(arm: Arm, offered: Sequence[Offer]) -> list[Judged]:
    """Verify each draft under the whole request, many abreast, in the decoder that streaming uses.

    The scores are taken where the acceptance rules see them. The drafts are given as unfinished ones, so that their
    last token goes into the pass too: a verifier that looks at the token it judges is to see every one.
    """
    prompts = [arm.prompt(offer.request, len(offer.request.sentences)) for offer in offered]
    tau, seen = arm.recipe.eval.tau, dict[int, tuple[int, tuple[float, ...]]]()
    decoder = arm.batch_decoder()

    def rules(place: int, logits: Tensor, draft: Tensor) -> list[Tensor]:
        """`greedy` and the threshold rule; `top` and `probabilities` are written down."""
        scores = logits.float().log_softmax(dim=-1).gather(-1, draft.unsqueeze(-1)).squeeze(-1).exp()
        passes = greedy(logits, draft)
        seen[place] = int(passes.sum()), tuple(scores.tolist())
        if len(seen) % decoder.batch_size == 0 or len(seen) == len(offered):
            print(f"  drafts verified: {len(seen)}/{len(offered)}", flush=True)
        return [passes, scores >= tau]

    kept = decoder.verify(prompts, [Answer(offer.tokens) for offer in offered], rules)
    return [Judged(strict.kept, loose.kept, *seen[place], strict.passes) for place, (strict, loose) in enumerate(kept)]


def _answers(arm: Arm, requests: Sequence[Request], unseen: int, what: str) -> dict[str, Answer]:
    """The model's own answers, by id, to the requests without their last `unseen` sentences."""
    prompts = [arm.prompt(request, len(request.sentences) - unseen) for request in requests]
    made = arm.batch_decoder().advance(prompts, progress=counted(what, len(prompts)))
    return {request.id: one.answer for request, one in zip(requests, made, strict=True)}


def _written(arm: Arm, answer: Answer) -> bool:
    return bool(arm.renderer.text(answer.written).strip())


def _record(arm: Arm, offer: Offer, judged: Judged) -> dict[str, Any]:
    chances = [float(f"{p:.6g}") for p in judged.probabilities]
    wrong = chances[offer.right :]
    ended = offer.tokens[-1] in arm.stop_ids
    return {
        "taken_from": offer.taken_from,
        "tokens": list(offer.tokens),
        "text": arm.renderer.text(offer.tokens[:-1] if ended else offer.tokens),
        "right_tokens": offer.right,
        "kept_tokens": judged.kept,
        "kept_tokens_threshold": judged.kept_threshold,
        "top_tokens": judged.top,
        "median_probability": statistics.median(chances),
        "first_wrong_probability": wrong[0] if wrong else None,
        "passes": judged.passes,
        "probabilities": chances,
    }
