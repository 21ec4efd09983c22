"""Build training pairs: a prefix of a request asks, the answer to the whole request answers.

    python data_builders/build.py recipe=smollm2
    python data_builders/build.py recipe=smollm2 data.answers=corpus data.cut=inside

Writes <run>/data: pairs-*.parquet, heldout.jsonl (never trained on), manifest.json, README.md, dropped/.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_builders import pairs as output
from data_builders.answers import Answered, corpus_answers, self_answers
from data_builders.corpora import seed
from data_builders.cuts import Cut, cuts
from headstart import model as loading
from headstart.batch import BatchDecoder
from headstart.family import stop_ids
from headstart.prompt import Renderer, renderer
from headstart.request import Request
from headstart.sentences import RULE_VERSION
from recipes import run_folder
from recipes.loader import Invocation, run_script
from recipes.schema import Recipe

PROGRESS = ".answers.jsonl"
VERSION = "1"  # changes whenever the same settings would give other pairs


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, build)


def build(invocation: Invocation) -> None:
    recipe = invocation.recipe
    train, heldout = seed.split_tasks(seed.load(), recipe.data.heldout_tasks, recipe.run.seed)
    train = [request for request in train if len(request.sentences) > 1][: recipe.data.limit]
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    settings = step_settings(recipe, rendering)
    if invocation.dry_run:
        folder = invocation.run_dir / "data"
        what = f"would build pairs of {len(train)} requests ({len(heldout)} held out) into {folder}"
        run_folder.say_plan(folder, settings, what)
        return
    with run_folder.step(invocation, invocation.run_dir / "data", settings) as step:
        if step is not None:
            answers = make_answers(recipe, train, rendering, step.partial)
            manifest = write(recipe, train, heldout, answers, rendering, step.partial)
            print("  ".join(f"{name}: {count}" for name, count in manifest["counts"].items()))
            run_folder.finish(step)
            (step.folder / PROGRESS).unlink(missing_ok=True)  # only now: until then a killed run goes on from it


def step_settings(recipe: Recipe, rendering: Renderer) -> dict[str, Any]:
    """What decides the pairs."""
    own = recipe.data.answers == "self"
    weights = {**recipe.model.model_dump(), "weights": loading.weights_hash(recipe.model)}
    return {
        "data": recipe.data.model_dump(),
        "system_message": recipe.prompt.system_message,
        "seed": recipe.run.seed,
        "corpus": seed.VERSION,
        "builder": VERSION,
        "sentence_rule": RULE_VERSION,
        "renderer": rendering.fingerprint,
        "model": weights if own else None,
    }


def make_answers(recipe: Recipe, requests: Sequence[Request], rendering: Renderer, folder: Path) -> list[Answered]:
    """Answers of the training requests, in their order."""
    if recipe.data.answers == "corpus":
        return corpus_answers(requests)
    model = loading.load_model(recipe.model)
    stops = stop_ids(loading.family(recipe.model), rendering.tokenizer, model)
    print(f"end tokens: {', '.join(rendering.tokenizer.convert_ids_to_tokens(sorted(stops)))}")
    decoder = BatchDecoder(model, stops, recipe.data.max_new_tokens, recipe.data.batch_size)
    return self_answers(requests, decoder, rendering, folder / PROGRESS)


def make_pairs(recipe: Recipe, requests: Sequence[Request], answers: Sequence[Answered]) -> Iterator[dict[str, Any]]:
    """The pairs of every request whose answer is usable."""
    for request, answered in zip(requests, answers, strict=True):
        if answered.dropped is None:
            found = cuts(request, recipe.data.cuts, recipe.data.cut, recipe.run.seed)
            whole = [Cut(request.text, len(request.sentences))] if recipe.data.whole else []
            for cut in [*found, *whole]:
                yield output.pair(request, cut, answered.text, recipe.prompt.system_message, recipe.data.answers)


def write(
    recipe: Recipe,
    train: Sequence[Request],
    heldout: Sequence[Request],
    answers: Sequence[Answered],
    rendering: Renderer,
    folder: Path,
) -> dict[str, Any]:
    """Write the data set; returns the manifest."""
    count = output.write_pairs(make_pairs(recipe, train, answers), folder)
    output.write_heldout(heldout, folder / "heldout.jsonl")
    shutil.rmtree(folder / "dropped", ignore_errors=True)
    dropped = output.write_dropped(answers, folder / "dropped")
    own = f"{recipe.model.name}, greedy, on the whole request, without the message for incomplete requests"
    manifest = {
        "corpus": {"name": recipe.data.corpus, "version": seed.VERSION, "licence": seed.LICENCE},
        "counts": {
            "requests": len(train),
            "pairs": count,
            "held out": len(heldout),
            **{f"dropped: {reason}": number for reason, number in dropped.items()},
        },
        "cuts": {"kind": recipe.data.cut, "per_request": recipe.data.cuts, "whole_requests": recipe.data.whole},
        "answers": {"source": own if recipe.data.answers == "self" else "corpus"},
        "default_system_text": rendering.default_system,
        "renderer": rendering.fingerprint,
        "sentence_rule": RULE_VERSION,
        "seed": recipe.run.seed,
        "versions": run_folder.versions(),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    (folder / "README.md").write_text(output.card(manifest))
    return manifest


if __name__ == "__main__":
    sys.exit(main())
