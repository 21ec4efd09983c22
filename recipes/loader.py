"""The command line of every script: `recipe=NAME section.key=value ... [--dry-run] [--print-config] [--help]`.

A script may have flags of its own that take a number or a text (`--preview 3`, `--push NAME/REPO`).

Precedence: schema default < base recipe < recipe < command line. OmegaConf merges, pydantic types and checks.
"""

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from recipes.errors import UserError
from recipes.schema import Recipe

RECIPES = Path(__file__).parent
FLAGS = ("--dry-run", "--print-config", "--help")
COMMAND_LINE = "command line"  # as a source


@dataclass(frozen=True)
class Invocation:
    """A resolved command line.

    `sources` says where each value that is not a default came from, by dotted key; `flags` are the script's own flags
    that were given, each with its number or text.
    """

    name: str
    recipe: Recipe
    sources: Mapping[str, str]
    reference: str
    dry_run: bool = False
    flags: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    @property
    def named(self) -> str:
        """What names this run on another script's command line: the recipe as it was given, and the folder."""
        moved = self.sources.get("run.dir") == COMMAND_LINE
        return f"recipe={self.reference}" + (f" run.dir={self.recipe.run.dir}" if moved else "")

    @property
    def run_dir(self) -> Path:
        """The run's folder (`run.dir` is always filled in here)."""
        return Path(self.recipe.run.dir or f"runs/{self.name}")


def names() -> list[str]:
    """The recipes that come with headstart."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def run_script(
    doc: str | None,
    argv: Sequence[str] | None,
    body: Callable[[Invocation], None],
    flags: Mapping[str, int | str] = MappingProxyType({}),
) -> int:
    """Parse the command line, run `body`, and turn what the user can mend into one line and exit code 2.

    `flags` are the script's own, each with an example of what it takes: a number of at least 1, or a text.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--help" in arguments:
            print(help_text(doc))
            return 0
        given, arguments = _own_flags(arguments, flags)
        invocation = replace(parse(arguments), flags=given)
        if "--print-config" in arguments:
            print(to_yaml(invocation.recipe), end="")
            return 0
        if is_main_process():
            print_sources(invocation)
        body(invocation)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a path that cannot be written, a file where a folder is expected
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


def _own_flags(arguments: Sequence[str], flags: Mapping[str, int | str]) -> tuple[dict[str, int | str], list[str]]:
    """What was given behind `flags`, and the other arguments."""
    found, others, left = dict[str, int | str](), list[str](), iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag not in flags:
            others.append(argument)
            continue
        given = value if equals else next(left, "")
        example = flags[flag]
        if isinstance(example, int):
            if not given.isdecimal() or int(given) < 1:
                raise UserError(f"{flag} takes a number of at least 1: {flag} {example}")
            found[flag] = int(given)
        else:
            if not given or given.startswith("-") or "=" in given:  # the next argument, taken for its text
                raise UserError(f"{flag} takes a text: {flag} {example}")
            found[flag] = given
    return found, others


def parse(arguments: Sequence[str]) -> Invocation:
    """Resolve `recipe=...` and the overrides. Raises UserError for anything that is not as the schema says."""
    overrides, dry_run = [], False
    reference: str | None = None
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument in FLAGS:
            dry_run |= argument == "--dry-run"
        elif argument.startswith("-") or not equals:
            raise UserError(
                f"cannot read {argument!r}: say recipe=NAME, section.key=value or one of {', '.join(FLAGS)}"
            )
        elif key == "recipe" and reference is not None:
            raise UserError(f"recipe={reference} and recipe={value}: give one; a recipe may name a base")
        elif key == "recipe":
            reference = value
        else:
            overrides.append(argument)
    if not reference:
        raise UserError(f"which recipe? say recipe=NAME ({', '.join(names())}) or recipe=PATH")
    return resolve(reference, overrides, dry_run)


def resolve(reference: str, overrides: Sequence[str] = (), dry_run: bool = False) -> Invocation:
    """Merge and check. `reference` is a recipe's name or a YAML file's path."""
    path = find(reference)
    layers = [*_file_layers(path), (COMMAND_LINE, _parse_overrides(overrides))]
    sources: dict[str, str] = {}
    for label, layer in layers:
        given = _leaves(_container(layer, label))
        sources = {key: source for key, source in sources.items() if key not in given} | dict.fromkeys(given, label)
    merged = _container(_merge([layer for _, layer in layers], path), str(path))
    recipe = _check(merged, sources)
    if recipe.run.dir is None:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": f"runs/{path.stem}"})})
    return Invocation(path.stem, recipe, sources, reference, dry_run)


