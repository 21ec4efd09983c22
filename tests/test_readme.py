"""README is run: every command resolves, every file it names exists, and its Python example works."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_builders import build
from eval import audit, report, run
from recipes.loader import names
from recipes.schema import Recipe
from train import merge, sft

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = {
    "data_builders/build.py": build.main,
    "train/sft.py": sft.main,
    "train/merge.py": merge.main,
    "eval/run.py": run.main,
    "eval/report.py": report.main,
    "eval/audit.py": audit.main,
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def test_every_command_is_known():
    known = {"make", "python", "accelerate", "hf", "vllm"}  # the last are run by test_vllm
    assert {command[0] for command in commands()} == known
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for command in commands() if command[0] == "make" for target in command[1:]} <= targets


@pytest.mark.parametrize("command", [c for c in commands() if c[0] in ("python", "accelerate")], ids=" ".join)
def test_every_script_call_resolves(command, capsys):
    """The script exists, its recipe and overrides resolve, a launch file exists, and `--print-config` runs."""
    script = next(word for word in command if word.endswith(".py"))
    arguments = command[command.index(script) + 1 :]
    if "--config_file" in command:
        assert (ROOT / command[command.index("--config_file") + 1]).is_file()
    assert SCRIPTS[script]([*arguments, "--print-config"]) == 0
    assert "model:" in capsys.readouterr().out


def test_every_path_and_key_named_in_readme_exists():
    for path in re.findall(r"`((?:recipes|headstart|eval|data_builders|train|configs|tests)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path
    for key in re.findall(
        r"`(?:\w+ )?((?:run|model|prompt|data|slots|train|merge|eval|report)\.\w+)(?:=[^`]*)?`", README
    ):
        section, name = key.split(".")
        if name not in ("py", "html", "md", "json"):
            assert name in type(getattr(Recipe(), section)).model_fields, key


def test_recipes_named_in_readme_are_those_that_exist():
    known = {"smollm2", "smollm2-long", "smollm2-six", "qwen3", "llama3", "gemma3"}
    assert known | {"refusion-prefix-to-answer", "refusion-draft-refinement"} == set(names())
    assert all(name in README for name in names())


@pytest.mark.slow
def test_the_python_example_runs():
    [example] = blocks("python")
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+ draft tokens kept\n", done.stdout)


def test_the_steps_are_the_makefiles_and_nothing_is_left_to_fill_in():
    block = next(
        block for block in blocks("bash") if block.startswith("python data_builders/build.py recipe=smollm2\n")
    )
    steps = [" ".join(shlex.split(line, comments=True)) for line in block.splitlines()]
    made = re.findall(r"^\t\$\(BIN\)/(python (?:data_builders|train|eval)/.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert steps == [line.replace("$(RECIPE) $(ARGS)", "smollm2") for line in made]
    assert not re.search(r"^[A-Z_]{6,}$", README, re.MULTILINE)
