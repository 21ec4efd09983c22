"""The pair builder: cuts, answers, drops, draws, and the same bytes after a kill and from any number of workers."""

import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from conftest import real_tokenizer
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import MESSAGE, arguments, invocation, seed_requests, talker_folder
from trl.data_utils import apply_chat_template, is_conversational

from data_builders import build, modelling, pairs, preview, reading, sources, work, writing
from data_builders.cuts import Cut, cuts
from eval import arms
from eval.benchmarks import heldout, own
from headstart.batch import BatchDecoder
from headstart.decoder import Answer
from headstart.family import FAMILIES
from headstart.prompt import renderer
from headstart.request import Message, Request
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Train
from train.rows import render, training_rows

SELF = ("data.answers=self", "data.limit=11", "data.batch_size=4", "data.max_new_tokens=10", "data.cuts=2")
REQUESTS = {made.id: made for made in seed_requests()}
CORPUS = ("data.answers=corpus", "data.limit=11")


def request(*sentences, name="r/1"):
    return Request(name, "made", sentences)


sentences = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6)
shares = st.sampled_from(
    [{"sentence": 1.0}, {"word": 1.0}, {"anywhere": 1.0}, {"sentence": 0.5, "word": 0.25, "anywhere": 0.25}]
)


@given(sentences, st.integers(1, 8), shares, st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_cuts_are_distinct_and_hold_the_last_sentence_back(pieces, count, shares, seed):
    made = request(*pieces)
    found = cuts(made, count, shares, seed)
    lengths = [len(cut.prefix) for cut in found]
    assert lengths == sorted(set(lengths))
    assert len(found) <= count
    ends = list(itertools.accumulate(map(len, pieces)))
    for cut in found:
        assert 0 < len(cut.prefix) <= len(made.text) - len(pieces[-1])
        assert made.text.startswith(cut.prefix)
        assert cut.sentences == sum(end <= len(cut.prefix) for end in ends)
        assert (len(cut.prefix) in ends) == (cut.kind == "sentence")
        assert shares.get(cut.kind, 0) > 0
        if cut.kind == "word":
            after = made.text[len(cut.prefix)]
            assert cut.prefix[-1].isalnum() or cut.prefix[-1] == "_"
            assert not after.isalnum()
            assert after != "_"
    if shares == {"sentence": 1.0}:
        assert len(found) == min(count, len(pieces) - 1)
    assert found == cuts(made, count, shares, seed)


def test_cuts_take_every_place_in_turn():
    made = request("One.", " Two.", " Three.", " Four.")
    only = {"sentence": 1.0}
    assert [cut.sentences for cut in cuts(made, 9, only, 0)] == [1, 2, 3]
    assert {cuts(made, 1, only, seed)[0].sentences for seed in range(60)} == {1, 2, 3}
    others = [request(*made.sentences, name=f"r/{n}") for n in range(60)]
    assert {cuts(other, 1, only, 0)[0].sentences for other in others} == {1, 2, 3}
    others = [request("  ab cd.", " ef gh.", " Bye.", name=f"r/{n}") for n in range(200)]
    # words end at 4, (7 is a mark's), 11; anywhere else after "a" but not where a sentence ends, at 8
    assert {len(cuts(other, 1, {"word": 1.0}, 0)[0].prefix) for other in others} == {4, 7, 11, 14}
    assert {len(cuts(other, 1, {"anywhere": 1.0}, 0)[0].prefix) for other in others} == {3, 5, 6, 9, 10, 12, 13}
    assert cuts(request("Alone."), 3, only, 0) == []
    assert cuts(request("A", "b"), 3, {"anywhere": 1.0}, 0) == []


def test_cuts_come_in_the_stated_shares():
    wanted = {"sentence": 0.5, "word": 0.3, "anywhere": 0.2}
    text = ["One two three four five six.", " Seven eight nine ten eleven.", " Twelve.", " Bye."]
    kinds = [cut.kind for n in range(2000) for cut in cuts(request(*text, name=f"r/{n}"), 1, wanted, 0)]
    for kind, share in wanted.items():
        assert abs(kinds.count(kind) / len(kinds) - share) < 0.05


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
    assert manifest["corpora"]["seed"]["licence"] == "apache-2.0"
    card = (built / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert f"| all | pairs | {manifest['counts']['pairs']} |" in card


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
        assert user["content"] + row["rest"] == made.text
        assert (row["cut"], row["draft"], row["draft_sentences"], row["draft_fate"]) == ("sentence", None, None, None)
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
    assert all(set(row) == {"id", "dropped", "answer"} and row["answer"] for row in dropped)
    assert not used & {row["id"] for row in dropped}
    counts = manifest["counts"]
    assert counts["dropped: answer reached the token limit"] == len(dropped)
    assert counts["requests"] == len(used)
    assert counts["pairs"] == len(rows(built))
    reasons = sum(number for name, number in counts.items() if name.startswith("dropped: "))
    assert len(used) + reasons == 11


def test_corpus_answers_are_the_references(model, tmp_path):
    assert build.main(arguments(model, tmp_path / "run", *CORPUS)) == 0
    found = rows(tmp_path / "run" / "data")
    assert len(found) == 22
    for row in found:
        assert row["completion"][0]["content"] == REQUESTS[row["id"].split("#")[0]].reference
        assert row["answer_source"] == "corpus"
    assert list((tmp_path / "run" / "data" / "dropped").iterdir()) == []


def test_answers_can_be_the_models_own_in_some_corpora(model, tmp_path):
    settings = ("data.corpora=[seed,everyday]", "data.answers={everyday: self}", "data.limit=12", "data.batch_size=4")
    assert build.main(arguments(model, tmp_path / "run", *settings, "data.max_new_tokens=10", "data.heldout=0")) == 0
    found = rows(tmp_path / "run" / "data")
    whose = {(row["source"], row["answer_source"]) for row in found}
    assert whose == {("seed", "corpus"), ("everyday", "self")}
    for row in found:
        if row["source"] == "seed":
            assert row["completion"][0]["content"] == REQUESTS[row["id"].split("#")[0]].reference
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["answers"]["seed"] == "corpus"
    assert "greedy" in manifest["answers"]["everyday"]
    asked = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert len(asked) == 12, "only the requests of everyday are asked"


@pytest.mark.parametrize("named", ["mbpp", "mine.jsonl"])
def test_answers_of_a_corpus_that_is_not_drawn_from_are_refused(named):
    with pytest.raises(UserError, match=f"data.answers.{named}: '{named}' is none of the corpora"):
        parse(["recipe=smollm2", "data.corpora=[seed,mine.jsonl]", f"data.answers={{{named}: self}}"])


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
    assert build.main(arguments(model, tmp_path / "run", *CORPUS, "data.cut={anywhere: 1.0}", "data.cuts=4")) == 0
    for row in rows(tmp_path / "run" / "data"):
        made, prefix = REQUESTS[row["id"].split("#")[0]], row["prompt"][-1]["content"]
        assert made.text == prefix + row["rest"]
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
    if batches:
        with (run / modelling.CACHE).open("a") as file:
            file.write('{"key": "half a li')

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


@pytest.mark.parametrize("where", [(writing, "write_shard"), (work, "card")])
def test_a_build_killed_while_writing_decodes_nothing_again(built, model, tmp_path, monkeypatch, where):
    run = tmp_path / "run"

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*where, killed)
        assert build.main(arguments(model, run, *SELF)) == 130
    assert not (run / "data").exists()
    monkeypatch.setattr(BatchDecoder, "advance", killed)
    assert build.main(arguments(model, run, *SELF)) == 0
    assert files(run / "data") == files(built)


def test_other_cuts_ask_for_no_answer_again(built, model, tmp_path, monkeypatch):
    """The cache lies in the run's folder, beside the data."""
    run = tmp_path / "run"
    assert build.main(arguments(model, run, *SELF)) == 0
    shutil.rmtree(run / "data")
    monkeypatch.setattr(BatchDecoder, "advance", None)
    assert build.main(arguments(model, run, *SELF, "data.cuts=1")) == 0
    assert len(rows(run / "data")) < len(rows(built))


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
    assert len(training_rows(built, arm.renderer, Train(), 0).dataset) == len(found)
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
    row = pairs.pair(made, Cut("One.", 1, "sentence"), "Yes.", "The message.", "corpus")
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user", "assistant", "user"]
    r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    prompt = r.prompt("One.", made.history, "The message.")
    assert render(row, r).ids[: len(prompt)] == prompt


def test_a_system_message_of_the_history_joins_the_arms_own():
    """As the renderer has it: templates take one."""
    history = (Message("system", "Be kind."), Message("user", "Hi."), Message("assistant", "Hello!"))
    made = Request("r/1", "made", ("One.", " Two."), history)
    row = pairs.pair(made, Cut("One.", 1, "sentence"), "Yes.", "The message.", "corpus")
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
    assert build.main(arguments(model, tmp_path / "run", *CORPUS, "data.heldout=0")) == 0
    assert (tmp_path / "run" / "data" / "heldout.jsonl").read_text() == ""
    capsys.readouterr()
    assert build.main(arguments(model, tmp_path / "more", *CORPUS, "data.heldout=999")) == 2
    assert capsys.readouterr().err.startswith("error: data.heldout=999: there are 74 to take from")


def test_dry_run_says_what_would_be_done_and_writes_nothing(model, tmp_path, capsys):
    assert build.main(arguments(model, tmp_path / "run", *SELF, "--dry-run")) == 0
    assert f"would build pairs of seed into {tmp_path / 'run' / 'data'}" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_other_settings_are_refused_and_unrelated_ones_are_not(built, model, capsys):
    run = built.parent
    assert build.main(arguments(model, run, *SELF, "eval.limit=3", "train.rank=2")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert build.main(arguments(model, run, *SELF, "data.cuts=1")) == 2
    assert f"{built}: made by other settings (data.cuts: 2 there, 1 here)" in capsys.readouterr().err


def conversations(path, count, first=0):
    """A file of made-up conversations, as many different ones as asked for."""
    kinds = ["a list", "two words", "the first number", "an empty text"]
    with path.open("w") as file:
        for n in range(first, first + count):
            text = f"Write task {n}. It takes {kinds[n % 4]} and {n * n}. It gives {kinds[n % 3]} and {n * 7}. Thanks."
            answer = f"Here is task {n}, which gives {kinds[n % 3]}."
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns[: 1 + (n % 17 > 0)], "id": f"{n}"}) + "\n")
    return path


