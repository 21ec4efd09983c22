"""Merging: what is stored, what is proved, and what is refused."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import tiny_run
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_run import save_base, train, trained, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForConditionalGeneration, GenerationConfig

from headstart.family import FAMILIES
from headstart.model import load_model
from headstart.prompt import renderer
from recipes.errors import UserError
from recipes.loader import resolve
from train import merge, merging
from train.adapter import adapted_modules

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def copied(family, folder):
    """The shared run of a family, in a folder of its own; returns the recipe's path and the run's folder."""
    source = trained(family).parent
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / "run", folder / "run", ignore=shutil.ignore_patterns("merged*", ".*"))
    recipe = folder / "tiny.yaml"
    recipe.write_text((source / "tiny.yaml").read_text().replace(str(source / "run"), str(folder / "run")))
    return recipe, folder / "run"


def run(recipe, *overrides):
    """Run train/merge.py in this process; returns the merged folder."""
    assert merge.main([f"recipe={recipe}", *overrides]) == 0
    return resolve(str(recipe), overrides).run_dir / "merged"


def refused(recipe, capsys, *overrides):
    """The one line that train/merge.py ends with, exit code 2 and no output folder."""
    capsys.readouterr()
    folder = resolve(str(recipe), overrides).run_dir
    if (folder / "adapter" / "step.json").exists():
        tiny_run.reseal(folder / "adapter")
    assert merge.main([f"recipe={recipe}", *overrides]) == 2
    assert not (folder / "merged").exists()
    assert not (folder / ".merged.partial").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def tensors(folder):
    """All stored tensors of a transformers folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def pickles(folder):
    return [path.name for path in folder.rglob("*") if path.suffix in PICKLES]


def change_adapter(run_folder, change):
    """Rewrite the adapter's tensors."""
    path = run_folder / "adapter" / "adapter_model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(path).items()}, path)


