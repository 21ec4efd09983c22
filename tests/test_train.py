"""Training: rows, where the adapter sits, and whole runs of train/sft.py on tiny models."""

import itertools
import json
import re
import shutil

import pytest
import tiny_run
import torch
from conftest import FAMILIES as NAMES
from conftest import SIZES, tiny_model
from datasets import Dataset
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from tiny_run import distance, killed_after, rows, train, trained, weights, write_pairs, write_recipe
from transformers import AutoModelForCausalLM, Phi3Config
from trl import SFTConfig, SFTTrainer

from headstart.family import FAMILIES
from headstart.model import weights_hash
from headstart.prompt import IGNORED, renderer
from recipes.errors import UserError
from recipes.loader import resolve
from recipes.schema import Train
from train import sft
from train.adapter import adapted_modules, lora_config, prove_adapter, refuse_quantised
from train.checkpoints import WHOLE
from train.rows import in_order, padding_share, training_rows, write_dropped
from train.trainer import LabelledTrainer

PARITY = {"steps": 6, "dropout": 0.0}


@pytest.fixture(scope="module")
def smollm2():
    """The renderer of SmolLM2's real tokenizer."""
    return renderer(tiny_run.tokenizer("smollm2"), FAMILIES["smollm2"])


@pytest.fixture(scope="module")
def base():
    """A base that trains in no time."""
    return tiny_run.small_base()


@pytest.fixture
def data(tmp_path):
    """A data folder with ten pairs, the last of them long."""
    pairs = rows(9)
    long = rows(10)[9]
    long["completion"][0]["content"] = "word " * 200
    write_pairs([*pairs, long], tmp_path)
    return tmp_path


# rows


def test_a_pair_longer_than_max_length_is_dropped_and_counted_and_no_label_is_lost(data, smollm2, tmp_path):
    whole = training_rows(data, smollm2, Train(), 0)
    assert whole.too_long == []
    lengths = [len(ids) for ids in whole.dataset["input_ids"]]
    found = training_rows(data, smollm2, Train(max_length=max(lengths[:-1])), 0)  # a row of just that length fits
    assert found.too_long == [{"id": rows(10)[9]["id"], "tokens": lengths[-1]}]
    assert found.dataset[:] == whole.dataset.select(range(9))[:]
    for pair, row in zip(rows(9), found.dataset, strict=True):
        supervised = [token for token in row["labels"] if token != IGNORED]
        assert supervised[-1] == smollm2.end_of_turn
        assert smollm2.text(supervised[:-1]) == pair["completion"][0]["content"]
        assert row["input_ids"][-len(supervised) :] == supervised
    assert found.supervised_tokens == sum(x != IGNORED for labels in found.dataset["labels"] for x in labels)
    write_dropped(found, tmp_path / "dropped")
    assert json.loads((tmp_path / "dropped" / "too-long.jsonl").read_text()) == found.too_long[0]


def test_no_pair_that_fits_is_an_error(data, smollm2):
    with pytest.raises(UserError, match=r"none of 10 pairs fits train\.max_length=20 tokens"):
        training_rows(data, smollm2, Train(max_length=20), 0)


def test_no_pairs_is_an_error(tmp_path, smollm2):
    with pytest.raises(UserError, match="holds no pairs"):
        training_rows(tmp_path, smollm2, Train(max_length=20), 0)
    write_pairs([], tmp_path)
    with pytest.raises(UserError, match="holds no pairs; build the data anew"):
        training_rows(tmp_path, smollm2, Train(max_length=20), 0)


def test_a_pair_without_an_answer_is_named(tmp_path, smollm2):
    pairs = rows(3)
    pairs[1]["completion"][0]["content"] = " \n"
    write_pairs(pairs, tmp_path)
    with pytest.raises(UserError, match=re.escape(f"pair {pairs[1]['id']}: ")):
        training_rows(tmp_path, smollm2, Train(), 0)


def order(**settings):
    """Settings that decide the order of rows."""
    return Train(**{"steps": 6, "effective_batch": 4, **settings})


def laid(dataset, settings, seed=1):
    """The rows in the order of training, as tuples of ids."""
    return [tuple(row) for row in in_order(dataset, settings, seed)["input_ids"]]