def built_of(model, run, path, *overrides):
    """A build of one's own file, in pieces of 20 rows."""
    settings = (f"data.corpora=[{path}]", "data.answers=corpus", "data.heldout=5", "data.duplicates=near", *overrides)
    return build.main(arguments(model, run, *settings))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(sources, "ROWS", 20)
    monkeypatch.setattr(writing, "PIECES", 3)


def test_one_worker_or_several_killed_or_not_leave_the_same_bytes(model, tmp_path, monkeypatch, small_pieces):
    path = conversations(tmp_path / "own.jsonl", 250)
    assert built_of(model, tmp_path / "one", path, "data.workers=1") == 0
    whole = files(tmp_path / "one" / "data")
    assert sum(name.startswith("pairs-") for name in whole) == 5
    assert built_of(model, tmp_path / "two", path, "data.workers=3") == 0
    assert files(tmp_path / "two" / "data") == whole
    for where, calls in (((reading, "read_piece"), 4), ((writing, "write_shard"), 2), ((work, "card"), 0)):
        run, original, seen = tmp_path / f"killed-{where[1]}", getattr(*where), []

        def killed(*given, original=original, seen=seen, calls=calls):
            if len(seen) == calls:
                raise KeyboardInterrupt
            seen.append(original(*given))
            return seen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(*where, killed)
            assert built_of(model, run, path, "data.workers=1") == 130
        assert not (run / "data").exists()
        assert built_of(model, run, path, "data.workers=1") == 0
        assert files(run / "data") == whole


