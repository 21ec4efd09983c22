"""eval/run.py as a whole on tiny models: arms, kills, scores, bad input, figures recomputed from the evidence."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from conftest import real_tokenizer
from peft import get_peft_model
from tiny_models import REQUESTS, SHORT, arguments, invocation, reciter, save, talker_folder

from eval import arms, run, shards, suite, timing
from eval.benchmarks import heldout
from eval.replay import replay
from headstart import model as loading
from headstart.family import FAMILIES
from recipes import run_folder
from recipes.errors import UserError
from train.adapter import lora_config

ANSWER = "def one(): return 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that writes answers of all kinds: empty, ended, cut, kept whole, in part, not at all."""
    return talker_folder(tmp_path_factory.mktemp("model") / "tiny")


# --- arms ---


def finished(folder, source, settings):
    """A run's `folder` as a finished step that `source` fills."""
    made = invocation(Path("x"), folder.parent)
    with run_folder.step(made, folder, settings) as step:
        source(step.partial)
        run_folder.finish(step)


def test_an_arm_is_weights_and_a_prompt(model, tmp_path):
    """plain has no message; adapter and merged have their own weights, which agree; hashes tell them apart."""
    weights = loading.weights_hash(invocation(model, tmp_path / "run").recipe.model)
    base = loading.load_model(invocation(model, tmp_path / "run").recipe.model)
    torch.manual_seed(3)
    adapted = get_peft_model(base, lora_config(invocation(model, tmp_path / "run").recipe.train, FAMILIES["smollm2"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.5)
    message = invocation(model, tmp_path / "run").recipe.prompt.model_dump()
    settings = {"model": {"weights": weights}, "prompt": message, **message}
    finished(tmp_path / "run" / "adapter", adapted.save_pretrained, settings)
    merged = adapted.merge_and_unload()
    tokenizer = real_tokenizer("smollm2")
    finished(tmp_path / "run" / "merged", lambda folder: save(merged, tokenizer, folder), settings)
    found = {}
    for name in ("plain", "message", "adapter", "merged"):
        arm = arms.load(invocation(model, tmp_path / "run", *SHORT, f"eval.arm={name}", "eval.replay=full"))
        found[name] = (arm, replay(arm, REQUESTS[:6]))
        assert arm.name == name
        assert not arm.model.training
        assert (arm.system is None) == (name == "plain")
    assert found["plain"][0].prompt(REQUESTS[0], 1) != found["message"][0].prompt(REQUESTS[0], 1)
    assert found["message"][0].prompt(REQUESTS[0], 1) == found["merged"][0].prompt(REQUESTS[0], 1)
    assert found["plain"][1] != found["message"][1] != found["merged"][1] == found["adapter"][1]
    assert found["plain"][0].weights == found["message"][0].weights == weights
    assert len({arm.weights for arm, _ in found.values()}) == 3


@pytest.mark.parametrize(("arm", "command"), [("adapter", "train/sft.py"), ("merged", "train/merge.py")])
def test_an_arm_that_is_not_there_names_the_command(model, tmp_path, capsys, arm, command):
    argv = arguments(model, tmp_path / "run", f"eval.arm={arm}")
    assert f"{command} recipe={tmp_path / 'tiny.yaml'} run.dir={tmp_path / 'run'}" in fails(capsys, *argv)


@pytest.mark.parametrize("arm", ["adapter", "merged"])
def test_an_arm_of_another_base_is_refused(model, tmp_path, capsys, arm):
    finished(tmp_path / "run" / arm, lambda folder: None, {"model": {"weights": "0123"}})
    said = fails(capsys, *arguments(model, tmp_path / "run", f"eval.arm={arm}"))
    assert f"{tmp_path / 'run' / arm}: made from another base (weights 0123)" in said


# --- the whole script ---


def row(number, sentences, entry_point="one", tests="assert one() == 1"):
    extra = {"entry_point": entry_point, "tests": tests, "task": f"task{number}"}
    return {"id": f"own/{number}", "sentences": sentences, "reference": None, "extra": extra}


ROWS = [
    row(0, ["Write `one`.", " It returns 1."]),
    row(1, ["Write `one`.", " It returns 2."], tests="assert one() == 2"),
    row(2, ["Write `two`."], "two", "assert two() == 2"),
    row(3, ["Write `two`.", " It returns 2.", " Thanks \u2028 字."], "two", "assert two() == 2"),
    row(4, ["Write a function.", " Name it `one`.", " It returns 1.", " Always."]),
]


def benchmark(folder, rows=ROWS, name="own.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chosen(path):
    """Overrides that evaluate this file's requests."""
    return ("eval.benchmarks=[heldout]", f"eval.paths.heldout={path}")


def fails(capsys, *argv):
    """The one line that eval/run.py says about bad input."""
    capsys.readouterr()
    assert run.main(list(argv)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def recited(tmp_path_factory):
    """A model that answers everything with one right function."""
    tokenizer = real_tokenizer("smollm2")
    return save(reciter(tokenizer, ANSWER), tokenizer, tmp_path_factory.mktemp("model") / "tiny")


SETTINGS = ("eval.replay=full", "eval.max_new_tokens=12", "eval.batch_size=2", "eval.timed=2")


@pytest.fixture(scope="module")
def evaluated(recited, tmp_path_factory):
    """The evaluation folder of a whole run, and its command line but for the run's folder."""
    folder = tmp_path_factory.mktemp("evaluated")
    overrides = (*SETTINGS, *chosen(benchmark(folder)))
    assert run.main(arguments(recited, folder / "run", *overrides)) == 0
    return folder / "run" / "eval" / "message", overrides


def test_a_whole_evaluation(evaluated):
    folder, _ = evaluated
    found, clock = lines(folder / "requests.jsonl"), lines(folder / "timings.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert [line["id"] for line in found] == [f"own/{n}" for n in range(5)]
    assert [line["stream_score"] for line in found] == [1, 0, None, 0, 1]
    assert [line["base_score"] for line in found] == [1, 0, None, 0, 1]
    assert found[0]["stream"]["text"] == ANSWER
    assert found[0]["score_note"] == "base: passed; stream: passed"
    assert found[1]["score_note"] == "base: assertion failed; stream: assertion failed"
    assert found[3]["score_note"] == "base: extraction; stream: extraction"
    assert found[3]["sentences"][2] == " Thanks \u2028 字."
    name = summary["settings"]["eval"]["benchmarks"][0]
    assert {line["benchmark"] for line in found} == set(summary["benchmarks"]) == set(summary["ids"]) == {name}
    assert summary["ids"][name] == [line["id"] for line in found]
    assert summary["excluded"] == [{"id": "own/2", "benchmark": name, "reason": "single sentence"}]
    assert [one["id"] for one in clock] == ["own/0", "own/1"]
    figures = summary["benchmarks"][name]
    assert (figures["n"], figures["n_excluded"], figures["n_timed"]) == (4, 1, 2)
    assert figures["quality_stream"]["value"] == figures["quality_base"]["value"] == 0.5
    assert figures["one_pass_share"]["value"] == figures["kept_share"]["value"] == 1
    assert figures["speedup_passes_median"]["value"] == len(found[0]["base"]["tokens"])
    assert summary["arm"] == "message"
    assert set(summary["hashes"]) == {"data", "renderer", "sentence_rule", "weights"}
    assert summary["noise_floor"]["streamed_answer_differs_from_base"] == 0
    assert summary["sandbox"].startswith(("bubblewrap", "isolated interpreter"))
    assert summary["versions"]["torch"]


def test_running_again_does_nothing(evaluated, recited, capsys):
    folder, overrides = evaluated
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run.main(arguments(recited, folder.parent.parent, *overrides, "train.rank=3")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    argv = arguments(recited, folder.parent.parent, *overrides, "eval.timed=1")
    assert f"{folder}: made by other settings (eval.timed: 2 there, 1 here)" in fails(capsys, *argv)


def interrupt(*arguments, **keywords):
    raise KeyboardInterrupt


def test_a_killed_evaluation_resumes_to_the_same_bytes(evaluated, recited, tmp_path, monkeypatch):
    """Broken off in the second batch, inside a line and a character; the first batch is not replayed again."""
    folder, overrides = evaluated
    argv = arguments(recited, tmp_path / "run", *overrides)
    seen = []

    def counted(arm, part, unfit):
        seen.append([request.id for request in part])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return replay(arm, part, unfit)

    monkeypatch.setattr(shards, "replay", counted)
    assert run.main(argv) == 130
    assert not (tmp_path / "run" / "eval" / "message").exists()
    [written] = (tmp_path / "run" / "eval" / ".message.partial").glob("*.jsonl")
    with written.open("ab") as file:
        file.write('\n[1, [{"id": "字'.encode()[:-1])
    with monkeypatch.context() as patch:
        patch.setattr(timing, "time_request", interrupt)
        assert run.main(argv) == 130
    assert seen == [["own/0", "own/1"], ["own/2", "own/3"], ["own/2", "own/3"], ["own/4"]]
    monkeypatch.setattr(shards, "replay", interrupt)
    assert run.main(argv) == 0  # what is left is timed; nothing is replayed
    again = tmp_path / "run" / "eval" / "message"
    assert (again / "requests.jsonl").read_bytes() == (folder / "requests.jsonl").read_bytes()
    assert [one["id"] for one in lines(again / "timings.jsonl")] == ["own/0", "own/1"]
    summaries = [json.loads((one / "summary.json").read_text()) for one in (folder, again)]
    assert summaries[0]["hashes"] == summaries[1]["hashes"]
    assert {path.name for path in again.iterdir()} == {path.name for path in folder.iterdir()}


def test_figures_recomputed_from_the_evidence(model, tmp_path):
    """A few independent lines over requests.jsonl and timings.jsonl against summary.json."""
    rows = [row(i, list(request.sentences)) for i, request in enumerate(REQUESTS)]
    overrides = (*SHORT, "eval.timed=3", *chosen(benchmark(tmp_path, rows)))
    assert run.main(arguments(model, tmp_path / "run", *overrides)) == 0
    folder = tmp_path / "run" / "eval" / "message"
    summary = json.loads((folder / "summary.json").read_text())
    found = [line for line in lines(folder / "requests.jsonl") if line["excluded"] is None]
    clock = lines(folder / "timings.jsonl")
    speedups = [line["base_passes"] / line["stream_passes"] for line in found]
    drafted = [line for line in found if line["draft_tokens"]]
    seconds = [one["base_seconds"] / one["stream_seconds_cold"] for one in clock]
    ends = [line["base"]["stop"] == line["stream"]["stop"] == "end" for line in found]
    expected = {
        "quality_base": 0,
        "quality_stream": 0,
        "base_passes_median": statistics.median(line["base_passes"] for line in found),
        "stream_passes_median": statistics.median(line["stream_passes"] for line in found),
        "speedup_passes_mean": statistics.mean(speedups),
        "speedup_passes_median": statistics.median(speedups),
        "speedup_seconds_mean": statistics.mean(seconds),
        "speedup_seconds_median": statistics.median(seconds),
        "kept_share": statistics.mean(line["kept_tokens"] / line["draft_tokens"] for line in drafted),
        "kept_share_pooled": sum(x["kept_tokens"] for x in drafted) / sum(x["draft_tokens"] for x in drafted),
        "kept_tokens_mean": statistics.mean(line["kept_tokens"] for line in found),
        "one_pass_share": statistics.mean(line["stream_passes"] == 1 for line in found),
        "keeps_nothing_share": sum(line["kept_tokens"] == 0 for line in drafted) / len(found),
        "no_draft_share": statistics.mean(line["draft_tokens"] == 0 for line in found),
        "below_1x_share": statistics.mean(one < 1 for one in seconds),
        "ends_by_itself_share": statistics.mean(ends),
    }
    assert len(clock) > 1
    assert 0 < expected["no_draft_share"] < expected["ends_by_itself_share"] < 1
    (name,) = summary["benchmarks"]
    for scope in (summary["benchmarks"][name], summary["macro"], summary["pooled"]):
        assert (scope["n"], scope["n_excluded"], scope["n_timed"]) == (
            len(found),
            len(summary["ids"][name]) - len(found),
            len(clock),
        )
        assert {key: scope[key]["value"] for key in expected} == pytest.approx(expected)
        for key in expected:
            assert scope[key]["low"] <= scope[key]["value"] <= scope[key]["high"]


def test_two_benchmarks_and_a_limit(recited, tmp_path):
    own = [{"id": f"own/{n}", "text": "Hi. You.", "reference": ANSWER} for n in (7, 8)]
    own.append({"id": "own/9", "text": "Hi. You."})
    more = benchmark(tmp_path, own, "more.jsonl")
    # run.seed=27 draws the first two of each
    overrides = (
        "run.seed=27",
        "eval.limit=2",
        "eval.timed=1",
        "eval.max_new_tokens=12",
        f"eval.benchmarks=[heldout,{more}]",
        f"eval.paths.heldout={benchmark(tmp_path)}",
    )
    assert run.main(arguments(recited, tmp_path / "run", *overrides)) == 0
    folder = tmp_path / "run" / "eval" / "message"
    assert [line["id"] for line in lines(folder / "requests.jsonl")] == ["own/0", "own/1", "own/7", "own/8"]
    assert [one["id"] for one in lines(folder / "timings.jsonl")] == ["own/0", "own/7"]
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["benchmarks"]) == ["heldout", str(more)]
    quality = [part["quality_stream"]["value"] for part in summary["benchmarks"].values()]
    assert quality == [0.5, 1.0]
    assert summary["macro"]["quality_stream"]["value"] == 0.75


def test_a_broken_line_is_named(model, tmp_path, capsys):
    path = benchmark(tmp_path)
    good = path.read_text(encoding="utf-8")
    broken = {
        '{"id": "x", "sentences": ["a"': "line 6: ",
        json.dumps(row(9, [])): "line 6: sentences: ",
        json.dumps(row(9, ["a", 3])): "line 6: sentences.1: ",
        json.dumps(row(9, ["a", "b"], tests="assert (")): "line 6: extra.tests: Value error, does not compile",
        "[]": "line 6: the row: ",
    }
    for text, expected in broken.items():
        path.write_text(good + text + "\n", encoding="utf-8")
        said = fails(capsys, *arguments(model, tmp_path / "run", *chosen(path)))
        assert f"{path}, {expected}" in said
    path.write_text(good + json.dumps(ROWS[0]) + "\n", encoding="utf-8")
    said = fails(capsys, *arguments(model, tmp_path / "run", *chosen(path)))
    assert "the id 'own/0' stands twice in heldout" in said
    assert not (tmp_path / "run").exists()


def test_bad_input_is_one_line(model, tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "run"
    path = benchmark(tmp_path)

    def said(*overrides):
        return fails(capsys, *arguments(model, run_dir, *chosen(path), *overrides))

    assert "set eval.allow_code_execution=true" in said("eval.allow_code_execution=false")
    assert f"first run: python data_builders/build.py recipe={tmp_path / 'tiny.yaml'} run.dir=" in fails(
        capsys, *arguments(model, run_dir, "eval.benchmarks=[heldout]")
    )
    assert f"{tmp_path}/none.jsonl: cannot be read" in said(f"eval.paths.heldout={tmp_path}/none.jsonl")
    missing = f"eval.benchmarks=[heldout,{tmp_path}/none.jsonl]"
    assert f"{tmp_path}/none.jsonl: cannot be read" in said(missing)
    assert "no benchmark 'humanevil'; there are humaneval, mbpp" in said("eval.benchmarks=[heldout,humanevil]")
    assert "eval.paths.heldout: 'heldout' is not among" in said("eval.benchmarks=[humaneval]")
    copy = benchmark(tmp_path, [{"id": "own/3", "text": "Hi. You."}], "copy.jsonl")
    assert f"the id 'own/3' stands in heldout and in {copy}" in said(f"eval.benchmarks=[heldout,{copy}]")
    assert "cannot be loaded" in said(f"model.name={tmp_path / 'nowhere'}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 processes were launched but 1 joined" in said()
    assert not (run_dir / "eval" / "message").exists()


def test_a_sandbox_that_judges_wrongly_stops_the_run(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite.sandbox, "GOOD", "def f(x):\n    return x + 2\n")
    said = fails(capsys, *arguments(model, tmp_path / "run", *chosen(benchmark(tmp_path))))
    assert "the sandbox is not fit to score" in said


def test_a_sandbox_that_fails_while_scoring_stops_the_run(recited, tmp_path, capsys, monkeypatch):
    argv = arguments(recited, tmp_path / "run", "eval.max_new_tokens=12", *chosen(benchmark(tmp_path)))

    def broken(*arguments, **keywords):
        raise suite.sandbox.SandboxError("no bwrap any more")

    monkeypatch.setattr(suite.heldout, "score", broken)
    assert "scoring stopped, the sandbox failed (no bwrap any more); the same command resumes" in fails(capsys, *argv)
    assert not (tmp_path / "run" / "eval" / "message").exists()


def test_dry_run_says_what_would_be_done_and_writes_nothing(model, tmp_path, capsys):
    path = benchmark(tmp_path)
    argv = arguments(model, tmp_path / "run", *chosen(path), "eval.limit=3", "--dry-run")
    assert run.main(argv) == 0
    assert f"would replay 3 of heldout into {tmp_path / 'run' / 'eval' / 'message'}" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError):
        run_folder.need(tmp_path / "run", "nothing")


def test_half_a_surrogate_pair_is_named(tmp_path):
    row = {"id": "a", "sentences": ["x \ud800"], "extra": {"entry_point": "f", "tests": "assert f", "task": "t"}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"line 1: sentences\.0: "):
        heldout.load(str(path))
