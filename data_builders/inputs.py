"""What a build reads and what decides its pairs: files, benchmarks' tasks, settings, and the code itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_builders import contamination, corpora, duplicates, making, sources
from eval import extract
from eval.benchmarks import mbpp
from headstart import model as loading
from headstart import sentences
from headstart.decoders import settings_of
from headstart.prompt import Renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.schema import Recipe


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
        return run_folder.digest([[name, [repr(task) for task in found]] for name, found in self.tasks.items()])


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
    stems = [corpora.stem(name) for name in data.corpora]
    if len(set(stems)) < len(stems):
        raise UserError(f"data.corpora={list(data.corpora)}: two of one name, endings apart; rename a file")
    files: dict[str, dict[Path, str]] = {}
    for name in data.corpora:
        module = corpora.module(name)
        place = name if module is corpora.jsonl else data.paths.get(name)
        found = [] if module in corpora.INCLUDED else sources.files(name, module.ORIGIN, place)
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
        "model": {**weights, **settings_of(recipe)} if making.needs_model(recipe.data) else None,
    }


def code_hash() -> str:
    """A hash of the code that decides the pairs: data that other code made is not taken for this code's."""
    own = Path(__file__).parent
    others = [Path(str(module.__file__)) for module in (sentences, mbpp, extract)]
    files = [*sorted(own.rglob("*.py")), *sorted(own.rglob("*.txt")), *others]
    return run_folder.digest([[file.name, run_folder.file_hash(file)] for file in files])
