"""Merging: what is stored, what is proved, and what is refused."""

import json
import re
import shutil
import socket
import subprocess
import sys

import fake_hub
import pytest
import tiny_gemma
import tiny_run
import torch
from huggingface_hub import constants as hub_constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_run import save_base, train, trained, write_recipe
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer
from headstart.family import FAMILIES, stop_ids
from headstart.model import load_model, load_tokenizer
from headstart.prompt import renderer
from headstart.session import StreamingSession
from recipes.errors import UserError
from recipes.loader import resolve
from train import merge, merging
from train.adapter import adapted_modules
from train.base import mend_generation

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
    return run_of(recipe, overrides) / "merged"


def run_of(recipe, arguments):
    """The run's folder."""
    return resolve(str(recipe), [argument for argument in arguments if not argument.startswith("-")]).run_dir


def merged_in_little(folder, family, base=None, **changes):
    """Train and merge a base that trains in no time, or the given one; returns the recipe's path."""
    base = base or save_base(folder / "base", family, tiny_run.byte_tokenizer(family), **changes)
    recipe = write_recipe(folder, base, family, steps=2, save_every=1, learning_rate=1e-2)
    train(recipe)
    run(recipe)
    return recipe


def refused(recipe, capsys, *overrides):
    """The one line that train/merge.py ends with, exit code 2 and no output folder."""
    capsys.readouterr()
    folder = run_of(recipe, overrides)
    if (folder / "adapter" / "step.json").exists():
        tiny_run.reseal(folder / "adapter")
    assert merge.main([f"recipe={recipe}", *overrides]) == 2
    assert not (folder / "merged").exists()
    assert not (folder / ".merged.partial").exists()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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
out, *folders = sys.argv[1:]
logits = []
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for text in ("Hello.", "Add 2 to x.", "Name a colour."):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
        with torch.no_grad():
            logits.append(model(prompt["input_ids"]).logits[0])
torch.save(logits, out)
"""


def test_the_merged_folder_in_a_fresh_process_is_base_and_adapter(tmp_path):
    """Plain transformers, on three prompts that its own template renders; embeddings tied and not."""
    recipes = [merged_in_little(tmp_path / str(tied), "smollm2", tie_word_embeddings=tied) for tied in (False, True)]
    arguments = [tmp_path / "logits.pt", *(recipe.parent / "run" / "merged" for recipe in recipes)]
    done = subprocess.run([sys.executable, "-c", FRESH, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rendering = renderer(tiny_run.byte_tokenizer(), FAMILIES["smollm2"])
    prompts = [torch.tensor([rendering.prompt(text)]) for text in ("Hello.", "Add 2 to x.", "Name a colour.")]
    plain, adapted = [], []
    for recipe in recipes:
        base = load_model(resolve(str(recipe)).recipe.model)
        with torch.no_grad():
            plain += [base(ids).logits[0] for ids in prompts]
            whole = PeftModel.from_pretrained(base, recipe.parent / "run" / "adapter").eval()
            adapted += [whole(ids).logits[0] for ids in prompts]
    for found, expected, bare in zip(torch.load(tmp_path / "logits.pt"), adapted, plain, strict=True):
        assert float((found - expected).abs().max()) < 1e-4
        assert float((found - bare).abs().max()) > 1e-3


def test_the_merged_folder_streams_in_a_session():
    """As README says: its folder is the recipe's model, and the streamed answer is the plain one."""
    recipe = trained("smollm2")
    settings = resolve(str(recipe), [f"model.name={run(recipe)}"]).recipe.model
    tokenizer, model = load_tokenizer(settings), load_model(settings)
    rendering, stops = renderer(tokenizer, FAMILIES["smollm2"]), stop_ids(FAMILIES["smollm2"], tokenizer, model)
    with StreamingSession(AutoregressiveDecoder(model, stops, 12), rendering, tiny_run.MESSAGE) as session:
        session.update("Add 2 to x.").result()
        final = session.submit("Add 2 to x. Be quick.")
    plain = AutoregressiveDecoder(model, stops, 12)
    prompt = rendering.prompt("Add 2 to x. Be quick.", system=tiny_run.MESSAGE)
    assert final.answer == plain.decode(prompt, plain.verify(prompt, Answer()).answer)


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
    assert mend_generation(model.generation_config, "tiny") is None
    merging.save(model, tmp_path, None)
    assert not (tmp_path / "generation_note.json").exists()
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert (saved.temperature, saved.repetition_penalty, saved.eos_token_id) == (0.7, 1.1, 2)


def tokenizer_with_image_tokens():
    """Gemma-3's over single bytes, with the names that its processor asks for."""
    bytewise = tiny_run.byte_tokenizer("gemma3")
    names = {name: getattr(bytewise, name) for name in ("bos_token", "eos_token", "pad_token", "chat_template")}
    image = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    return PreTrainedTokenizerFast(tokenizer_object=bytewise.backend_tokenizer, extra_special_tokens=image, **names)


