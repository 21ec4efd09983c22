"""DS-1000: how a prompt becomes a request, how an answer gets into the gap, and where the program runs.

The toy rows have both shapes of the gap and need the standard library only; `make ds1000-env` and the shared rows are
needed for the last tests only.
"""

import ast
import gzip
import json
import textwrap
import venv
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import ds1000, scoring
from eval.benchmarks.protocol import Benchmark
from eval.sandbox import Limits, SandboxError
from headstart.request import Request
from recipes.errors import UserError

MODULE: Benchmark = ds1000
LOADING = {519, 539, 565, 566, 567, 577, 598, 624, 629, 650, 654, 655, 656, 661, 819}  # a data set, over the network

# The input differs from the prompt's example in the second case, so that a repeated example does harm.
CONTEXT = '''
exec_context = r"""
import math
{before}
[insert]
{after}
"""


def test_execution(solution: str):
    code = exec_context.replace("[insert]", solution)
    for given in (3, 10):
        env = {{"test_input": given}}
        exec(code, env)
        assert env["result"] == 2 * given + 1
'''
NO_LOOP = "\n\ndef test_string(solution: str):\n    assert 'while' not in solution.split()\n"

GIVEN = "import math\nx = 3\nwhile x > 3:\n    x -= 1"
TOP = {
    "prompt": "Problem:\nI have a number. I want twice that number, and one more.\n\n\nA:\n<code>\n"
    f"{GIVEN}\n</code>\nresult = ... # put solution in this variable\nBEGIN SOLUTION\n<code>\n",
    "reference_code": "result = 2 * x + 1\n",
    "metadata": {"problem_id": 0, "library": "Pandas"},
    "code_context": CONTEXT.format(before="x = test_input", after="") + NO_LOOP,
}
HEADER = "import math\nexample_x = 3\ndef f(x=example_x):\n    one = math.floor(1.5)"
BODY = {
    "prompt": "Problem:\nI have a number. Twice that number, and one more, is what I want.\nA:\n<code>\n"
    f"{HEADER}\n    # return the solution in this function\n    # result = f(x)\n    ### BEGIN SOLUTION",
    "reference_code": "    result = 2 * x + one\n\n    return result\n",
    "metadata": {"problem_id": 1, "library": "Numpy"},
    "code_context": CONTEXT.format(before="def f(x):\n    one = math.floor(1.5)", after="result = f(test_input)"),
}
PLOT = {
    "prompt": "import math\n\nx = 3\n\n# Double x and add one, as `result`.\n# SOLUTION START\n",
    "reference_code": "result = 2 * x + 1",
    "metadata": {"problem_id": 2, "library": "Matplotlib"},
    "code_context": CONTEXT.format(before="x = test_input", after=""),
}
RESULT = "result = 2 * x + 1"

