"""UltraChat and MT-Bench as benchmarks: what is streamed, what is history, what is the reference."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from eval.benchmarks import chat, mtbench
from eval.benchmarks.protocol import Benchmark, Score
from eval.sandbox import Limits
from headstart.request import Message, Request
from recipes.errors import UserError

CHAT: Benchmark = chat
MTBENCH: Benchmark = mtbench
HI, YES = {"role": "user", "content": "Hi there."}, {"role": "assistant", "content": "Yes?"}
ASK, TOLD = {"role": "user", "content": "One. Two."}, {"role": "assistant", "content": "Three it is."}
ROW = {"prompt": "hi THERE.", "prompt_id": "f00", "messages": [HI, YES, ASK, TOLD]}


def write(path: Path, *rows: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one(path: Path, row: dict) -> Request:
    (request,) = CHAT.load(write(path / "rows.jsonl", row))
    return request


def test_the_last_answered_turn_is_streamed(tmp_path: Path) -> None:
    request = one(tmp_path, ROW)
    assert (request.id, request.source) == ("chat/f00", "chat")
    assert request.sentences == ("One.", " Two.")
    assert request.history == (Message("user", "Hi there."), Message("assistant", "Yes?"))
    assert request.reference == "Three it is."
    unanswered = one(tmp_path, {**ROW, "messages": [*ROW["messages"], {"role": "user", "content": "And?"}]})
    assert unanswered == request


def test_one_exchange_and_a_system_message(tmp_path: Path) -> None:
    assert one(tmp_path, {**ROW, "messages": [HI, YES]}).history == ()
    system = {"role": "system", "content": "Be kind."}
    request = one(tmp_path, {**ROW, "messages": [system, HI, YES]})
    assert (request.history, request.text) == ((Message("system", "Be kind."),), "Hi there.")


def test_the_older_release(tmp_path: Path) -> None:
    request = one(tmp_path, {"id": "17", "data": ["Hi there.", "Yes?", "One. Two.", "Three it is.", "And?"]})
    newer = one(tmp_path, {**ROW, "prompt_id": "17"})
    assert request == newer


def test_dialogues_that_open_alike_keep_ids_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {**ROW, "prompt_id": "f00/2"}, ROW, ROW, ROW)
    assert [r.id for r in CHAT.load(path)] == ["chat/f00/2", "chat/f00", "chat/f00/3", "chat/f00/4"]


def test_a_blank_answer_is_no_reference(tmp_path: Path) -> None:
    request = one(tmp_path, {**ROW, "messages": [HI, {"role": "assistant", "content": " \n"}]})
    assert request.reference is None
    assert CHAT.known(request) == []
    assert CHAT.score([request], ["x"], Limits()) == [Score(None, "no reference")]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**ROW, "messages": [YES, HI]}, "message 1 has the role 'assistant'"),
        ({**ROW, "messages": [HI, ASK, TOLD]}, "message 2 has the role 'user'"),
        ({**ROW, "messages": [HI, YES, {"role": "system", "content": "x"}]}, "message 3 has the role 'system'"),
        ({**ROW, "messages": [HI]}, "no user turn has an answer"),
        ({**ROW, "messages": []}, "there is no user turn"),
        ({**ROW, "messages": [HI, {"role": "tool", "content": "x"}]}, "messages.1.role"),
        ({**ROW, "messages": [HI, {"role": "assistant", "content": None}]}, "messages.1.content"),
        ({"messages": [HI, YES]}, "prompt_id"),
        ({"id": "1", "data": "Hi"}, "messages"),
        ({"id": "1", "data": ["Hi", 3]}, "messages.1.content"),
    ],
)
def test_broken_row_names_file_and_line(tmp_path: Path, row: dict, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROW, row)
    with pytest.raises(UserError) as caught:
        CHAT.load(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_real_dialogue(shared: Path) -> None:
    path = shared / "data" / "ultrachat_200k" / "train_sft_sample.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(line) for line in lines]
    requests = CHAT.load(str(path))
    assert len(requests) == len({request.id for request in requests}) == len(rows) == 500
    for row, request in zip(rows, requests, strict=True):
        said = [*request.history, Message("user", request.text), Message("assistant", str(request.reference))]
        assert [{"role": m.role, "content": m.content} for m in said] == [
            {"role": m["role"], "content": m["content"]} for m in row["messages"]
        ]
        assert all(request.sentences)
    _gold_is_right(CHAT, requests)


def _gold_is_right(benchmark: Benchmark, requests: list[Request]) -> None:
    known = [benchmark.known(request) for request in requests]
    assert {len(answers) for answers in known} == {1}
    scores = benchmark.score(requests, [answers[0].answer for answers in known], Limits())
    assert set(scores) == {Score(1.0, "scored")}


@pytest.mark.parametrize(
    ("benchmark", "row", "hub", "found"),
    [
        (CHAT, ROW, ("HuggingFaceH4/ultrachat_200k", "test_sft"), "chat/f00"),
        (
            MTBENCH,
            {"prompt": ["One?", "Two?"], "prompt_id": 61, "category": "math", "reference": []},
            ("HuggingFaceH4/mt_bench_prompts", "train"),
            "mtbench/61",
        ),
    ],
)
def test_hub_is_the_default(
    monkeypatch: pytest.MonkeyPatch, benchmark: Benchmark, row: dict, hub: tuple[str, str], found: str
) -> None:
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **options: asked.append((names, options)) or [row])
    assert [request.id for request in benchmark.load(None)] == [found]
    ((names, options),) = asked
    assert (names[0], options["split"]) == hub


def question(number: int, **more: object) -> dict:
    return {"question_id": number, "category": "math", "turns": ["Add. One and one.", "Double it. Now."], **more}


def answer(number: int, *turns: str) -> dict:
    return {"question_id": number, "model_id": "gpt-4", "choices": [{"index": 0, "turns": list(turns)}]}


def seen(request: Request) -> tuple[str, str | None, str | None]:
    """The streamed turn, the first turn's answer in the history, and the reference."""
    if request.history:
        assert request.history[0] == Message("user", "Add. One and one.")
        assert [message.role for message in request.history] == ["user", "assistant"]
    return request.text, request.history[1].content if request.history else None, request.reference


