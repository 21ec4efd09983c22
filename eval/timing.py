"""Wall clock of single requests, base and stream in turn, on an idle device after a warm-up."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eval.arms import Arm
from eval.lines import append, read_whole_lines
from eval.replay import draft_of
from headstart.decoder import Answer, Verified, now
from headstart.decoders import SingleDecoder
from headstart.request import Request

T = TypeVar("T")
Requests = Mapping[str, Sequence[Request]]


def time_all(arm: Arm, requests: Requests, lines: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Time the first `eval.timed` requests of each benchmark (all where it is not given), the excluded apart."""
    timings = read_whole_lines(path)
    done = {timing["id"] for timing in timings}
    warm = False
    for name, rows in requests.items():
        # By place in the benchmark, not by outcome: so that all arms time the same requests.
        chosen = [request for request in rows[: arm.recipe.eval.timed] if lines[request.id]["excluded"] is None]
        for i, request in enumerate(chosen):
            if request.id in done:
                continue
            if not warm:
                warm_up(arm, request)
                warm = True
            taken = time_request(arm, request, lines[request.id], stream_first=bool(i % 2))
            append(path, [taken])
            timings.append(taken)
            print(f"{name}: timed {i + 1}/{len(chosen)}", flush=True)
    return timings


def warm_up(arm: Arm, request: Request) -> None:
    """A few untimed passes: the first call pays for set-up."""
    decoder, passes = arm.decoder(request.source), itertools.count(1)
    prompt = arm.prompt(request, len(request.sentences))
    decoder.decode(prompt, decoder.verify(prompt, Answer()).answer, lambda: next(passes) > 3)


def time_request(arm: Arm, request: Request, line: Mapping[str, Any], stream_first: bool) -> dict[str, Any]:
    """A line of timings.jsonl: seconds after the last sentence, device synchronised, monotonic clock.

    `base_seconds` and `stream_seconds_cold` start with nothing at hand; `stream_seconds` (warm) with the cache of the
    prompt before the last sentence, as a session has it: its verification is timed by itself, and the decoding after
    it, which is the same work, is taken from the cold run. `update_seconds` (replay=full) is each update's own time;
    the last one is `stream_seconds`. `base_tokens` and `stream_tokens` say what was decoded here, one request at a
    time.
    """
    decoder = arm.decoder(request.source)
    whole, draft = arm.prompt(request, len(request.sentences)), draft_of(line)
    updates: list[float] = []

    def warm() -> tuple[float, Verified]:
        decoder.forget()
        if line["updates"] is None:
            decoder.prefill(arm.prompt(request, len(request.sentences) - 1))
        else:
            updates.extend(_updates(arm, decoder, request))
        return _timed(decoder, lambda: decoder.verify(whole, draft))

    def cold(held: Answer) -> tuple[float, float, Answer]:
        decoder.forget()
        return _update(decoder, whole, held)

    sides: dict[str, Any] = {"base": lambda: cold(Answer()), "stream_cold": lambda: cold(draft), "stream": warm}
    order = ("stream", "stream_cold", "base") if stream_first else ("base", "stream_cold", "stream")
    measured = {name: sides[name]() for name in order}
    base_verification, base_rest, base = measured["base"]
    verification, rest, stream = measured["stream_cold"]
    session = measured["stream"][0] + rest
    return {
        "id": request.id,
        "base_seconds": base_verification + base_rest,
        "stream_seconds": session,
        "stream_seconds_cold": verification + rest,
        "update_seconds": [*updates, session] if updates else None,
        "base_tokens": list(base.tokens),
        "stream_tokens": list(stream.tokens),
    }


def noise_floor(lines: Mapping[str, Mapping[str, Any]], timings: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """How often numerics alone change an answer: in float32 never, in bfloat16 near-ties flip."""
    timed = [(lines[timing["id"]], timing) for timing in timings]
    counted = [line for line in lines.values() if line["excluded"] is None]
    return {
        "dtype": dtype,
        "streamed_answer_differs_from_base": _share(
            line["stream"]["tokens"] != line["base"]["tokens"] for line in counted
        ),
        "alone_differs_from_batched": _share(line["base"]["tokens"] != t["base_tokens"] for line, t in timed),
        "n": len(counted),
        "n_alone": len(timed),
    }


def _update(decoder: SingleDecoder, prompt: list[int], draft: Answer) -> tuple[float, float, Answer]:
    """Seconds of the verification, seconds of the decoding after it, and the answer."""
    verification, verified = _timed(decoder, lambda: decoder.verify(prompt, draft))
    rest, answer = _timed(decoder, lambda: decoder.decode(prompt, verified.answer))
    return verification, rest, answer


def _timed(decoder: SingleDecoder, work: Callable[[], T]) -> tuple[float, T]:
    begin = now(decoder.model.device)
    done = work()
    return now(decoder.model.device) - begin, done


def _updates(arm: Arm, decoder: SingleDecoder, request: Request) -> list[float]:
    """The seconds of each update before the last sentence, as a session walks them."""
    draft, seconds = Answer(), []
    for i in range(1, len(request.sentences)):
        verification, rest, draft = _update(decoder, arm.prompt(request, i), draft)
        seconds.append(verification + rest)
    return seconds


def _share(flags: Any) -> float | None:
    values = list(flags)
    return sum(values) / len(values) if values else None