TOP_RIGHT = {
    "fence": f"```python\n{RESULT}\n```",
    "fence in prose": f"You double it:\n\n```python\n{RESULT}\n```\n\nThis gives the number.",
    "bare": RESULT,
    "bare, closed": f"{RESULT}\n</code>\nEND SOLUTION\n\nIt doubles the number.",
    "closed, then something else": f"{RESULT}\n</code>\nresult = 0",
    "tags": f"BEGIN SOLUTION\n<code>\n{RESULT}\n</code>\nEND SOLUTION",
    "tags on the line": f"The answer is <code>{RESULT}</code> and nothing else.",
    "marks in a fence": f"```python\nBEGIN SOLUTION\n<code>\n{RESULT}\n</code>\nEND SOLUTION\n```",
    "commented marks": f"```python\n### BEGIN SOLUTION\n{RESULT}\n### END SOLUTION\n```",
    "imports again": f"```python\nimport numpy as np\nimport math\n\n{RESULT}\n```",
    "given code again": f"```python\nimport numpy as np\n{GIVEN}\n\n{RESULT}\n```",
    "given code again, bare": f"{GIVEN}\n\n{RESULT}",
    "part of the given code again": f"```python\nimport math\nx=3  # the number\n{RESULT}\n```",
    "whole prompt again": f"{TOP['prompt']}{RESULT}\n</code>",
    "whole prompt again in a fence": f"```\n{TOP['prompt']}{RESULT}\n```",
    "the given code, then the solution": f"Given:\n```python\n{GIVEN}\n```\nThen:\n```python\n{RESULT}\n```",
    "usage behind": f"```python\n{RESULT}\n```\nThen:\n```python\nprint(result)\n```\nIt prints\n```\n7\n```",
    "a correction": f"```python\nresult = 3 * x\n```\nNo, rather:\n```python\n{RESULT}\n```",
    "shell line first": f"```bash\npip install math\n```\n```python\n{RESULT}\n```",
    "without a fence, in prose": f"You can do this:\n\n{RESULT}\n\nHope that helps.",
    "behind a colon": f"Do this:\n{RESULT}\n\nHope that helps.",
    "several paragraphs without a fence": "Here:\n\ndouble = 2 * x\n\nresult = double + 1\n\nDone",
    "cut off": f"```python\n{RESULT}\nprint(result, wh",
    "windows line ends": "```python\r\ndouble = 2 * x\r\nresult = double + 1\r\n```",
    "indented as a whole": "```python\n    double = 2 * x\n    result = double + 1\n```",
    "own function": "```python\ndef g(n):\n    return 2 * n + 1\n\nresult = g(x)\n```",
}
WHOLE = f"{HEADER}\n    return 2 * x + one"
BODY_RIGHT = {
    "fence": "```python\n    result = 2 * x + one\n    return result\n```",
    "bare": "    result = 2 * x + one\n    return result\n",
    "call behind": "```python\n    return 2 * x + one\n\nresult = f(load_data())\n```",
    "comment at the left": "```python\n# twice\n    return 2 * x + one\n```",
    "not indented": "```python\nresult = 2 * x + one\nreturn result\n```",
    "first line without indentation": "result = 2 * x + one\n    return result",
    "indented by two": "```python\n  if x:\n    return 2 * x + one\n```",
    "indented by a tab": "```python\n\tif x:\n\t\treturn 2 * x + one\n```",
    "marks": "```python\n    ### BEGIN SOLUTION\n    y = 2 * x + one\n    ### END SOLUTION\n    return y\n```",
    "tags": "    return 2 * x + one\n</code>\nEND SOLUTION",
    "imports again": "```python\n    import numpy as np\n    import math\n    return 2 * x + one\n```",
    "whole function": "```python\ndef f(x):\n    one = math.floor(1.5)\n    return 2 * x + one\n```",
    "given code again": f"```python\n{WHOLE}\n```",
    "given code again, bare": f"{WHOLE}\n\nIt doubles x.",
    "whole prompt again": f"{BODY['prompt']}\n    return 2 * x + one\n</code>",
    "helper beside": "```python\nfrom math import floor\ndef g(n):\n    return floor(n)\ndef f(x):\n    s = '''\n'''\n"
    "    return 2 * g(x) + len(s)\nprint(f(3))\n```",
    "usage behind": "```python\n    return 2 * x + one\n```\nUse it:\n```python\nprint(f(3))\n```",
    "lines of text in a string": "```python\ns = '''\n'''\nreturn 2 * x + len(s)\n```",
    "not indented, without a fence": "The body is:\n\nresult = 2 * x + one\nreturn result\n\nIt doubles x.",
    "cut off": "```python\n    return 2 * x + one\n\n    print(",
}
# These give the note that stands behind them
TOP_WRONG = {
    "wrong": ("```python\nresult = 2 * x\n```", "assertion failed"),
    "prose": ("I cannot do that.", "extraction"),
    "nothing": ("", "extraction"),
    "only the given code": (f"{GIVEN}\nresult = ... # put solution in this variable", "extraction"),
    "only imports in a fence": ("```python\nimport math\n```", "error: KeyError"),
    "broken": ("```python\nresult = (\n```", "error: SyntaxError"),
    "leaves": (f"```python\n{RESULT}\nexit()\n```", "tests did not finish"),
    "forbidden word": ("```python\nresult = 1\nwhile result < 2 * x + 1:\n    result += 1\n```", "assertion failed"),
    "own example": ("```python\nx = 5\nresult = 2 * x + 1\n```", "assertion failed"),
}
BODY_WRONG = {
    "wrong": ("```python\n    return 2 * x\n```", "assertion failed"),
    "no return": ("```python\n    result = 2 * x + one\n```", "assertion failed"),
    "prose": ("I cannot do that.", "extraction"),
    "broken": ("```python\n     result = 2 * x\n    return result\n```", "error: IndentationError"),
}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def requests(tmp_path: Path) -> list[Request]:
    return MODULE.load(write(tmp_path / "rows.jsonl", TOP, BODY, PLOT))


