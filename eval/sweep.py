"""The frontier of quality against speedup over tau: one walk for all values, in which what they share is done once.

Under `threshold` each tau has a path of its own: what it keeps of a draft decides the next draft. Two taus part only
where one of them keeps a token that the other rejects, and a token over 0.5 is always the most likely one; so much of
their work is the same. Equal drafts of a prefix are verified once: the probabilities that a pass gives say what every
tau keeps. Equal answers are decoded on once, and where one stands on the way that another takes, it is not decoded at
all. The passes of a tau are those that it would have cost alone.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from eval import metrics
from eval.arms import Arm
from eval.replay import Replayed, counted, lines_of, reasons_against, replay
from headstart.acceptance import everything, thresholds
from headstart.batch import Advance, BatchDecoder
from headstart.decoder import Answer
from headstart.lookup import Tokens
from headstart.request import Request

FRONTIER = ("quality_stream", "speedup_passes_mean", "speedup_passes_median", "kept_share", "one_pass_share")

Line = dict[str, Any]
Steps = dict[tuple[int, float], list[Advance]]  # (request's place, tau) -> a step for each sentence so far


def sweep(
    arm: Arm,
    requests: Sequence[Request],
    taus: Sequence[float],
    unfit: Callable[[Request], str | None] = lambda request: None,
) -> dict[float, list[Line]]:
    """For each tau the lines that `replay` makes under `acceptance=threshold`, this tau and `replay=full`.

    In float32 they are equal to those, field by field; what the arm's recipe says of acceptance plays no part.
    """
    if arm.renderer.family.decoder != "autoregressive":  # nothing is shared: the rest of an answer is decoded in slots
        return {tau: replay(_at(arm, tau), requests, unfit) for tau in taus}
    reasons = reasons_against(arm, requests, unfit)
    fit = [request for request in requests if reasons[request.id] is None]
    base, steps = _walk(arm, fit, taus) if fit else ([], {})
    runs = {tau: [Replayed(r, base[row], tuple(steps[row, tau])) for row, r in enumerate(fit)] for tau in taus}
    return {tau: lines_of(arm, requests, reasons, runs[tau], full=True) for tau in taus}


def _at(arm: Arm, tau: float) -> Arm:
    """The arm under this threshold."""
    settings = arm.recipe.eval.model_copy(update={"acceptance": "threshold", "tau": tau})
    return replace(arm, recipe=arm.recipe.model_copy(update={"eval": settings}))


def frontier(lines: Sequence[Line], confidence: float, samples: int, seed: int) -> list[dict[str, Any]]:
    """An entry for each tau, in rising order, from the scored lines of sweep.jsonl, each of which has its `tau`.

    An entry is `tau`, then `n` and the figures of FRONTIER as {"value", "low", "high"} over all requests as one set;
    the same for each of `benchmarks`, and the mean of these in `macro`.
    """
    entries = []
    for tau in sorted({line["tau"] for line in lines}):
        groups: dict[str, list[Line]] = {}
        for line in lines:
            if line["tau"] == tau:
                groups.setdefault(line["benchmark"], []).append(line)
        figures = metrics.summarise(groups, (), confidence, samples, seed)
        parts = {name: _chosen(found) for name, found in figures["benchmarks"].items()}
        macro = _chosen(figures["macro"])
        entries.append({"tau": tau, **_chosen(figures["pooled"]), "macro": macro, "benchmarks": parts})
    return entries


def _chosen(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in ("n", *FRONTIER)}


def _walk(arm: Arm, requests: Sequence[Request], taus: Sequence[float]) -> tuple[list[Advance], Steps]:
    """The base answers, and each tau's steps; requests that have an i-th sentence take step i together."""
    decoder = arm.batch_decoder()
    assert isinstance(decoder, BatchDecoder)
    prompts = [[arm.prompt(request, i) for i in range(1, 1 + len(request.sentences))] for request in requests]
    base = decoder.advance([path[-1] for path in prompts], progress=counted("sweep, base answers", len(requests)))
    first = decoder.advance([path[0] for path in prompts], progress=counted("sweep, first drafts", len(requests)))
    steps: Steps = {(row, tau): [first[row]] for row, tau in itertools.product(range(len(requests)), taus)}
    for i in range(1, max(map(len, prompts))):
        step = {row: path[i] for row, path in enumerate(prompts) if len(path) > i}
        held = {key: taken[-1].answer for key, taken in steps.items() if key[0] in step}
        verified = _verified(decoder, step, held, taus)
        ways = {row: [base[row]] if len(prompts[row]) == i + 1 else [] for row in step}
        _decode_on(decoder, step, [(row, after.answer) for (row, _), after in verified.items()], ways)
        for key, after in verified.items():
            steps[key].append(_finished(after, ways[key[0]]))
        print(f"  sweep, sentence {i + 1}: {len(step)} of {len(requests)} requests have one", flush=True)
    return base, steps


def _verified(
    decoder: BatchDecoder,
    prompts: Mapping[int, Tokens],
    held: Mapping[tuple[int, float], Answer],
    taus: Sequence[float],
) -> dict[tuple[int, float], Advance]:
    """What stands after the verification of each held draft; a draft that several taus hold is verified once."""
    drafts = list(dict.fromkeys((row, draft) for (row, _), draft in held.items()))

    def rules(place: int, logits: Tensor, draft: Tensor) -> list[Tensor]:
        return thresholds(logits, draft, taus)

    judged = decoder.verify([prompts[row] for row, _ in drafts], [draft for _, draft in drafts], rules)
    by_draft = {draft: dict(zip(taus, by_tau, strict=True)) for draft, by_tau in zip(drafts, judged, strict=True)}
    return {(row, tau): by_draft[row, draft][tau] for (row, tau), draft in held.items()}


def _decode_on(
    decoder: BatchDecoder,
    prompts: Mapping[int, Tokens],
    answers: Sequence[tuple[int, Answer]],
    ways: Mapping[int, list[Advance]],
) -> None:
    """Decode on and add to `ways`, the decodings of each row, until every unfinished answer stands on one of them.

    An answer that begins with another one waits for that one's way, which may lead over it.
    """
    plain = replace(decoder, rule=everything)
    pending = [job for job in dict.fromkeys(answers) if job[1].stop is None]
    while pending := [(row, answer) for row, answer in pending if _way(answer, ways[row]) is None]:
        now = [job for job in pending if not any(_begins(other, job) for other in pending)]
        made = plain.advance([prompts[row] for row, _ in now], [answer for _, answer in now])
        for (row, _), advance in zip(now, made, strict=True):
            ways[row].append(advance)


def _begins(one: tuple[int, Answer], other: tuple[int, Answer]) -> bool:
    """Whether `other` is the same row's, and begins with `one`."""
    shorter, longer = one[1].tokens, other[1].tokens
    return one[0] == other[0] and len(shorter) < len(longer) and longer[: len(shorter)] == shorter


def _way(answer: Answer, ways: Sequence[Advance]) -> Advance | None:
    """The decoding that began at or before this unfinished answer and led over it."""
    size = len(answer.tokens)
    return next((w for w in ways if w.kept <= size and w.answer.tokens[:size] == answer.tokens), None)


def _finished(after: Advance, ways: Sequence[Advance]) -> Advance:
    """The whole step: what stands after the verification, and the rest of its way; passes of both, by the hook."""
    if after.answer.stop is not None:
        return after
    way = _way(after.answer, ways)
    assert way is not None
    walked_before = len(after.answer.tokens) - way.kept  # each pass of the way gave one token
    return Advance(way.answer, after.kept, after.passes + way.passes - walked_before)
