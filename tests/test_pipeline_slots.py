"""Both ReFusion recipes from data to report on a CPU: model.tiny, ReFusion's tokenizer, made-up rows of its corpora."""

import json

import pytest
from conftest import tokenizer_folder

from data_builders import build
from eval import audit, report, run
from train import merge, sft

SETTINGS = (
    *("model.tiny=true", "model.dtype=float32", "model.device=cpu", "model.revision=null"),
    *("data.corpora=[seed]", "data.limit=40", "data.pairs=40", "data.heldout=6", "data.benchmarks=[humaneval]"),
    *("data.max_new_tokens=32", "data.workers=1"),
    *("slots.slot_size=8", "slots.serial_blocks=2", "slots.slot_threshold=0.5", "slots.token_threshold=0.1"),
    *("train.steps=4", "train.effective_batch=4", "train.micro_batch=2", "train.learning_rate=3e-3"),
    *("train.warmup_steps=0", "train.watch_every=2", "train.watch_requests=4", "train.watch_max_new_tokens=32"),
    *("eval.benchmarks=[humaneval]", "eval.limit=6", "eval.max_new_tokens=32", "eval.timed=1", "eval.tau=0.05"),
    *("eval.allow_code_execution=true", "report.bootstrap=50", "report.replays=1", "merge.max_new_tokens=8"),
)


@pytest.mark.parametrize("name", ["refusion-prefix-to-answer", "refusion-draft-refinement"])
def test_a_slot_diffusion_recipe_runs_from_data_to_report(name, tmp_path, capsys):
    given = [f"recipe={name}", f"run.dir={tmp_path / 'run'}", f"model.name={tokenizer_folder('refusion')}", *SETTINGS]
    steps = ((build, ()), (run, ("eval.arm=plain",)), (sft, ()), (merge, ()), (run, ("eval.arm=merged",)), (report, ()))
    for script, more in steps:
        assert script.main([*given, *more]) == 0, capsys.readouterr().err
    folder = tmp_path / "run"
    assert (folder / "report" / "report.html").is_file()
    looks = [json.loads(line) for line in (folder / "adapter" / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 2, 4]
    lines = [json.loads(line) for line in (folder / "eval" / "merged" / "requests.jsonl").read_text().splitlines()]
    walked = [line for line in lines if line["excluded"] is None]
    assert walked
    assert all(len(line["updates"]) == len(line["sentences"]) for line in walked)
    assert all(line["stream_passes_paper"] == max(3, line["stream_passes"]) for line in walked)
    assert json.loads((folder / "merged" / "merge.json").read_text())["changed_tensors"] > 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("slots.slot_size=3", "are no whole number of slots"),
        ("slots.benchmarks={humaneval: {slot_size: 3}}", "are no whole number of slots"),
        ("slots.benchmarks={humanevall: {slot_size: 4}}", "slots.benchmarks.humanevall: no benchmark 'humanevall'"),
        ("slots.hide=each", "slots.hide: model.family=refusion has no use for it"),
        ("slots={keep: every, paper_floor: true}", "goes with neither paper_floor nor half_kept=drop"),
    ],
)
@pytest.mark.parametrize("script", [run, audit])
def test_slots_that_cannot_be_are_refused_before_a_model_is_loaded(script, setting, said, tmp_path, capsys):
    given = [f"run.dir={tmp_path / 'run'}", f"model.name={tokenizer_folder('refusion')}", *SETTINGS]
    asked = ["recipe=refusion-prefix-to-answer", *given, setting, "eval.arm=plain", "--dry-run"]
    assert script.main(asked) == 2
    assert said in capsys.readouterr().err


def test_slots_of_a_model_that_has_none_are_refused(capsys):
    assert run.main(["recipe=smollm2", "slots.keep=every", "--dry-run"]) == 2
    assert "slots.keep: model.family=smollm2 has no use for it" in capsys.readouterr().err
