"""Replays requests sentence by sentence, many abreast, and writes down what each one did.

Under `greedy` a draft depends on its prefix alone and not on the path: `replay=last` makes only the draft before the
last sentence; `replay=full` makes all drafts of all requests abreast, and what an update keeps is the common prefix of
two drafts. Under the other rules the path matters: every sentence is walked, verify, keep, regenerate.

`recycle` adds what look-ups would save: the whole request is decoded once more on both sides, base with its prompt to
look things up in, stream with the rest of its draft as well. Nothing else changes by it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.arms import Arm
from headstart.autoregressive import common_prefix
from headstart.batch import Advance, BatchDecoder
from headstart.decoder import Answer
from headstart.decoders import walk
from headstart.family import context_length
from headstart.lookup import lookup_passes, pieces
from headstart.request import Request
from headstart.residual import residual, residual_paper, residual_paper_slots, total_passes

COUNTS = (
    "base_passes",
    "stream_passes",
    "stream_passes_paper",
    "base_passes_lookup",
    "stream_passes_recycle",
    "recycle_differs",
    "draft_tokens",
    "kept_tokens",
    "unseen_tokens",
    "turn_tokens",
    "updates",
    "total_passes",
    "base_score",
    "stream_score",
    "score_note",
)


@dataclass(frozen=True)
class Replayed:
    """One request's run: the base answer, and a step for each sentence, or under `replay=last` for the last two.

    `lookups`, under `recycle`: base and stream once more, with look-ups.
    """

    request: Request
    base: Advance
    steps: tuple[Advance, ...]
    lookups: tuple[Advance, Advance] | None = None

    @property
    def draft(self) -> Answer:
        """The draft held when the last sentence arrives."""
        return self.steps[-2].answer

    @property
    def stream(self) -> Advance:
        """What the last sentence cost: verification of that draft, and the rest."""
        return self.steps[-1]


def replay(
    arm: Arm, requests: Sequence[Request], unfit: Callable[[Request], str | None] = lambda request: None
) -> list[dict[str, Any]]:
    """The lines of requests.jsonl for these requests, in their order, not scored yet.

    `unfit` says why the benchmark cannot score a request here, or None; such a request is excluded.
    """
    reasons = reasons_against(arm, requests, unfit)
    fit = [request for request in requests if reasons[request.id] is None]
    return lines_of(arm, requests, reasons, _run(arm, fit), full=arm.recipe.eval.replay == "full")


def reasons_against(
    arm: Arm, requests: Sequence[Request], unfit: Callable[[Request], str | None]
) -> dict[str, str | None]:
    """Why a request cannot be replayed, by its id; None where it can."""
    return {request.id: _unfit(arm, request) or unfit(request) for request in requests}


def lines_of(
    arm: Arm, requests: Sequence[Request], reasons: Mapping[str, str | None], runs: Sequence[Replayed], full: bool
) -> list[dict[str, Any]]:
    """The lines of `requests`, those with a reason excluded; `full`: the runs have a step for each sentence."""
    walked = {run.request.id: run for run in runs}
    return [
        _line(arm, walked[request.id], full) if request.id in walked else _excluded(request, str(reasons[request.id]))
        for request in requests
    ]


def draft_of(line: Mapping[str, Any]) -> Answer:
    """The draft of a line, as the decoder takes it."""
    return Answer(tuple(line["draft"]["tokens"]), line["draft"]["stop"])


def _unfit(arm: Arm, request: Request) -> str | None:
    if len(request.sentences) < 2:
        return "single sentence"
    limit = context_length(arm.model.config) - arm.recipe.eval.max_new_tokens
    return "longer than the model's context" if len(arm.prompt(request, len(request.sentences))) > limit else None


def _run(arm: Arm, requests: Sequence[Request]) -> list[Replayed]:
    if not requests:
        return []
    decoder = arm.batch_decoder(requests[0].source)
    whole = [arm.prompt(request, len(request.sentences)) for request in requests]
    base = decoder.advance(whole, progress=counted("base answers", len(whole)))
    if arm.by_prefix:
        paths = _abreast(arm, requests)
        drafts = [path[-1].answer for path in paths]
        streams = decoder.advance(whole, drafts, counted("streamed answers", len(whole)))
        paths = [(*path, stream) for path, stream in zip(paths, streams, strict=True)]
    else:
        paths = _walk(arm, requests)
    runs = [Replayed(*columns) for columns in zip(requests, base, paths, strict=True)]
    return _look_up(arm, whole, runs) if arm.recipe.eval.recycle else runs


def _abreast(arm: Arm, requests: Sequence[Request]) -> list[tuple[Advance, ...]]:
    """The drafts of all requests, each made from its prefix alone; under `greedy` a walk would make the same ones.

    What an update would keep is the common prefix with the draft before, and its passes follow from that.
    """
    whole_path = arm.recipe.eval.replay == "full"
    cuts = [range(1 if whole_path else len(r.sentences) - 1, len(r.sentences)) for r in requests]
    prompts = [arm.prompt(request, i) for request, path in zip(requests, cuts, strict=True) for i in path]
    made = iter(arm.batch_decoder().advance(prompts, progress=counted("drafts", len(prompts))))
    return [tuple(_updates_of([next(made).answer for _ in path])) for path in cuts]


def _updates_of(answers: Sequence[Answer]) -> Iterator[Advance]:
    for before, answer in itertools.pairwise([Answer(), *answers]):
        kept = common_prefix(before.tokens, answer.tokens)
        yield Advance(answer, kept, residual(len(answer.tokens), kept))


def _walk(arm: Arm, requests: Sequence[Request]) -> list[tuple[Advance, ...]]:
    """Each request's steps, one for each sentence; requests that have an i-th sentence take step i together."""
    decoder = arm.batch_decoder(requests[0].source)
    paths = [[arm.prompt(request, i) for i in range(1, 1 + len(request.sentences))] for request in requests]
    return walk(decoder, paths)


