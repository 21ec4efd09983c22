"""What a model adds to pairs: drafts of every fate, and cuts dropped for telling nothing of the answer."""

import itertools
import json
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
import torch
from conftest import SIZES, real_tokenizer, tiny_model
from tiny_models import arguments, seed_requests, talker_folder

from data_builders import build, contamination, modelling, pairs, sources, work, writing
from data_builders.answers import Answered, Cache, Raw
from data_builders.cuts import Cut, whole
from data_builders.making import Maker
from data_builders.modelling import ModelMaker
from data_builders.reading import Drawn
from headstart.family import FAMILIES
from headstart.likelihood import mean_log_likelihoods
from headstart.prompt import IGNORED, Row, renderer
from headstart.request import Message, Request
from recipes.schema import Data


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return talker_folder(tmp_path_factory.mktemp("model") / "tiny", seed=4, end_weight=2.0)


def rows(run):
    return pq.read_table(sorted((run / "data").glob("pairs-*.parquet"))).to_pylist()


class Said:
    """A backend that answers by a table from what is asked to (text, stop)."""

    def __init__(self, table):
        self.settings = {"backend": "table"}
        self.table = table
        self.asked = []
        self._waiting = []

    def ask(self, key, question):
        self.asked.append((question.id, question.text, question.system, question.history))
        self._waiting.append((key, self.table(question.text)))
        return

    def finished(self):
        found, self._waiting = self._waiting, []
        return found

    def close(self):
        self._waiting.clear()


@contextmanager
def maker(tmp_path, said, likelihoods=None, **data):
    given = Data(corpora=("seed",), benchmarks=(), **data)
    with Cache(tmp_path / "cache") as cache:
        r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
        yield ModelMaker(Maker(given, "Guess.", 0), said, cache, r, likelihoods, "table")


HISTORY = (Message("user", "Hi."), Message("assistant", "Hello!"))
REQUEST = Request("r/1", "made", ("One.", " Two.", " Three.", " Four."), HISTORY, "the right answer")


def drawn(*sentences):
    found = [whole(REQUEST) if n == 4 else Cut(REQUEST.prefix(n), n, "sentence") for n in sentences]
    return Drawn(REQUEST, tuple(cut for cut in found if cut.kind != "whole"))


def raw(text, stop="end"):
    return Raw(text, stop)


@pytest.mark.parametrize(
    ("draft", "answer", "fate"),
    [
        ("a b c", "a b  c\n", "right"),
        ("a b d", "a b c", "partly right"),
        ("a", "a b c", "partly right"),
        ("x b c", "a b c", "stale"),
        ("A b c", "a b c", "stale"),
    ],
)
def test_fate_of_a_draft(draft, answer, fate):
    assert pairs.fate(draft, answer) == fate


def test_a_draft_is_the_models_answer_to_an_earlier_prefix_under_the_message(tmp_path):
    """It stays beside the prompt, which is that of a bare prefix; where no earlier prefix is, there is no pair."""
    said = Said(lambda text: raw(f"draft of {len(text)}"))
    settings = {"answers": "corpus", "kind": "draft-refinement", "whole": True}
    with maker(tmp_path, said, **settings) as made:
        [one] = made.of_model([drawn(1, 2, 3)])
    assert [row["cut_sentences"] for row in one.pairs] == [2, 3, 4]
    for row in one.pairs:
        n = row["draft_sentences"]
        assert 1 <= n < row["cut_sentences"]
        assert row["draft"] == f"draft of {len(REQUEST.prefix(n))}"
        assert (row["kind"], row["draft_fate"], row["completion"][0]["content"]) == (
            "draft-refinement",
            "stale",
            REQUEST.reference,
        )
        assert row["prompt"][-1] == {"role": "user", "content": REQUEST.prefix(row["cut_sentences"])}
        assert "draft" not in json.dumps(row["prompt"])
    assert {(text, system, history) for _, text, system, history in said.asked} == {
        (REQUEST.prefix(row["draft_sentences"]), "Guess.", HISTORY) for row in one.pairs
    }


