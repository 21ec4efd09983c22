"""CoEdIT as a benchmark: the cut after the instruction, ids of both types, and every real row."""

import json
from pathlib import Path

import pytest

from eval.benchmarks import coedit
from eval.benchmarks.protocol import Benchmark
from eval.sandbox import Limits
from recipes.errors import UserError

MODULE: Benchmark = coedit
ROWS = [
    {"_id": 3, "task": "gec", "src": "Fix the grammar: He go home. He sleep.", "tgt": "He goes home. He sleeps."},
    {"_id": "7", "task": "gec", "src": "Fix this: note: He go home", "tgt": "Note: he goes home"},
]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_load(tmp_path: Path) -> None:
    first, second = MODULE.load(write(tmp_path / "rows.jsonl", ROWS))
    assert (first.id, first.source, first.reference) == ("coedit/3", "coedit", "He goes home. He sleeps.")
    assert first.sentences == ("Fix the grammar:", " He go home.", " He sleep.")
    assert (second.id, second.sentences) == ("coedit/7", ("Fix this:", " note: He go home"))
    assert first.history == ()


@pytest.mark.parametrize(
    ("src", "pieces"),
    [
        ("Rewrite it. Be brief: one two. Three.", ["Rewrite it.", " Be brief:", " one two.", " Three."]),
        ("No colon here. At all.", ["No colon here.", " At all."]),
        ("At 10:30 he go: home", ["At 10:30 he go:", " home"]),
        ("Nothing follows: ", ["Nothing follows: "]),
    ],
)
def test_pieces(src: str, pieces: list[str]) -> None:
    assert list(coedit.pieces(src)) == pieces


def test_scores(tmp_path: Path) -> None:
    requests = MODULE.load(write(tmp_path / "rows.jsonl", ROWS))
    right, half = MODULE.score(requests, ["he goes home he sleeps", "note"], Limits())
    assert (right.value, right.note) == (1.0, "scored")
    assert half.value == pytest.approx(2 * 1 / (1 + 4))
    assert MODULE.METRIC == "F1"


def test_hub_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **options: asked.append((names, options)) or ROWS)
    assert [request.id for request in MODULE.load(None)] == ["coedit/3", "coedit/7"]
    ((names, options),) = asked
    assert (names[0], options["split"]) == ("grammarly/coedit", "validation")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"_id": 9, "task": "gec", "src": "Fix: x"}, "line 2: tgt"),
        ({"_id": 9, "task": "gec", "src": "", "tgt": "x"}, "line 2: src"),
        ({"_id": 9.5, "task": "gec", "src": "Fix: x", "tgt": "x"}, "line 2: _id"),
        (ROWS[0], "_id 3 stands there twice"),
    ],
)
def test_broken_row(tmp_path: Path, row: dict, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[0], row])
    with pytest.raises(UserError) as caught:
        MODULE.load(path)
    assert path in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_real_row(shared: Path) -> None:
    path = shared / "data" / "coedit" / "validation_subset.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    requests = MODULE.load(str(path))
    assert len(requests) == len(rows) == 781
    for row, request in zip(rows, requests, strict=True):
        assert request.text == row["src"]
        assert request.reference == row["tgt"]
        ends = [len("".join(request.sentences[:i])) for i in range(1, len(request.sentences))]
        assert row["src"].index(": ") + 1 in ends
        assert all(request.sentences)
    known = [MODULE.known(request) for request in requests]
    assert {len(answers) for answers in known} == {1}
    scores = MODULE.score(requests, [answers[0].answer for answers in known], Limits())
    assert {score.value for score in scores} == {1.0}