def test_a_multimodal_base_is_adapted_and_merged_in_its_language_layers_only(tmp_path):
    """As google/gemma-3-12b-it lies on the hub; every tensor keeps its name there."""
    tokens = tokenizer_with_image_tokens()
    base = tiny_gemma.save_multimodal(tmp_path / "base", tokens)
    processor = json.loads((base / "processor_config.json").read_text())
    (base / "processor_config.json").write_text(json.dumps({**processor, "chat_template": "an older one"}))
    (base / "chat_template.json").write_text('{"chat_template": "an older one"}')
    recipe = write_recipe(tmp_path, base, "gemma3", steps=1)
    train(recipe)
    folder = run(recipe)
    before, after = tensors(base), tensors(folder)
    assert before.keys() == after.keys()
    assert not any("lm_head" in name for name in after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 4 * 6
    assert all(re.fullmatch(r"language_model.*self_attn\.[qkvo]_proj\.weight", name) for name in changed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is Gemma3ForConditionalGeneration
    saved = json.loads((folder / "generation_config.json").read_text())
    assert {key: saved[key] for key in tiny_gemma.GENERATION} == tiny_gemma.GENERATION
    assert not (folder / "generation_note.json").exists()
    base_model = load_model(resolve(str(recipe)).recipe.model)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base_model, recipe.parent / "run" / "adapter").eval()
        assert float((model(IDS).logits - adapted(IDS).logits).abs().max()) < 1e-4
    assert json.loads((folder / "preprocessor_config.json").read_text()) == tiny_gemma.PROCESSOR
    assert json.loads((folder / "processor_config.json").read_text()) == processor
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 2 to x."}]
    text = AutoProcessor.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    ids = renderer(tokens, FAMILIES["gemma3"]).prompt("Add 2 to x.", system="Be brief.")
    assert tokens.encode(text, add_special_tokens=False) == ids


# every family


@pytest.mark.parametrize("tied", [False, True])
def test_ties_stop_ids_and_sampling_values_survive_in_every_family(tmp_path, family, tied):
    """Training saves checkpoints and adapter on such a base, and the merge repairs what strict validation refuses."""
    base = save_base(tmp_path / "base", family, tiny_run.byte_tokenizer(family), tie_word_embeddings=tied)
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0.6, "top_k": 20, "top_p": 0.9}
    (base / "generation_config.json").write_text(json.dumps(generation))
    recipe = merged_in_little(tmp_path, family, base)
    folder = recipe.parent / "run" / "merged"
    saved = json.loads((folder / "generation_config.json").read_text())
    assert {key: saved[key] for key in (*generation, "do_sample")} == {**generation, "do_sample": True}
    assert json.loads((folder / "generation_note.json").read_text())["changed"] == "do_sample set to true"
    assert tensors(base).keys() == tensors(folder).keys()
    assert ("lm_head.weight" in tensors(folder)) is not tied
    model = AutoModelForCausalLM.from_pretrained(folder)
    same = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert same is tied
    assert {0, 2} <= stop_ids(FAMILIES[family], AutoTokenizer.from_pretrained(folder), model)


def test_a_generation_config_that_no_merge_could_save_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    recipe, _ = copied("smollm2", tmp_path)
    base = tmp_path / "base"
    shutil.copytree(trained("smollm2").parent / "base", base)
    (base / "generation_config.json").write_text('{"early_stopping": true, "eos_token_id": 2}')
    monkeypatch.setattr(merging, "self_check", None)  # the work
    line = refused(recipe, capsys, f"model.name={base}")
    assert line.startswith(f"error: {base}: its generation_config.json cannot be saved again, so ")
    assert "early_stopping" in line


# a base held in 4 bits while the adapter was trained


def test_an_adapter_trained_on_a_4_bit_base_is_merged_into_the_full_one_and_says_so(tmp_path, capsys):
    recipe, folder = copied("smollm2", tmp_path)
    record = folder / "adapter" / "step.json"
    made = json.loads(record.read_text())
    made["settings"]["train"]["base_4bit"] = True
    record.write_text(json.dumps(made))
    capsys.readouterr()
    merged = run(recipe)
    assert merge.TRAINED_IN_4_BITS in capsys.readouterr().out.splitlines()
    assert f"- {merge.TRAINED_IN_4_BITS}" in (merged / "README.md").read_text().splitlines()
    assert json.loads((merged / "merge.json").read_text())["trained_on_4bit_base"] is True
    assert {tensor.dtype for tensor in tensors(merged).values()} == {torch.float32}  # the base's own
    plain = json.loads((run(trained("smollm2")) / "merge.json").read_text())
    assert plain["trained_on_4bit_base"] is False