def find(reference: str) -> Path:
    """The file of a recipe given by name or path."""
    path = RECIPES / f"{reference}.yaml" if reference in names() else Path(reference)
    if path.is_file():
        return path
    near = difflib.get_close_matches(reference, names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no recipe {reference!r}: {hint}there are {', '.join(names())}, or give the path of a YAML file")


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML; the text is itself a valid `recipe=` file, `${` inside a value included."""
    return yaml.safe_dump(_escaped(recipe.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=1 << 16)


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def is_main_process() -> bool:
    """Whether this is rank 0 of a launch (or the only process); set by accelerate before any script runs."""
    return os.environ.get("RANK", "0") == "0"


def print_sources(invocation: Invocation) -> None:
    """Print the values that are not defaults, each with where it came from."""
    values = dict(_values(invocation.recipe.model_dump(mode="json")))
    defaults = dict(_values(Recipe().model_dump(mode="json")))
    print(f"recipe {invocation.name} (values that are not defaults)")
    for key, value in values.items():
        if value != defaults.get(key):
            print(f"  {key} = {value}   [{invocation.sources.get(key, 'recipe name')}]")


def help_text(doc: str | None) -> str:
    """The script's docstring, the grammar and every key with its default."""
    lines = [(doc or "").strip(), "", "Keys (section.key=value), with their defaults:"]
    for section, field in Recipe.model_fields.items():
        lines.append(f"  {section}")
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        for key, leaf in field.annotation.model_fields.items():
            default = "(see recipes/schema.py)" if key == "system_message" else leaf.default
            lines.append(f"    {key} = {default}   {leaf.description}")
    return "\n".join([*lines, "", f"Flags: {', '.join(FLAGS)}. Recipes: {', '.join(names())}."])


def _file_layers(path: Path) -> list[tuple[str, DictConfig]]:
    layer = _read(path)
    base = layer.pop("base", None)
    if base is None:
        return [(str(path.name), layer)]
    base_path = find(str(base))
    base_layer = _read(base_path)
    if "base" in base_layer:
        raise UserError(f"{base_path.name}: a base recipe may not have a base of its own")
    return [(base_path.name, base_layer), (path.name, layer)]


def _read(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not a readable YAML recipe: {_one_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{path}: a recipe is a mapping of sections ({', '.join(Recipe.model_fields)})")
    return loaded


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    parsed = OmegaConf.create()
    for override in overrides:
        try:
            parsed.merge_with_dotlist([override])
        except (YAMLError, OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
            raise UserError(f"command line: cannot read {override}: {_one_line(error)}") from error
    return parsed


def _merge(layers: list[DictConfig], path: Path) -> DictConfig:
    try:
        merged = OmegaConf.merge(*layers)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot merge with the command line: {_one_line(error)}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _container(layer: DictConfig, label: str) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(layer, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{label}: {_one_line(error)}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _check(values: Mapping[str, Any], sources: Mapping[str, str]) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error, sources)) from error


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    source = _source(key, sources)
    if first["type"] == "extra_forbidden":
        known = [name for name, _ in _values(Recipe().model_dump(mode="json"))]
        elsewhere = [name for name in known if name.endswith(f".{key.rpartition('.')[2]}")]
        near = elsewhere or difflib.get_close_matches(key, [*known, *Recipe.model_fields], n=1, cutoff=0.0)
        return f"{source}: unknown key {key!r}; the nearest is {near[0]!r}"
    if first["type"] == "value_error":  # a rule over several keys, in the schema's own words
        return f"{source}: {first['ctx']['error']}"
    why = "Input should be a list, as in [a,b]" if first["type"] == "tuple_type" else first["msg"]
    return f"{source}: {key}={first['input']!r}: {why}"


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Where `key` came from; for a section or an item of a list, where the latest value inside or around it did."""
    related = [name for name in sources if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")]
    return sources.get(key) or (sources[related[-1]] if related else "recipe")


def _leaves(values: Mapping[str, Any], path: str = "") -> list[str]:
    return [key for key, _ in _values(values, path)]


def _values(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _values(value, f"{name}.")
        else:
            yield name, value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