def test_the_order_of_rows_is_whole_epochs_shuffled_anew(data, smollm2):
    dataset = training_rows(data, smollm2, Train(), 0).dataset
    ids = [tuple(row) for row in dataset["input_ids"]]
    read = laid(dataset, order(effective_batch=1, steps=24))
    assert len(read) == 24
    assert sorted(read[:10]) == sorted(read[10:20]) == sorted(ids)
    assert read[:10] != read[10:20]
    assert read == laid(dataset, order(effective_batch=1, steps=24))
    assert read[:16] == laid(dataset, order(effective_batch=1, steps=16))
    assert read != laid(dataset, order(effective_batch=1, steps=24), seed=2)


def test_without_a_window_a_step_has_the_rows_of_plain_shuffling_longest_first(data, smollm2):
    dataset = training_rows(data, smollm2, Train(), 0).dataset
    plain, stepped = laid(dataset, order(effective_batch=1, steps=24)), laid(dataset, order())
    for begin in range(0, 24, 4):
        step = stepped[begin : begin + 4]
        assert sorted(step) == sorted(plain[begin : begin + 4])
        assert [len(row) for row in step] == sorted(map(len, step), reverse=True)


def test_a_window_sorts_its_steps_by_length_and_shuffles_them(data, smollm2):
    dataset = training_rows(data, smollm2, Train(), 0).dataset
    plain, windowed = laid(dataset, order()), laid(dataset, order(length_window=3))
    lengths = [[len(row) for row in windowed[i : i + 4]] for i in range(0, 24, 4)]
    for begin in (0, 12):
        assert sorted(windowed[begin : begin + 12]) == sorted(plain[begin : begin + 12])
        spans = sorted((min(step), max(step)) for step in lengths[begin // 4 : begin // 4 + 3])
        assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans))
    padded = [padding_share([len(row) for row in rows], 4) for rows in (plain, windowed)]
    assert padded[1] < padded[0]
    assert any(step[0] < following[0] for step, following in itertools.pairwise(lengths))  # not simply sorted


def test_the_padding_share_is_what_the_collator_pads():
    assert padding_share([5, 3, 2, 2], 2) == pytest.approx(2 / 14)
    assert padding_share([5, 3, 2], 2) == pytest.approx(2 / 12)
    assert padding_share([5, 3, 2, 2], 1) == 0


# where the adapter sits


def with_adapter(model, family):
    """Names of the modules that PEFT really put an adapter on."""
    adapted = get_peft_model(model, lora_config(Train(), FAMILIES[family]))
    names = {name.partition(".lora_")[0] for name, _ in adapted.named_parameters() if ".lora_" in name}
    return {name.removeprefix("base_model.model.") for name in names}


def test_the_adapter_sits_on_q_k_v_o_of_every_layer_and_nowhere_else(family):
    model = tiny_model(family)
    layers = model.config.num_hidden_layers
    expected = {f"model.layers.{i}.self_attn.{x}_proj" for i in range(layers) for x in "qkvo"}
    assert set(adapted_modules(model, FAMILIES[family])) == expected
    assert with_adapter(model, family) == expected


def test_the_adapter_leaves_a_vision_tower_alone():
    model = tiny_run.multimodal_gemma()
    vision = {name for name, _ in model.named_modules() if re.search(r"vision.*\.(q|k|v)_proj$", name)}
    assert len(vision) == 6  # what a list of names would also hit
    found = set(adapted_modules(model, FAMILIES["gemma3"]))
    assert found == with_adapter(model, "gemma3")
    assert {re.sub(r".*layers\.", "", name) for name in found} == {
        f"{i}.self_attn.{x}_proj" for i in range(2) for x in "qkvo"
    }
    assert all("language_model" in name for name in found)


def test_fused_projections_are_refused_with_the_names_that_there_are():
    model = AutoModelForCausalLM.from_config(
        Phi3Config(**{**SIZES, "vocab_size": 97, "num_hidden_layers": 2, "pad_token_id": 0})
    )
    with pytest.raises(UserError, match=r"matches 2 modules, expected q, k, v, o in 2 layers; .* o_proj, qkv_proj"):
        adapted_modules(model, FAMILIES["llama3"])


# what was saved is whole