def test_drafts_come_from_the_prefix_before_and_from_older_ones(tmp_path):
    """A cut inside the third sentence finds a draft of the second at most."""
    with maker(tmp_path, Said(lambda text: raw("d")), answers="corpus", kind="draft-refinement") as made:
        found = [
            made._earlier(Request(f"r/{n}", "made", REQUEST.sentences), Cut(REQUEST.prefix(3), 3, "sentence"))
            for n in range(200)
        ]
        inside = Cut(REQUEST.prefix(2) + " Th", 2, "anywhere")
        assert {made._earlier(Request(f"r/{n}", "made", REQUEST.sentences), inside) for n in range(50)} == {1, 2}
        assert made._earlier(REQUEST, Cut("On", 0, "anywhere")) == 0
    assert set(found) == {1, 2}
    assert found.count(2) > found.count(1) > 20


def test_drafts_that_are_cut_off_are_drafts_and_empty_ones_are_none(tmp_path):
    def table(text):
        return raw("", "end") if text == REQUEST.prefix(1) else raw("the right ans", "length")

    with maker(tmp_path, Said(table), answers="corpus", kind="draft-refinement", whole=True) as made:
        [one] = made.of_model([drawn(2, 3)])
    lost = [row for row in one.dropped if row["dropped"] == "draft: empty answer"]
    assert len(one.pairs) + len(lost) == 3
    assert len(lost) >= 1
    assert {row["draft_fate"] for row in one.pairs} <= {"partly right"}


def test_a_build_of_draft_refinement_pairs_has_every_fate(model, tmp_path):
    """A tiny model drafts and answers: some of its drafts are right, some partly, some stale."""
    settings = ("data.answers=self", "data.kind=draft-refinement", "data.whole=true", "data.limit=60")
    assert build.main(arguments(model, tmp_path / "run", *settings, "data.max_new_tokens=10")) == 0
    found = rows(tmp_path / "run")
    assert {row["draft_fate"] for row in found} == {"right", "partly right", "stale"}
    counts = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())["counts"]
    for fate in ("right", "partly right", "stale"):
        assert counts[f"draft: {fate}"] == sum(row["draft_fate"] == fate for row in found) > 0
    answered = {row["id"].split("#")[0]: row["completion"][0]["content"] for row in found}
    for row in found:
        assert row["draft_fate"] == pairs.fate(row["draft"], answered[row["id"].split("#")[0]])


def test_a_cut_that_tells_nothing_of_the_answer_is_dropped(tmp_path):
    """By the mean log-likelihood of the answer after the prefix against after the whole request; asked once a row."""
    scored = []

    def likelihoods(found):
        scored.extend(found)
        return [-0.001 * (800 - len(row.ids)) for row in found]  # the longer the prompt, the likelier

    said = Said(lambda text: raw("x"))
    with maker(tmp_path, said, likelihoods, answers="corpus", max_surprise=1e-9) as made:
        [none] = made.of_model([drawn(1, 2, 3)])
    assert none.pairs == []
    assert [row["dropped"] for row in none.dropped] == ["answer not foreseeable from the cut"] * 3
    assert len(scored) == 4
    with maker(tmp_path, said, likelihoods, answers="corpus", max_surprise=0.005, whole=True) as made:
        [some] = made.of_model([drawn(1, 2, 3)])
    assert len(scored) == 4
    assert [row["cut_sentences"] for row in some.pairs] == [2, 3, 4]
    assert float(some.dropped[0]["nats_a_token"]) == pytest.approx(0.006, abs=1e-6)


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_likelihoods_are_those_of_one_row_at_a_time(family):
    """Against the plain log-softmax of all logits, in float32; the batch makes no difference."""
    tiny = tiny_model(family, 300, seed=2, **SIZES) if SIZES else tiny_model(family, 300, seed=2)
    draw = torch.Generator().manual_seed(0)
    made = []
    for n in range(9):
        ids = torch.randint(5, 290, (6 + 3 * n,), generator=draw).tolist()
        made.append(Row(ids, [IGNORED] * (2 + n) + ids[2 + n :]))
    found = mean_log_likelihoods(tiny, made, 4)
    for row, score in zip(made, found, strict=True):
        with torch.inference_mode():
            logits = tiny(input_ids=torch.tensor([row.ids])).logits[0].float().log_softmax(-1)
        places = [at for at in range(1, len(row.ids)) if row.labels[at] != IGNORED]
        wanted = sum(float(logits[at - 1, row.ids[at]]) for at in places) / len(places)
        assert score == pytest.approx(wanted, abs=1e-5)
    assert mean_log_likelihoods(tiny, made, 1) == pytest.approx(found, abs=1e-5)
    assert mean_log_likelihoods(tiny, [], 4) == []