def _look_up(arm: Arm, whole: Sequence[Sequence[int]], runs: Sequence[Replayed]) -> list[Replayed]:
    """The runs with their `lookups`. Raises RuntimeError where the hook's counts are not what the answers imply."""
    decoder, made = arm.batch_decoder(), {}
    assert isinstance(decoder, BatchDecoder)  # the schema allows look-ups for these alone
    held = [run.draft for run in runs]
    sides = {
        "base": ([Answer()] * len(runs), [[prompt] for prompt in whole]),
        "stream": (held, [[draft.tokens, prompt] for draft, prompt in zip(held, whole, strict=True)]),
    }
    for side, (drafts, sources) in sides.items():
        progress = counted(f"{side} answers with look-ups", len(runs))
        made[side] = decoder.advance(whole, drafts, progress, sources)
        for run, advance, given in zip(runs, made[side], sources, strict=True):
            searched = pieces(given, arm.stop_ids)
            expected = lookup_passes(advance.answer.tokens, advance.kept, searched, decoder.limit)
            _agree(run.request.id, f"{side} with look-ups", advance.passes, expected)
    pairs = zip(made["base"], made["stream"], strict=True)
    return [replace(run, lookups=pair) for run, pair in zip(runs, pairs, strict=True)]


def counted(what: str, total: int) -> Callable[[int], None]:
    """A progress callback that prints how many of `total` are done."""
    done = 0

    def say(count: int) -> None:
        nonlocal done
        done += count
        print(f"  {what}: {done}/{total}", flush=True)

    return say


