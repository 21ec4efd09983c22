"""Token F1: by hand, by its properties, and against a public implementation of SQuAD's scorer."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.benchmarks import f1
from eval.benchmarks.protocol import Known, Score
from eval.sandbox import Limits
from headstart.request import Request

Scorer = Callable[[str, str], float]
SCRAPS = (
    "a",
    "an",
    "the",
    "The",
    "cat",
    "Cat",
    "mat",
    " ",
    "\n",
    "\u2003",
    ".",
    "-",
    "'",
    '"',
    "“",
    "é",
    "İ",
    "1",
    "_",
)
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(SCRAPS)).map("".join))


@pytest.fixture(scope="module")
def squad() -> Iterator[Scorer]:
    """The F1 of torchmetrics for one pair; in float64, since its default of float32 is too coarse to compare with."""
    text = pytest.importorskip("torchmetrics.functional.text", reason="torchmetrics, the public scorer, is absent")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield (
        lambda answer, reference: (
            text.squad(
                {"prediction_text": answer, "id": "1"},
                {"answers": {"answer_start": [0], "text": [reference]}, "id": "1"},
            )["f1"].item()
            / 100
        )
    )
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("The cat sat.", "a cat, SAT", 1.0),
        ("cat sat on mat", "cat sat", 2 * 1.0 * 0.5 / 1.5),  # precision 1/2, recall 1
        ("cat cat cat", "cat cat dog", 2 / 3),  # two of "cat" are shared, not three
        ("mat on sat cat", "cat sat on mat", 1.0),  # order does not count
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("cat", "", 0.0),
        ("well-known", "well known", 0.0),  # punctuation leaves no blank behind
        ("“cat”", "cat", 0.0),  # only ASCII punctuation is taken out
        ("another theatre", "other theatre", 0.5),  # no article inside a word
        ("a the", "an", 0.0),  # no word on either side: nothing is shared
    ],
)
def test_by_hand(answer: str, reference: str, value: float) -> None:
    assert f1.f1(answer, reference) == pytest.approx(value, abs=1e-12)


def test_words() -> None:
    assert f1.words("  The U.S.\tarmy's\u2003A-team (an\nold one)") == ["us", "armys", "ateam", "old", "one"]
    assert f1.words("The ... a?") == []


@given(TEXTS, TEXTS)
def test_properties(left: str, right: str) -> None:
    value = f1.f1(left, right)
    assert 0 <= value <= 1
    assert value == f1.f1(right, left)
    assert (value == 1) == (bool(f1.words(left)) and sorted(f1.words(left)) == sorted(f1.words(right)))
    assert (value > 0) == bool(set(f1.words(left)) & set(f1.words(right)))


@settings(deadline=None, max_examples=500)
@given(answer=TEXTS, reference=TEXTS)
def test_against_the_public_scorer(squad: Scorer, answer: str, reference: str) -> None:
    if f1.words(answer) or f1.words(reference):
        assert f1.f1(answer, reference) == pytest.approx(squad(answer, reference), abs=1e-9)
    else:  # v1.1, which is ours, gives 0 where nothing is shared; v2.0 calls it agreement
        assert (f1.f1(answer, reference), squad(answer, reference)) == (0, 1)


def test_against_the_public_scorer_on_real_rows(squad: Scorer, shared: Path) -> None:
    pairs = [(row["src"], row["tgt"]) for row in _rows(shared / "data" / "coedit" / "validation_subset.jsonl")]
    dialogues = _rows(shared / "data" / "ultrachat_200k" / "train_sft_sample.jsonl.gz")
    pairs += [(d["messages"][-3]["content"], d["messages"][-1]["content"]) for d in dialogues]
    found = [(f1.f1(*pair), squad(*pair)) for pair in pairs]
    assert len(found) == 781 + 500
    assert max(abs(ours - theirs) for ours, theirs in found) < 1e-9
    assert len({ours for ours, _ in found}) > 500


def _rows(path: Path) -> list[dict]:
    stored = path.read_bytes()
    lines = (gzip.decompress(stored) if path.suffix == ".gz" else stored).decode().split("\n")
    return [json.loads(line) for line in lines if line]


def test_scores_and_known() -> None:
    requests = [
        Request("a", "own", ("Say cat.",), reference="The cat."),
        Request("b", "own", ("Say cat.",)),
        Request("c", "own", ("Say the.",), reference="The."),
    ]
    assert f1.score(requests, ["cat", "cat", "the"], Limits()) == [
        Score(1.0, "scored"),
        Score(None, "no reference"),
        Score(None, "reference without words"),
    ]
    assert f1.score(requests[:1], [""], Limits()) == [Score(0.0, "scored")]
    assert [f1.known(request) for request in requests] == [[Known("The cat.")], [], []]
    assert [f1.unfit(request) for request in requests] == [None] * 3


def test_answers_and_requests_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        f1.score([Request("a", "own", ("x",))], [], Limits())