@pytest.fixture
def saved(tmp_path):
    """Tensors of an adapter on two modules, and a function that saves and proves them."""
    modules = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    tensors = {}
    for module in modules:
        for side in "AB":
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = torch.ones(2, 2)

    def check():
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        prove_adapter(tmp_path, modules)

    return tensors, check


def test_a_whole_adapter_passes(saved):
    saved[1]()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(0), "is empty"),
        (torch.full((2, 2), float("nan")), "is not finite"),
        (torch.full((2, 2), float("inf")), "is not finite"),
        (torch.zeros(2, 2), "is zero after training"),
        (None, "is missing"),
    ],
)
def test_an_adapter_that_is_not_whole_is_refused(saved, tensor, says):
    tensors, check = saved
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(UserError, match=f"{re.escape(name)} {says}"):
        check()


def test_a_tensor_under_a_wrong_name_is_refused(saved):
    tensors, check = saved
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    tensors[f"module.{name}"] = tensors.pop(name)
    with pytest.raises(UserError, match="is missing"):
        check()


def test_a_quantised_base_is_refused(base, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    recipe = resolve(str(trained("smollm2")), [f"model.name={folder}"]).recipe
    with pytest.raises(UserError, match="its weights are quantised; give the full-precision model"):
        refuse_quantised(recipe.model)


# whole runs


def test_a_run_saves_the_adapter_alone(family):
    recipe = trained(family)
    invocation = resolve(str(recipe))
    adapter = invocation.run_dir / "adapter"
    names = {path.name for path in adapter.iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "headstart.json",
        "log.jsonl",
        "README.md",
        "recipe.yaml",
        "step.json",
    }
    layers = tiny_model(family).config.num_hidden_layers
    tensors = weights(adapter)
    assert len(tensors) == 8 * layers
    assert all(".lora_" in name for name in tensors)
    card = tiny_run.card(adapter)
    assert card["base"] == invocation.recipe.model.name
    assert card["base_weights"] == weights_hash(invocation.recipe.model)
    assert card["family"] == family
    assert card["renderer"] == renderer(tiny_run.tokenizer(family), FAMILIES[family]).fingerprint
    assert card["adapted_modules"] == adapted_modules(tiny_model(family), FAMILIES[family])
    assert [json.loads(line)["step"] for line in (adapter / "log.jsonl").open()] == [1, 2]


def test_the_adapter_loads_with_peft_on_an_unchanged_base(family):
    run = trained(family).parent
    base = AutoModelForCausalLM.from_pretrained(run / "base", dtype=torch.float32)
    made = tiny_model(family, len(tiny_run.tokenizer(family))).state_dict()
    assert all(torch.equal(tensor, made[name]) for name, tensor in base.state_dict().items())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, run / "run" / "adapter")(ids).logits
    assert float((after - before).abs().max()) > 1e-3


def test_running_again_does_nothing(capsys):
    recipe = trained("smollm2")
    adapter = resolve(str(recipe)).run_dir / "adapter"
    before = {path: path.stat().st_mtime_ns for path in adapter.iterdir()}
    train(recipe)
    assert "complete and made by these settings; nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in adapter.iterdir()} == before