def toy(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**row, **changes}


# --- requests ---


def test_load(requests: list[Request]) -> None:
    assert [request.id for request in requests] == ["ds1000/0", "ds1000/1", "ds1000/2"]
    for request, row in zip(requests, (TOP, BODY, PLOT), strict=True):
        assert request.text == row["prompt"]
        assert request.source == "ds1000"
        assert request.extra["code_context"] == row["code_context"]
        assert request.reference == f"```python\n{row['reference_code']}\n```"
        assert [known.expected for known in MODULE.known(request)] == [1]
    assert MODULE.METRIC == "pass@1"


def test_the_code_around_the_gap_is_one_last_piece(requests: list[Request]) -> None:
    top, body, plot = (request.sentences for request in requests)
    assert top[:-1] == ("Problem:", "\nI have a number.", " I want twice that number, and one more.")
    assert top[-1] == TOP["prompt"][TOP["prompt"].index("\n\n\nA:") :]
    assert body[-1] == BODY["prompt"][BODY["prompt"].index("\nA:") :]
    assert plot == ("import math", "\n\nx = 3", "\n\n# Double x and add one, as `result`.\n# SOLUTION START\n")


def test_an_instruction_before_the_code_is_a_sentence() -> None:
    prompt = TOP["prompt"].replace("A:\n", "A:\n\nUse one line\n")
    pieces = ds1000.pieces(prompt)
    assert "".join(pieces) == prompt
    assert pieces[-3:-1] == ["\n\n\nA:", "\n\nUse one line"]
    assert pieces[-1].startswith("\n<code>\nimport math\n")


