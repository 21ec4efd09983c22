"""Watching: its figures are the evaluator's, it changes nothing, and the best adapter is kept."""

import json
import re
import statistics

import pytest
import tiny_run
import torch
from peft import PeftModel
from tiny_models import WORDS, save
from tiny_run import MESSAGE, killed_after, train, weights, write_recipe
from transformers import AutoModelForCausalLM

from eval import run as evaluation
from headstart.family import FAMILIES
from headstart.prompt import renderer
from headstart.residual import kept_share
from headstart.tiny import tiny_model
from recipes.errors import UserError
from recipes.loader import parse, resolve
from recipes.schema import Train
from train import base as train_base
from train import sft, watching
from train.watch import Watched, best, watched_requests

WATCHED = {"watch_every": 2, "watch_max_new_tokens": 12, "watch_requests": 5}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model whose answers are few words and end by themselves."""
    tokens = tiny_run.tokenizer("smollm2")
    return save(tiny_model(tokens, FAMILIES["smollm2"]), tokens, tmp_path_factory.mktemp("base"))


def pairs():
    """Answers in the few words that a talker has."""
    found = tiny_run.rows(10)
    for n, pair in enumerate(found):
        pair["completion"][0]["content"] = " ".join(word.strip() for word in WORDS[n % 4 : n % 4 + 4])
    return found


def recipe_of(folder, base, **settings):
    """A recipe that is watched; its adapter moves, and its answers do not vanish."""
    return write_recipe(folder, base, "smollm2", pairs(), **{"steps": 6, "learning_rate": 1e-3, **WATCHED, **settings})


def looks(adapter):
    """What watch.jsonl says."""
    return [Watched(**json.loads(line)) for line in (adapter / "watch.jsonl").read_text().splitlines()]


def timeless(adapter):
    """The looks without what differs from run to run."""
    return [{**vars(look), "seconds": None} for look in looks(adapter)]


@pytest.fixture(scope="module")
def watched_run(base, tmp_path_factory):
    """A run of six steps, watched at every second one."""
    folder = tmp_path_factory.mktemp("watched")
    recipe = recipe_of(folder, base)
    return recipe, train(recipe)


def test_it_looks_at_step_0_and_then_at_every_nth(watched_run):
    found = looks(watched_run[1])
    assert [look.step for look in found] == [0, 2, 4, 6]
    assert all(look.n >= 3 and look.seconds > 0 for look in found)
    assert len({look.drift for look in found}) == 4  # the adapter moves
    assert not (watched_run[1] / ".best").exists()


def test_its_figures_are_those_of_the_evaluator(watched_run):
    recipe, adapter = watched_run
    own = adapter.parent / "own.jsonl"
    own.write_text("".join(json.dumps(f"{task} Be quick.") + "\n" for task in tiny_run.TASKS[:5]))
    settings = ["eval.arm=adapter", f"eval.benchmarks=[{own}]", "eval.max_new_tokens=12", "eval.timed=0"]
    assert evaluation.main([f"recipe={recipe}", *settings]) == 0
    lines = [json.loads(x) for x in (adapter.parent / "eval" / "adapter" / "requests.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["excluded"] is None]
    speedups = [line["base_passes"] / line["stream_passes"] for line in counted]
    shares = [kept_share(line["draft_tokens"], line["kept_tokens"]) for line in counted]
    shares = [share for share in shares if share is not None]
    last = looks(adapter)[-1]
    assert last.n == len(counted)
    assert last.speedup_passes_median == statistics.median(speedups)
    assert last.speedup_passes_mean == pytest.approx(statistics.fmean(speedups), rel=1e-12)
    assert last.kept_share == pytest.approx(statistics.fmean(shares), rel=1e-12)
    assert 0 < last.kept_share < 1


@torch.no_grad()
def test_its_drift_is_the_divergence_on_the_plain_answers(watched_run, base):
    _, adapter = watched_run
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    rendering = renderer(tiny_run.tokenizer("smollm2"), FAMILIES["smollm2"])
    total, tokens = 0.0, 0
    for task in tiny_run.TASKS[:5]:
        plain = rendering.prompt(task + " Be quick.")
        with model.disable_adapter():
            whole = model.generate(
                torch.tensor([plain]), max_new_tokens=12, do_sample=False, eos_token_id=rendering.end_of_turn
            )[0].tolist()
            answer = whole[len(plain) :]
            wanted = model(torch.tensor([whole])).logits[0, len(plain) - 1 : -1].log_softmax(-1)
        row = [*rendering.prompt(task + " Be quick.", system=MESSAGE), *answer]
        said = model(torch.tensor([row])).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
        total += float((wanted.exp() * (wanted - said)).sum())
        tokens += len(answer)
    assert looks(adapter)[-1].drift == pytest.approx(total / tokens, rel=1e-3)


def test_without_a_message_an_untrained_adapter_has_not_moved(base, tmp_path):
    recipe = recipe_of(tmp_path, base, steps=2, learning_rate=1e-1)
    recipe.write_text(recipe.read_text().replace(f"system_message: {MESSAGE}", "system_message: null"))
    step = tmp_path / "run" / "data" / "step.json"
    step.write_text(step.read_text().replace(json.dumps(MESSAGE), "null"))
    found = looks(train(recipe))
    assert abs(found[0].drift) < 1e-6
    assert found[1].drift > 100 * abs(found[0].drift)


def test_watching_does_not_change_what_is_trained(watched_run, base, tmp_path):
    recipe = recipe_of(tmp_path, base, watch_every=0)
    name = "adapter_model.safetensors"
    unwatched = train(recipe)
    assert (unwatched / name).read_bytes() == (watched_run[1] / name).read_bytes()
    assert (unwatched / "log.jsonl").read_text() == (watched_run[1] / "log.jsonl").read_text()
    assert not (unwatched / "watch.jsonl").exists()


def test_its_share_of_the_time_is_printed(base, tmp_path, capsys):
    train(recipe_of(tmp_path, base, steps=2))
    printed = capsys.readouterr().out
    assert re.search(r"watch at step 0: kept [\d.]+%, speedup in passes median [\d.]+x mean", printed)
    assert re.search(r"watching took \d+ s, [\d.]+% of the run", printed)


def test_a_killed_run_resumes_with_the_same_looks_and_keeps_the_same_adapter(base, tmp_path, monkeypatch):
    settings = {"save_every": 2, "keep": "best", "max_drift": 100.0}
    whole = train(recipe_of(tmp_path / "whole", base, **settings))
    recipe = recipe_of(tmp_path / "killed", base, **settings)
    with monkeypatch.context() as patch:
        killed_after(patch, 4)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe)
    resumed = train(recipe)
    assert timeless(resumed) == timeless(whole)
    name = "adapter_model.safetensors"
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert tiny_run.card(resumed)["step"] == tiny_run.card(whole)["step"]


def test_the_best_adapter_is_that_of_its_step(base, tmp_path, monkeypatch):
    ranked = {2: 1.0, 4: 3.0, 6: 2.0}
    chosen = lambda looks, settings: max((x for x in looks if x.step), key=lambda x: ranked[x.step], default=None)  # noqa: E731
    monkeypatch.setattr("train.watching.best", chosen)
    kept = train(recipe_of(tmp_path / "best", base, steps=6, keep="best"))
    four = train(recipe_of(tmp_path / "four", base, steps=4))
    assert tiny_run.card(kept)["step"] == 4
    assert all(torch.equal(tensor, weights(four)[name]) for name, tensor in weights(kept).items())


def test_a_look_that_comes_out_otherwise_after_a_resume_leaves_no_adapter_of_another_step(base, tmp_path, monkeypatch):
    """Killed after a look at step 6 that was the best; resumed from step 4, step 6 is no longer better than step 2."""
    ranked = {2: 2.0, 4: 1.0, 6: 3.0, 8: 0.0}
    chosen = lambda looks, settings: max((x for x in looks if x.step), key=lambda x: ranked[x.step], default=None)  # noqa: E731
    monkeypatch.setattr("train.watching.best", chosen)
    recipe = recipe_of(tmp_path / "killed", base, steps=8, save_every=4, keep="best")
    looked = watching.Watch._look

    def killed(self, state, control):
        looked(self, state, control)
        if state.global_step == 6:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(watching.Watch, "_look", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe)
    ranked[6] = 0.5
    kept = train(recipe)
    assert tiny_run.card(kept)["step"] == 2
    two = train(recipe_of(tmp_path / "two", base, steps=2))
    assert all(torch.equal(tensor, weights(two)[name]) for name, tensor in weights(kept).items())


def test_held_out_requests_that_do_not_fit_are_one_line(base, tmp_path):
    recipe = recipe_of(tmp_path, base)
    data = resolve(str(recipe)).run_dir / "data"
    long = {"id": "long", "sentences": ["A word" + " and a word" * 1000 + ".", " And then?"]}
    (data / "heldout.jsonl").write_text(json.dumps(long) + "\n")
    tiny_run.reseal(data)
    with pytest.raises(UserError, match=r"no request to watch fits train.max_length=\d+ tokens"):
        sft.train(parse([f"recipe={recipe}"]))


def look(step, median, mean=1.0, drift=0.0):
    return Watched(step, 5, 0.5, mean, median, drift, 1.0)


def test_the_best_is_the_fastest_whose_drift_is_within_bounds():
    settings = Train(keep="best", watch_every=1, max_drift=0.1)
    start = look(0, 9.0, drift=0.2)
    assert best([start], settings) is None
    slow, fast, far = look(1, 1.0, drift=0.25), look(2, 2.0, drift=0.3), look(3, 8.0, drift=0.31)
    assert best([start, slow, fast, far], settings) is fast
    assert best([start, far], settings) is None
    silent = Watched(5, 0, None, None, None, 0.2, 1.0)
    assert best([start, silent], settings) is None
    tie = look(4, 2.0, mean=5.0, drift=0.1)
    assert best([start, slow, fast, far, tie], settings) is tie


def test_without_a_step_within_bounds_the_last_is_kept_and_it_says_so(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.watching.best", lambda looks, settings: None)
    settings = {"steps": 4}
    last = train(recipe_of(tmp_path / "last", base, **settings))
    kept = train(recipe_of(tmp_path / "best", base, **settings, keep="best", max_drift=0.0))
    assert "no watched step is within train.max_drift=0.0; the last is kept" in capsys.readouterr().out
    assert (kept / "adapter_model.safetensors").read_bytes() == (last / "adapter_model.safetensors").read_bytes()


def test_the_requests_are_drawn_by_seed_and_those_of_one_sentence_left_out(tmp_path):
    file = tmp_path / "heldout.jsonl"
    rows = [{"id": str(n), "sentences": ["One.", " Two."][: 1 + n % 3], "reference": None} for n in range(12)]
    rows.append(
        {"id": "chat", "messages": [{"role": r, "content": "Hello there. Who are you?"} for r in ("user", "user")]}
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    everything = watched_requests(file, 100, 0)
    assert [request.id for request in everything] == [*(str(n) for n in range(12) if n % 3), "chat"]
    assert everything[-1].sentences == ("Hello there.", " Who are you?")
    assert everything[-1].history[0].content == "Hello there. Who are you?"
    assert len(watched_requests(file, 3, 0)) == 3
    assert len({tuple(r.id for r in watched_requests(file, 3, seed)) for seed in range(8)}) > 1


def test_nothing_to_watch_is_an_error(base, tmp_path, capsys):
    recipe = recipe_of(tmp_path, base, steps=2)
    heldout = tmp_path / "run" / "data" / "heldout.jsonl"
    heldout.write_text("")
    tiny_run.reseal(heldout.parent)
    assert sft.main([f"recipe={recipe}"]) == 2
    assert "no request of two sentences to watch; set data.heldout, or train.watch_every=0" in capsys.readouterr().err
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.keep=best", "train.keep=best needs steps that are watched"),
        ("eval.benchmarks=[humaneval,heldout]", "eval.benchmarks may not report on them"),
        ("eval.benchmarks=[runs/x/data/heldout.jsonl]", "eval.benchmarks may not report on them"),
    ],
)
def test_what_cannot_be_kept_or_reported_honestly_is_refused(override, says):
    given = [] if override == "train.keep=best" else ["train.keep=best", "train.watch_every=5"]
    with pytest.raises(UserError, match=re.escape(says)):
        parse(["recipe=smollm2", *given, override])


def test_nothing_is_watched_under_zero3(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("train.base.zero_stage", lambda: 3)
    recipe = recipe_of(tmp_path, base, steps=2)
    given = resolve(str(recipe))
    step = type("Step", (), {"invocation": given, "partial": tmp_path})
    assert sft.watch(given.recipe, None, frozenset(), step) == []
    assert "nothing is watched under ZeRO-3; launch under zero2.yaml" in capsys.readouterr().out
    kept = resolve(str(recipe), ["train.keep=best", "eval.benchmarks=[mbpp]"]).recipe
    with pytest.raises(UserError, match="nothing is watched under ZeRO-3"):
        train_base.check(kept)
