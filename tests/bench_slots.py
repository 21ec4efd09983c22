"""Slot decoding of the laboratory's model against one token a pass by the same network, and against the described steps
without a cache: python tests/bench_slots.py

One thread, each prompt three times on each side, the best counts. Requests stand alone (some 30 tokens), and behind a
conversation of some 400 tokens, where there is something to be cached; there the model, which has seen no conversation,
answers worse, and the tokens are compared all the same. One token a pass is a reading that training gave the network
inside of slots only: its answers may be others. Exits with 1 where a token differs from the one without a cache, or
where the cache gains less than 1.5 times behind a conversation.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from laboratory import DECODING, KINDS, PLACES, folder
from slot_transcription import Transcription

from headstart import model as loading
from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer, PassCounter
from headstart.decoders import single_decoder
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import Renderer, renderer
from headstart.request import Message
from headstart.slot_diffusion import SlotDiffusionDecoder
from recipes.schema import Model

REQUESTS = 16  # of each kind
TALK = 400  # tokens
LEAST = 1.5


def main() -> None:
    torch.set_num_threads(1)
    settings = Model(name=str(folder() / "slots"), family="refusion", dtype="float32", device="cpu")
    tokenizer, model = loading.load_tokenizer(settings), loading.load_model(settings)
    rendering, ends = renderer(tokenizer, FAMILIES["refusion"]), stop_ids(FAMILIES["refusion"], tokenizer, model)
    slots = single_decoder(model, rendering, ends, PLACES, DECODING)
    assert isinstance(slots, SlotDiffusionDecoder)
    plain = Transcription(model, ends, slots.mask_id, DECODING)
    one = AutoregressiveDecoder(model, ends, PLACES)
    sides = {
        "slots": slots_answer(slots),
        "slots without a cache": transcribed(plain),
        "a token a pass": token_by_token(one),
    }
    slow = []
    print("requests, side: exact answers, tokens a pass, median passes, milliseconds an answer")
    for kind in KINDS:
        rows = [json.loads(line) for line in (folder() / f"{kind}.jsonl").read_text().splitlines()]
        asked, talk = rows[:REQUESTS], conversation(rendering, rows[REQUESTS:])
        for where, history in (("alone", ()), ("behind a conversation", talk)):
            prompts = [rendering.prompt(row["text"], history) for row in asked]
            found = {name: measured(model, prompts, answer) for name, answer in sides.items()}
            assert found["slots"].tokens == found["slots without a cache"].tokens, f"{kind}, {where}: a token differs"
            for name, side in found.items():
                texts = [rendering.text(tokens[:-1]) for tokens in side.tokens]
                right = sum(text == row["reference"] for text, row in zip(texts, asked, strict=True))
                each = sum(map(len, side.tokens)) / sum(side.passes)
                print(
                    f"{kind} {where}, {name}: {right}/{len(asked)}, {each:.2f}, {statistics.median(side.passes):.1f}, "
                    f"{1000 * statistics.mean(side.seconds):.1f}",
                    flush=True,
                )
            seconds = {name: sum(side.seconds) for name, side in found.items()}
            gained = seconds["slots without a cache"] / seconds["slots"]
            against = seconds["a token a pass"] / seconds["slots"]
            said = f"{gained:.2f}x as fast as without a cache, {against:.2f}x as fast as a token a pass"
            print(f"{kind} {where} ({len(prompts[0])} tokens): {said}", flush=True)
            slow += [kind] if history and gained < LEAST else []
    if slow:
        raise SystemExit(f"the cache gains less than {LEAST}x behind a conversation on {', '.join(slow)}")


def conversation(rendering: Renderer, rows: Sequence[dict[str, str]]) -> tuple[Message, ...]:
    """Earlier turns of some TALK tokens."""
    turns: list[Message] = []
    for row in rows:
        if len(rendering.prompt("", turns)) >= TALK:
            break
        turns += [Message("user", row["text"]), Message("assistant", row["reference"])]
    return tuple(turns)


@dataclass(frozen=True)
class Side:
    """Of each prompt: the answer's tokens, its passes by the hook, and its seconds."""

    tokens: list[list[int]]
    passes: list[int]
    seconds: list[float]


def measured(model: Any, prompts: Sequence[list[int]], answer: Callable[[list[int]], list[int]]) -> Side:
    """What answering each prompt takes, the best of three."""
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
    return Side(tokens, passes, seconds)


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
