"""What the engine adds to the model's bare forward passes, and what batching buys. Run by `make bench`.

Ratios are taken side by side in one run on SmolLM2-135M in float32: the machine may be shared.
"""

import statistics
import time

from eval.benchmarks import humaneval
from headstart import model as loading
from headstart.autoregressive import AutoregressiveDecoder
from headstart.batch import BatchDecoder
from headstart.decoder import Answer, PassCounter
from headstart.family import stop_ids
from headstart.prompt import renderer
from recipes.schema import Model

REQUESTS, LIMIT = 8, 64
BOUND = 1.10


def main() -> None:
    settings = Model(dtype="float32")
    tokenizer, model = loading.load_tokenizer(settings), loading.load_model(settings)
    rendering = renderer(tokenizer, loading.family(settings))
    stops = stop_ids(loading.family(settings), tokenizer, model)
    requests = humaneval.load()[:REQUESTS]
    prompts = [[rendering.prompt(r.prefix(len(r.sentences) - k)) for r in requests] for k in (1, 0)]

    batch = BatchDecoder(model, stops, LIMIT, REQUESTS)
    batch.advance(prompts[0][:2])  # warm-up
    began = time.perf_counter()
    drafts = [advance.answer for advance in batch.advance(prompts[0])]
    abreast = time.perf_counter() - began

    alone, ratios = 0.0, []
    decoder = AutoregressiveDecoder(model, stops, LIMIT)
    for before, whole, draft in zip(*prompts, drafts, strict=True):
        decoder.forget()
        began = time.perf_counter()
        decoder.decode(before, decoder.verify(before, Answer()).answer)
        alone += time.perf_counter() - began
        with PassCounter(model, timed=True) as counter:
            began = time.perf_counter()
            decoder.decode(whole, decoder.verify(whole, draft).answer)
            wall = time.perf_counter() - began
        ratios.append(wall / counter.seconds)
        print(f"residual {wall:.3f} s, {counter.calls} bare passes {counter.seconds:.3f} s, ratio {ratios[-1]:.3f}")

    worst, middle = max(ratios), statistics.median(ratios)
    print(f"engine overhead: median {middle:.3f}, worst {worst:.3f} of the bare passes' time (bound {BOUND})")
    print(f"{REQUESTS} drafts abreast take {abreast:.1f} s, one at a time {alone:.1f} s: {alone / abreast:.1f}x")
    if middle > BOUND:
        raise SystemExit(f"the engine's overhead is over its bound: {middle:.3f} > {BOUND}")


if __name__ == "__main__":
    main()