# the hub


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small merged run; returns the recipe's path."""
    return merged_in_little(tmp_path_factory.mktemp("whole"), "smollm2")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub of our own that huggingface_hub's client talks to, with a token."""
    monkeypatch.setattr(hub_constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
    with fake_hub.hub() as served:
        monkeypatch.setattr(hub_constants, "ENDPOINT", served.url)
        yield served


def push_refused(recipe, capsys):
    """The one line with which a push ends, exit code 2; the merged folder is there and stays."""
    capsys.readouterr()
    assert merge.main([f"recipe={recipe}", "--push", "ann/tiny"]) == 2
    assert (recipe.parent / "run" / "merged" / "step.json").is_file()
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


def test_push_sends_the_whole_folder_to_a_private_repository(tmp_path, hub, capsys):
    """With the merge, and again where the folder is complete: then only the push is done."""
    recipe = merged_in_little(tmp_path, "smollm2")
    folder = recipe.parent / "run" / "merged"
    shutil.rmtree(folder)
    for _ in range(2):
        hub.files.clear()
        assert merge.main([f"recipe={recipe}", "--push", "ann/tiny"]) == 0
        assert {path for _, path in hub.files} == {path.name for path in folder.iterdir()}
        assert all(hub.files["ann/tiny", path.name] == path.read_bytes() for path in folder.iterdir())
    printed = capsys.readouterr().out
    assert printed.count(f"{folder}: pushed, {hub.url}/ann/tiny/commit/c0ffee") == 2
    assert printed.count("nothing to do") == 1
    assert hub.repositories.keys() == {"ann/tiny"}
    assert hub.repositories["ann/tiny"]["visibility"] == "private"


def test_a_push_without_a_token_is_one_line(whole, hub, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    line = push_refused(whole, capsys)
    assert line.startswith("error: --push ann/tiny: there is no token; log in with `hf auth login`, or set HF_TOKEN; ")
    assert "merged stays as it is, and the same command pushes it" in line
    assert hub.asked == []


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_push_is_one_line_and_the_same_command_pushes_later(whole, hub, capsys, status):
    hub.refuses = (status, "You don't have the rights")
    line = push_refused(whole, capsys)
    assert "the hub refuses; log in with a token that may write there (" in line
    assert str(status) in line
    assert hub.files == {}
    hub.refuses = None
    run(whole, "--push=ann/tiny")
    assert ("ann/tiny", "model.safetensors") in hub.files


def test_a_hub_that_cannot_be_reached_is_one_line(whole, hub, capsys, monkeypatch):
    monkeypatch.setattr(hub_constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "error: --push ann/tiny: the upload failed (" in push_refused(whole, capsys)


@pytest.mark.parametrize("given", ["ann/tiny/more", "-ann", "recipe=smollm2", ""])
def test_a_name_that_is_none_is_refused_before_the_work(tmp_path, capsys, given):
    recipe, _ = copied("smollm2", tmp_path)
    assert "error: --push" in refused(recipe, capsys, f"--push={given}")


def test_a_dry_run_pushes_nothing(whole, hub, capsys):
    assert merge.main([f"recipe={whole}", "--push=ann/tiny", "--dry-run"]) == 0
    assert "to ann/tiny, made private where it is not there yet" in capsys.readouterr().out
    assert hub.asked == []


def test_nothing_is_sent_without_the_flag(tmp_path, hub, monkeypatch):
    """Neither at training's save nor at the merge's: no name is looked up and no address connected to."""
    monkeypatch.setattr(hub_constants, "HF_HUB_DISABLE_TELEMETRY", True)  # TRL's trainer tells the hub that it is used
    addresses = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connected(own, address):
        addresses.append(address)
        return connect(own, address)

    def looked_up(host, *rest, **more):
        addresses.append(host)
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket.socket, "connect", connected)
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    recipe = merged_in_little(tmp_path, "smollm2")
    assert addresses == []
    run(recipe, "--push=ann/tiny")
    assert addresses  # those of the hub: so they would have been seen


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


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_the_head_is_refused(tmp_path, capsys, tied):
    """One that its own card allows: on a tied model it would change the embedding too."""
    base = save_base(tmp_path / "base", "smollm2", tiny_run.byte_tokenizer(), tie_word_embeddings=tied)
    recipe = write_recipe(tmp_path, base, "smollm2", steps=1)
    adapter = train(recipe)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = f"({config['target_modules']})|lm_head"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    card = tiny_run.card(adapter)
    (adapter / "headstart.json").write_text(
        json.dumps({**card, "adapted_modules": [*card["adapted_modules"], "lm_head"]})
    )
    vocabulary, hidden = load_model(resolve(str(recipe)).recipe.model).get_input_embeddings().weight.shape
    on_head = {"lora_A": torch.randn(8, hidden), "lora_B": torch.randn(vocabulary, 8)}
    named = {f"base_model.model.lm_head.{side}.weight": tensor for side, tensor in on_head.items()}
    save_file({**tiny_run.weights(adapter), **named}, adapter / "adapter_model.safetensors")
    assert "lm_head is adapted, which family smollm2 does not" in refused(recipe, capsys)


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

    def save(model, folder, _):
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