def test_merged_equals_adapter_and_only_targeted_tensors_changed(family):
    recipe = trained(family)
    folder = run(recipe)
    settings = resolve(str(recipe)).recipe.model
    base = load_model(settings)
    targeted = {f"{name}.weight" for name in adapted_modules(base, FAMILIES[family])}
    before, after = tensors(recipe.parent / "base"), tensors(folder)
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == targeted
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain = base(IDS).logits
        adapted = PeftModel.from_pretrained(base, recipe.parent / "run" / "adapter").eval()(IDS).logits
        assert float((merged(IDS).logits - adapted).abs().max()) < 1e-4
        assert float((merged(IDS).logits - plain).abs().max()) > 1e-3
    assert not pickles(folder)
    assert not pickles(folder.parent / "adapter")
    proof = json.loads((folder / "merge.json").read_text())
    assert proof["changed_tensors"] == len(targeted)
    assert proof["dtype"] == "float32"
    assert proof["logits_stored"] < 1e-4


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "llama3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_tokenizer_template_and_renderer_go_along(family):
    folder = run(trained(family))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendering = renderer(tokenizer, FAMILIES[family])
    assert rendering.fingerprint == tiny_run.card(folder.parent / "adapter")["renderer"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 2 to x."}]
    bare = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(bare, add_special_tokens=False) == rendering.prompt("Add 2 to x.", system="Be brief.")


def test_the_card_says_where_the_model_comes_from():
    recipe = trained("smollm2")
    folder = run(recipe)
    card = (folder / "README.md").read_text()
    trained_with = json.loads((folder.parent / "adapter" / "step.json").read_text())
    for said in (
        str(recipe.parent / "base"),
        tiny_run.card(folder.parent / "adapter")["base_weights"],
        trained_with["content"],
        trained_with["settings"]["data"],
        tiny_run.MESSAGE,
        "relative error of the stored update",
        "8 tensors changed",
    ):
        assert said in card


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello."}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] - prompt["input_ids"].shape[1])
"""


def test_the_merged_folder_loads_with_plain_transformers_in_a_fresh_process(tmp_path):
    folder = run(trained("smollm2"))
    done = subprocess.run([sys.executable, "-c", FRESH, folder], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= 3


def test_merging_again_does_nothing(capsys):
    folder = run(trained("smollm2"))
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    run(trained("smollm2"))
    assert "complete and made by these settings; nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# dtypes, ties, generation config


@pytest.fixture(scope="module")
def stored_in_bfloat16(tmp_path_factory):
    """A run on a base that is stored in bfloat16, ties its embeddings and gives sampling values without do_sample."""
    folder = tmp_path_factory.mktemp("bfloat16")
    base = save_base(
        folder / "base", "smollm2", tiny_run.byte_tokenizer(), dtype=torch.bfloat16, tie_word_embeddings=True
    )
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9}
    (base / "generation_config.json").write_text(json.dumps(generation))
    recipe = write_recipe(folder, base, "smollm2", learning_rate=1e-2)
    train(recipe)
    return recipe


def test_a_bfloat16_base_gives_a_bfloat16_model_and_the_loss_is_printed(stored_in_bfloat16, capsys):
    folder = run(stored_in_bfloat16)
    printed = capsys.readouterr().out
    assert "logits, stored in bfloat16 against adapter" in printed
    assert "relative error of the stored update: " in printed
    assert {tensor.dtype for tensor in tensors(folder).values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    proof = json.loads((folder / "merge.json").read_text())
    assert 0.001 < proof["delta_error"] < 1
    assert proof["logits_merged"] < 1e-4
    assert proof["logits_merged"] < proof["logits_stored"] < 0.05 * proof["largest_logit"]
    assert proof["logits_stored"] < proof["adapter_effect"]


def test_merge_dtype_float32_is_honoured(stored_in_bfloat16, tmp_path):
    shutil.copytree(stored_in_bfloat16.parent / "run", tmp_path / "run", ignore=shutil.ignore_patterns("merged"))
    folder = run(stored_in_bfloat16, f"run.dir={tmp_path / 'run'}", "merge.dtype=float32")
    assert {tensor.dtype for tensor in tensors(folder).values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    assert json.loads((folder / "merge.json").read_text())["delta_error"] < 1e-5


def test_tied_embeddings_stay_tied(stored_in_bfloat16):
    folder = run(stored_in_bfloat16)
    assert "lm_head.weight" not in tensors(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_sampling_values_without_do_sample_are_saved_and_the_change_is_written_down(stored_in_bfloat16):
    folder = run(stored_in_bfloat16)
    saved = GenerationConfig.from_pretrained(folder)
    assert (saved.temperature, saved.top_p, saved.do_sample) == (0.6, 0.9, True)
    assert saved.eos_token_id == [2, 0]
    assert "do_sample" in json.loads((folder / "generation_note.json").read_text())["changed"]
    saved.validate(strict=True)


def test_a_valid_generation_config_is_not_touched(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(trained("smollm2").parent / "base")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, repetition_penalty=1.1, eos_token_id=2)
    merging.save(model, tmp_path)
    assert not (tmp_path / "generation_note.json").exists()
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.temperature, saved.repetition_penalty, saved.eos_token_id) == (0.7, 1.1, 2)


def test_a_multimodal_base_is_adapted_and_merged_in_its_language_layers_only(tmp_path):
    base, tokens = tmp_path / "base", tiny_run.byte_tokenizer("gemma3")
    tiny_run.multimodal_gemma(len(tokens)).save_pretrained(base)
    tokens.save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"do_resize": true}')
    recipe = write_recipe(tmp_path, base, "gemma3", steps=1)
    train(recipe)
    folder = run(recipe)
    before, after = tensors(base), tensors(folder)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 8
    assert all(re.search(r"language_model.*self_attn\.[qkvo]_proj", name) for name in changed)
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is Gemma3ForConditionalGeneration
    assert (folder / "preprocessor_config.json").read_text() == '{"do_resize": true}'


# what is refused


def test_an_adapter_of_another_base_is_refused(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    other = save_base(tmp_path / "other", "smollm2", seed=1)
    line = refused(recipe, capsys, f"model.name={other}")
    assert line.startswith(f"error: {folder / 'adapter'}: this adapter belongs to another base (")
    assert f"the recipe's model is {other}" in line


def test_a_missing_adapter_names_the_command(tmp_path, capsys):
    base = trained("smollm2").parent / "base"
    line = refused(write_recipe(tmp_path, base, "smollm2"), capsys)
    assert "first run: accelerate launch train/sft.py recipe=" in line


def test_an_adapter_without_a_card_is_refused(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    (folder / "adapter" / "headstart.json").unlink()
    assert "headstart.json: missing or not readable" in refused(recipe, capsys)


def test_a_quantised_base_is_refused(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    base = tmp_path / "base"
    shutil.copytree(trained("smollm2").parent / "base", base)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    card = folder / "adapter" / "headstart.json"
    settings = resolve(str(recipe), [f"model.name={base}"]).recipe.model
    card.write_text(json.dumps({**json.loads(card.read_text()), "base_weights": merge.loading.weights_hash(settings)}))
    assert "its weights are quantised" in refused(recipe, capsys, f"model.name={base}")


def test_an_adapter_that_changes_nothing_is_refused(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    change_adapter(folder, lambda name, tensor: torch.zeros_like(tensor) if ".lora_B." in name else tensor)
    assert "lora_B.weight is zero after training" in refused(recipe, capsys)


def test_an_update_that_bfloat16_swallows_whole_is_refused(stored_in_bfloat16, tmp_path, capsys):
    shutil.copytree(stored_in_bfloat16.parent / "run", tmp_path / "run", ignore=shutil.ignore_patterns("merged"))
    change_adapter(tmp_path / "run", lambda name, tensor: tensor * 1e-6)
    line = refused(stored_in_bfloat16, capsys, f"run.dir={tmp_path / 'run'}")
    assert line == (
        "error: merge: no weight changed when stored in torch.bfloat16; use merge.dtype=float32 or train longer"
    )


def test_an_adapter_that_is_not_finite_is_refused(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    change_adapter(folder, lambda name, tensor: torch.full_like(tensor, float("nan")))
    assert "is not finite" in refused(recipe, capsys)


@pytest.mark.parametrize("bound", ["EXACT", "STORED"])
def test_a_failed_proof_leaves_nothing(tmp_path, capsys, monkeypatch, bound):
    recipe, _ = copied("smollm2", tmp_path)
    monkeypatch.setattr(merging, bound, -1.0 if bound == "EXACT" else {torch.float32: -1.0})
    assert "differ by" in refused(recipe, capsys)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight changed though the adapter does not"),
        ("model.layers.0.self_attn.q_proj.weight", "stored logits differ by"),
    ],
)
def test_a_weight_that_is_corrupted_on_its_way_to_the_disk_is_found(tmp_path, capsys, monkeypatch, name, says):
    recipe, _ = copied("smollm2", tmp_path)

    def save(model, folder):
        with torch.no_grad():
            model.get_parameter(name).add_(0.5)
        model.save_pretrained(folder)

    monkeypatch.setattr(merging, "save", save)
    assert says in refused(recipe, capsys)


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    assert merge.main([f"recipe={recipe}", "--dry-run"]) == 0
    assert f"would merge {folder / 'adapter'}" in capsys.readouterr().out
    assert not (folder / "merged").exists()


def test_a_stored_model_that_chooses_other_tokens_is_refused_unless_they_tie():
    adapter = torch.tensor([[10.0, 9.99, 0.0], [10.0, 5.0, 0.0]])
    check = merging.SelfCheck([[1]], [[0, 0]], [adapter])
    assert merging._near_ties([adapter], check, 0.01) == 0
    assert merging._near_ties([torch.tensor([[9.9, 10.0, 0.0], [10.0, 5.0, 0.0]])], check, 0.01) == 1
    with pytest.raises(UserError, match="chooses another token where the adapter's lead is 5"):
        merging._near_ties([torch.tensor([[10.0, 9.99, 0.0], [7.0, 8.0, 0.0]])], check, 0.01)