def test_the_order_of_the_rows_decides_the_order_of_the_pairs_alone(model, tmp_path, small_pieces):
    path = conversations(tmp_path / "own.jsonl", 90)
    lines = path.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    shuffled = tmp_path / "elsewhere" / "own.jsonl"  # the name is part of the ids
    shuffled.parent.mkdir()
    shuffled.write_text("".join(lines))
    found = {}
    for name, file in (("as it is", path), ("shuffled", shuffled)):
        assert built_of(model, tmp_path / name, file, "data.limit=40", "data.pairs=50", "data.workers=1") == 0
        found[name] = sorted(rows(tmp_path / name / "data"), key=lambda row: row["id"])
    assert found["as it is"] == found["shuffled"]
    assert len(found["shuffled"]) == 50


def test_as_many_pairs_as_asked_for_also_where_answers_are_dropped(model, tmp_path):
    """The model is asked about no more requests than it takes."""
    wanted = ("data.answers=self", "data.batch_size=4", "data.max_new_tokens=10", "data.pairs=20")
    assert build.main(arguments(model, tmp_path / "run", *wanted)) == 0
    assert len(rows(tmp_path / "run" / "data")) == 20
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["counts"]["dropped: answer reached the token limit"] > 0
    asked = (tmp_path / "run" / modelling.CACHE).read_text().count("\n")
    assert asked < 60