def test_other_settings_are_refused(capsys):
    assert sft.main([f"recipe={trained('smollm2')}", "train.learning_rate=0.5"]) == 2
    assert "made by other settings (train.learning_rate: 0.001 there, 0.5 here)" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(base, tmp_path, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2")
    assert sft.main([f"recipe={recipe}", "--dry-run"]) == 0
    assert "10 rows of 10 pairs" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").glob("[!.]*")} == {"data", "recipe.yaml"}


def test_a_dry_run_says_what_training_would_stop_at(base, tmp_path, capsys):
    """A generation config that no merge could save (fault 31), and held-out requests that are not there."""
    recipe, odd = write_recipe(tmp_path, base, "smollm2"), tmp_path / "odd"
    shutil.copytree(base, odd)
    (odd / "generation_config.json").write_text('{"early_stopping": true, "eos_token_id": 2}')
    (tmp_path / "run" / "data" / "heldout.jsonl").unlink(missing_ok=True)
    tiny_run.reseal(tmp_path / "run" / "data")
    for setting, says in (
        (f"model.name={odd}", "its generation_config.json cannot be saved again"),
        ("train.watch_every=1", "no request of two sentences to watch"),
    ):
        for flags in (["--dry-run"], []):
            assert sft.main([f"recipe={recipe}", setting, *flags]) == 2
            assert says in capsys.readouterr().err


def test_dropped_pairs_are_kept_for_review(base, tmp_path, capsys):
    pairs = rows(9)
    pairs[4]["completion"][0]["content"] = "word " * 200
    adapter = train(write_recipe(tmp_path, base, "smollm2", pairs, steps=1, max_length=400))
    assert "8 rows of 9 pairs; 1 longer than 400 tokens dropped" in capsys.readouterr().out
    assert json.loads((adapter / "dropped" / "too-long.jsonl").read_text())["id"] == pairs[4]["id"]


def test_a_batch_that_does_not_divide_is_an_error(capsys):
    recipe = trained("smollm2")
    assert sft.main([f"recipe={recipe}", "train.micro_batch=3"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: train.effective_batch=2 is no multiple of micro_batch x processes = 3 x 1; change one of them\n"
    )


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "2"}, "2 processes were launched but 1 joined"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "several processes were asked for"),
    ],
)
def test_a_process_that_is_alone_but_should_not_be_is_an_error(monkeypatch, capsys, environment, says):
    recipe = trained("smollm2")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sft.main([f"recipe={recipe}"]) == 2
    assert says in capsys.readouterr().err


def test_a_killed_run_resumes_and_ends_bit_identical(base, tmp_path, monkeypatch, capsys):
    settings = {"steps": 6, "save_every": 2, "micro_batch": 4, "dropout": 0.2, "schedule": "cosine"}
    whole = train(write_recipe(tmp_path / "whole", base, "smollm2", **settings))
    recipe = write_recipe(tmp_path / "killed", base, "smollm2", **settings)
    with monkeypatch.context() as patch:
        killed_after(patch, 4)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe)
    partial = resolve(str(recipe)).run_dir / ".adapter.partial"
    (partial / ".checkpoints" / "checkpoint-4" / WHOLE).unlink()  # as if killed while it was being written
    (partial / ".checkpoints" / "checkpoint-4" / "trainer_state.json").write_text('{"half')
    capsys.readouterr()
    resumed = train(recipe)
    printed = capsys.readouterr().out
    assert "continuing what a killed run left" in printed
    assert re.findall(r"step (\d)/6", printed) == ["3", "4", "5", "6"]
    name = "adapter_model.safetensors"
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()
    assert (resumed / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    assert not (resumed / ".checkpoints").exists()


def test_a_launch_of_another_size_does_not_resume(base, tmp_path, monkeypatch, capsys):
    recipe = write_recipe(tmp_path, base, "smollm2", steps=2, save_every=1)
    with monkeypatch.context() as patch:
        killed_after(patch, 1)
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe)
    marker = tmp_path / "run" / ".adapter.partial" / ".checkpoints" / "checkpoint-1" / WHOLE
    marker.write_text(marker.read_text().replace("1 process", "4 process"))
    assert sft.main([f"recipe={recipe}"]) == 2
    assert re.search(r"written under 4 process.*; launch as before, or remove", capsys.readouterr().err)


@pytest.fixture(scope="module")
def parity(base, tmp_path_factory):
    """The adapter of 6 steps of 8 rows, each step in one forward pass."""
    return weights(train(write_recipe(tmp_path_factory.mktemp("parity"), base, "smollm2", **PARITY)))


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_and_padding_do_not_change_the_update(base, tmp_path, parity, micro_batch):
    found = weights(train(write_recipe(tmp_path, base, "smollm2", **PARITY, micro_batch=micro_batch)))
    assert distance(parity, found) < 1e-3


def test_gradient_checkpointing_does_not_change_the_update(base, tmp_path, parity):
    found = weights(train(write_recipe(tmp_path, base, "smollm2", **PARITY, gradient_checkpointing=True)))
    assert distance(parity, found) < 1e-5
    assert all(tensor.any() for name, tensor in found.items() if ".lora_B." in name)


