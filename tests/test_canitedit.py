"""CanItEdit as a benchmark: the request, the program taken from an answer, one file with its tests, missing modules."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import sandbox
from eval.benchmarks import canitedit
from eval.sandbox import Limits
from headstart.request import Request
from recipes.errors import UserError

BEFORE = 'import math\n\nclass Shop:\n    """Sells."""\n    def price(self, n):\n        return math.floor(n) - 1'
AFTER = BEFORE.replace("- 1", "+ 1") + "\n\ndef total(shop, ns):\n    return sum(shop.price(n) for n in ns)"
TESTS = """\
### START TESTS ###
if True:  # pragma: no cover
    shop = Shop()
    try:
        shop.price("x")
    except TypeError as error:
        assert error
    assert shop.price(1) == 2
    assert total(shop, [1, 2]) == 5"""
ROW: dict[str, Any] = {
    "id": 7,
    "name": "shop",
    "full_name": "7_shop",
    "before": BEFORE,
    "after": AFTER,
    "tests": TESTS,
    "instruction_descriptive": "Add one instead. Then write `total(shop, ns)`, the sum of all prices.",
    "instruction_lazy": "add, and a total",
    "taxonomy": {"change_kind": "adaptive", "libraries": [], "topic": "Language"},
}

FENCED = f"```python\n{AFTER}\n```"
OLD = f"```python\n{BEFORE}\n```"
HALF = AFTER.replace("    return sum(", "    return min(")  # whole, but wrong

RIGHT = [
    FENCED,
    AFTER,
    f"Sure! I changed `price`:\n\n{FENCED}\n\nThat should do, shouldn't it?",
    FENCED.replace("\n", "\r\n"),
    FENCED.replace("```python", "```"),
    f"~~~python\n{AFTER}\n~~~",
    f"````markdown\n{FENCED}\n````",
    f"1. The program:\n\n   ```python\n   {AFTER.replace(chr(10), chr(10) + '   ')}\n   ```\n2. Done.",
    f"This was the program:\n{OLD}\nThis is the new one:\n{FENCED}",
    f"{FENCED}\nRun it:\n```bash\nls\n```\n```bash\npython shop.py --now\n```",
    f"{FENCED}\nUse it so:\n```python\nshop = Shop()\nprint(total(shop, [1]))\n```\nIt prints:\n```text\n2\n```",
    f"{FENCED}\nWhat changed:\n```python\ndef total(shop, ns):\n    return sum(shop.price(n) for n in ns)\n```",
    f"{FENCED}\nAs a diff:\n```diff\n-        return math.floor(n) - 1\n+        return math.floor(n) + 1\n```",
    f"{FENCED}\nAn older program of yours, as it was:\n{OLD}",
    f"```python\n{HALF}\n```\nNo, wait:\n{FENCED}",
    f"Here it is:\n```python\n{AFTER}\n",
    f"{FENCED}\nAn example that ends too early:\n```python\nshop = Sh",
    AFTER.replace("Sells.", "Sells.\n\n    ```\n    shop = Shop()\n    ```\n    "),
    f"```python\n{AFTER}\n\nif __name__ == '__main__':\n    raise SystemExit(input())\n```",
]
WRONG = {
    OLD: "assertion failed",
    BEFORE: "assertion failed",
    f"```python\n{HALF}\n```": "assertion failed",
    f"{FENCED}\nShorter:\n```python\n{HALF}\n```": "assertion failed",
    "```python\ndef total(shop, ns):\n    return sum(map(shop.price, ns))\n```": "error: NameError",
    "```python\nclass Shop:\n    ...  # as before\n```": "error: AttributeError",
    f"```python\n{AFTER}\nraise SystemExit(0)\n```": "tests did not finish",
    f"```python\nimport os\n{AFTER}\nos._exit(0)\n```": "tests did not finish",
    f"```python\n{AFTER}\nreturn\n```": "error: SyntaxError",
}
FORMAT = [
    "```diff\n--- a/shop.py\n+++ b/shop.py\n@@ -5 +5 @@\n-        return math.floor(n) - 1\n+        return n + 1\n```",
    "--- a/shop.py\n+++ b/shop.py\n@@ -5 +5 @@\n-        return math.floor(n) - 1\n+        return n + 1",
    "```python\nshop = Shop()\ndef total(shop, ns):\n    ns\n-    print(ns)\n+    sum(ns)\n```",
    "```\n- shop.price([n for n in ns])\n+ shop.price([n + 1 for n in ns])\n```",
    "<<<<<<< SEARCH\n- 1\n=======\n+ 1\n>>>>>>> REPLACE",
    f"Here it is:\n```python\n{AFTER[:-9]}",
    f"Here it is:\n\n{AFTER}\n\nThat is all.",
    "```python\ndef total(shop, ns):\n    # ... as before ...\n```",
    "Change the minus to a plus.",
    "Done",
    "",
    "```\n```",
    "```text\n42\n```",
    "\x00",
]


def write(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def loaded(folder: Path, **changes: Any) -> Request:
    return canitedit.load(write(folder, {**ROW, **changes}))[0]


def verdicts(request: Request, answers: list[str]) -> list[tuple[float | None, str]]:
    scores = canitedit.score([request] * len(answers), answers, Limits())
    return [(score.value, score.note) for score in scores]


def test_a_row_gives_two_requests(tmp_path: Path) -> None:
    requests = canitedit.load(write(tmp_path, {**ROW, "id": 9}, ROW))
    kinds = ("9/descriptive", "9/lazy", "7/descriptive", "7/lazy")
    assert [request.id for request in requests] == [f"canitedit/{kind}" for kind in kinds]
    assert requests[2].sentences == (
        f"```python\n{BEFORE}\n```",
        "\n\nAdd one instead.",
        " Then write `total(shop, ns)`, the sum of all prices.",
    )
    assert requests[3].sentences == (f"```python\n{BEFORE}\n```", "\n\nadd, and a total")
    assert {request.reference for request in requests} == {f"```python\n{AFTER}\n```"}
    assert {request.source for request in requests} == {canitedit.NAME}


def test_a_program_with_a_fence_in_it_gets_a_longer_one(tmp_path: Path) -> None:
    fence = '"""\n```\nshop = Shop()\n````\n"""\n'
    request = loaded(tmp_path, before=fence + BEFORE, after=fence + AFTER)
    assert request.sentences[0] == f"`````python\n{fence}{BEFORE}\n`````"
    assert verdicts(request, [known.answer for known in canitedit.known(request)]) == [
        (1, "passed"),
        (0, "assertion failed"),
    ]


def test_after_passes_and_before_fails(tmp_path: Path) -> None:
    request = loaded(tmp_path)
    known = canitedit.known(request)
    assert [(k.name, k.expected) for k in known] == [("reference", 1), ("before", 0)]
    assert [value for value, _ in verdicts(request, [k.answer for k in known])] == [1, 0]


def test_right_answers_of_many_shapes(tmp_path: Path) -> None:
    assert verdicts(loaded(tmp_path), RIGHT) == [(1, "passed")] * len(RIGHT)


def test_wrong_answers_fail_for_what_they_do(tmp_path: Path) -> None:
    assert verdicts(loaded(tmp_path), list(WRONG)) == [(0, note) for note in WRONG.values()]


def test_answers_without_a_program_fail_by_format(tmp_path: Path) -> None:
    request = loaded(tmp_path)
    assert [canitedit.program(request, answer) for answer in FORMAT] == ["format"] * len(FORMAT)
    assert verdicts(request, FORMAT[:2]) == [(0, "format")] * 2


def test_program_and_tests_are_one_file(tmp_path: Path) -> None:
    """Tests read the source, replace a name of the program, and see a builtin's name as the program defines it."""
    code = "from __future__ import annotations\n\nLIMIT = 1\n\ndef high(x: Nothing):\n    return abs(x) > LIMIT\n"
    code += "\ndef abs(x):\n    '''A form\x0cfeed.'''\n    return x"
    tests = """\
    import inspect, sys
    assert inspect.getsource(high) == "def high(x: Nothing):\\n    return abs(x) > LIMIT\\n"
    assert inspect.getsource(abs).endswith("return x\\n")
    whole = inspect.getsource(sys.modules[__name__])
    assert whole.startswith("from __future__") and "START" in whole
    assert high(2) and not high(-2)
    LIMIT = 3
    assert not high(2)
    assert abs(-1) == -1"""
    request = loaded(tmp_path, after=code, tests=f"### START TESTS ###\nif True:\n{tests}")
    assert verdicts(request, [request.reference or ""]) == [(1, "passed")]


def test_half_a_minute_is_allowed_whatever_the_recipe_says(tmp_path: Path) -> None:
    request = loaded(tmp_path, tests="import time\ntime.sleep(1.5)")
    (score,) = canitedit.score([request], [request.reference or ""], Limits(seconds=0.5))
    assert score.note == "passed"


def test_missing_modules_are_found_wherever_they_are_imported(tmp_path: Path) -> None:
    """`taxonomy.libraries` is not asked: it is incomplete."""
    request = loaded(
        tmp_path,
        before="import zz_first.part as p, json\nfrom . import near\nfrom .zz_near import x",
        after="def f():\n    from zz_second.deep import x\n    import numpy.linalg",
        tests="if True:\n    import os.path, aa_third, zz_first",
        taxonomy={"libraries": ["zz_unused"]},
    )
    assert request.extra["needs"] == ["aa_third", "numpy", "zz_first", "zz_second"]
    assert canitedit.unfit(request) == "needs aa_third, zz_first, zz_second"
    assert canitedit.unfit(loaded(tmp_path)) is None
    assert canitedit.unfit(loaded(tmp_path, tests="import numpy")) is None
    assert loaded(tmp_path, before="import (").extra["needs"] == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([ROW, ROW], "id 7 is there twice"),
        ([ROW, {**ROW, "id": "8"}], "line 2: id"),
        ([{key: value for key, value in ROW.items() if key != "after"}], "line 1: after: Field required"),
        ([{**ROW, "instruction_lazy": ""}], "instruction_lazy"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError) as caught:
        canitedit.load(write(tmp_path, *rows))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# --- the real rows ---

NUMPY = (29, 32, 33, 38, 30, 41, 61, 88, 95, 96, 105, 110, 118)  # of the 22 rows that need packages
OTHERS = (15, 25, 26, 52, 59, 66, 78, 98, 100)
QUICK = (1, 8, 47, 54, 65, 85)  # 54 and 65 read the source, 85 replaces a builtin
COMPARE_TIMES = (47, 55, 60)


def real(shared: Path, ids: tuple[int, ...] | None = None) -> list[Request]:
    """The descriptive requests of these rows, by default of all whose imports are of the standard library."""
    requests = canitedit.load(str(shared / "data" / "canitedit" / "canitedit.jsonl"))
    few = [r for r in requests if r.id.endswith("/descriptive")]
    return [r for r in few if (number(r) in ids if ids else not r.extra["needs"])]


def number(request: Request) -> int:
    return int(request.id.split("/")[1])


def test_real_rows_load(shared: Path) -> None:
    requests = canitedit.load(str(shared / "data" / "canitedit" / "canitedit.jsonl"))
    assert len(requests) == 210
    assert [r.id for r in requests[:3]] == ["canitedit/1/descriptive", "canitedit/1/lazy", "canitedit/2/descriptive"]
    for request in requests:
        assert all(request.sentences)
        assert request.sentences[0] == f"```python\n{request.extra['before']}\n```"
        assert len(request.sentences) > 1
        assert request.sentences[1].startswith("\n\n")
    needs = {number(r): r.extra["needs"] for r in requests if r.extra["needs"]}
    assert sorted(needs) == sorted(NUMPY + OTHERS)
    assert {n for n, modules in needs.items() if "numpy" in modules} == set(NUMPY)
    assert needs[30] == ["numpy", "torch"]
    assert needs[61] == ["numpy", "pandas", "sklearn"]
    assert needs[78] == ["flask", "vllm"]


def wrong_verdicts(requests: list[Request]) -> list[tuple[str, str, str]]:
    jobs = [(request, known) for request in requests for known in canitedit.known(request)]
    scores = canitedit.score([r for r, _ in jobs], [k.answer for _, k in jobs], Limits())
    judged = zip(jobs, scores, strict=True)
    return [(r.id, k.name, score.note) for (r, k), score in judged if score.value != k.expected]


def test_few_real_rows(shared: Path) -> None:
    sandbox.check()
    requests = real(shared, QUICK)
    assert len(requests) == len(QUICK)
    assert wrong_verdicts(requests) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_real_row_passes_after_and_fails_before(shared: Path) -> None:
    """Rows that compare wall-clock times get five tries: on a busy machine the slower program can seem the faster."""
    sandbox.check()
    requests = real(shared)
    assert len(requests) == 83
    assert wrong_verdicts([r for r in requests if number(r) not in COMPARE_TIMES]) == []
    for request in (r for r in requests if number(r) in COMPARE_TIMES):
        assert [] in (wrong_verdicts([request]) for _ in range(5)), request.id