def test_an_answer_keeps_its_line_separators(tmp_path):
    """U+2028 inside an answer is no line end of a .jsonl file."""
    with writing.Review(tmp_path / "dropped") as review:
        review.add({"id": "a", "dropped": "empty answer", "answer": "one\u2028two\x85three"})
    text = (tmp_path / "dropped" / "empty-answer.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["answer"] for line in text.split("\n")[:-1]] == ["one\u2028two\x85three"]


def test_whole_requests_are_trained_on_by_option(model, tmp_path):
    """data.whole adds one pair a request: the whole of it, with the same answer."""
    found = {}
    for whole in ("false", "true"):
        assert build.main(arguments(model, tmp_path / whole, *CORPUS, f"data.whole={whole}")) == 0
        found[whole] = rows(tmp_path / whole / "data")
    added = [row for row in found["true"] if row not in found["false"]]
    assert len(added) == 11
    assert all(row["prompt"][-1]["content"] == REQUESTS[row["id"].split("#")[0]].text for row in added)
    assert {(row["kind"], row["rest"]) for row in added} == {("whole-request", "")}
    assert {row["kind"] for row in found["false"]} == {"prefix-to-answer"}


def test_heldout_conversations_are_requests_of_ones_own(model, tmp_path):
    """What comes from no task with tests is held out in the format that eval reads as one's own requests."""
    path = conversations(tmp_path / "own.jsonl", 40)
    assert built_of(model, tmp_path / "run", path) == 0
    held = own.load(str(tmp_path / "run" / "data" / "heldout.jsonl"))
    trained = {row["id"].split("#")[0] for row in rows(tmp_path / "run" / "data")}
    assert len(held) == 5
    assert not {made.id for made in held} & trained
    assert all(made.text.startswith("Write task") and made.reference.startswith("Here is") for made in held)


def test_preview_draws_prefix_rest_and_supervised_tokens(built, model, capsys):
    capsys.readouterr()
    assert build.main(arguments(model, built.parent, *SELF, "--preview", "3")) == 0
    said = capsys.readouterr().out
    shown = [row for row in rows(built) if row["id"] in said]
    assert len(shown) == 3
    for row in shown:
        assert row["prompt"][-1]["content"] in said
        assert f"held back: {row['rest']}" in said
    drawn = preview.drawing(shown[0], renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"]))
    green = "".join(drawn.plain[span.start : span.end] for span in drawn.spans if "green" in str(span.style))
    assert green == shown[0]["completion"][0]["content"] + "<|im_end|>"
    assert build.main(arguments(model, built.parent, *SELF, "--preview", "none")) == 2
    assert "--preview takes a number" in capsys.readouterr().err


def test_the_papers_recipes_train_on_the_models_own_answers_and_no_extra_filter():
    for name in ("qwen3", "llama3", "gemma3"):
        data = parse([f"recipe={name}"]).recipe.data
        assert (data.corpora, data.kind, data.answers) == (("lmsys",), "prefix-to-answer", "self")
        assert (data.duplicates, data.max_surprise, data.languages, data.whole) == ("keep", None, (), False)
        assert len(data.benchmarks) == 7  # kept disjoint from what it is measured on
    for name, kind in (
        ("refusion-prefix-to-answer", "prefix-to-answer"),
        ("refusion-draft-refinement", "draft-refinement"),
    ):
        recipe = parse([f"recipe={name}"]).recipe
        assert recipe.data.corpora == ("mbpp", "magicoder", "evol_codealpaca")
        assert (recipe.data.kind, recipe.data.pairs, recipe.prompt.system_message) == (kind, 13_845, None)


def test_one_bad_row_in_a_piece_of_its_own_ends_no_build(model, tmp_path, small_pieces):
    """The 21st row is a piece by itself; a file is judged as a whole."""
    path = conversations(tmp_path / "own.jsonl", 20)
    path.write_text(path.read_text() + "{broken")
    assert built_of(model, tmp_path / "run", path) == 0
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["corpora"]["own.jsonl"]["counts"]["dropped: malformed row"] == 1


def test_ids_of_two_files_do_not_meet(model, tmp_path, capsys):
    """Blank and missing ids are none; two files of one name are refused."""
    for name in ("a", "b"):
        lines = [{"id": n, "text": f"Name {name} {n}. Say {n * n}.", "reference": "Yes."} for n in range(9)]
        lines += [
            {"id": bad, "text": f"Say {name} {n}. Why?", "reference": "No."} for n, bad in enumerate(("", float("nan")))
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jsonl").write_text((tmp_path / "b.jsonl").read_text())
    settings = ("data.answers=corpus", "data.heldout=0")
    both = f"data.corpora=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]"
    assert build.main(arguments(model, tmp_path / "run", *settings, both)) == 0
    assert len({row["id"] for row in rows(tmp_path / "run" / "data")}) == 22
    capsys.readouterr()
    same = f"data.corpora=[{tmp_path}/a.jsonl,{tmp_path}/c/a.jsonl]"
    assert build.main(arguments(model, tmp_path / "other", *settings, same)) == 2
    assert "two of one name, endings apart; rename a file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_workers_end_with_a_parent_that_is_killed(model, tmp_path):
    path = tmp_path / "own.jsonl"
    with path.open("w") as file:
        for n in range(sources.ROWS + 2_000):
            text = f"Write task {n}. " + " ".join(f"It takes {n * k} and {k}." for k in range(20))
            file.write(json.dumps({"id": f"{n}", "text": text, "reference": "Yes."}) + "\n")
    settings = (f"data.corpora=[{path}]", "data.answers=corpus", "data.duplicates=near", "data.workers=2")
    command = [sys.executable, build.__file__, *arguments(model, tmp_path / "run", *settings)]
    parent = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers = []
    while len(workers) < 2 and parent.poll() is None:
        workers = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
        time.sleep(0.1)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert build.main(arguments(model, tmp_path / "run", *settings)) == 0
