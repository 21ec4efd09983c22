"""vLLM on loopback serves what train/ makes: our own decoder's tokens, our own renderer's prompts.

Needs the environment that `make vllm-env` builds, in the repository's folder or where HEADSTART_VLLM says.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tiny_gemma
import tiny_run
import torch
from conftest import FAMILIES as NAMES

from data_builders import build
from eval import suite
from headstart import model as loading
from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer
from headstart.family import FAMILIES, stop_ids
from headstart.prompt import conversation, renderer
from headstart.request import Message
from recipes.loader import parse, resolve
from train import merge, sft

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
VLLM = Path(os.environ.get("HEADSTART_VLLM") or ROOT / ".venv-vllm")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (VLLM / "bin" / "vllm").is_file(), reason=f"{VLLM} holds no vLLM: make vllm-env"),
]
TOKENS = 48  # decoded on each prompt
TIE = (
    1e-3  # where our own lead of one token over another is smaller, kernels that sum in another order may choose either
)
START, ANSWER = 900, 300  # seconds that a server may take
HISTORY = (Message("user", "Hi. I write Python."), Message("assistant", "Hello!\n\nWhat shall we write?"))


def command(kind, invocation):
    """README's command that serves the merged folder, or the bare adapter, with this run in the place of qwen3's."""
    lines = [shlex.split(line) for line in README.splitlines() if line.startswith("vllm serve ")]
    [words] = [words for words in lines if (words[2] == "runs/qwen3/merged") == (kind == "merged")]
    source = loading.load_config(invocation.recipe.model).name_or_path
    named = {"Qwen/Qwen3-8B": source, '{"enable_thinking": false}': json.dumps(arguments_of(invocation))}
    return [named.get(word, word.replace("runs/qwen3", str(invocation.run_dir))) for word in words]


def arguments_of(invocation):
    """The family's template arguments, as vLLM takes them."""
    return dict(loading.family(invocation.recipe.model).template_arguments)


@contextlib.contextmanager
def serving(words, log):
    """A `vllm serve` command, in float32 on a free port; yields the server's address.

    Its whole process group ends with the block.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = ["--host", "127.0.0.1", "--port", port]
    how = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"]
    how.append("--enforce-eager")  # compiling takes minutes on two cores
    own = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PATH": f"{VLLM / 'bin'}:{os.environ['PATH']}",
    }
    left_out = {"PYTHONPATH", "OMP_NUM_THREADS"}
    environment = {key: value for key, value in os.environ.items() if key not in left_out} | own
    words = [str(VLLM / "bin" / words[0]), *words[1:], *where, *how]
    with log.open("w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=log.parent
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, url)
        yield url
    except BaseException:
        print(f"{shlex.join(words)}\n{log.read_text()[-40000:]}")
        raise
    finally:
        end(process)


def wait_until_up(process, url):
    """Until the server answers. Fails where it ends before, or takes too long."""
    limit = time.monotonic() + START
    while time.monotonic() < limit:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=10)
            return
        time.sleep(1)
    raise AssertionError(f"no server at {url} after {START} s")


def end(process):
    """End the server and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)


def ask(url, path, **body):
    """The server's answer to a JSON request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.code} {error.read().decode()[:500]}") from error


def served_tokens(url, model, prompts):
    """Greedy tokens that follow prompts given as ids, TOKENS each: nothing stops them."""
    greedy = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choices = ask(url, "/v1/completions", model=model, prompt=prompts, **greedy)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def own_tokens(model, prompts):
    """The same from our own decoder."""
    decoder = AutoregressiveDecoder(model, frozenset(), TOKENS)
    return [list(decoder.decode(p, decoder.verify(p, Answer()).answer).tokens) for p in prompts]


def near_ties(model, prompts, ours, theirs):
    """How many answers part, each at a token where our own lead is below TIE. Fails where one parts elsewhere."""
    parted = 0
    for prompt, own, served in zip(prompts, ours, theirs, strict=True):
        assert len(own) == len(served) == TOKENS
        at = next((i for i, (a, b) in enumerate(zip(own, served, strict=True)) if a != b), None)
        if at is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *own[:at]]])).logits[0, -1]
            lead = float(logits[own[at]] - logits[served[at]])
            assert lead < TIE, f"token {at}: {own[at]} here, {served[at]} there, where our lead is {lead:.1e}"
            parted += 1
    return parted


def check_chat(url, model, rendering, system, stops):
    """The chat endpoint renders the ids that we train on, whole and unfinished requests, with history and without."""
    texts = (
        "Write a Python function that adds",
        "Name a colour. Keep it short.",
        " x = 1\n\n    y = 2\n",
        "Grüße, 世界?",
    )
    for text in texts:
        for history in ((), HISTORY, HISTORY * 2):
            expected = rendering.prompt(text, history, system)
            messages = conversation(text, history, system)
            assert ask(url, "/tokenize", model=model, messages=messages)["tokens"] == expected
    asked = {"max_tokens": 8, "temperature": 0, "stop_token_ids": sorted(stops), "return_token_ids": True}
    answer = ask(url, "/v1/chat/completions", model=model, messages=messages, **asked)
    assert answer["prompt_token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)
    return expected, answer["choices"][0]["token_ids"]


# SmolLM2-135M


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A short training run of the real model, merged in float32: the resolved command line."""
    folder = tmp_path_factory.mktemp("vllm")
    arguments = [
        "recipe=smollm2",
        f"run.dir={folder / 'run'}",
        "model.dtype=float32",
        "data.benchmarks=[]",
        "train.steps=6",
        "train.warmup_steps=0",
        "train.effective_batch=4",
        "train.learning_rate=2.0e-3",
        "merge.dtype=float32",
    ]
    for script in (build.main, sft.main, merge.main):
        assert script(arguments) == 0
    return parse(arguments)


