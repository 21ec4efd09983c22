"""Build training pairs: a prefix of a request asks, the answer to the whole request answers.

    python data_builders/build.py recipe=smollm2
    python data_builders/build.py recipe=qwen3 data.paths.lmsys=PATH
    python data_builders/build.py recipe=smollm2 --preview 3

Writes <run>/data: pairs-*.parquet, heldout.jsonl (never trained on), manifest.json, README.md, dropped/. `--preview N`
draws N of its pairs: prefix, held-back rest, and the supervised tokens in colour.
"""

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_builders import (
    choosing,
    contamination,
    corpora,
    cuts,
    duplicates,
    making,
    pairs,
    reading,
    rules,
    sources,
    words,
    workers,
    writing,
)
from data_builders.card import card
from data_builders.choosing import Choice
from data_builders.making import Maker
from data_builders.preview import preview
from data_builders.sources import Piece
from headstart import model as loading
from headstart import sentences
from headstart.prompt import Renderer, renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Recipe

DECIDING = (sentences, choosing, contamination, corpora, cuts, duplicates, making, pairs, reading, rules, words)
"""The modules whose code decides the pairs: data that other code made is not taken for this code's."""


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, build, counted=("--preview",))


def build(invocation: Invocation) -> None:
    recipe, folder = invocation.recipe, invocation.run_dir / "data"
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    if invocation.counted.get("--preview"):
        run_folder.need(folder, f"python data_builders/build.py {invocation.named}")
        preview(folder, invocation.counted["--preview"], rendering, recipe.run.seed)
        return
    inputs = find_inputs(recipe)
    settings = step_settings(recipe, rendering, inputs)
    if invocation.dry_run:
        run_folder.say_plan(folder, settings, f"would build pairs of {inputs.said()} into {folder}")
        return
    with run_folder.step(invocation, folder, settings) as step:
        if step is not None:
            manifest = Work(recipe, rendering, inputs, step.partial).done()
            print("  ".join(f"{name}: {count:,}" for name, count in manifest["counts"].items()))
            run_folder.finish(step)
            for hidden in step.folder.glob(".*"):  # only now: until then a killed run goes on from them
                shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink()


@dataclass(frozen=True)
class Inputs:
    """All that is read: each corpus' files with their hashes, and the benchmarks' tasks."""

    files: dict[str, dict[Path, str]]
    tasks: dict[str, list[contamination.Task]]

    def said(self) -> str:
        """In words."""
        return ", ".join(f"{name} ({len(found)} files)" if found else name for name, found in self.files.items())

    def tasks_hash(self) -> str:
        """A hash of all tasks that are looked for."""
        return run_folder.digest([[name, [task.text for task in found]] for name, found in self.tasks.items()])


def find_inputs(recipe: Recipe) -> Inputs:
    """Find and hash the corpora's files, load the benchmarks. Raises UserError that says what to do."""
    from eval import suite  # the benchmarks, with all that scores them

    data = recipe.data
    for name in data.paths:
        if name not in (*data.corpora, *data.benchmarks):
            raise UserError(f"data.paths.{name}: {name!r} is neither among data.corpora nor among data.benchmarks")
    for name in data.limit if isinstance(data.limit, dict) else ():
        if name not in data.corpora:
            raise UserError(f"data.limit.{name}: {name!r} is not among data.corpora={list(data.corpora)}")
    files: dict[str, dict[Path, str]] = {}
    for name in data.corpora:
        module = corpora.module(name)
        place = name if module is corpora.jsonl else data.paths.get(name)
        found = [] if module is corpora.seed else sources.files(name, module.ORIGIN, place)
        files[name] = {file: run_folder.file_hash(file) for file in found}
    tasks = {}
    for name in data.benchmarks:
        try:
            own = name if name.endswith(".jsonl") else None
            requests = suite.benchmark(name).load(own or data.paths.get(name))
        except UserError as error:
            raise UserError(f"data.benchmarks: {error}; or take {name} out, and the pairs may hold its tasks") from None
        tasks[name] = [contamination.task(name, request) for request in requests]
    return Inputs(files, tasks)


def step_settings(recipe: Recipe, rendering: Renderer, inputs: Inputs) -> dict[str, Any]:
    """What decides the pairs."""
    weights = {**recipe.model.model_dump(), "weights": loading.weights_hash(recipe.model)}
    return {
        "data": recipe.data.deciding(),
        "system_message": recipe.prompt.system_message,
        "seed": recipe.run.seed,
        "inputs": {name: list(found.values()) or corpora.module(name).VERSION for name, found in inputs.files.items()},
        "tasks": inputs.tasks_hash(),
        "code": code_hash(),
        "duplicates": duplicates.VERSION,
        "sentence_rule": sentences.RULE_VERSION,
        "renderer": rendering.fingerprint,
        "model": weights if making.needs_model(recipe.data) else None,
    }


def code_hash() -> str:
    """A hash of the modules that decide the pairs, corpora included."""
    files = {Path(str(module.__file__)) for module in (*DECIDING, *corpora.MODULES.values(), corpora.jsonl)}
    return run_folder.digest([[file.name, run_folder.file_hash(file)] for file in sorted(files)])


