"""The command line and its recipes: precedence, what is printed, one line for each kind of bad input."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from eval import report
from recipes import loader
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Recipe

NUMBER_OF_RECIPES = 8
SCRIPTS = ("data_builders.build", "train.sft", "train.merge", "eval.run", "eval.audit", "eval.report")


@pytest.fixture(params=SCRIPTS)
def script(request):
    """Each script as a module."""
    return importlib.import_module(request.param)


def write(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def fails(capsys, *argv, script=report):
    """The one line that a script says about bad input."""
    capsys.readouterr()
    assert script.main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    return said.err


def test_every_recipe_loads():
    assert len(loader.names()) == NUMBER_OF_RECIPES
    for name in loader.names():
        invocation = parse([f"recipe={name}"])
        assert invocation.name == name
        assert invocation.run_dir == Path("runs") / name
        assert invocation.recipe.run.dir == f"runs/{name}"
        assert invocation.named == f"recipe={name}"
        by_path = parse([f"recipe={loader.find(name)}"])
        assert by_path.named == f"recipe={loader.find(name)}"
        assert replace(by_path, reference=name) == invocation
        assert parse([f"recipe={name}", "run.dir=elsewhere"]).named == f"recipe={name} run.dir=elsewhere"


def test_the_schemas_defaults_are_the_papers_values():
    train = Recipe().train
    assert (train.rank, train.alpha, train.dropout, train.learning_rate) == (8, 16, 0.05, 2e-5)
    assert (train.effective_batch, train.max_length, train.steps) == (16, 2048, 1000)


def test_precedence(tmp_path, monkeypatch):
    """Schema default < base recipe < recipe < command line, by key."""
    write(tmp_path, "train: {rank: 2, alpha: 3, dropout: 0.1}\nrun: {dir: of_base}", "ground.yaml")
    write(tmp_path, "base: ground.yaml\ntrain: {alpha: 5, dropout: 0.2}")
    monkeypatch.chdir(tmp_path)
    invocation = parse(["recipe=mine.yaml", "train.dropout=0.3"])
    train = invocation.recipe.train
    assert (train.steps, train.rank, train.alpha, train.dropout) == (1000, 2, 5, 0.3)
    assert invocation.run_dir == Path("of_base")
    assert invocation.sources == {
        "run.dir": "ground.yaml",
        "train.rank": "ground.yaml",
        "train.alpha": "mine.yaml",
        "train.dropout": "command line",
    }
    assert parse(["recipe=mine.yaml", "train.rank=7", "train.rank=9"]).recipe.train.rank == 9
    assert parse(["recipe=mine.yaml"]).name == "mine"


def test_a_list_is_replaced_whole(tmp_path):
    path = write(tmp_path, "eval: {benchmarks: [humaneval, heldout]}")
    assert parse([f"recipe={path}"]).recipe.eval.benchmarks == ("humaneval", "heldout")
    assert parse([f"recipe={path}", "eval.benchmarks=[a.jsonl]"]).recipe.eval.benchmarks == ("a.jsonl",)


def test_a_base_of_a_base_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, base in (("a.yaml", "smollm2"), ("b.yaml", "a.yaml"), ("c.yaml", "b.yaml"), ("self.yaml", "self.yaml")):
        write(tmp_path, f"base: {base}", name)
    assert parse(["recipe=a.yaml"]).recipe.model == parse(["recipe=smollm2"]).recipe.model
    assert "b.yaml: a base recipe may not have a base" in fails(capsys, "recipe=c.yaml")
    assert "self.yaml: a base recipe may not have a base" in fails(capsys, "recipe=self.yaml")


def test_values_with_an_equals_sign_blanks_and_yaml_types():
    text = "a=b=c, then  x"
    recipe = parse(["recipe=smollm2", f"prompt.system_message={text}", "train.learning_rate=3e-4", "eval.limit=null"])
    assert recipe.recipe.prompt.system_message == text
    assert recipe.recipe.train.learning_rate == 3e-4
    assert recipe.recipe.eval.limit is None
    assert parse(["recipe=smollm2", "model.name=org/x=y"]).recipe.model.name == "org/x=y"
    assert parse(["recipe=smollm2", 'prompt.system_message="one: two"']).recipe.prompt.system_message == "one: two"


def test_the_saved_recipe_is_itself_a_recipe(tmp_path, capsys):
    """`--print-config` prints the whole recipe as YAML; loaded again it is the same run in the same folder."""
    argv = ["recipe=smollm2", "train.rank=3", "prompt.system_message=a: b #c 'é\"", "--print-config"]
    argv[2] = f"prompt.system_message='{argv[2].partition('=')[2].replace(chr(39), chr(39) * 2)}'"
    assert report.main(argv) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["prompt"]["system_message"] == "a: b #c 'é\""
    assert set(yaml.safe_load(text)) == set(Recipe.model_fields)
    again = parse([f"recipe={write(tmp_path, text, 'recipe.yaml')}"])
    assert again.recipe == parse(argv[:-1]).recipe
    assert again.run_dir == Path("runs/smollm2")
    assert loader.to_yaml(again.recipe) == text


def test_every_recipe_survives_being_saved(tmp_path):
    for name in loader.names():
        recipe = parse([f"recipe={name}"]).recipe
        assert parse([f"recipe={write(tmp_path, loader.to_yaml(recipe))}"]).recipe == recipe


def test_help_names_every_key(script, capsys):
    """`--help` needs no recipe and wins over bad arguments."""
    for argv in (["--help"], ["recipe=smollm2", "--help"], ["--help", "nonsense"]):
        assert script.main(argv) == 0
        said = capsys.readouterr().out
        assert script.__doc__.strip().splitlines()[0] in said
        for section, field in Recipe.model_fields.items():
            for key, leaf in field.annotation.model_fields.items():
                assert f"    {key} = " in said.partition(f"\n  {section}\n")[2]
                assert leaf.description in said
        assert all(name in said for name in (*loader.FLAGS, *loader.names()))


def test_every_script_speaks_the_same_language(script, capsys):
    assert script.main(["recipe=smollm2", "run.seed=3", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"]["seed"] == 3
    assert "unknown key 'train.rnk'" in fails(capsys, "recipe=smollm2", "train.rnk=1", script=script)
    assert "which recipe?" in fails(capsys, script=script)


def test_what_is_not_a_default_is_printed_with_where_it_came_from(tmp_path, capsys, monkeypatch):
    path = write(tmp_path, "base: smollm2\ntrain: {rank: 4, alpha: 16}")
    argv = [f"recipe={path}", "train.dropout=0.5", f"run.dir={tmp_path / 'run'}"]
    assert report.main(argv) == 2  # there is nothing to report on
    said = capsys.readouterr().out.splitlines()
    assert "  train.rank = 4   [mine.yaml]" in said
    assert "  train.dropout = 0.5   [command line]" in said
    assert "  eval.allow_code_execution = True   [smollm2.yaml]" in said
    assert not any("alpha" in line for line in said)  # said, but the default
    monkeypatch.setenv("RANK", "1")
    assert report.main(argv) == 2
    assert capsys.readouterr().out == ""  # rank 0 alone prints


UNKNOWN = {
    "train.rnk=8": "unknown key 'train.rnk'; the nearest is 'train.rank'",
    "trian.rank=8": "unknown key 'trian'; the nearest is 'train'",
    "eval.benchmark=x": "unknown key 'eval.benchmark'; the nearest is 'eval.benchmarks'",
    "rank=8": "unknown key 'rank'; the nearest is 'train.rank'",
    "base=smollm2": "unknown key 'base'",
}


@pytest.mark.parametrize("override", UNKNOWN)
def test_an_unknown_key_names_the_nearest(override, tmp_path, capsys):
    assert UNKNOWN[override] in fails(capsys, "recipe=smollm2", override)
    assert "command line: " in fails(capsys, "recipe=smollm2", override)
    if not override.startswith("base"):
        key, value = override.split("=")
        section, _, leaf = key.rpartition(".")
        path = write(tmp_path, f"{section}: {{{leaf}: {value}}}" if section else f"{leaf}: {value}")
        assert f"mine.yaml: {UNKNOWN[override]}" in fails(capsys, f"recipe={path}")


BAD_VALUES = {
    "train.rank=many": "train.rank='many'",
    "train.rank=1.5": "train.rank=1.5",
    "train.rank=0": "train.rank=0",
    "train.rank=[1]": "train.rank=[1]",
    "train.learning_rate=-1": "train.learning_rate=-1",
    "train.gradient_checkpointing=perhaps": "train.gradient_checkpointing='perhaps'",
    "train=3": "train=3",
    "train.rank.x=3": "train.rank={'x': 3}",
    "model.family=gpt2": "model.family='gpt2'",
    "model.name=7": "model.name=7",
    "train.rank=true": "train.rank=True",
    "train.learning_rate=inf": "train.learning_rate='inf'",
    "train.max_grad_norm=.nan": "train.max_grad_norm=nan",
    "eval.benchmarks=humaneval": "eval.benchmarks='humaneval': Input should be a list, as in [a,b]",
    "eval.benchmarks=[]": "eval.benchmarks=[]",
    "eval.benchmarks=[a,2]": "eval.benchmarks.1=2",
    "report.confidence=2": "report.confidence=2",
    "data.cut={word: 0.5}": "data.cut={'word': 0.5}: the shares have to sum to 1",
    "data.corpora=[seed,seed]": "a name stands there twice",
    "train.rank=${nothing}": "nothing",
    "train.rank=[1": "cannot read train.rank=[1",
}


@pytest.mark.parametrize("override", BAD_VALUES)
def test_a_bad_value_names_its_key_and_where_it_stands(override, capsys):
    said = fails(capsys, "recipe=smollm2", "train.steps=5", override)
    assert said.startswith("error: command line: ")
    assert BAD_VALUES[override] in said


def test_last_without_greedy_is_an_error(tmp_path, capsys):
    path = write(tmp_path, "eval: {acceptance: top_k}")
    said = fails(capsys, f"recipe={path}")
    assert said == (
        "error: mine.yaml: replay=last holds under acceptance=greedy only; with top_k set eval.replay=full\n"
    )
    said = fails(capsys, f"recipe={write(tmp_path, 'eval: {replay: full, acceptance: top_k}')}", "eval.replay=last")
    assert said.startswith("error: command line: replay=last holds under")


def test_a_missing_recipe_lists_what_there_is(tmp_path, capsys):
    for reference in ("smolm2", tmp_path / "none.yaml", tmp_path, "smollm2.yaml"):
        said = fails(capsys, f"recipe={reference}")
        assert f"no recipe {str(reference)!r}" in said
        assert all(name in said for name in loader.names())
    assert "did you mean 'smollm2'?" in fails(capsys, "recipe=smolm2")
    assert "no recipe 'nope'" in fails(capsys, f"recipe={write(tmp_path, 'base: nope')}")
    assert "which recipe?" in fails(capsys, "recipe=")


@pytest.mark.parametrize("argument", ["--dryrun", "-n", "train", "--set=3"])
def test_an_argument_of_another_grammar(argument, capsys):
    said = fails(capsys, "recipe=smollm2", argument)
    assert f"cannot read {argument!r}" in said
    assert "--dry-run" in said


BROKEN = {
    "train: [": "mine.yaml: not a readable YAML recipe",
    "a: 1\n b: 2": "mine.yaml: not a readable YAML recipe",
    "train: {rank: 1, rank: 2}": "found duplicate key rank",
    "42": "mine.yaml: not a readable YAML recipe",
    "- a\n- b": "mine.yaml: a recipe is a mapping of sections (run, model, prompt",
    "only words": "mine.yaml: unknown key 'only words'",
    "train:": "mine.yaml: train=None",
    "train: 5": "mine.yaml: train=5",
    "train: {1: 2}": "mine.yaml: train.1=1",
    "train: {rank: '???'}": "mine.yaml: Missing mandatory value",
    "train: {rank: ${steps}}": "mine.yaml: not a readable YAML recipe",
    "train: {rank: '${steps}'}": "mine.yaml: Interpolation key 'steps' not found",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_that_is_no_recipe(text, tmp_path, capsys):
    assert BROKEN[text] in fails(capsys, f"recipe={write(tmp_path, text)}")


def test_a_file_that_is_no_text(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "mine.yaml: not a readable YAML recipe" in fails(capsys, f"recipe={path}")


def test_an_empty_file_is_all_defaults(tmp_path):
    recipe = parse([f"recipe={write(tmp_path, '# nothing')}"]).recipe
    assert recipe.model_copy(update={"run": Recipe().run}) == Recipe()


def test_recipes_are_frozen():
    recipe = parse(["recipe=smollm2"]).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.rank = 2


def test_an_interrupt_says_that_the_command_resumes(capsys):
    def body(invocation):
        raise KeyboardInterrupt

    assert loader.run_script("doc", ["recipe=smollm2"], body) == 130
    assert capsys.readouterr().err == "interrupted; the same command resumes\n"


def test_a_bug_is_not_hidden():
    """Only what the user can mend becomes one line."""

    def body(invocation):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        loader.run_script("doc", ["recipe=smollm2"], body)

    def refusal(invocation):
        raise UserError("mend this")

    assert loader.run_script("doc", ["recipe=smollm2"], refusal) == 2


def test_dollar_braces_survive_saving(tmp_path):
    """A saved recipe is reloadable whatever its values hold, and nothing is read from the environment."""
    for value in ("${x}", "a${oc.env:HOME}", "plain $ {x}"):
        recipe = loader.resolve("smollm2").recipe
        recipe = recipe.model_copy(update={"prompt": recipe.prompt.model_copy(update={"system_message": value})})
        path = tmp_path / "saved.yaml"
        path.write_text(loader.to_yaml(recipe))
        assert loader.resolve(str(path)).recipe.prompt.system_message == value


def test_two_recipes_are_refused(capsys):
    assert report.main(["recipe=smollm2", "recipe=qwen3"]) == 2
    assert "give one" in capsys.readouterr().err


def test_a_path_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert (
        importlib.import_module("data_builders.build").main(
            ["recipe=smollm2", f"run.dir={tmp_path / 'file'}", "data.answers=corpus"]
        )
        == 2
    )
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
