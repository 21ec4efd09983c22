"""HumanEval and the held-out tasks as benchmarks: loading, programs, scores."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval import sandbox
from eval.benchmarks import heldout, humaneval, scoring
from eval.sandbox import Limits, SandboxError
from headstart.request import Request
from recipes.errors import UserError

ROW = {
    "id": "seed/add_one/0",
    "sentences": ["Write add_one.", " It adds one."],
    "reference": "```python\ndef add_one(x):\n    return math.floor(x) + 1\n```",
    "extra": {
        "entry_point": "add_one",
        "tests": "assert add_one(1) == 2",
        "task": "add_one",
        "preamble": "import math",
    },
}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return humaneval.load()


def test_load(requests: list[Request]) -> None:
    assert [r.id for r in requests] == [f"HumanEval/{i}" for i in range(164)]
    for request in requests:
        assert request.text == request.extra["prompt"]
        assert "```" not in request.text
        assert len(request.sentences) > 1


def test_canonical_solutions_all_pass(requests: list[Request]) -> None:
    sandbox.check()
    answers = [r.reference or "" for r in requests]
    scores = humaneval.score(requests, answers, Limits())
    assert [(r.id, s) for r, s in zip(requests, scores, strict=True) if s.value != 1] == []
    assert len(scores) == 164


def test_bodies_alone_continue_the_prompt(requests: list[Request]) -> None:
    for request in requests:
        body = (request.reference or "").removeprefix(f"```python\n{request.text}").removesuffix("```")
        for answer in (body, f"Here it is:\n```python\n{body}```\nDone."):
            made = humaneval.program(request, answer)
            assert isinstance(made, humaneval.Program)
            assert filled(made.code) == filled(request.text + body)


def filled(code: str) -> list[str]:
    return [line for line in code.split("\n") if line.strip()]


def test_stubs_fail(requests: list[Request]) -> None:
    few = requests[:6]
    scores = humaneval.score(few, [f"```python\n{r.text}    return None\n```" for r in few], Limits())
    assert [s.value for s in scores] == [0] * 6


def test_notes_and_denominator(requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 33: the model's own failures count, a harness fault stops the scoring."""
    first = requests[0]
    wrong = f"```python\n{first.text}    "
    answers = [first.reference or ""] * 6 + [
        wrong + "return 7\n```",
        wrong + "while True: pass\n```",
        wrong + "return (\n```",
    ]
    answers.append("I cannot.")
    real = sandbox.run_tests

    def faulty(program: str, *rest: object) -> sandbox.Verdict:
        if "fault" in program:
            raise SandboxError("the sandbox did not start: out of luck")
        return real(program, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sandbox, "run_tests", faulty)
    scores = humaneval.score([first] * 10, answers, Limits(seconds=1))
    assert [s.value for s in scores] == [1] * 6 + [0] * 4
    assert [s.note for s in scores[6:]] == ["assertion failed", "timeout", "syntax error", "extraction"]
    answers[9] = wrong + "return 'fault'\n```"
    with pytest.raises(SandboxError, match=r"HumanEval/0: harness error: the sandbox did not start"):
        humaneval.score([first] * 10, answers, Limits(seconds=1))


def test_answers_and_requests_must_match(requests: list[Request]) -> None:
    with pytest.raises(ValueError, match="zip"):
        humaneval.score(requests[:2], ["x"], Limits())


def test_heldout_scores(tmp_path: Path) -> None:
    path = tmp_path / "heldout.jsonl"
    second = {**ROW, "id": "b", "sentences": ["Line\u2028separator"]}
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps(second, ensure_ascii=False) + "\n", encoding="utf-8")
    requests = heldout.load(str(path))
    assert [r.id for r in requests] == [ROW["id"], "b"]
    assert requests[0].text == "Write add_one. It adds one."
    scores = heldout.score(requests, [requests[0].reference or "", "return x + 1"], Limits())
    assert scores == [scoring.Score(1, "passed"), scoring.Score(0, "extraction")]
    assert heldout.program(replace(requests[0], extra={**requests[0].extra, "preamble": ""}), "x") == "extraction"


def _without(key: str) -> dict[str, object]:
    return {**ROW, "extra": {k: v for k, v in ROW["extra"].items() if k != key}}  # type: ignore[attr-defined]


def _with(**extra: object) -> dict[str, object]:
    return {**ROW, "extra": {**ROW["extra"], **extra}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "not JSON (Expecting"),
        ("[1]", "the row: Input should be a valid dictionary"),
        (json.dumps({**ROW, "id": 3}), "id: Input should be a valid string"),
        (json.dumps({**ROW, "sentences": "abc"}), "sentences: Input should be a valid list"),
        (json.dumps({**ROW, "sentences": ["a", ""]}), "sentences.1: String should have at least 1 character"),
        (json.dumps({**ROW, "extra": None}), "extra: Input should be a valid dictionary"),
        (json.dumps(_without("tests")), "extra.tests: Field required"),
        (json.dumps(_with(entry_point="abs")), "extra.entry_point: Value error, 'abs' is no free name"),
        (json.dumps(_with(tests="assert (")), "extra.tests: Value error, does not compile"),
        (json.dumps(_with(preamble=3)), "extra.preamble: Input should be a valid string"),
        (json.dumps(_with(preamble="def (")), "extra.preamble: Value error, does not compile"),
        (json.dumps({**ROW, "refrence": "x"}), "refrence: Extra inputs are not permitted"),
        (json.dumps(_with(test="assert f")), "extra.test: Extra inputs are not permitted"),
        (json.dumps({**ROW, "id": "\ud800"}), "id: "),
    ],
)
def test_broken_row_names_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        heldout.load(str(path))
    message = str(caught.value)
    assert f"{path}, line 2: " in message
    assert says in message
    assert "\n" not in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl"):
        heldout.load(str(tmp_path / "none.jsonl"))


def test_file_without_a_row(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    with pytest.raises(UserError, match=r"empty\.jsonl: holds no request"):
        heldout.load(str(path))