class Work:
    """One build, from rows to manifest, in the step's partial folder; each part goes on from what is there."""

    def __init__(self, recipe: Recipe, rendering: Renderer, inputs: Inputs, folder: Path) -> None:
        self.recipe = recipe
        self.data = recipe.data
        self.rendering = rendering
        self.inputs = inputs
        self.folder = folder
        self.read = folder / reading.FOLDER
        self.workers = recipe.data.workers or workers.cores()
        self.maker = Maker(recipe.data, recipe.prompt.system_message, recipe.run.seed)
        self.pieces = list(self._plan())
        self.owners = [self.data.corpora.index(piece.corpus) for piece in self.pieces]
        self.sources = [corpora.module(piece.corpus).NAME for piece in self.pieces]
        self.beyond = 0  # requests that data.pairs leaves out

    def done(self) -> dict[str, Any]:
        """Everything; returns the manifest."""
        self._read()
        with _timed("duplicates and draw"):
            choice = choosing.choose(self.data, self.read, self.owners)
        if making.needs_model(self.data):
            counts, dropped, shards = self._made_with_model(choice)
        else:
            counts, dropped, shards = self._made(choice)
        writing.write_heldout(self.folder, choice, self.sources)
        return self._finish(choice, counts, dropped, shards)

    def _plan(self) -> Iterator[Piece]:
        for name, found in self.inputs.files.items():
            if not found:
                yield Piece(name, "", 0, 0, 1)
            for file in found:
                yield from sources.plan(name, file)

    def _read(self) -> None:
        self.read.mkdir(exist_ok=True)
        tasks = [task for found in self.inputs.tasks.values() for task in found]
        index = contamination.Index(tasks) if tasks else None
        settings = reading.Settings(self.data, self.recipe.run.seed, rules.rules(self.data), index)
        todo = [
            (piece, number, self.read)
            for number, piece in enumerate(self.pieces)
            if not reading.is_read(self.read, number)
        ]
        with _timed("read, rules, cuts, benchmarks, keys"):
            _follow("read", workers.run(reading.read_piece, settings, todo, min(self.workers, len(todo))), len(todo))
        counts: Counter[str] = Counter()
        for number, piece in enumerate(self.pieces):
            self._say_if_useless(number, piece)
            counts.update(next(reading.review(self.read, number))["counts"])
        if not any(len(reading.keys(self.read, number)) for number in range(len(self.pieces))):
            why = ", ".join(f"{name} {counts[name]}" for name in sorted(counts) if name.startswith("dropped"))
            raise UserError(
                f"data.corpora: no request comes of {counts['rows']} rows ({why}); see data_builders/rules.py"
            )

    def _say_if_useless(self, number: int, piece: Piece) -> None:
        """Raises UserError where no row of a file's piece is of the corpus' schema: that is another kind of file."""
        lines = reading.review(self.read, number)
        counts = next(lines)["counts"]
        if counts.get("rows") and counts.get("dropped: malformed row") == counts["rows"]:
            first = next(lines)
            raise UserError(
                f"{piece.file}, row {first['row']}: {first['detail']}; no row from here on is one of {piece.corpus}: "
                "give rows of its schema"
            )

    def _made(self, choice: Choice) -> tuple[Counter[str], list[dict[str, str]], int]:
        most = choice.cuts + np.uint32(self.data.whole)
        most[choice.fates != choosing.TRAIN] = 0
        plans = writing.plans(choice, self._within(choice, most), self.sources)
        todo = [(self.folder, plan) for plan in plans if not writing.is_written(self.folder, plan)]
        with _timed("pairs"):
            _follow(
                "pairs", workers.run(writing.shard_of_corpus, self.maker, todo, min(self.workers, len(todo))), len(todo)
            )
        return (*writing.shard_counts(self.folder, plans), len(plans))

    def _made_with_model(self, choice: Choice) -> tuple[Counter[str], list[dict[str, str]], int]:
        from data_builders.modelling import model_maker  # torch, which the workers do without

        with model_maker(self.recipe, self.maker, self.rendering, self.folder.parent) as maker:
            given = np.zeros(len(choice.fates), dtype=np.uint32)
            asked = np.zeros(len(choice.fates), dtype=bool)
            for rows in self._rounds(choice, given):
                asked[rows] = True
                some = np.zeros(len(given), dtype=np.uint32)
                some[rows] = 1
                for plan in writing.plans(choice, some, self.sources):
                    found = writing.requests(self.folder, plan)
                    places = np.concatenate(
                        [np.flatnonzero(m) + choice.firsts[n] for (n, _), m in zip(plan.pieces, plan.most, strict=True)]
                    )
                    made = maker.of_model(drawn for drawn, _ in found)
                    given[places] = [len(one.pairs) for one in made]
            most = self._within(choice, given)
            keep = np.where(asked & (most == 0) & (given == 0), 1, most).astype(np.uint32)  # so that drops are told
            plans = writing.plans(choice, keep, self.sources)
            for plan in plans:
                if not writing.is_written(self.folder, plan):
                    chosen = list(writing.requests(self.folder, plan))
                    made = maker.of_model(drawn for drawn, _ in chosen)
                    writing.write_shard(self.folder, plan, zip(made, (n for _, n in chosen), strict=True))
        return (*writing.shard_counts(self.folder, plans), len(plans))

    def _rounds(self, choice: Choice, given: NDArray[np.uint32]) -> Iterator[NDArray[np.int64]]:
        """The requests to ask a model about: all at once, or, where data.pairs says how many pairs are wanted, in the
        order of the draw until there are as many."""
        order = choosing.drawn(choice)
        if self.data.pairs is None:
            yield order
            return
        expected = choice.cuts[order].astype(np.int64) + self.data.whole
        begin = 0
        while begin < len(order) and (lacking := self.data.pairs - int(given.sum())) > 0:
            end = begin + int(np.searchsorted(np.cumsum(expected[begin:]), lacking)) + 1
            yield order[begin:end]
            begin = end

    def _within(self, choice: Choice, most: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """`most`, cut down to data.pairs pairs in the order of the draw."""
        if self.data.pairs is None:
            return most
        order = choosing.drawn(choice)
        before = np.cumsum(most[order].astype(np.int64)) - most[order]
        allowed = most.copy()
        allowed[order] = np.clip(self.data.pairs - before, 0, most[order])
        self.beyond = int((before >= self.data.pairs).sum())
        return allowed

    def _finish(
        self, choice: Choice, counts: Counter[str], dropped: list[dict[str, str]], shards: int
    ) -> dict[str, Any]:
        with _timed("review and manifest"):
            shutil.rmtree(self.folder / "dropped", ignore_errors=True)
            with writing.Review(self.folder / "dropped") as review:
                for number in range(len(self.pieces)):
                    lines = reading.review(self.read, number)
                    next(lines)
                    for line in lines:
                        review.add(line)
                for line in (*choosing.dropped(choice, self.read), *dropped):
                    review.add(line)
            manifest = self._manifest(choice, counts, Counter(line["dropped"] for line in dropped), shards)
            (self.folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
            (self.folder / "README.md").write_text(card(manifest))
        return manifest

    def _manifest(self, choice: Choice, counts: Counter[str], lost: Counter[str], shards: int) -> dict[str, Any]:
        read = writing.read_counts(self.folder, self.owners, choice)
        own = f"{self.recipe.model.name}, greedy, on the whole request, without the message for incomplete requests"
        kinds = {name: counts[name] for name in sorted(counts) if name.startswith("pairs: ")}
        found = writing.certificate(self.folder, len(self.pieces))
        removed = sum(of.get(f"dropped: {writing.CONTAMINATED}", 0) for of in read.values())
        admitted = len(choice.fates)
        return {
            "kind": self.data.kind,
            "corpora": {
                corpora.shown(name): {
                    "licence": corpora.module(name).ORIGIN.licence,
                    "terms": corpora.module(name).ORIGIN.terms,
                    "files": {file.name: sha for file, sha in self.inputs.files[name].items()},
                    "counts": read[at],
                }
                for at, name in enumerate(self.data.corpora)
            },
            "counts": {
                "requests": counts["requests"],
                "pairs": sum(kinds.values()),
                **kinds,
                **{name: counts[name] for name in sorted(counts) if name.startswith(("cut: ", "draft: "))},
                "held out": int((choice.fates == choosing.HELDOUT).sum()),
                **{f"dropped: {reason}": lost[reason] for reason in sorted(lost)},
                **({"not drawn (data.pairs)": self.beyond} if self.beyond else {}),
            },
            "disjoint_from": {
                "detector": contamination.VERSION,
                "rows_checked": admitted + removed,
                "rows_removed": removed,
                "benchmarks": {
                    name: {"tasks": len(tasks), "found": len({e["id"] for e in found if e["benchmark"] == name})}
                    for name, tasks in self.inputs.tasks.items()
                },
                "found": found,
            },
            "cuts": {"shares": self.data.cut, "per_request": self.data.cuts, "whole_requests": self.data.whole},
            "answers": own if self.data.answers == "self" else "corpus",
            "duplicates": self.data.duplicates,
            "shards": shards,
            "default_system_text": self.rendering.default_system,
            "renderer": self.rendering.fingerprint,
            "sentence_rule": sentences.RULE_VERSION,
            "seed": self.recipe.run.seed,
            "versions": run_folder.versions(),
        }


class _timed:
    """Says how long a stage took."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is None:
            print(f"{self.stage}: {time.monotonic() - self.began:.1f} s", flush=True)


def _follow(what: str, done: Iterator[int], count: int) -> None:
    said = time.monotonic()
    for number in done:
        if time.monotonic() - said > 5:
            said = time.monotonic()
            print(f"  {what}: {number}/{count} pieces", flush=True)


if __name__ == "__main__":
    sys.exit(main())