FIRST, SECOND = "Add. One and one.", "Double it. Now."


def test_questions_with_their_own_references(tmp_path: Path) -> None:
    path = write(
        tmp_path / "question.jsonl",
        question(81),
        question(82, reference=None),
        question(83, reference=["2", "4"]),
        question(84, reference=["2", ""]),
        question(85, reference=["", "4"]),
    )
    requests = MTBENCH.load(path)
    assert [request.id for request in requests] == [f"mtbench/{number}" for number in range(81, 86)]
    assert [seen(request) for request in requests] == [
        (FIRST, None, None),
        (FIRST, None, None),
        (SECOND, "2", "4"),
        (SECOND, "2", None),
        (FIRST, None, None),
    ]
    assert requests[2].sentences == ("Double it.", " Now.")
    assert [score.note for score in MTBENCH.score(requests, ["4"] * 5, Limits())] == [
        "no reference",
        "no reference",
        "scored",
        "no reference",
        "no reference",
    ]


def test_reference_answers_come_first_and_fill_gaps(tmp_path: Path) -> None:
    write(
        tmp_path / "question.jsonl",
        question(81),
        question(82, reference=["2", ""]),
        question(83, reference=["2", "4"]),
        question(84, reference=["2", "4"]),
    )
    write(tmp_path / "judge_prompts.jsonl", {"name": "not a question"})
    assert seen(MTBENCH.load(str(tmp_path))[0]) == (FIRST, None, None)
    answers = [answer(81, "It is 2.", "It is 4."), answer(82, "Two.", "Four."), answer(83, "Two.", " ")]
    write(tmp_path / "reference_answer" / "gpt-4.jsonl", *answers)
    assert [seen(request) for request in MTBENCH.load(str(tmp_path))] == [
        (SECOND, "It is 2.", "It is 4."),
        (SECOND, "Two.", "Four."),
        (SECOND, "Two.", "4"),
        (SECOND, "2", "4"),
    ]
    alone = MTBENCH.load(str(tmp_path / "question.jsonl"))
    assert seen(alone[0]) == (FIRST, None, None)


def test_hub_rows_in_a_folder(tmp_path: Path) -> None:
    write(
        tmp_path / "train.jsonl", {"prompt": [FIRST, SECOND], "prompt_id": 7, "category": "x", "reference": ["2", "4"]}
    )
    (request,) = MTBENCH.load(str(tmp_path))
    assert (request.id, *seen(request)) == ("mtbench/7", SECOND, "2", "4")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (question(82, turns=["One?"]), "line 2: turns"),
        (question(82, turns="One?"), "line 2: turns"),
        (question(82, reference="2"), "line 2: reference"),
        ({"turns": ["One?", "Two?"]}, "line 2: question_id"),
        (question(81), "question 81 stands there twice"),
    ],
)
def test_broken_question(tmp_path: Path, row: dict, says: str) -> None:
    path = write(tmp_path / "question.jsonl", question(81), row)
    with pytest.raises(UserError) as caught:
        MTBENCH.load(path)
    assert path in str(caught.value)
    assert says in str(caught.value)


def test_broken_reference_answer(tmp_path: Path) -> None:
    write(tmp_path / "question.jsonl", question(81))
    path = write(tmp_path / "reference_answer" / "gpt-4.jsonl", {"question_id": 81, "choices": []})
    with pytest.raises(UserError, match=r"gpt-4\.jsonl, line 1: choices") as caught:
        MTBENCH.load(str(tmp_path))
    assert path in str(caught.value)


def test_every_real_question(shared: Path) -> None:
    folder = shared / "data" / "mt_bench"
    questions, answers = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").split("\n") if line]
        for name in ("question.jsonl", "reference_answer/gpt-4.jsonl")
    )
    gpt4 = {row["question_id"]: row["choices"][0]["turns"] for row in answers}
    pairs = [gpt4.get(q["question_id"]) or q.get("reference") or ["", ""] for q in questions]
    shapes = Counter((first != "", first != "" and second != "") for first, second in pairs)
    assert shapes == {(True, True): 35, (True, False): 4, (False, False): 41}

    requests = MTBENCH.load(str(folder))
    assert [request.id for request in requests] == [f"mtbench/{number}" for number in range(81, 161)]
    assert Counter((r.history != (), r.reference is not None) for r in requests) == shapes
    for row, (first, second), request in zip(questions, pairs, requests, strict=True):
        assert request.text == row["turns"][1 if first else 0]
        assert [m.content for m in request.history] == ([row["turns"][0], first] if first else [])
        assert request.reference == ((second or None) if first else None)
    _gold_is_right(MTBENCH, [request for request in requests if request.reference is not None])