def test_another_learning_rate_changes_the_update(base, tmp_path, parity):
    """What the parity tests would not see if all runs ended alike."""
    found = weights(train(write_recipe(tmp_path, base, "smollm2", **{**PARITY, "learning_rate": 2e-3})))
    assert distance(parity, found) > 1e-1


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("steps", 7, "max_steps"),
        ("micro_batch", 3, "per_device_train_batch_size"),
        ("schedule", "linear", "lr_scheduler_type"),
        ("warmup_steps", 5, "warmup_steps"),
        ("weight_decay", 0.5, "weight_decay"),
        ("max_grad_norm", 0.5, "max_grad_norm"),
        ("gradient_checkpointing", True, "activation_checkpointing"),
        ("log_every", 3, "logging_steps"),
        ("save_every", 9, "save_steps"),
        ("rank", 4, "r"),
        ("alpha", 32, "lora_alpha"),
        ("dropout", 0.5, "lora_dropout"),
    ],
)
def test_a_setting_reaches_the_trainer_or_the_adapter(tmp_path, key, value, name):
    recipe = resolve("smollm2", [f"train.{key}={value}", "model.device=cpu"]).recipe
    found = {
        **lora_config(recipe.train, FAMILIES["smollm2"]).to_dict(),
        **sft.arguments(recipe, tmp_path, accumulation=2).to_dict(),
    }
    assert found[name] == value
    assert found["gradient_accumulation_steps"] == 2


def test_a_process_trains_on_one_device_however_many_there_are(tmp_path, monkeypatch):
    """Else transformers spreads one process' rows over all, and a step has several times the recipe's rows."""

    def four(self):
        self._n_gpu = 4
        return torch.device("cpu")

    monkeypatch.setattr(SFTConfig, "_setup_devices", property(four))
    arguments = sft.arguments(resolve("smollm2", ["model.device=cpu"]).recipe, tmp_path, accumulation=2)
    assert (arguments.n_gpu, arguments.train_batch_size) == (1, arguments.per_device_train_batch_size)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["train.steps=1"], "the first step of a warm-up has rate 0"),
        (
            ["train.keep=best", "train.watch_every=50", "train.steps=40"],
            "train.watch_every=50 watches none of 40 steps",
        ),
        (["train.dropout=1.0"], "less than 1"),
    ],
)
def test_settings_under_which_nothing_could_be_learnt_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        resolve("smollm2", settings)


def test_a_loss_that_is_not_finite_stops_with_one_line(base, tmp_path, capsys):
    broken = tmp_path / "base"
    shutil.copytree(base, broken)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(broken)
    recipe = write_recipe(tmp_path, broken, "smollm2")
    capsys.readouterr()
    assert sft.main([f"recipe={recipe}"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert errors == ["error: step 1: the loss is not finite; lower train.learning_rate"]
    assert not (tmp_path / "run" / "adapter").exists()


def test_every_family_is_covered():
    """All but those that this version cannot train."""
    assert set(NAMES) == {name for name, family in FAMILIES.items() if family.decoder == "autoregressive"}


@pytest.mark.parametrize("family", NAMES)
def test_the_loss_without_unlabelled_logits_is_trls(family, tmp_path):
    """LabelledTrainer's loss and gradients are the stock trainer's, and it makes no logit without a label."""
    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]}, {"input_ids": [4, 3], "labels": [-100, 3]}]
    found = {}
    for kind in (SFTTrainer, LabelledTrainer):
        model = tiny_model(family)
        made = []
        model.get_output_embeddings().register_forward_hook(lambda *io, made=made: made.append(io[2].numel() // 97))
        trainer = kind(
            model=model,
            args=SFTConfig(str(tmp_path), max_length=None, use_cpu=True, bf16=False, report_to="none"),
            train_dataset=Dataset.from_list(rows),
            processing_class=tiny_run.tokenizer("smollm2"),
        )
        batch = trainer.data_collator(rows)
        loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(4))
        loss.backward()
        found[kind] = loss.item(), [p.grad for p in model.parameters() if p.grad is not None]
        if kind is LabelledTrainer:
            assert made == [4]
    assert found[LabelledTrainer][0] == pytest.approx(found[SFTTrainer][0], rel=1e-5)
    for ours, theirs in zip(found[LabelledTrainer][1], found[SFTTrainer][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
