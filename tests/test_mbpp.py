"""MBPP as a benchmark: which rows, what the request shows, which function is tested, what passes."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from eval import sandbox
from eval.benchmarks import mbpp
from eval.benchmarks.protocol import Known
from eval.sandbox import Limits
from recipes.errors import UserError

FULL: dict[str, Any] = {
    "task_id": 11,
    "text": "Write a function to find the elements that two lists share. Sort them.",
    "code": "def similar_elements(a, b):\r\n\treturn sorted(set(a) & set(b))\r\n",
    "test_list": [
        "assert similar_elements([1, 2], [2, 3]) == [2]",
        "assert similar_elements([], [2]) == [] ",
        "assert similar_elements([4, 3], [3, 4]) == [3, 4]",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
SANITIZED: dict[str, Any] = {
    "source_file": "x.ipynb",
    "task_id": 11,
    "prompt": "Write a function to halve a number.",
    "code": "def halve(x):\n    return x / 2",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(halve(1), 0.5)"],
}
SET_UP: dict[str, Any] = {
    **FULL,
    "code": "class Node:\n    def __init__(self, n):\n        self.n = n\n\ndef value(node):\n    return node.n",
    "test_setup_code": "root = Node(1) \r\nother = Node(2)",
    "test_list": ["assert value(root) == 1", "assert value(other) == 2"],
}
HIDES_A_BUILTIN: dict[str, Any] = {
    **FULL,
    "code": "def sum(a, b):\n    return a + b",
    "test_list": ["assert sum(10, 15) == 25"],
}
WITH_ID = (5, 11, 510, 511, 600, 601, 974)
# Real rows with a builtin's name, a set-up, a lone carriage return, a leading blank line, and text that is not ASCII
ODD_ROWS = {f"mbpp/{number}" for number in (11, 104, 122, 126, 207, 219, 255, 260, 360, 367, 510)}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("row", [FULL, SANITIZED])
def test_the_ids_decide_in_both_spellings(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write(tmp_path, *({**row, "task_id": number} for number in WITH_ID))
    assert [request.id for request in mbpp.load(path)] == ["mbpp/11", "mbpp/510"]


def test_on_the_hub_all_splits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels are wrong here: nothing of the test part is in the split "test"."""
    splits = {"prompt": [510], "test": [974, 601], "validation": [5, 11], "train": [12, 511]}

    def load_dataset(name: str, config: str, split: str, streaming: bool) -> list[dict[str, Any]]:
        assert (name, config) == ("google-research-datasets/mbpp", "full")
        return [{**FULL, "task_id": number} for number in splits[split]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sorted(request.id for request in mbpp.load(None)) == ["mbpp/11", "mbpp/12", "mbpp/510"]


def test_every_assertion_is_a_piece_and_names_the_function(tmp_path: Path) -> None:
    (request,) = mbpp.load(write(tmp_path, FULL))
    assert request.sentences == (
        "Write a function to find the elements that two lists share.",
        " Sort them.",
        "\n\nThe function must pass these tests:",
        "\nassert similar_elements([1, 2], [2, 3]) == [2]",
        "\nassert similar_elements([], [2]) == []",
        "\nassert similar_elements([4, 3], [3, 4]) == [3, 4]",
    )
    assert request.source == mbpp.NAME
    assert request.extra["entry_point"] == "similar_elements"
    assert "\r" not in f"{request.reference}{request.extra}{request.text}"


def test_a_set_up_is_shown_and_runs_between_the_code_and_the_tests(tmp_path: Path) -> None:
    (request,) = mbpp.load(write(tmp_path, SET_UP))
    assert request.sentences[-3:] == (
        "\nroot = Node(1) \nother = Node(2)",
        "\nassert value(root) == 1",
        "\nassert value(other) == 2",
    )
    without = "```python\ndef value(node):\n    return node.n\n```"
    scores = mbpp.score([request] * 2, [request.reference or "", without], Limits())
    assert [(s.value, s.note) for s in scores] == [(1, "passed"), (0, "error: NameError")]


@pytest.mark.parametrize(
    ("code", "tests", "name"),
    [
        ("def f(x): pass", ["assert set(f([1])) == {1}"], "f"),
        ("def f(x): pass", ["assert math.isclose(f(1), 1.0)"], "f"),
        ("def f(x): pass", ["assert not f(g(1))"], "f"),
        ("def g(x): pass\ndef f(x): pass", ["assert f(g(1)) == 1"], "f"),
        ("def g(x): pass", ["assert f(g(1)) == 1"], "g"),
        ("def f(x): pass", ["assert (2 if True else h(1)) == len(f(x))"], "f"),
        ("f = lambda x: x", ["assert f(1)[0] == 1"], "f"),
        ("def sum(a): pass", ["assert sum(1) == 1"], "sum"),
        ("def f(x): pass", ["assert x == 1", "assert f(1)"], "f"),
        ("f(", ["assert sorted(f(1)) == 1"], "f"),
    ],
)
def test_entry_point(tmp_path: Path, code: str, tests: list[str], name: str) -> None:
    (request,) = mbpp.load(write(tmp_path, {**FULL, "code": code, "test_list": tests}))
    assert request.extra["entry_point"] == name


def test_a_function_with_a_builtins_name_is_the_one_that_is_tested(tmp_path: Path) -> None:
    (request,) = mbpp.load(write(tmp_path, HIDES_A_BUILTIN))
    answers = [request.reference or "", "```python\ndef sum(a, b):\n    return a - b\n```"]
    scores = mbpp.score([request] * 2, answers, Limits())
    assert [(s.value, s.note) for s in scores] == [(1, "passed"), (0, "assertion failed")]


def test_the_imports_of_the_tests_run(tmp_path: Path) -> None:
    (request,) = mbpp.load(write(tmp_path, SANITIZED))
    assert mbpp.known(request) == [Known(request.reference or "")]
    assert [s.value for s in mbpp.score([request], [request.reference or ""], Limits())] == [1]


def test_answers_of_many_shapes(tmp_path: Path) -> None:
    (request,) = mbpp.load(write(tmp_path, FULL))
    good = "def similar_elements(a, b):\n    return sorted(set(a) & set(b))"
    block = f"```python\n{good}\n```"
    right = [
        block,
        block.replace("\n", "\r\n"),
        f"Install first:\n```bash\npip install nothing\n```\nThen:\n{block}",
        f"{block}\nIt uses sets:\n```text\nset(a) & set(b)\n```",
        f"Use it so:\n{block}\n```python\nprint(similar_elements([1], [1]))\n```",
        f"```python\n{good}",
        f"Sure!\n\n{good}\n\nThat is all, is it not?",
        f"```python\ndef similar_elements(a, b):\n    return []\n```\nBetter:\n{block}",
    ]
    wrong = {
        "```python\ndef other(a, b):\n    return sorted(set(a) & set(b))\n```": "extraction",
        "I do not know.": "extraction",
        "": "extraction",
        f"{block}\nOr rather:\n```python\ndef similar_elements(a, b):\n    return []\n```": "assertion failed",
        "```python\ndef similar_elements(a, b):\n    raise SystemExit(0)\n```": "tests did not finish",
        "```python\ndef similar_elements(a, b):\n    return (\n```": "syntax error",
    }
    answers = [*right, *wrong]
    scores = mbpp.score([request] * len(answers), answers, Limits())
    assert [(s.value, s.note) for s in scores] == [(1, "passed")] * len(right) + [(0, note) for note in wrong.values()]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{**FULL, "task_id": 601}], "no task_id from 11 to 510"),
        ([FULL, FULL], "task_id 11 is there twice"),
        ([FULL, {**FULL, "task_id": "12"}], "line 2: task_id"),
        ([{key: value for key, value in FULL.items() if key != "text"}], "line 1: text: Field required"),
        ([{**FULL, "test_list": []}], "test_list"),
        ([{**FULL, "test_list": ["assert f("]}], "mbpp/11: an assertion does not parse"),
        ([{**FULL, "test_list": ["assert 1 == max(1, 0)"]}], "mbpp/11: the assertions call no function"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError) as caught:
        mbpp.load(write(tmp_path, *rows))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# --- the real rows ---


