"""The pair builder: cuts, answers, drops, and the same bytes after a kill."""

import itertools
import json
import random

import pyarrow.parquet as pq
import pytest
from conftest import real_tokenizer
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MESSAGE, arguments, invocation, reciter, talker, talker_folder
from trl.data_utils import apply_chat_template, is_conversational

from data_builders import answers, build, pairs
from data_builders.answers import Answered
from data_builders.corpora import seed
from data_builders.cuts import Cut, cuts
from eval import arms
from eval.benchmarks import heldout
from headstart.batch import BatchDecoder
from headstart.decoder import Answer
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import renderer
from headstart.request import Message, Request
from recipes.errors import UserError
from recipes.loader import parse
from train.rows import render, training_rows

SELF = ("data.answers=self", "data.limit=11", "data.batch_size=4", "data.max_new_tokens=10", "data.cuts=2")
REQUESTS = {made.id: made for made in seed.load()}
CORPUS = ("data.answers=corpus", "data.limit=11")


def request(*sentences, name="r/1"):
    return Request(name, "made", sentences)


sentences = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6)


@given(sentences, st.integers(1, 8), st.sampled_from(["sentence", "inside"]), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_cuts_are_distinct_and_hold_something_back(pieces, count, kind, seed):
    made = request(*pieces)
    found = cuts(made, count, kind, seed)
    lengths = [len(cut.prefix) for cut in found]
    assert lengths == sorted(set(lengths))
    assert len(found) <= count
    ends = list(itertools.accumulate(map(len, pieces)))
    for cut in found:
        assert 0 < len(cut.prefix) < len(made.text)
        assert made.text.startswith(cut.prefix)
        assert cut.sentences == sum(end <= len(cut.prefix) for end in ends)
        assert (len(cut.prefix) in ends) == (kind == "sentence")
        if kind == "inside":
            assert any(char.isalnum() for char in cut.prefix)
    if kind == "sentence":
        assert len(found) == min(count, len(pieces) - 1)
    assert found == cuts(made, count, kind, seed)


def test_cuts_take_every_place_in_turn():
    made = request("One.", " Two.", " Three.", " Four.")
    assert [cut.sentences for cut in cuts(made, 9, "sentence", 0)] == [1, 2, 3]
    assert {cuts(made, 1, "sentence", seed)[0].sentences for seed in range(60)} == {1, 2, 3}
    others = [request(*made.sentences, name=f"r/{n}") for n in range(60)]
    assert {cuts(other, 1, "sentence", 0)[0].sentences for other in others} == {1, 2, 3}
    others = [request("  a b.", " cd.", name=f"r/{n}") for n in range(200)]
    assert {len(cuts(other, 1, "inside", 0)[0].prefix) for other in others} == {
        3,
        4,
        5,
        7,
        8,
        9,
    }  # after "a" and later; not at 6, where the second sentence starts
    assert cuts(request("Alone."), 3, "sentence", 0) == []
    assert cuts(request("A", "b"), 3, "inside", 0) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's folder."""
    return talker_folder(tmp_path_factory.mktemp("model") / "tiny", seed=4, end_weight=2.0)


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    """The data folder of a whole run with the model's own answers."""
    run = tmp_path_factory.mktemp("built") / "run"
    assert build.main(arguments(model, run, *SELF)) == 0
    return run / "data"


def files(folder):
    """Every file's bytes; of step.json the part that is not provenance."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(found.pop("step.json"))
    found.pop("recipe.yaml")  # names the run's folder
    return found | {"step": [record[key] for key in ("settings", "key", "content")]}


def rows(folder):
    return pq.read_table(sorted(folder.glob("pairs-*.parquet"))).to_pylist()


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_folder_is_complete(built):
    assert sorted(path.name for path in built.iterdir()) == [
        "README.md",
        "dropped",
        "heldout.jsonl",
        "manifest.json",
        "pairs-00000.parquet",
        "recipe.yaml",
        "step.json",
    ]
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["default_system_text"] is True  # fault 8: SmolLM2's template puts one where none is given
    assert manifest["corpus"] == {"name": "seed", "version": seed.VERSION, "licence": "Apache-2.0"}
    card = (built / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert f"| pairs | {manifest['counts']['pairs']} |" in card


def test_each_pair_is_a_prefix_and_the_answer_to_the_whole_request(built):
    found = rows(built)
    assert len(found) > 4
    answer_of = {}
    for row in found:
        made = REQUESTS[row["id"].split("#")[0]]
        system, user = row["prompt"]
        assert system["role"] == "system"
        assert system["content"] == MESSAGE
        assert user == {"role": "user", "content": made.prefix(row["cut_sentences"])}
        assert row["cut_characters"] == len(user["content"]) == int(row["id"].split("#")[1])
        assert 1 <= row["cut_sentences"] < row["sentences"] == len(made.sentences)
        assert [turn["role"] for turn in row["completion"]] == ["assistant"]
        answer_of.setdefault(made.id, set()).add(row["completion"][0]["content"])
        assert (row["source"], row["kind"], row["answer_source"]) == ("seed", "prefix-to-answer", "self")
    assert all(len(texts) == 1 for texts in answer_of.values())
    assert len({row["id"] for row in found}) == len(found)


def test_self_answers_are_the_plain_models_greedy_answers(built, model, tmp_path):
    """Decoded on the whole request, without the message for incomplete requests."""
    arm = arms.load(invocation(model, tmp_path / "run", "eval.arm=plain", "eval.max_new_tokens=10"))
    for row in rows(built):
        made = REQUESTS[row["id"].split("#")[0]]
        prompt = arm.prompt(made, len(made.sentences))
        decoder = arm.decoder()
        answer = decoder.decode(prompt, decoder.verify(prompt, Answer()).answer)
        assert answer.stop == "end"
        assert arm.renderer.text(answer.written) == row["completion"][0]["content"]


def test_answers_that_do_not_end_are_dropped_counted_and_kept(built):
    manifest = json.loads((built / "manifest.json").read_text())
    dropped = lines(built / "dropped" / "answer-reached-the-token-limit.jsonl")
    used = {row["id"].split("#")[0] for row in rows(built)}
    assert dropped
    assert used
    assert all(set(row) == {"id", "answer"} and row["answer"] for row in dropped)
    assert not used & {row["id"] for row in dropped}
    counts = manifest["counts"]
    assert counts["dropped: answer reached the token limit"] == len(dropped)
    assert counts["requests"] == 11
    assert counts["pairs"] == len(rows(built))
    reasons = sum(number for name, number in counts.items() if name.startswith("dropped: "))
    assert len(used) + reasons == counts["requests"]


def test_an_empty_answer_is_dropped(tmp_path):
    """A model that ends at once; a reference that is blank, and one that is not there."""
    r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    model = reciter(r.tokenizer, "")
    decoder = BatchDecoder(model, stop_ids(r.family, r.tokenizer, model), 5, 2)
    found = answers.self_answers([request("Hi.", " You."), request("Say x.")], decoder, r, tmp_path / "progress")
    assert [answered.dropped for answered in found] == ["empty answer", "empty answer"]
    blank = [Request("a", "made", ("x",), reference=" \n"), Request("b", "made", ("x",))]
    assert [answered.dropped for answered in answers.corpus_answers(blank)] == ["empty answer", "empty answer"]
    assert pairs.write_dropped(found, tmp_path / "dropped") == {"empty answer": 2}
    assert len(lines(tmp_path / "dropped" / "empty-answer.jsonl")) == 2


def test_corpus_answers_are_the_references(model, tmp_path):
    assert build.main(arguments(model, tmp_path / "run", *CORPUS)) == 0
    found = rows(tmp_path / "run" / "data")
    assert len(found) == 22
    for row in found:
        assert row["completion"][0]["content"] == REQUESTS[row["id"].split("#")[0]].reference
        assert row["answer_source"] == "corpus"
    assert list((tmp_path / "run" / "data" / "dropped").iterdir()) == []


def test_a_pair_does_not_depend_on_the_other_rows(model, tmp_path):
    """Another limit changes no row that is in both; another seed changes cuts."""
    found = {}
    for name, overrides in {"few": ("data.limit=5",), "many": ("data.limit=9",), "seed": ("run.seed=1",)}.items():
        assert build.main(arguments(model, tmp_path / name, "data.answers=corpus", *overrides)) == 0
        found[name] = {row["id"]: row for row in rows(tmp_path / name / "data")}
    assert len(found["few"]) == 10
    assert found["few"].items() <= found["many"].items()
    assert not found["many"].keys() <= found["seed"].keys()


def test_cuts_inside_a_sentence(model, tmp_path):
    assert build.main(arguments(model, tmp_path / "run", *CORPUS, "data.cut=inside", "data.cuts=4")) == 0
    for row in rows(tmp_path / "run" / "data"):
        made, prefix = REQUESTS[row["id"].split("#")[0]], row["prompt"][-1]["content"]
        assert made.text.startswith(prefix)
        assert prefix not in [made.prefix(i) for i in range(1, 1 + len(made.sentences))]


@pytest.mark.parametrize("batches", [0, 2])
def test_a_killed_build_ends_with_the_same_bytes(built, model, tmp_path, monkeypatch, capsys, batches):
    """Broken off after some batches, with half a line written; the finished batches are not decoded again."""
    run, advance = tmp_path / "run", BatchDecoder.advance
    decoded = []

    def killed(self, prompts, *rest):
        if len(decoded) == batches:
            raise KeyboardInterrupt
        decoded.append(len(prompts))
        return advance(self, prompts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(BatchDecoder, "advance", killed)
        assert build.main(arguments(model, run, *SELF)) == 130
    assert not (run / "data").exists()
    progress = run / ".data.partial" / build.PROGRESS
    if batches:
        with progress.open("a") as file:
            file.write('{"id": "half a li')

    def counted(self, prompts, *rest):
        decoded.append(len(prompts))
        return advance(self, prompts, *rest)

    monkeypatch.setattr(BatchDecoder, "advance", counted)
    assert build.main(arguments(model, run, *SELF)) == 0
    assert decoded == [4, 4, 3]
    assert files(run / "data") == files(built)
    capsys.readouterr()
    assert build.main(arguments(model, run, *SELF)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert decoded == [4, 4, 3]


@pytest.mark.parametrize("where", ["write_pairs", "card"])
def test_a_build_killed_while_writing_decodes_nothing_again(built, model, tmp_path, monkeypatch, where):
    run = tmp_path / "run"

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pairs, where, killed)
        assert build.main(arguments(model, run, *SELF)) == 130
    assert not (run / "data").exists()
    monkeypatch.setattr(BatchDecoder, "advance", killed)
    assert build.main(arguments(model, run, *SELF)) == 0
    assert files(run / "data") == files(built)


def test_answers_of_other_requests_are_not_taken_over(tmp_path):
    """Progress of another order is thrown away (the step's settings guard against it; so does the file itself)."""
    r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    model = talker(r.tokenizer, 4, end_weight=2.0)
    decoder = BatchDecoder(model, stop_ids(r.family, r.tokenizer, model), 5, 2)
    progress = tmp_path / "progress"
    made = [request(f"Count to {n}.", " Now.", name=f"r/{n}") for n in range(5)]
    whole = answers.self_answers(made, decoder, r, progress)
    assert answers.self_answers(made[::-1], decoder, r, progress) == whole[::-1]
    assert [row["id"] for row in lines(progress)] == [one.id for one in made[::-1]]


def test_training_prompts_are_the_evaluators_prompts(built, model, tmp_path):
    """Fault 8: one prefix through builder, trainer and evaluator, with the message; byte-equal ids."""
    arm = arms.load(invocation(model, tmp_path / "run", "eval.arm=message"))
    found = rows(built)
    for row in found:
        made = REQUESTS[row["id"].split("#")[0]]
        trained = render(row, arm.renderer)
        prompt = arm.prompt(made, row["cut_sentences"])
        assert trained.ids[: len(prompt)] == prompt
        assert trained.labels[: len(prompt)] == [-100] * len(prompt)
        supervised = trained.labels[len(prompt) :]
        assert supervised == [*arm.renderer.answer(row["completion"][0]["content"]), arm.renderer.end_of_turn]
    assert len(training_rows(built, arm.renderer, 2048).dataset) == len(found)
    text = found[0]["prompt"][-1]["content"]
    plain = arm.renderer.prompt(text)
    for system in (None, "Be brief."):  # without a system message the template's default one stands in all paths
        pair = {"id": "x", "prompt": [{"role": "user", "content": text}], "completion": found[0]["completion"]}
        if system:
            pair["prompt"].insert(0, {"role": "system", "content": system})
        prompt = arm.renderer.prompt(text, (), system)
        assert render(pair, arm.renderer).ids[: len(prompt)] == prompt
    assert plain != arm.renderer.prompt(text, (), "Be brief.")


def test_the_columns_are_what_trl_reads(built):
    """TRL's own code takes the rows for conversations, and its ids begin with our prompt's."""
    tokenizer = real_tokenizer("smollm2")
    r = renderer(tokenizer, FAMILIES["smollm2"])
    dataset = Dataset.from_parquet([str(path) for path in built.glob("pairs-*.parquet")])
    assert {"prompt", "completion"} <= set(dataset.column_names)
    for row in dataset:
        pair = {key: row[key] for key in ("prompt", "completion")}
        assert is_conversational(pair)
        applied = apply_chat_template(pair, tokenizer)
        ours = render(row, r)
        theirs = tokenizer.encode(applied["prompt"] + applied["completion"], add_special_tokens=False)
        assert theirs[: len(ours.ids)] == ours.ids


def test_history_stands_between_the_message_and_the_prefix():
    made = Request("r/1", "made", ("One.", " Two."), (Message("user", "Hi."), Message("assistant", "Hello!")))
    row = pairs.pair(made, Cut("One.", 1), "Yes.", "The message.", "corpus")
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user", "assistant", "user"]
    r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    prompt = r.prompt("One.", made.history, "The message.")
    assert render(row, r).ids[: len(prompt)] == prompt


def test_heldout_tasks_are_never_trained_on(built):
    held = heldout.load(str(built / "heldout.jsonl"))
    assert len({made.extra["task"] for made in held}) == 12
    trained = {row["id"].split("#")[0] for row in rows(built)}
    dropped = {row["id"] for path in (built / "dropped").iterdir() for row in lines(path)}
    assert not {made.extra["task"] for made in held} & {REQUESTS[name].extra["task"] for name in trained | dropped}
    for made in held:
        assert made.sentences == REQUESTS[made.id].sentences
        assert made.reference == REQUESTS[made.id].reference
        assert dict(made.extra) == dict(REQUESTS[made.id].extra)


def test_no_task_held_out_is_allowed_and_all_are_not(model, tmp_path, capsys):
    assert build.main(arguments(model, tmp_path / "run", *CORPUS, "data.heldout_tasks=0")) == 0
    assert (tmp_path / "run" / "data" / "heldout.jsonl").read_text() == ""
    capsys.readouterr()
    assert build.main(arguments(model, tmp_path / "more", *CORPUS, "data.heldout_tasks=999")) == 2
    assert capsys.readouterr().err.startswith("error: data.heldout_tasks=999: the corpus has")
    with pytest.raises(UserError):
        seed.split_tasks(list(REQUESTS.values()), 999, 0)


def test_dry_run_says_what_would_be_done_and_writes_nothing(model, tmp_path, capsys):
    assert build.main(arguments(model, tmp_path / "run", *SELF, "--dry-run")) == 0
    assert f"would build pairs of 11 requests (60 held out) into {tmp_path / 'run' / 'data'}" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_other_settings_are_refused_and_unrelated_ones_are_not(built, model, capsys):
    run = built.parent
    assert build.main(arguments(model, run, *SELF, "eval.limit=3", "train.rank=2")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert build.main(arguments(model, run, *SELF, "data.cuts=1")) == 2
    assert f"{built}: made by other settings (data.cuts: 2 there, 1 here)" in capsys.readouterr().err


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "SHARD_ROWS", 3)
    made = request("One.", " Two.")
    wanted = [pairs.pair(made, Cut("One.", 1), f"answer {n}", "m", "corpus") for n in range(7)]
    random.Random(0).shuffle(wanted)
    for count, names in ((0, 1), (3, 1), (4, 2), (7, 3)):
        folder = tmp_path / str(count)
        folder.mkdir()
        assert pairs.write_pairs(iter(wanted[:count]), folder) == count
        assert sorted(path.name for path in folder.iterdir()) == [f"pairs-{n:05d}.parquet" for n in range(names)]
        assert rows(folder) == wanted[:count]


def test_an_answer_keeps_its_line_separators(tmp_path):
    """U+2028 inside an answer is no line end of a .jsonl file."""
    found = [Answered("a", "one\u2028two\x85three", "empty answer")]
    pairs.write_dropped(found, tmp_path)
    text = (tmp_path / "empty-answer.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.split("\n")[:-1]] == [{"id": "a", "answer": "one\u2028two\x85three"}]
    held = Request("h", "seed", ("a\u2028b",), extra={"entry_point": "f", "tests": "f()", "task": "f"})
    pairs.write_heldout([held], tmp_path / "heldout.jsonl")
    assert heldout.load(str(tmp_path / "heldout.jsonl"))[0].text == "a\u2028b"


def test_whole_requests_are_trained_on_by_option(tmp_path):
    """data.whole adds one pair a request: the whole of it, with the same answer."""
    requests = seed.load()[:3]
    answered = answers.corpus_answers(requests)
    found = {}
    for whole in ("false", "true"):
        recipe = parse(["recipe=qwen3", "data.answers=corpus", f"data.whole={whole}"]).recipe
        found[whole] = list(build.make_pairs(recipe, requests, answered))
    added = [row for row in found["true"] if row not in found["false"]]
    assert [row["prompt"][-1]["content"] for row in added] == [request.text for request in requests]
    assert {row["kind"] for row in added} == {"whole-request"}
    assert {row["kind"] for row in found["false"]} == {"prefix-to-answer"}
