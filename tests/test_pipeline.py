"""Each autoregressive recipe from data to report on a CPU: model.tiny, its real tokenizer, made-up conversations."""

import json

import lmsys_rows
import pytest
from conftest import FAMILIES, tokenizer_folder

from data_builders import build
from eval import report, run
from train import merge, sft

SETTINGS = (
    *("model.tiny=true", "model.dtype=float32", "model.device=cpu"),
    *("data.benchmarks=[humaneval]", "data.limit=60", "data.heldout=6", "data.max_new_tokens=24", "data.workers=1"),
    *("train.steps=4", "train.effective_batch=4", "train.micro_batch=2", "train.learning_rate=3e-3"),
    *("train.warmup_steps=0", "train.watch_every=2", "train.watch_requests=4", "train.watch_max_new_tokens=16"),
    *("eval.benchmarks=[humaneval]", "eval.limit=6", "eval.max_new_tokens=24", "eval.timed=0"),
    *("eval.allow_code_execution=true", "report.bootstrap=50", "report.replays=1", "merge.max_new_tokens=8"),
    "report.quality_before=message",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Made-up rows of LMSYS-Chat-1M's schema."""
    folder = tmp_path_factory.mktemp("lmsys")
    lmsys_rows.write(folder, 80, files=1)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_recipe_runs_from_data_to_report(name, corpus, tmp_path, capsys):
    given = [f"recipe={name}", f"run.dir={tmp_path / 'run'}", *SETTINGS]
    if name == "smollm2":
        given += ["data.answers=self", "data.corpora=[seed]"]
    else:
        given += [f"model.name={tokenizer_folder(name)}", f"data.paths.lmsys={corpus}"]
    steps = ((build, ()), (run, ("eval.arm=message",)), (sft, ()), (merge, ()))
    for script, more in (*steps, (run, ("eval.arm=merged",)), (report, ())):
        assert script.main([*given, *more]) == 0, capsys.readouterr().err
    folder = tmp_path / "run"
    assert (folder / "report" / "report.html").is_file()
    looks = [json.loads(line) for line in (folder / "adapter" / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 2, 4]
    summary = json.loads((folder / "eval" / "merged" / "summary.json").read_text())
    assert summary["pooled"]["n"] + summary["pooled"]["n_excluded"] == 6
    assert json.loads((folder / "merged" / "merge.json").read_text())["changed_tensors"] > 0
