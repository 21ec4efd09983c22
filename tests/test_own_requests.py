"""A user's own requests: every form of a line, and what is said about a line that is none."""

import json
from pathlib import Path

import pytest

from eval.benchmarks import own
from eval.benchmarks.protocol import Benchmark, Score
from eval.sandbox import Limits
from headstart.request import Message, Request
from recipes.errors import UserError

OWN: Benchmark = own
HI, YES = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}
ASK, TOLD = {"role": "user", "content": "One. Two."}, {"role": "assistant", "content": "Three."}
SYSTEM = {"role": "system", "content": "Be kind."}


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("One. Two.", Request("mine/1", "own", ("One.", " Two."))),
        ({"text": "One. Two."}, Request("mine/1", "own", ("One.", " Two."))),
        ({"text": "One.", "id": "x", "reference": "Yes."}, Request("x", "own", ("One.",), reference="Yes.")),
        ({"text": "One.", "id": None, "reference": " "}, Request("mine/1", "own", ("One.",))),
        ({"messages": [HI]}, Request("mine/1", "own", ("Hi.",))),
        ({"messages": [HI, YES]}, Request("mine/1", "own", ("Hi.",), reference="Yes?")),
        (
            {"messages": [SYSTEM, HI, YES, ASK]},
            Request(
                "mine/1",
                "own",
                ("One.", " Two."),
                (Message("system", "Be kind."), Message("user", "Hi."), Message("assistant", "Yes?")),
            ),
        ),
        (
            {"messages": [HI, YES, ASK, TOLD], "reference": "Four."},
            Request(
                "mine/1",
                "own",
                ("One.", " Two."),
                (Message("user", "Hi."), Message("assistant", "Yes?")),
                reference="Four.",
            ),
        ),
    ],
)
def test_forms(tmp_path: Path, line: object, expected: Request) -> None:
    (found,) = OWN.load(write(tmp_path / "mine.jsonl", line))
    assert found == expected


def test_lines_and_default_ids(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes('\ufeff"One."\r\n\r\n{"text": "Line\u2028separator"}\r\n'.encode())
    requests = OWN.load(str(path))
    assert [(request.id, request.text) for request in requests] == [
        ("mine/1", "One."),
        ("mine/3", "Line\u2028separator"),
    ]


def test_scores(tmp_path: Path) -> None:
    requests = OWN.load(write(tmp_path / "mine.jsonl", {"text": "Say cat.", "reference": "The cat."}, "Say dog."))
    assert OWN.score(requests, ["cat", "dog"], Limits()) == [Score(1.0, "scored"), Score(None, "no reference")]
    assert [len(OWN.known(request)) for request in requests] == [1, 0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "not JSON"),
        ("3", "the line is no JSON object or string"),
        ("null", "the line is no JSON object or string"),
        ('{"txt": "x"}', "the line has the unknown key 'txt'; known are text, messages, id, reference"),
        ("{}", 'give either "text" or "messages"'),
        ('{"text": "x", "messages": []}', 'give either "text" or "messages"'),
        ('{"text": null}', '"text" must be a string'),
        ('{"text": "x", "id": 3}', '"id" must be a string'),
        ('{"text": "x", "reference": ["y"]}', '"reference" must be a string'),
        ('{"text": " "}', "the turn to stream is blank"),
        ('""', "the turn to stream is blank"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "x", "id": "mine/1"}', "id 'mine/1' stands there twice"),
        ('{"messages": {}}', '"messages" must be a list'),
        ('{"messages": []}', "there is no user turn"),
        ('{"messages": ["x"]}', "message 1 is no JSON object"),
        (
            '{"messages": [{"role": "user", "text": "x"}]}',
            "message 1 has the unknown key 'text'; known are role, content",
        ),
        ('{"messages": [{"role": "user"}]}', 'message 1 needs the string "content"'),
        ('{"messages": [{"role": "human", "content": "x"}]}', "message 1 has the role 'human' where 'user' is due"),
        (json.dumps({"messages": [HI, ASK]}), "message 2 has the role 'user' where 'assistant' is due"),
        (json.dumps({"messages": [HI, YES, SYSTEM, ASK]}), "message 3 has the role 'system'"),
        (json.dumps({"messages": [SYSTEM]}), "there is no user turn"),
    ],
)
def test_broken_line_names_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'"Fine."\n{line}\n', encoding="utf-8")
    with pytest.raises(UserError) as caught:
        OWN.load(str(path))
    assert f"{path}, line 2: " in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_is_needed() -> None:
    with pytest.raises(UserError, match=r"give their file: eval\.benchmarks=\[PATH\.jsonl\]"):
        OWN.load(None)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"\n", "no request")]
)
def test_file_without_requests(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "mine.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        OWN.load(str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        OWN.load(str(tmp_path))