def test_packed_rows_and_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(TOP).encode()))
    assert [request.id for request in MODULE.load(str(path))] == ["ds1000/0"]
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **options: asked.append((names, options)) or [TOP])
    assert [request.id for request in MODULE.load(None)] == ["ds1000/0"]
    ((names, options),) = asked
    assert (names[0], options["split"]) == ("xlangai/DS-1000", "test")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (toy(TOP, metadata={"problem_id": "0", "library": "Pandas"}), r"line 2: metadata\.problem_id"),
        (toy(TOP, metadata={"problem_id": 4}), r"line 2: metadata\.library"),
        (toy(TOP, prompt=""), "line 2: prompt"),
        (toy(TOP, code_context=None), "line 2: code_context"),
        (TOP, "problem_id 0 is there twice"),
    ],
)
def test_broken_rows(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        MODULE.load(write(tmp_path / "rows.jsonl", TOP, row))


# --- answers (fault 23) ---


def scored(request: Request, answers: dict[str, str]) -> dict[str, str]:
    """Name to note, by our own interpreter: the toy rows need no library."""
    scores = scoring.score([request] * len(answers), list(answers.values()), ds1000.program, Limits())
    assert all(score.value == (score.note == "passed") for score in scores)
    return {name: score.note for name, score in zip(answers, scores, strict=True)}


def test_right_answers_at_the_top_level(requests: list[Request]) -> None:
    assert scored(requests[0], TOP_RIGHT) == dict.fromkeys(TOP_RIGHT, "passed")


def test_right_answers_in_a_body(requests: list[Request]) -> None:
    assert scored(requests[1], BODY_RIGHT) == dict.fromkeys(BODY_RIGHT, "passed")


def test_wrong_answers(requests: list[Request]) -> None:
    for request, wrong in ((requests[0], TOP_WRONG), (requests[1], BODY_WRONG)):
        found = scored(request, {name: answer for name, (answer, _) in wrong.items()})
        assert found == {name: note for name, (_, note) in wrong.items()}


def test_known_answers(requests: list[Request]) -> None:
    for request in requests:
        assert scored(request, {"reference": MODULE.known(request)[0].answer}) == {"reference": "passed"}


def test_untouched_answers_stay_as_they_are_written() -> None:
    code = "# twice\nresult = {'a': 2,\n          'b': 0x10}  # one more"
    assert ds1000.solution(f"```python\n{code}\n```", TOP["prompt"]) == code
    body = textwrap.indent(f"{code}\n\nreturn result", "    ")
    assert ds1000.solution(f"```python\n{body}\n```", BODY["prompt"]) == body


def test_repeated_code_is_taken_out_where_the_input_replaces_it() -> None:
    again = "import math\nx = 3\ny = x\n"
    assert ds1000.solution(f"```\n{again}```", TOP["prompt"]) == "import math\ny = x"
    # Here `x = 3` is all that is given; a part of what is given stays, since the plot may be asked for once more.
    assert ds1000.solution(f"```\n{again}```", PLOT["prompt"]) == "import math\ny = x"
    longer = PLOT["prompt"].replace("x = 3\n", "x = 3\nz = 4\n")
    assert ds1000.solution(f"```\n{again}```", longer) == again.rstrip()
    assert ds1000.solution(f"```\n{again}z = 4\n```", longer) == f"{again}z = 4"
    assert ds1000.solution("```\nx = 3\nz = 4\nx = 3\ny = x\n```", longer) == "x = 3\ny = x"


def test_the_block_that_binds_what_is_asked_for_wins() -> None:
    blocks = "```python\nresult = 1\n```\n```python\nother = 2\n```\n```python\nx = 'not closed\n```"
    assert ds1000.solution(blocks, TOP["prompt"]) == "result = 1"
    assert ds1000.solution(blocks, PLOT["prompt"]) == "other = 2"
    two = TOP["prompt"].replace("result = ...", "first, df = ...")
    assert ds1000.solution("```\nfirst = 1\ndf['a'] = 2\n```\n```\nfirst = 3\n```", two) == "first = 1\ndf['a'] = 2"


def test_row_whose_function_is_left_open() -> None:
    prompt = TOP["prompt"].replace(GIVEN, "import math\ndef f(x):")
    assert ds1000.solution("```python\nresult = 2 * x\n```", prompt) == "    result = 2 * x"


# --- where it runs ---


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package folder of an empty virtual environment that stands for .venv-ds1000."""
    venv.create(tmp_path / ".venv-ds1000", with_pip=False)
    monkeypatch.setattr(ds1000, "PYTHON", tmp_path / ".venv-ds1000" / "bin" / "python")
    return next((tmp_path / ".venv-ds1000" / "lib").glob("python*/site-packages"))


def test_without_the_environment_nothing_fits(
    requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ds1000, "PYTHON", tmp_path / ".venv-ds1000" / "bin" / "python")
    assert {MODULE.unfit(request) for request in requests} == {"needs .venv-ds1000: run `make ds1000-env`"}
    with pytest.raises(SandboxError, match="does not start"):
        MODULE.score(requests[:1], ["x"], Limits())
    assert MODULE.score([], [], Limits()) == []


def test_rows_that_lack_a_library(environment: Path, tmp_path: Path) -> None:
    inside = toy(TOP, code_context=TOP["code_context"].replace("import math", "import os\nfrom sklearn.svm import SVC"))
    inside["metadata"] = {"problem_id": 3, "library": "Pytorch"}
    body = toy(BODY, reference_code="    import tensorflow as tf\n    return 2 * x + one\n")
    loads = toy(PLOT, code_context="import seaborn as sns\nsns.load_dataset('x')\n" + PLOT["code_context"])
    three = MODULE.load(write(tmp_path / "three.jsonl", inside, body, loads))
    reasons = ["needs sklearn, torch", "needs numpy, tensorflow", "needs matplotlib, seaborn, the network"]
    assert [MODULE.unfit(request) for request in three] == reasons
    for name in ("sklearn", "torch", "numpy", "matplotlib", "seaborn"):
        (environment / name).mkdir()
        (environment / name / "__init__.py").touch()
    assert [MODULE.unfit(request) for request in three] == [None, "needs tensorflow", "needs the network"]


def test_scores_come_from_the_environment(environment: Path, requests: list[Request], tmp_path: Path) -> None:
    """Its packages, with ctypes, in a working folder of its own, without a display, with time and memory enough."""
    (environment / "pandas.py").write_text("import ctypes, gc, os\ngc.get_referents([1])\nTWO = 2\n")
    context = TOP["code_context"].replace("import math", "import math, os\nimport pandas\nopen('a.png', 'w').close()")
    (request,) = MODULE.load(write(tmp_path / "one.jsonl", toy(TOP, code_context=context)))
    right = "import pandas\nassert os.environ['MPLBACKEND'] == 'Agg'\nresult = pandas.TWO * x + 1"
    scores = MODULE.score([request] * 3, [right, "result = pandas.TWO", "import numpy\nresult = 1"], Limits(seconds=1))
    assert [score.note for score in scores] == ["passed", "assertion failed", "error: ModuleNotFoundError"]
    assert scoring.score([request], [right], ds1000.program, Limits())[0].note != "passed"
    (environment / "pandas.py").write_text("raise OSError\n")
    with pytest.raises(SandboxError, match=r"pandas cannot be loaded \(error: OSError\); run `make ds1000-env` again"):
        MODULE.score([request], [right], Limits())


def test_limits_are_raised_and_never_lowered() -> None:
    least = ds1000.fitted(Limits())
    assert (least.seconds, least.memory_mb) == (ds1000.SECONDS, ds1000.MEMORY_MB)
    assert least.seconds >= 30
    assert least.native
    more = ds1000.fitted(Limits(seconds=500.0, memory_mb=9000, processes=3))
    assert (more.seconds, more.memory_mb, more.processes) == (500.0, 9000, 3)
    assert (more.python, least.file_bytes) == (str(ds1000.PYTHON), 16 << 20)


# --- the real rows ---


def real(shared: Path) -> tuple[list[Request], list[dict[str, Any]]]:
    path = shared / "data" / "ds1000" / "test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        return MODULE.load(str(path)), [json.loads(line) for line in lines]


def plain(code: str) -> str:
    """Without marks and without what is blank around it."""
    return ds1000._MARKS.sub("", code).strip("\n").rstrip()


def statements(code: str | None) -> list[str]:
    nodes = ast.parse(ds1000._flush(code or "!")[0]).body
    return [ast.dump(node) for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom)]


def test_real_rows(shared: Path) -> None:
    requests, rows = real(shared)
    assert [request.id for request in requests] == [f"ds1000/{n}" for n in range(1000)]
    for request, row in zip(requests, rows, strict=True):
        assert request.text == row["prompt"]
        assert all(request.sentences)
        assert len(request.sentences) > 1
        first, last = "".join(request.sentences[:-1]), request.sentences[-1]
        if "<code>" in request.text:
            assert last.lstrip().removeprefix("A:").lstrip().startswith("<code>\n")
            assert not first.rstrip().endswith("A:")
            assert "<code>" not in first
        else:
            ast.parse(first)  # no cut falls inside a statement
    bodies = [request.id for request in requests if ds1000.gap(request.text).function]
    assert len(bodies) == 72
    assert len({request.id for request in requests if ds1000.gap(request.text).asked}) == 740


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_real_references_reach_the_gap_unchanged(shared: Path) -> None:
    for request, row in zip(*real(shared), strict=True):
        if request.id in ("ds1000/730", "ds1000/736"):
            continue  # given code that does not parse, and a solution that begins with a given statement
        code = row["reference_code"]
        found = ds1000.solution(request.reference or "", request.text)
        given = request.text.partition("\n<code>\n")[2].partition("</code>")[0]
        for answer in (code, f"{code}\n</code>\nEND SOLUTION", f"```python\n{given}\n{code}\n```"):
            again = ds1000.solution(answer, request.text)
            assert again is not None, request.id
            assert statements(found) == statements(again), (request.id, answer)
        assert found == plain(code)


def test_real_rows_and_what_they_need(shared: Path) -> None:
    requests, rows = real(shared)
    needs = {int(request.id.partition("/")[2]): request.extra["needs"] for request in requests}
    assert {n for n in needs if ds1000.NETWORK in needs[n]} == LOADING
    for library, name, more in (("Pytorch", "torch", {377, 378}), ("Tensorflow", "tensorflow", {379, 380})):
        rows_of = {n for n, row in enumerate(rows) if row["metadata"]["library"] == library}
        assert {n for n in needs if name in needs[n]} == rows_of | more | ({936, 937} & rows_of)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [False, True], ids=["reference", "prompt repeated"])
def test_every_reference_passes(shared: Path, repeated: bool) -> None:
    if not ds1000.PYTHON.exists():
        pytest.skip("the libraries of DS-1000 are absent: run `make ds1000-env`")
    requests = [request for request in real(shared)[0] if MODULE.unfit(request) is None]
    assert len(requests) >= 868
    answers = [request.reference or "" for request in requests]
    if repeated:
        codes = [answer.removeprefix("```python\n") for answer in answers]
        answers = [f"```python\n{request.text}\n{code}" for request, code in zip(requests, codes, strict=True)]
    scores = MODULE.score(requests, answers, Limits())
    assert [(r.id, s.note) for r, s in zip(requests, scores, strict=True) if s.value != 1] == []
