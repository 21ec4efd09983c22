"""Slot decoding of the laboratory's model against one token a pass by the same network, and against the described steps
without a cache: python tests/bench_slots.py. Exits with 1 where a token differs or the cache gains less than 1.5 times.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from laboratory import KINDS, PLACES, folder
from slot_transcription import Transcription

from headstart import model as loading
from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer, PassCounter
from headstart.decoders import single_decoder
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import renderer
from headstart.slot_diffusion import SlotDiffusionDecoder
from recipes.schema import Model, Slots

REQUESTS = 16  # of each kind
LEAST = 1.5
SETTINGS = Slots(slot_size=8, serial_blocks=1, slot_threshold=0.9, token_threshold=0.4)


def main() -> None:
    torch.set_num_threads(1)
    settings = Model(name=str(folder() / "slots"), family="refusion", dtype="float32", device="cpu")
    tokenizer, model = loading.load_tokenizer(settings), loading.load_model(settings)
    rendering, ends = renderer(tokenizer, FAMILIES["refusion"]), stop_ids(FAMILIES["refusion"], tokenizer, model)
    slots = single_decoder(model, rendering, ends, PLACES, SETTINGS)
    assert isinstance(slots, SlotDiffusionDecoder)
    plain = Transcription(model, ends, slots.mask_id, SETTINGS)
    one = AutoregressiveDecoder(model, ends, PLACES)
    slow = []
    for kind in KINDS:
        lines = (folder() / f"{kind}.jsonl").read_text().splitlines()[:REQUESTS]
        prompts = [rendering.prompt(json.loads(line)["text"]) for line in lines]
        sides = {
            "slots": slots_answer(slots),
            "without cache": transcribed(plain),
            "a token a pass": token_by_token(one),
        }
        found = {name: measured(model, prompts, answer) for name, answer in sides.items()}
        assert found["slots"][0] == found["without cache"][0], f"{kind}: a token differs"
        for name, (_, passes, seconds) in found.items():
            print(
                f"{kind}, {name}: median {statistics.median(passes):.0f} passes, {sum(seconds) / len(seconds):.4f} s",
                flush=True,
            )
        gained = sum(found["without cache"][2]) / sum(found["slots"][2])
        against = sum(found["a token a pass"][2]) / sum(found["slots"][2])
        print(f"{kind}: {gained:.2f}x as fast as without a cache, {against:.2f}x as fast as a token a pass", flush=True)
        slow += [kind] if gained < LEAST else []
    if slow:
        raise SystemExit(f"the cache gains less than {LEAST}x on {', '.join(slow)}")


def measured(
    model: Any, prompts: Sequence[list[int]], answer: Callable[[list[int]], list[int]]
) -> tuple[list[list[int]], list[int], list[float]]:
    """Tokens, passes by the hook, and seconds of each prompt, the best of three."""
    tokens, passes, seconds = [], [], []
    for prompt in prompts:
        times = []
        for _ in range(3):
            with PassCounter(model) as counter:
                began = time.perf_counter()
                found = answer(prompt)
                times.append(time.perf_counter() - began)
        tokens.append(found)
        passes.append(counter.calls)
        seconds.append(min(times))
    return tokens, passes, seconds


def slots_answer(decoder: SlotDiffusionDecoder) -> Callable[[list[int]], list[int]]:
    def answer(prompt: list[int]) -> list[int]:
        decoder.forget()
        return list(decoder.decode(prompt, Answer()).tokens)

    return answer


def transcribed(plain: Transcription) -> Callable[[list[int]], list[int]]:
    return lambda prompt: plain.decode(prompt, PLACES)


def token_by_token(decoder: AutoregressiveDecoder) -> Callable[[list[int]], list[int]]:
    def answer(prompt: list[int]) -> list[int]:
        decoder.forget()
        return list(decoder.decode(prompt, decoder.verify(prompt, Answer()).answer).tokens)

    return answer


if __name__ == "__main__":
    main()