@pytest.fixture(scope="module")
def prompts(smollm2):
    """Prefixes and whole requests that were not trained on, as ids, with the recipe's message."""
    given = [f"run.dir={smollm2.run_dir}", "eval.benchmarks=[humaneval]", "eval.limit=6"]
    requests = suite.load(parse(["recipe=smollm2", *given])).requests["humaneval"]
    rendering = renderer(loading.load_tokenizer(smollm2.recipe.model), FAMILIES["smollm2"])
    system = smollm2.recipe.prompt.system_message
    return [rendering.prompt(text, (), system) for r in requests for text in (r.prefix(1), r.text)]


def own(invocation, folder=None):
    return loading.load_model(invocation.recipe.model, folder, dtype=torch.float32)


def test_the_merged_folder_is_served_as_our_decoder_decodes_it(smollm2, prompts, tmp_path):
    merged = smollm2.run_dir / "merged"
    model, system = own(smollm2, merged), smollm2.recipe.prompt.system_message
    rendering = renderer(loading.load_tokenizer(smollm2.recipe.model, merged), FAMILIES["smollm2"])
    stops = stop_ids(FAMILIES["smollm2"], rendering.tokenizer, model)
    ours = own_tokens(model, prompts)
    assert ours != own_tokens(own(smollm2), prompts)
    with serving(command("merged", smollm2), tmp_path / "log") as url:
        parted = near_ties(model, prompts, ours, served_tokens(url, str(merged), prompts))
        prompt, answered = check_chat(url, str(merged), rendering, system, stops)
    assert parted <= 1
    decoder = AutoregressiveDecoder(model, stops, 8)
    assert answered == list(decoder.decode(prompt, decoder.verify(prompt, Answer()).answer).tokens)
    print(f"\nmerged: {len(prompts)} prompts, {TOKENS} tokens each, {parted} parted at a near-tie")


def test_the_bare_adapter_on_its_base_is_served_as_the_merged_model_decodes(smollm2, prompts, tmp_path):
    """The adapter's folder as it is; the base is served beside it, so that an adapter without effect would be seen."""
    model, plain = own(smollm2, smollm2.run_dir / "merged"), own(smollm2)
    rendering = renderer(loading.load_tokenizer(smollm2.recipe.model), FAMILIES["smollm2"])
    ours, without = own_tokens(model, prompts), own_tokens(plain, prompts)
    words = command("adapter", smollm2)
    with serving(words, tmp_path / "log") as url:
        parted = near_ties(model, prompts, ours, served_tokens(url, "headstart", prompts))
        parted_base = near_ties(plain, prompts, without, served_tokens(url, words[2], prompts))
        stops = stop_ids(FAMILIES["smollm2"], rendering.tokenizer, plain)
        check_chat(url, "headstart", rendering, smollm2.recipe.prompt.system_message, stops)
    assert parted <= 1
    assert parted_base <= 1
    assert sum(a != b for a, b in zip(ours, without, strict=True)) > len(prompts) / 2
    print(f"\nadapter: {len(prompts)} prompts, {TOKENS} tokens each, {parted} parted at a near-tie, base {parted_base}")


# every family


def wide_base(folder, family):
    """A tiny base whose attention heads are wide enough for vLLM, with the real tokenizer; Gemma-3's is multimodal."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    if family == "gemma3":
        return tiny_gemma.save_multimodal(folder, tiny_run.tokenizer(family), **sizes)
    return tiny_run.save_base(folder, family, **sizes)


@pytest.fixture(scope="module", params=[name for name in NAMES if name != "smollm2"])
def little(request, tmp_path_factory):
    """A merged run of a tiny model of the family: the family and the resolved recipe."""
    folder = tmp_path_factory.mktemp(request.param)
    base = wide_base(folder / "base", request.param)
    path = tiny_run.write_recipe(
        folder, base, request.param, steps=2, effective_batch=2, micro_batch=2, learning_rate=1e-2
    )
    tiny_run.train(path)
    assert merge.main([f"recipe={path}"]) == 0
    return FAMILIES[request.param], resolve(str(path))


@pytest.mark.parametrize("served", ["merged", "adapter"])
def test_every_family_is_served_as_our_decoder_decodes_it(little, served, tmp_path):
    """The merged folder as it is; the bare adapter on its base, with the family's template arguments given."""
    family, invocation = little
    merged = invocation.run_dir / "merged"
    model = own(invocation, merged)
    rendering = renderer(loading.load_tokenizer(invocation.recipe.model), family)
    prompts = [rendering.prompt(text, (), tiny_run.MESSAGE) for text in (*tiny_run.TASKS, "Wait", "Why not?")]
    ours = own_tokens(model, prompts)
    assert sum(a != b for a, b in zip(ours, own_tokens(own(invocation), prompts), strict=True)) > len(prompts) / 2
    words = command(served, invocation)
    name = words[2] if served == "merged" else "headstart"
    with serving(words, tmp_path / "log") as url:
        check_chat(url, name, rendering, tiny_run.MESSAGE, stop_ids(family, rendering.tokenizer, model))
        parted = near_ties(model, prompts, ours, served_tokens(url, name, prompts))
    assert parted <= 1
    print(f"\n{family.name}, {served}: {len(prompts)} prompts, {TOKENS} tokens each, {parted} parted at a near-tie")
