"""Which program is taken from a free-form answer. The programs run right here, so only harmless answers are used."""

import pytest

from eval.extract import extract, preamble

STUB = 'def f(x):\n    """Adds one.\n\n    >>> f(1)\n    2\n    """\n'
HELPED = (
    "from typing import List\n\n\ndef twice(n):\n    return 2*n\n\n\n"
    'def f(xs: List[int]) -> int:\n    """Twice the sum."""\n'
)
PYTHON = "```python\ndef f(x):\n    return x + 1\n```"


def passes(answer: str, prompt: str = STUB, tests: str = "assert f(1) == 2 and f(-1) == 0") -> bool:
    found = extract(answer, prompt, "f")
    assert found.note is None, found
    assert found.code is not None
    space: dict[str, object] = {"__name__": "answer"}
    exec(compile(found.code, "<answer>", "exec"), space)
    try:
        exec(tests, space)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    "answer",
    [
        "Install this:\n```bash\npip install def\n```\nThen:\n" + PYTHON,
        PYTHON + "\nSummary:\n```text\nf adds one\n```",
        "Here:\n```python\ndef f(x):\n    return x + 1",
        "Here:\n```python\ndef f(x):\n    return x + 1\n\nprint(f(",
        "```def f(x):\n    return x + 1\n```",
        "```python def f(x):\n    return x + 1\n```",
        "Sure! Here it is:\n\ndef f(x):\n    return x + 1\n\nThis adds one, doesn't it?",
        "Sure:\n\ndef f(x):\n    return x + 1\n\nExplanation: trivial\n",
        "Sure:\n\ndef f(x):\n    return x + 1\n\nDone\n",
        "Sure:\n\nimport math\n\nNow use it (well):\n\ndef f(x):\n    return math.floor(x) + 1\n",
        "    return x + 1",
        "\n\n    y = x\n    return y + 1\n\nThat is all.",
        "The body is:\n    return x + 1\n",
        "````markdown\n```python\ndef f(x):\n    return x + 1\n```\n````",
        "````\ntext\n```python\ndef f(x):\n    return x + 1\n```\n````\nmore",
        PYTHON + "\nUse it so:\n```python\nprint(f(1))\nassert f(2) == 3\n```",
        "```python\ndef f(x):\n    return x\n```\nWrong, corrected:\n" + PYTHON,
        "```python\n    return x + 1\n```",
        "```\n    y = x\n    return y + 1\n```",
        "```python\nreturn x + 1\n```",
        "```python\nif x:\n    return x + 1\nreturn 1\n```",
        "1. Write it:\n\n   ```python\n   def f(x):\n       return x + 1\n   ```\n2. Run it.",
        "```python\n    def f(x):\n        return x + 1\n```",
        "Here is the code: ```python\ndef f(x):\n    return x + 1\n```",
        "```python\ndef f(x):\n    return x + 1```\nDone.",
        "~~~python\ndef f(x):\n    return x + 1\n~~~",
        "```bash\npip install x\n\n" + PYTHON,
        '```python\ndef f(x):\n    """Adds.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 1\n```',
        "```python\r\ndef f(x):\r\n    return x + 1\r\n```",
        "```python\nf = lambda x: x + 1\n```",
        "```python\nfrom __future__ import annotations\n\ndef f(x: Nothing):\n    return x + 1\n```",
        STUB + "    return x + 1\n",
        "```python\ndef f(x):\n    return x + 1\n\nif __name__ == '__main__':\n    raise SystemExit\n```",
        "```python\nimport re\n\ndef f(x):\n    return x + len(re.findall(r'\\d', '1'))\n```",
    ],
)
def test_right_answer_passes(answer: str) -> None:
    assert passes(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "     return x + 1",
        "     y = x\n    return y + 1",
        "```python\n     y = x\n    return y + 1\n```",
        "y = x\n    return y + 1",
        "",
        "   \n",
        "I am sorry, I cannot do this.",
        "Use addition.\n\n  - add one\n  - return it",
        "```bash\npip install f\n```",
        "```python\nprint(f(1))\n```",
        "```python\ndef g(x):\n    return x + 1\n```",
        "x",
        "\x00",
    ],
)
def test_nothing_found(answer: str) -> None:
    found = extract(answer, STUB, "f")
    assert found.code is None
    assert found.note == "extraction"


def test_last_version_counts_even_if_it_is_wrong() -> None:
    assert not passes(PYTHON + "\nOr rather:\n```python\ndef f(x):\n    return x\n```")
    assert not passes("def f(x):\n    return x + 1\n\nNo, wait:\n\ndef f(x):\n    return x\n\nThat is it.")


def test_syntax_error_in_a_closed_block_is_kept_for_the_verdict() -> None:
    found = extract("```python\ndef f(x):\n    return x + 1\n    else: oops\n```", STUB, "f")
    assert found.code is not None
    with pytest.raises(SyntaxError):
        compile(found.code, "<answer>", "exec")


def test_cut_definition_is_not_repaired() -> None:
    found = extract("```python\ndef f(x):\n    y = (x +", STUB, "f")
    assert found.code is not None
    with pytest.raises(SyntaxError):
        compile(found.code, "<answer>", "exec")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("```python\ndef f(xs: List[int]) -> int:\n    return twice(sum(xs))\n```", True),
        ("    return twice(sum(xs))", True),
        ("def twice(n):\n    return 3*n\n\n\ndef f(xs):\n    return twice(sum(xs))", False),
        ("```python\ndef twice(n):\n    return 3*n\n\n\ndef f(xs):\n    return 2*sum(xs)\n```", False),
    ],
)
def test_imports_and_helpers_of_the_prompt(answer: str, right: bool) -> None:
    assert passes(answer, HELPED, "assert f([1, 2]) == 6 and twice(2) == 4") is right


def test_preamble() -> None:
    assert preamble(HELPED, "f") == HELPED[: HELPED.index("def f(")]
    assert preamble("@cache\ndef f(x):\n    ...\n", "f") == ""
    assert preamble("import math\n", "f") == "import math\n"
    assert preamble(STUB, "f") == ""


def test_future_import_behind_a_preamble() -> None:
    answer = "```python\nfrom __future__ import annotations\ndef f(x: Any):\n    return math.floor(x) + 1\n```"
    assert passes(answer, "import math\n")


def test_no_prompt_no_body() -> None:
    assert extract("    return x + 1", "", "f").note == "extraction"
    assert passes(PYTHON, "")


def test_long_answer_is_quick() -> None:
    answer = "def g(x):\n    return (x\n\nfrom here on it goes (wrong\n" * 500
    assert extract(answer, STUB, "f").note == "extraction"