def test_a_build_scores_with_the_recipes_model(model, tmp_path):
    """data.max_surprise loads the model though the answers are the corpus'."""
    settings = ("data.answers=corpus", "data.limit=8", "data.max_surprise=0.0001")
    assert build.main(arguments(model, tmp_path / "run", *settings)) == 0
    counts = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())["counts"]
    dropped = counts.get("pairs dropped: answer not foreseeable from the cut", 0)
    assert 0 < dropped < 16
    assert counts["pairs"] + dropped == sum(
        min(2, len(r.sentences) - 1) for r in seed_requests() if r.id in used(tmp_path)
    )


def used(tmp_path):
    data = tmp_path / "run" / "data"
    lost = [json.loads(line)["pair"] for path in (data / "dropped").iterdir() for line in path.open()]
    return {name.split("#")[0] for name in [*(row["id"] for row in rows(tmp_path / "run")), *lost]}


def test_the_corpus_answers_need_no_model_and_drafts_one_of_the_family(model, tmp_path, capsys):
    family = ("model.family=refusion", "train.objective=slot_diffusion", "eval.replay=full")
    settings = ("data.answers=corpus", "data.limit=3")
    assert build.main(arguments(model, tmp_path / "run", *family, *settings, "data.kind=draft-refinement")) == 2
    assert "model.family=refusion expects a model of type qwen3" in capsys.readouterr().err
    assert build.main(arguments(model, tmp_path / "pairs", *family, *settings)) == 0
    assert len(rows(tmp_path / "pairs")) == 6


def test_a_resumed_build_whose_answers_changed_keeps_no_old_shard(model, tmp_path, monkeypatch):
    """Killed before its card, its cache lost, resumed with a model that answers otherwise: nothing is counted twice."""
    monkeypatch.setattr(sources, "ROWS", 4)
    monkeypatch.setattr(writing, "PIECES", 1)
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"id": f"{n}", "text": f"Name {n}. Say {n * n}."}) + "\n" for n in range(16)))
    argv = arguments(model, tmp_path / "run", f"data.corpora=[{path}]", "data.heldout=0", "data.max_new_tokens=10")

    def killed(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        modelling, "answers", lambda asked, *rest: (Answered(q.id, "x", dropped(next(stops))) for q in asked)
    )

    def dropped(stop):
        return None if stop == "end" else "answer reached the token limit"

    with monkeypatch.context() as patch:
        patch.setattr(work, "card", killed)
        stops = itertools.cycle(["end"])
        assert build.main(argv) == 130
    first = {
        row["id"] for row in pq.read_table(sorted((tmp_path / "run" / ".data.partial").glob("pairs-*"))).to_pylist()
    }
    assert len(first) == 16
    stops = itertools.cycle(["length"] * 4 + ["end"] * 12)
    assert build.main(argv) == 0
    found = rows(tmp_path / "run")
    assert len(found) == len({row["id"] for row in found}) == 12
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["counts"]["pairs"] == 12
    stops = itertools.cycle(["length"])
    assert build.main([*argv[:2], f"run.dir={tmp_path / 'none'}", *argv[3:]]) == 2


def test_huge_literals_and_odd_code_end_no_build():
    index = contamination.Index([])
    assert index.find(["Look.", f"```python\ndef g():\n    return 0x{'f' * 5000}\n```"]) == []