def _line(arm: Arm, run: Replayed, full: bool) -> dict[str, Any]:
    base, stream = run.base.answer, run.stream.answer
    sides = {"base": base, "stream": stream}
    for name, answer in sides.items():
        if not arm.renderer.text(answer.written).strip():
            line = _excluded(run.request, f"empty answer ({name})")
            return line | {side: _answer(arm, given) for side, given in {**sides, "draft": run.draft}.items()}
    paper = residual_paper_slots(run.stream.passes)
    if arm.renderer.family.decoder == "autoregressive":
        _agree(run.request.id, "base", run.base.passes, residual(len(base.tokens), 0))
        _agree(run.request.id, "stream", run.stream.passes, residual(len(stream.tokens), run.stream.kept))
        paper = residual_paper(len(stream.tokens), run.stream.kept)
    return {
        "id": run.request.id,
        "benchmark": run.request.source,
        "sentences": list(run.request.sentences),
        "draft": _answer(arm, run.draft),
        "base": _answer(arm, base),
        "stream": _answer(arm, stream),
        "base_passes": run.base.passes,
        "stream_passes": run.stream.passes,
        "stream_passes_paper": paper,
        **_looked_up(run),
        "draft_tokens": len(run.draft.tokens) if run.draft.written else 0,
        "kept_tokens": run.stream.kept if run.draft.written else 0,
        **_unseen(arm, run.request),
        "updates": _updates(arm, run.steps) if full else None,
        "total_passes": total_passes(step.passes for step in run.steps) if full else None,
        "base_score": None,
        "stream_score": None,
        "score_note": None,
        "excluded": None,
    }


def _unseen(arm: Arm, request: Request) -> dict[str, int]:
    """The final turn's tokens, and how many of them its last sentence adds."""
    whole = len(request.sentences)
    seen, turn = (
        len(arm.renderer.tokenizer(request.prefix(i), add_special_tokens=False).input_ids) for i in (whole - 1, whole)
    )
    return {"unseen_tokens": turn - seen, "turn_tokens": turn}


def _looked_up(run: Replayed) -> dict[str, Any]:
    """`recycle_differs` names the sides whose answer is another one with look-ups: none in float32."""
    if run.lookups is None:
        return dict.fromkeys(("base_passes_lookup", "stream_passes_recycle", "recycle_differs"))
    base, stream = run.lookups
    pairs = {"base": (run.base, base), "stream": (run.stream, stream)}
    return {
        "base_passes_lookup": base.passes,
        "stream_passes_recycle": stream.passes,
        "recycle_differs": [side for side, (plain, made) in pairs.items() if plain.answer != made.answer],
    }


def _updates(arm: Arm, steps: Sequence[Advance]) -> list[dict[str, Any]]:
    updates = []
    for before, step in zip([Answer(), *(step.answer for step in steps)], steps, strict=False):
        tokens = (before.written, step.answer.written, before.written[: step.kept])
        held, text, kept = (arm.renderer.text(written) for written in tokens)
        whole = min(common_prefix(kept, held), common_prefix(kept, text))  # the last character may be cut in its bytes
        updates.append(
            {
                "passes": step.passes,
                "draft_tokens": len(step.answer.tokens),
                "kept_tokens": step.kept,
                "tokens": list(step.answer.tokens),
                "text": text,
                "kept_text": kept[:whole],
                "dropped_text": held[whole:],
            }
        )
    return updates


def _answer(arm: Arm, answer: Answer) -> dict[str, Any]:
    return {"tokens": list(answer.tokens), "text": arm.renderer.text(answer.written), "stop": answer.stop}


def _excluded(request: Request, reason: str) -> dict[str, Any]:
    return {
        "id": request.id,
        "benchmark": request.source,
        "sentences": list(request.sentences),
        "draft": None,
        "base": None,
        "stream": None,
        **dict.fromkeys(COUNTS),
        "excluded": reason,
    }


def _agree(request_id: str, side: str, counted: int, expected: int) -> None:
    if counted != expected:
        raise RuntimeError(f"{request_id}: the hook counted {counted} passes for {side}, the tokens imply {expected}")