def real(shared: Path) -> str:
    return str(shared / "data" / "mbpp" / "mbpp.jsonl")


def test_real_rows_load(shared: Path) -> None:
    requests = mbpp.load(real(shared))
    assert [request.id for request in requests] == [f"mbpp/{number}" for number in range(11, 511)]
    for request in requests:
        assert all(request.sentences)
        assert "\r" not in request.text
        assert [piece for piece in request.sentences if piece.startswith("\nassert ")] == list(request.sentences[-3:])
        called = re.compile(rf"\b{request.extra['entry_point']} ?\(")
        assert all(called.search(piece) for piece in request.sentences[-3:])
        assert mbpp.unfit(request) is None
    assert [r.id for r in requests if "import" in r.extra["tests"]] == ["mbpp/126"]


def test_odd_real_rows_pass(shared: Path) -> None:
    sandbox.check()
    requests = [request for request in mbpp.load(real(shared)) if request.id in ODD_ROWS]
    assert len(requests) == len(ODD_ROWS)
    stubs = [f"```python\ndef {r.extra['entry_point']}(*_):\n    return 'no'\n```" for r in requests]
    assert [s.value for s in mbpp.score(requests, [r.reference or "" for r in requests], Limits())] == [1] * 11
    assert [s.value for s in mbpp.score(requests, stubs, Limits())] == [0] * 11


@pytest.mark.slow
def test_every_real_reference_passes(shared: Path) -> None:
    sandbox.check()
    requests = mbpp.load(real(shared))
    scores = mbpp.score(requests, [mbpp.known(r)[0].answer for r in requests], Limits())
    assert [(r.id, s.note) for r, s in zip(requests, scores, strict=True) if s.value != 1] == []
    assert len(scores) == 500
