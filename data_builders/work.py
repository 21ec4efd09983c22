"""One build of training pairs: inputs, stages, manifest. `build.py` is its command."""

import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_builders import choosing, contamination, corpora, making, reading, rules, sources, workers, writing
from data_builders.card import card
from data_builders.choosing import Choice
from data_builders.inputs import Inputs, find_inputs, step_settings
from data_builders.making import Maker
from data_builders.preview import preview
from data_builders.sources import Piece
from headstart import model as loading
from headstart import sentences
from headstart.prompt import Renderer, renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation
from recipes.schema import Recipe


def build(invocation: Invocation) -> None:
    """Build the data of a run, or draw pairs of what was built. Raises UserError for what the user can mend."""
    recipe, folder = invocation.recipe, invocation.run_dir / "data"
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    if "--preview" in invocation.flags:
        run_folder.need(folder, f"python data_builders/build.py {invocation.named}")
        preview(folder, invocation.flags["--preview"], rendering, recipe.run.seed)
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
        for hidden in folder.glob(".*"):  # only now: until then a killed run goes on from them
            shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink()


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
        self.maker = Maker(recipe.data, recipe.prompt.system_message, recipe.run.seed, rendering.control)
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
        if not any(number for name, number in counts.items() if name.startswith("pairs: ")):
            reasons = Counter(line["dropped"] for line in dropped)
            raise UserError(
                f"no pair comes of {sum(reasons.values())} requests: "
                + ", ".join(f"{reason} {reasons[reason]}" for reason in sorted(reasons))
                + "; see data.max_new_tokens and data.max_surprise"
            )
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
        self._say_if_useless()

    def _say_if_useless(self) -> None:
        """Raises UserError where no row of a file is of the corpus' schema, and where no request comes of any row."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for number, piece in enumerate(self.pieces):
            counts[piece.file].update(next(reading.review(self.read, number))["counts"])
        for piece, number in ((piece, number) for number, piece in enumerate(self.pieces) if piece.first == 1):
            found = counts[piece.file]
            if found["rows"] and found["dropped: malformed row"] == found["rows"]:
                first = next(islice(reading.review(self.read, number), 1, None), {"row": 1, "detail": "blank"})
                raise UserError(
                    f"{piece.file}, row {first['row']}: {first['detail']}; no row of the file is one of "
                    f"{piece.corpus}: give rows of its schema"
                )
        if not any(len(reading.keys(self.read, number)) for number in range(len(self.pieces))):
            total: Counter[str] = sum(counts.values(), Counter())
            reasons = ", ".join(f"{name} {total[name]}" for name in sorted(total) if name.startswith("dropped"))
            why = f" ({reasons}); see data_builders/rules.py" if reasons else ""
            raise UserError(f"data.corpora={list(self.data.corpora)}: no request comes of {total['rows']} rows{why}")

    def _made(self, choice: Choice) -> tuple[Counter[str], list[dict[str, str]], int]:
        most = choice.cuts + np.uint32(self.data.whole)
        most[choice.fates != choosing.TRAIN] = 0
        plans = writing.plans(choice, self._within(choice, most), self.sources)
        writing.clear_others(self.folder, plans)
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
                plans = writing.plans(choice, some, self.sources)
                found = (drawn for plan in plans for drawn, _ in writing.requests(self.folder, plan))
                given[np.flatnonzero(some)] = [len(one.pairs) for one in maker.of_model(found)]
            most = self._within(choice, given)
            told = asked & (given == 0)  # why they gave no pair
            keep = np.where(told, writing.NONE_EXPECTED, most).astype(np.uint32)
            plans = writing.plans(choice, keep, self.sources)
            writing.clear_others(self.folder, plans)
            for plan in plans:
                if not writing.is_written(self.folder, plan):
                    chosen = list(writing.requests(self.folder, plan))
                    made = maker.of_model(drawn for drawn, _ in chosen)
                    writing.write_shard(self.folder, plan, zip(made, (n for _, n in chosen), strict=True), self.maker)
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
            manifest = self._manifest(choice, counts, Counter(map(_unit, dropped)), shards)
            (self.folder / "manifest.json").write_text(
                json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8"
            )
            (self.folder / "README.md").write_text(card(manifest), "utf-8")
        return manifest

    def _manifest(self, choice: Choice, counts: Counter[str], lost: Counter[str], shards: int) -> dict[str, Any]:
        read = writing.read_counts(self.folder, self.owners, choice)
        own = f"{self.recipe.model.name}, greedy, on the whole request, without the message for incomplete requests"
        answers = {name: own if self.data.answers_of(name) == "self" else "corpus" for name in self.data.corpora}
        kinds = {name: counts[name] for name in sorted(counts) if name.startswith("pairs: ")}
        found = writing.certificate(self.folder, len(self.pieces))
        removed = sum(of.get(f"dropped: {reading.CONTAMINATED}", 0) for of in read.values())
        admitted = len(choice.fates)
        return {
            "kind": self.data.kind,
            "corpora": {
                corpora.shown(name): {
                    "licence": corpora.module(name).ORIGIN.licence,
                    "terms": corpora.module(name).ORIGIN.terms,
                    "files": [[file.name, sha] for file, sha in self.inputs.files[name].items()],
                    "counts": read[at],
                }
                for at, name in enumerate(self.data.corpora)
            },
            "counts": {
                "requests": counts["requests"],
                "pairs": sum(kinds.values()),
                **kinds,
                **{name: counts[name] for name in sorted(counts) if name.startswith(("cut: ", "draft: "))},
                "pairs that hold a control string": counts["hold a control string"],
                "held out": int((choice.fates == choosing.HELDOUT).sum()),
                **{reason: lost[reason] for reason in sorted(lost)},
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
            "answers": answers if len(set(answers.values())) > 1 else answers[self.data.corpora[0]],
            "duplicates": self.data.duplicates,
            "shards": shards,
            "default_system_text": self.rendering.default_system,
            "renderer": self.rendering.fingerprint,
            "sentence_rule": sentences.RULE_VERSION,
            "seed": self.recipe.run.seed,
            "versions": run_folder.versions(),
        }


def _unit(line: Mapping[str, Any]) -> str:
    """What was dropped on the way to pairs, a request or a pair, and why."""
    return f"{'pairs ' if 'pair' in line else ''}dropped: {line['dropped']}"


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
