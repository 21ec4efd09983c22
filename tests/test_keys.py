"""Every key that a recipe may set has an effect: one check for each."""

import importlib
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import lmsys_rows
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from conftest import real_tokenizer, tiny_model
from peft import get_peft_model
from safetensors import safe_open
from synthetic_arms import records, timings, write_run
from tiny_models import arguments, invocation, talker_folder

from data_builders import build, inputs, modelling, sources, workers
from data_builders.making import Maker, needs_model
from eval import arms, report, run, suite, timing
from eval.replay import replay
from eval.report_runs import Place
from eval.sweep import sweep
from eval.typing_time import time_to_draft
from headstart import model as loading
from headstart.acceptance import greedy, rule
from headstart.decoder import Answer
from headstart.family import FAMILIES
from headstart.prompt import renderer
from headstart.request import Request
from headstart.slot_diffusion import SlotDiffusionDecoder
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Eval, Model, Recipe, Train
from train import base, sft
from train.adapter import lora_config
from train.merging import load_adapted, merge_and_prove
from train.reporting import reporting
from train.rows import in_order, training_rows
from train.watch import Watcher

REQUESTS = [Request(f"r/{n}", "made", (f"Write task{n}.", " It takes a list.", " Thanks.")) for n in range(5)]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A tiny model's folder and helpers around it; what several checks need is made once."""
    folder = tmp_path_factory.mktemp("keys")
    model = talker_folder(folder / "model", seed=8, end_weight=1.0)  # its answers run to the limit
    runs = iter(range(1000))

    def resolve(*overrides, run="run"):
        return invocation(model, folder / run, *overrides)

    @cache
    def pairs(*overrides):
        """The rows and the manifest that build.py makes, with the corpus' answers."""
        made = folder / f"run{next(runs)}"
        settings = ("data.answers=corpus", "data.limit=6", *overrides)
        assert build.main(arguments(model, made, *settings)) == 0
        manifest = json.loads((made / "data" / "manifest.json").read_text())
        return SimpleNamespace(
            rows=pq.read_table(made / "data" / "pairs-00000.parquet").to_pylist(), manifest=manifest, data=made / "data"
        )

    @cache
    def adapter():
        """A random adapter of the tiny model, saved."""
        recipe = resolve().recipe
        torch.manual_seed(0)
        adapted = get_peft_model(loading.load_model(recipe.model), lora_config(recipe.train, FAMILIES["smollm2"]))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter.data, std=0.02)
        adapted.save_pretrained(folder / "adapter")
        return folder / "adapter"

    def arm(*overrides):
        return arms.load(resolve("eval.max_new_tokens=6", *overrides))

    return SimpleNamespace(model=model, folder=folder, resolve=resolve, pairs=pairs, adapter=adapter, arm=arm)


@cache
def rendering():
    return renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])


def recipe(*overrides):
    return parse(["recipe=smollm2", *overrides]).recipe


def trainer(key, value, shown=None):
    """A key of `train` that reaches TRL's settings as they are."""

    def check(here):
        plain, changed = (
            sft.arguments(recipe("model.device=cpu", *given), here.folder, 3).to_dict()
            for given in ((), (f"train.{key}={value}",))
        )
        moved = {name: changed[name] for name in changed if changed[name] != plain[name]}
        assert (value if shown is None else shown) in moved.values()

    return check


# --- run, model, prompt ---


def run_dir(here):
    assert parse(["recipe=smollm2", "run.dir=some/where"]).run_dir == Path("some/where")
    assert here.pairs().data.is_dir()


def run_seed(here):
    assert here.pairs().rows != here.pairs("run.seed=5").rows
    assert sft.arguments(recipe("run.seed=5", "model.device=cpu"), here.folder, 1).seed == 5
    rows = training_rows(here.pairs().data, rendering(), Train(), 0).dataset
    orders = [list(in_order(rows, Train(steps=2, effective_batch=4), seed)["labels"]) for seed in (0, 5)]
    assert orders[0] != orders[1]


def run_report_to(here):
    given = here.resolve("run.report_to=tensorboard", run="reported")
    for main_process in (False, True):
        with reporting(given, main_process) as reports:
            assert len(reports) == main_process
    assert list((given.run_dir / "tensorboard").iterdir())


def model_name(here):
    assert loading.load_model(here.resolve().recipe.model).config.hidden_size == 16
    assert loading.weights_hash(Model(name="org/model")) == "org/model@main"


def model_revision(here, monkeypatch):
    asked = []
    for kind in ("AutoTokenizer", "AutoModelForCausalLM", "AutoConfig"):
        patched = getattr(transformers, kind)
        monkeypatch.setattr(patched, "from_pretrained", lambda name, **given: asked.append(given["revision"]) or 1 / 0)
    for load in (loading.load_tokenizer, loading.load_model, loading.load_config):
        with pytest.raises(ZeroDivisionError):
            load(Model(name="org/model", revision="v2"))
    assert asked == ["v2"] * 3
    assert loading.weights_hash(Model(name="org/model", revision="v2")) == "org/model@v2"


def model_family(here):
    assert loading.family(Model(family="gemma3")).name == "gemma3"
    with pytest.raises(UserError, match="family=qwen3"):
        loading.load_model(here.resolve("model.family=qwen3").recipe.model)


def model_dtype(here):
    assert loading.load_model(here.resolve("model.dtype=float32").recipe.model).dtype == torch.float32
    assert loading.load_model(here.resolve("model.dtype=bfloat16").recipe.model).dtype == torch.bfloat16


def model_device(here):
    assert loading.device(Model(device="cpu")).type == "cpu"
    if torch.cuda.is_available():
        assert loading.device(Model(device="auto")).type == loading.device(Model(device="cuda")).type == "cuda"
    else:
        assert loading.device(Model(device="auto")).type == "cpu"
        with pytest.raises(UserError, match="torch sees no GPU"):
            loading.device(Model(device="cuda"))


def prompt_system_message(here):
    given = "prompt.system_message=Guess."
    assert here.pairs(given).rows[0]["prompt"][0] == {"role": "system", "content": "Guess."}
    arm = here.arm(given)
    assert arm.system == "Guess."
    assert "Guess." in arm.renderer.text(arm.prompt(REQUESTS[0], 1))


# --- data ---


LEAK = "Name the oldest bridge over the river that flows through Prague. Say who had it built."


def own_rows(here, name, count=6, **more):
    """A file of one's own conversations, of which some meet a rule."""
    path = here.folder / f"{name}.jsonl"
    if not path.exists():
        turns = [{"role": "user", "content": "Who won? Say why."}, {"role": "assistant", "content": "Nobody did."}]
        lines = [
            {"id": f"{n}", "text": f"Name river {n}. Say why {n * n}.", "reference": "The Nile."} for n in range(count)
        ]
        lines += [
            {"id": "long", "messages": [*turns, {"role": "user", "content": "And? Go on." * 20}, turns[1]]},
            {"id": "german", "messages": turns, "language": "German"},
            {"id": "again", "messages": turns},
            {"id": "leak", "text": LEAK, "reference": "Yes."},
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def own(here, *overrides):
    return here.pairs(f"data.corpora=[{own_rows(here, 'own')}]", "data.limit=null", "data.heldout=0", *overrides)


def ids(made):
    return {row["id"].split("#")[0].removeprefix("own/") for row in made.rows}


def data_corpora(here):
    assert list(here.pairs().manifest["corpora"]) == ["seed"]
    assert ids(own(here)) == {*map(str, range(6)), "long", "german", "again", "leak"}
    with pytest.raises(UserError, match="no corpus 'other'; there are lmsys, mbpp"):
        inputs.find_inputs(recipe("data.corpora=[other]"))


def data_paths(here):
    row = {"lang": "python", "raw_index": 1, "index": 2, "problem": "Write a function. It adds.", "solution": "Yes."}
    path = here.folder / "magicoder.jsonl"
    path.write_text(json.dumps(row) + "\n")
    given = ("data.corpora=[magicoder]", f"data.paths.magicoder={path}", "data.heldout=0")
    assert {row["id"] for row in here.pairs(*given).rows} == {"magicoder/1/2#17"}
    with pytest.raises(UserError, match=r"neither among data\.corpora nor among data\.benchmarks"):
        inputs.find_inputs(recipe(f"data.paths.magicoder={path}"))


def data_limit(here):
    assert (here.pairs().manifest["counts"]["requests"], len(here.pairs("data.limit=4").rows)) == (6, 8)
    assert len(here.pairs("data.limit={seed: 3}").rows) == 6


def data_pairs(here):
    assert (len(here.pairs().rows), len(here.pairs("data.pairs=5").rows)) == (12, 5)


def data_kind(here):
    given = ("data.kind=draft-refinement", "data.whole=true", "data.max_new_tokens=6")
    assert {row["kind"] for row in here.pairs().rows} == {"prefix-to-answer"}
    assert {row["kind"] for row in here.pairs(*given).rows} == {"draft-refinement"}


def data_heldout(here):
    def tasks(found):
        return {line.split('"task": "')[1].split('"')[0] for line in (found.data / "heldout.jsonl").open()}

    assert (len(tasks(here.pairs())), len(tasks(here.pairs("data.heldout=3")))) == (12, 3)


def data_cuts(here):
    assert (len(here.pairs().rows), len(here.pairs("data.cuts=1").rows)) == (12, 6)


def data_whole(here):
    assert (len(here.pairs("data.cuts=1").rows), len(here.pairs("data.cuts=1", "data.whole=true").rows)) == (6, 12)


def data_cut(here):
    inside = here.pairs("data.cut={anywhere: 1.0}").rows
    assert {row["cut"] for row in here.pairs().rows} == {"sentence"}
    assert {row["cut"] for row in inside} == {"anywhere"}
    with pytest.raises(UserError, match="the shares have to sum to 1"):
        recipe("data.cut={word: 0.5}")


def data_languages(here):
    assert "german" in ids(own(here))
    assert "german" not in ids(own(here, "data.languages=[English]"))


def marked(here, *overrides):
    """Made-up conversations with marks, as LMSYS-Chat-1M has them."""
    folder = here.folder / "lmsys"
    if not folder.exists():
        lmsys_rows.write(folder, 400, files=1)
    given = ("data.corpora=[lmsys]", f"data.paths.lmsys={folder}", "data.limit=null", *overrides)
    return here.pairs(*given).manifest["corpora"]["lmsys"]["counts"]


def data_flagged(here):
    assert marked(here)["dropped: flagged by moderation"] > 5
    assert "dropped: flagged by moderation" not in marked(here, "data.flagged=keep")


def data_redacted(here):
    assert "dropped: redacted" not in marked(here)
    assert marked(here, "data.redacted=drop")["dropped: redacted"] > 10


def data_max_characters(here):
    cut = own(here, "data.max_characters=100")
    assert cut.manifest["corpora"]["own.jsonl"]["counts"]["dropped: too long"] == 1
    shortened = own(here, "data.max_characters=240")
    assert any(row["prompt"][1]["content"] == "Who won? Say why." for row in own(here).rows)
    long = next(row["prompt"] for row in shortened.rows if row["id"].startswith("own/long"))
    assert long[1]["content"][:4] == "And?"


def data_duplicates(here):
    found = {how: ids(own(here, f"data.duplicates={how}")) for how in ("keep", "exact", "near")}
    assert {"german", "again"} <= found["keep"]
    assert len({"german", "again"} & found["exact"]) == len({"german", "again"} & found["near"]) == 1
    assert len(marked(here, "data.duplicates=near")) > len(marked(here, "data.duplicates=exact"))


def data_benchmarks(here):
    leak = here.folder / "benchmark.jsonl"
    leak.write_text(json.dumps({"id": "b/1", "text": LEAK}) + "\n")
    clean = own(here, f"data.benchmarks=[{leak}]")
    assert ids(own(here)) - ids(clean) == {"leak"}
    assert clean.manifest["disjoint_from"]["found"][0]["id"] == "b/1"


def model_made(here, monkeypatch, *overrides):
    """What a build with the model's own answers is made by."""
    taken = []
    given = here.resolve("data.answers=self", *overrides).recipe
    with modelling.model_maker(given, Maker(given.data, None, 0), rendering(), here.folder) as made:
        taken.append(made)
    return taken[0]


def data_answers(here, monkeypatch):
    assert model_made(here, monkeypatch).backend.decoder.model.config.hidden_size == 16
    assert not needs_model(here.resolve("data.answers=corpus").recipe.data)


def data_max_surprise(here, monkeypatch):
    assert model_made(here, monkeypatch).likelihoods is None
    assert model_made(here, monkeypatch, "data.max_surprise=0.5").likelihoods([]) == []
    assert len(here.pairs("data.max_surprise=0.0001").rows) < 12


def data_max_new_tokens(here, monkeypatch):
    assert model_made(here, monkeypatch, "data.max_new_tokens=7").backend.decoder.limit == 7


def data_batch_size(here, monkeypatch):
    assert model_made(here, monkeypatch, "data.batch_size=3").backend.decoder.batch_size == 3


def data_server(here, monkeypatch):
    backend = model_made(here, monkeypatch, "data.server=http://127.0.0.1:9/v1").backend
    assert backend.url == "http://127.0.0.1:9/v1"


def data_server_model(here, monkeypatch):
    given = ("data.server=http://127.0.0.1:9/v1", "data.server_model=served")
    assert model_made(here, monkeypatch, *given).backend.served == "served"
    assert model_made(here, monkeypatch, given[0]).backend.served == str(here.model)


def data_in_flight(here, monkeypatch):
    given = ("data.server=http://127.0.0.1:9/v1", "data.in_flight=5")
    assert model_made(here, monkeypatch, *given).backend.in_flight == 5


def data_workers(here, monkeypatch):
    """One worker reads in this process."""
    seen = []
    run = workers.run

    def counted(function, state, tasks, number):
        seen.append(number)
        return run(function, state, tasks, 1)

    monkeypatch.setattr(workers, "run", counted)
    path = conversations(here)
    for number in (1, 2):
        here.pairs(f"data.corpora=[{path}]", "data.limit=null", "data.heldout=0", f"data.workers={number}")
    assert max(seen[:2]) == 1
    assert max(seen[2:]) == 2


def conversations(here):
    """Enough rows for two pieces."""
    path = here.folder / "many.jsonl"
    rows = ({"id": f"{n}", "text": f"Name {n}. Say {n * n}.", "reference": "Yes."} for n in range(sources.ROWS + 5))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- train, merge ---


def lora(key, value, name):
    def check(here):
        assert getattr(lora_config(recipe(f"train.{key}={value}").train, FAMILIES["smollm2"]), name) == value

    return check


def train_effective_batch(here):
    assert [sft.accumulate(recipe(f"train.effective_batch={n}", "train.micro_batch=4"), 2) for n in (8, 24)] == [1, 3]


def train_micro_batch(here):
    trainer("micro_batch", 2)(here)
    assert [sft.accumulate(recipe("train.effective_batch=8", f"train.micro_batch={n}"), 1) for n in (1, 4)] == [8, 2]


def train_max_length(here):
    data = here.pairs().data
    whole = training_rows(data, rendering(), Train(), 0)
    lengths = sorted(len(row["input_ids"]) for row in whole.dataset)
    fewer = training_rows(data, rendering(), Train(max_length=lengths[5]), 0)
    assert (len(whole.dataset), len(fewer.dataset)) == (12, sum(length <= lengths[5] for length in lengths))


def train_objective(here):
    kinds = ("sft", "self_distill")
    columns = [training_rows(here.pairs().data, rendering(), Train(objective=x), 0).dataset.column_names for x in kinds]
    assert ["teacher_ids" in names for names in columns] == [False, True]


def retained(here, **settings):
    given = Train(objective="self_distill", **settings)
    return sum(bool(ids) for ids in training_rows(here.pairs().data, rendering(), given, 0).dataset["retained_ids"])


def train_retain(here):
    assert retained(here) == 0
    assert retained(here, retain=0.5, retain_share=1.0) == 12


def train_retain_share(here):
    assert 0 < retained(here, retain=1.0, retain_share=0.5) < 12


def elsewhere(module, test):
    """A key whose effect on a whole run is asserted by a test of its own."""

    def check(here):
        assert callable(getattr(importlib.import_module(module), test))

    return check


def train_length_window(here):
    rows = training_rows(here.pairs().data, rendering(), Train(), 0).dataset
    orders = [in_order(rows, Train(steps=3, effective_batch=4, length_window=n), 0)["labels"] for n in (1, 3)]
    assert list(orders[0]) != list(orders[1])


def train_attention(here):
    assert base.attention(recipe("model.device=cpu"))[0] == "sdpa"
    with pytest.raises(UserError, match="FlashAttention needs a GPU"):
        base.attention(recipe("model.device=cpu", "train.attention=flash_attention_2"))


def train_liger(here):
    with pytest.raises(UserError, match=r"train\.liger=true: its kernels need a GPU"):
        base.check(recipe("model.device=cpu", "train.liger=true"))


def watcher(here, *overrides):
    given = recipe("model.device=cpu", "train.watch_every=1", *overrides)
    return Watcher(given, rendering(), frozenset({2}), here.pairs("data.heldout=5").data / "heldout.jsonl")


def train_watch_requests(here):
    assert [sum(map(len, watcher(here, f"train.watch_requests={n}").groups)) for n in (2, 4)] == [2, 4]


def train_watch_max_new_tokens(here):
    assert watcher(here, "train.watch_max_new_tokens=7").limit == 7


def train_watch_every(here):
    step = SimpleNamespace(invocation=here.resolve(), partial=here.folder)
    assert sft.watch(recipe(), rendering(), frozenset(), step) == []


def merged(here, name, *overrides):
    given = here.resolve(*overrides).recipe
    folder = here.folder / name
    proof = merge_and_prove(load_adapted(given.model, here.adapter()), given, rendering(), folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return proof, file.get_tensor("model.norm.weight").dtype


def merge_dtype(here):
    assert merged(here, "float32", "merge.dtype=float32")[1] == torch.float32
    assert merged(here, "bfloat16", "merge.dtype=bfloat16")[1] == torch.bfloat16


def merge_max_new_tokens(here):
    few, more = (merged(here, f"m{n}", f"merge.max_new_tokens={n}")[0].tokens for n in (2, 5))
    assert (few, more) == (4 * 2, 4 * 5)


# --- eval ---


def eval_arm(here):
    assert here.arm("eval.arm=plain").system is None
    assert here.arm("eval.arm=message").system
    for arm in ("adapter", "merged"):
        with pytest.raises(UserError, match=f"run/{arm}: not there yet"):
            here.arm(f"eval.arm={arm}")


def eval_preset(here):
    """Between the defaults and what the recipe says."""
    paper = Eval.model_validate({"preset": "paper"})
    assert (len(paper.benchmarks), paper.replay, paper.limit_of("ds1000"), paper.limit_of("mbpp")) == (
        7,
        "full",
        128,
        None,
    )
    named = Eval.model_validate({"preset": "paper", "limit": {"mbpp": 2}})
    assert (named.limit_of("mbpp"), named.limit_of("ds1000"), named.limit_of("coedit")) == (2, 128, None)
    own = recipe("eval.preset=paper", "eval.benchmarks=[mbpp]", "eval.limit=3").eval
    assert (own.benchmarks, own.limit_of("mbpp"), own.replay) == (("mbpp",), 3, "full")


def eval_paths(here, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"_id": 1, "src": "Mend this: a b. C d.", "tgt": "A b. C d."}) + "\n")
    given = ["recipe=smollm2", "eval.benchmarks=[coedit]"]
    found = suite.load(parse([*given, f"eval.paths.coedit={path}"]))
    assert [request.text for request in found.requests["coedit"]] == ["Mend this: a b. C d."]
    with pytest.raises(UserError, match=r"eval\.paths\.mbpp: 'mbpp' is not among"):
        suite.load(parse([*given, f"eval.paths.mbpp={path}"]))
    with pytest.raises(UserError, match="a file of your own is its own path"):
        suite.load(parse(["recipe=smollm2", f"eval.benchmarks=[{path}]", f"eval.paths={{{path}: {path}}}"]))


def eval_gold(here, tmp_path):
    argv = arguments(here.model, tmp_path / "gold", "eval.gold=true", "eval.limit=3", "eval.benchmarks=[humaneval]")
    assert run.main(argv) == 0
    summary = json.loads((tmp_path / "gold" / "eval" / "gold" / "summary.json").read_text())
    assert summary["benchmarks"]["humaneval"]["reference"] == {"n": 3, "as_expected": 3}
    assert summary["sandbox"].startswith(("bubblewrap", "isolated"))
    assert not (tmp_path / "gold" / "eval" / "message").exists()


def eval_benchmarks(here):
    assert list(suite.load(parse(["recipe=smollm2", "eval.benchmarks=[humaneval]"])).requests) == ["humaneval"]
    with pytest.raises(UserError, match="no benchmark 'other'"):
        suite.load(parse(["recipe=smollm2", "eval.benchmarks=[other]"]))
    with pytest.raises(UserError, match="a name stands there twice"):
        parse(["recipe=smollm2", "eval.benchmarks=[humaneval,humaneval]"])


def eval_limit(here):
    for limit, number in (("null", 164), (3, 3)):
        found = suite.load(parse(["recipe=smollm2", "eval.benchmarks=[humaneval]", f"eval.limit={limit}"]))
        assert len(found.requests["humaneval"]) == number
    both = ["recipe=smollm2", "eval.benchmarks=[humaneval]", "eval.limit={humaneval: 2, mbpp: 1}"]
    assert len(suite.load(parse(both)).requests["humaneval"]) == 2
    with pytest.raises(UserError, match=r"eval\.limit\.humanevl: no benchmark"):
        suite.load(parse([*both[:2], "eval.limit={humanevl: 2}"]))
    ids = [[r.id for r in suite.draw(found.requests["humaneval"], 2, seed)] for seed in range(4)]
    assert len({tuple(drawn) for drawn in ids}) > 1
    few, more = ([r.id for r in suite.draw(found.requests["humaneval"], limit, 0)] for limit in (2, 3))
    assert set(few) < set(more) == {r.id for r in found.requests["humaneval"]}


def eval_timed(here, tmp_path):
    lines = {line["id"]: line for line in replay(here.arm(), REQUESTS)}
    usable = sum(line["excluded"] is None for line in lines.values())
    assert usable > 1
    for timed, number in ((0, 0), (1, 1), ("null", usable)):
        arm = here.arm(f"eval.timed={timed}")
        assert len(timing.time_all(arm, {"made": REQUESTS}, lines, tmp_path / f"{timed}.jsonl")) == number


def eval_replay(here):
    for mode, updates in (("last", type(None)), ("full", list)):
        found = [line for line in replay(here.arm(f"eval.replay={mode}"), REQUESTS) if line["excluded"] is None]
        assert {type(line["updates"]) for line in found} == {updates}


LOGITS = torch.log(torch.tensor([[0.6, 0.3, 0.1]] * 3))
DRAFT = torch.tensor([0, 1, 2])


def passing(*overrides):
    return rule(recipe("eval.replay=full", *overrides).eval)(LOGITS, DRAFT).tolist()


def eval_acceptance(here):
    assert passing() == [True, False, False]
    assert passing("eval.acceptance=threshold", "eval.tau=0.2") == [True, True, False]
    arm = here.arm("eval.replay=full", "eval.acceptance=top_k")
    for decoder in (arm.decoder(), arm.batch_decoder()):
        assert decoder.rule(LOGITS, DRAFT).tolist() == [True, True, False]


def eval_tau(here):
    assert passing("eval.acceptance=threshold", "eval.tau=0.05") == [True, True, True]
    assert passing("eval.acceptance=threshold", "eval.tau=0.5") == [True, False, False]


def eval_top_k(here):
    assert passing("eval.acceptance=top_k", "eval.top_k=1") == [True, False, False]
    assert passing("eval.acceptance=top_k", "eval.top_k=3") == [True, True, True]


def eval_recycle(here):
    for given, kind in ((), type(None)), (("eval.recycle=true",), int):
        found = [line for line in replay(here.arm(*given), REQUESTS) if line["excluded"] is None]
        assert {type(line["base_passes_lookup"]) for line in found} == {kind}
        assert {type(line["stream_passes_recycle"]) for line in found} == {kind}
    with pytest.raises(UserError, match="recycle=true is lossless under acceptance=greedy only"):
        recipe("eval.recycle=true", "eval.replay=full", "eval.acceptance=top_k")


def eval_sweep(here):
    arm = here.arm("eval.sweep=[1e-5, 0.5]")
    assert list(sweep(arm, REQUESTS[:2], arm.recipe.eval.sweep)) == [1e-5, 0.5]
    assert recipe().eval.sweep == ()
    for wrong in ("[0.5, 2]", "[0]", "[0.5, 0.5]", "[a]", "0.5"):
        with pytest.raises(UserError, match=r"eval\.sweep"):
            recipe(f"eval.sweep={wrong}")


def eval_max_new_tokens(here):
    arm = here.arm()
    assert (arm.decoder().limit, arm.batch_decoder().limit) == (6, 6)


def eval_batch_size(here):
    assert here.arm("eval.batch_size=3").batch_decoder().batch_size == 3


def eval_allow_code_execution(here):
    assert suite.check_scoring(recipe("eval.allow_code_execution=true").eval)
    with pytest.raises(UserError, match=r"set eval\.allow_code_execution=true"):
        suite.check_scoring(recipe("eval.allow_code_execution=false").eval)


def eval_time_limit(here):
    assert suite.limits(recipe("eval.time_limit=2.5").eval).seconds == 2.5


def eval_memory_limit(here):
    assert suite.limits(recipe("eval.memory_limit=300").eval).memory_mb == 300


def eval_chars_per_second(here):
    found = records(1, 0.5, 10)
    clock = [t | {"update_seconds": [2.0, 0.1, 1.0]} for t in timings(found, every=1)]

    def own(*overrides):
        speed = recipe(*overrides).eval.chars_per_second
        rows = time_to_draft({"made": found}, clock, speed, 0.95, 20, 0)["pooled"]["speeds"]
        return next(row for row in rows if row["own"])

    usual, fast = own(), own("eval.chars_per_second=9000")
    assert (usual["words_a_minute"], fast["chars_per_second"]) == (pytest.approx(40), 9000)
    assert fast["drafts_finished_share"]["value"] < usual["drafts_finished_share"]["value"]
    with pytest.raises(UserError, match="chars_per_second"):
        recipe("eval.chars_per_second=0")


# --- report ---


def compared(here, monkeypatch, **settings):
    """The three arms that report.py hands to `build_report`: before, after, before for quality."""
    made = here.resolve(*(f"report.{key}={value}" for key, value in settings.items()), run="reported")
    for name in ("plain", "message", "merged", "other"):
        with run_folder.step(made, made.run_dir / "eval" / name, {"arm": name}) as step:
            if step is not None:
                run_folder.finish(step)

    taken = []

    def build_report(found, *given):
        taken.extend(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "build_report", build_report)
    with pytest.raises(KeyboardInterrupt):
        report.report(made)
    return [folder.name for folder in (taken[0].before, taken[0].after, taken[0].quality_before)]


def one_of_three(name, place):
    def check(here, monkeypatch):
        plain, changed = compared(here, monkeypatch), compared(here, monkeypatch, **{name: "other"})
        assert plain == ["message", "merged", "plain"]
        assert changed[place] == "other"
        assert [changed[i] for i in range(3) if i != place] == [plain[i] for i in range(3) if i != place]

    return check


def made_up(folder, **changed):
    """The arms of a made-up run of its own."""
    return Place("x", *write_run(folder / f"reports{len(list(folder.glob('reports*')))}", n=12, **changed))


@cache
def written(folder, **settings):
    """The folder of the report on a made-up run."""
    given = [f"report.{key}={value}" for key, value in ({"bootstrap": 60, "replays": 1} | settings).items()]
    place = made_up(folder)
    out = place.before.parents[1] / "report"
    return report.build_report([place], out, recipe(*given).report, 0).parent


def interval(here, **settings):
    found = json.loads((written(here.folder, **settings) / "report.json").read_text())
    return found["arms"]["merged"]["benchmarks"]["humaneval"]["kept_share"]


def report_bootstrap(here):
    assert interval(here) != interval(here, bootstrap=61)


def report_confidence(here):
    wide, narrow = interval(here), interval(here, confidence=0.6)
    assert wide["value"] == narrow["value"]
    assert wide["high"] - wide["low"] > narrow["high"] - narrow["low"]


def report_replays(here):
    pages = [(written(here.folder, **given) / "report.html").read_text() for given in ({}, {"replays": 3})]
    blocks = [page.split('id="replay-data">')[1].split("</script>")[0] for page in pages]
    assert [len(json.loads(block)["runs"][0]["benchmarks"][0]["requests"]) for block in blocks] == [1, 3]


def report_runs(here):
    own = report.places(here.resolve(run="reported"))
    several = report.places(here.resolve("report.runs=[some/a,b]", "report.quality_before=message"))
    assert [place.name for place in own] == ["tiny"]
    assert [(place.name, str(place.before)) for place in several] == [
        ("a", "some/a/eval/message"),
        ("b", "b/eval/message"),
    ]


def report_force(here):
    place = made_up(here.folder, plain={"hashes": {"data": "other"}})
    settings = {force: recipe("report.bootstrap=20", f"report.force={force}").report for force in ("true", "false")}
    out = place.before.parents[1] / "report"
    with pytest.raises(UserError, match=r"report\.force=true"):
        report.build_report([place], out, settings["false"], 0)
    assert 'id="forced"' in report.build_report([place], out, settings["true"], 0).read_text()


def report_wandb(here, monkeypatch):
    sent = []
    monkeypatch.setattr(report, "upload", lambda folder, project, *given: sent.append((folder.name, project)))
    run = made_up(here.folder).before.parents[1]
    for name in ("plain", "message", "merged"):
        (run / "eval" / name).rename(run / name)
        made = here.resolve()
        with run_folder.step(made, run / "eval" / name, {"arm": name}) as step:
            for file in (run / name).iterdir():
                file.rename(step.partial / file.name)
            run_folder.finish(step)
    given = ("report.bootstrap=20", "report.replays=0", f"report.runs=[{run}]")
    for wandb in ((), ("report.wandb=made-up",)):
        report.report(here.resolve(*given, *wandb, run="sent"))
    assert sent == [("report", "made-up")]


def slots(key, value):
    """A setting of slot decoding leads to other passes or another answer."""

    def check(here):
        family = ("model.family=refusion", "train.objective=slot_diffusion", "eval.replay=full")
        common = ("slots.slot_size=4", "slots.serial_blocks=2", "slots.slot_threshold=0.3", "slots.token_threshold=0.1")

        def decoded(*more):
            settings = parse(["recipe=smollm2", *family, *common, *more]).recipe.slots
            decoder = SlotDiffusionDecoder(tiny_model("qwen3"), frozenset({2}), 96, 24, settings, greedy)
            return decoder.decode([11, 12, 13], Answer()), decoder.calls

        assert decoded() != decoded(f"slots.{key}={value}")

    return check


def slots_benchmarks(here):
    found = parse(["recipe=refusion-prefix-to-answer", "slots.benchmarks={mbpp: {token_threshold: 0.2}}"]).recipe.slots
    assert (found.of("mbpp").token_threshold, found.of("humaneval").token_threshold) == (0.2, 0.4)


CHECKS = {
    "run.dir": run_dir,
    "run.seed": run_seed,
    "run.report_to": run_report_to,
    "model.name": model_name,
    "model.revision": model_revision,
    "model.family": model_family,
    "model.dtype": model_dtype,
    "model.device": model_device,
    "model.trust_remote_code": elsewhere("test_bidirectional", "test_a_models_own_code_runs_only_when_it_is_asked_for"),
    "model.tiny": elsewhere("test_tiny", "test_a_tiny_model_answers_and_ends_by_itself"),
    "prompt.system_message": prompt_system_message,
    "data.corpora": data_corpora,
    "data.paths": data_paths,
    "data.limit": data_limit,
    "data.pairs": data_pairs,
    "data.kind": data_kind,
    "data.heldout": data_heldout,
    "data.cuts": data_cuts,
    "data.cut": data_cut,
    "data.whole": data_whole,
    "data.languages": data_languages,
    "data.flagged": data_flagged,
    "data.redacted": data_redacted,
    "data.max_characters": data_max_characters,
    "data.duplicates": data_duplicates,
    "data.benchmarks": data_benchmarks,
    "data.answers": data_answers,
    "data.max_surprise": data_max_surprise,
    "data.max_new_tokens": data_max_new_tokens,
    "data.batch_size": data_batch_size,
    "data.server": data_server,
    "data.server_model": data_server_model,
    "data.in_flight": data_in_flight,
    "data.workers": data_workers,
    "slots.slot_size": slots("slot_size", 6),
    "slots.serial_blocks": slots("serial_blocks", 1),
    "slots.slot_threshold": slots("slot_threshold", 0.01),
    "slots.token_threshold": slots("token_threshold", 0.0),
    "slots.benchmarks": slots_benchmarks,
    "slots.scoring": elsewhere("test_slot_decoder", "test_a_draft_token_is_judged_by_what_stands_to_its_left"),
    "slots.hide": elsewhere("test_bidirectional", "test_what_judges_a_draft"),
    "slots.half_kept": elsewhere("test_slot_decoder", "test_half_a_slot_is_kept_or_dropped"),
    "slots.keep": elsewhere("test_slot_decoder", "test_every_token_that_passes_can_be_kept_and_the_gaps_are_filled"),
    "slots.paper_floor": elsewhere(
        "test_slot_decoder", "test_a_draft_that_is_kept_whole_costs_one_pass_and_under_the_papers_floor_three"
    ),
    "slots.compat": elsewhere(
        "test_slot_decoder", "test_the_reference_is_reproduced_token_for_token_and_call_for_call"
    ),
    "train.objective": train_objective,
    "train.retain": train_retain,
    "train.retain_share": train_retain_share,
    "train.teacher_temperature": elsewhere("test_distill", "test_other_objectives_come_to_other_updates"),
    "train.rank": lora("rank", 3, "r"),
    "train.alpha": lora("alpha", 5, "lora_alpha"),
    "train.dropout": lora("dropout", 0.25, "lora_dropout"),
    "train.learning_rate": trainer("learning_rate", 0.125),
    "train.schedule": trainer("schedule", "linear"),
    "train.warmup_steps": trainer("warmup_steps", 17),
    "train.weight_decay": trainer("weight_decay", 0.375),
    "train.max_grad_norm": trainer("max_grad_norm", 0.625),
    "train.effective_batch": train_effective_batch,
    "train.micro_batch": train_micro_batch,
    "train.length_window": train_length_window,
    "train.max_length": train_max_length,
    "train.steps": trainer("steps", 13),
    "train.attention": train_attention,
    "train.gradient_checkpointing": trainer("gradient_checkpointing", "true", True),
    "train.liger": train_liger,
    "train.base_4bit": elsewhere("test_base", "test_a_4_bit_base_is_trained_on_and_merged_into_the_full_one"),
    "train.save_every": trainer("save_every", 19),
    "train.log_every": trainer("log_every", 23),
    "train.watch_every": train_watch_every,
    "train.watch_requests": train_watch_requests,
    "train.watch_max_new_tokens": train_watch_max_new_tokens,
    "train.keep": elsewhere("test_watch", "test_the_best_adapter_is_that_of_its_step"),
    "train.max_drift": elsewhere("test_watch", "test_the_best_is_the_fastest_whose_drift_is_within_bounds"),
    "train.tokens_per_second": elsewhere(
        "test_preflight", "test_a_dry_run_shows_what_training_will_meet_and_writes_nothing"
    ),
    "merge.dtype": merge_dtype,
    "merge.max_new_tokens": merge_max_new_tokens,
    "eval.arm": eval_arm,
    "eval.preset": eval_preset,
    "eval.benchmarks": eval_benchmarks,
    "eval.paths": eval_paths,
    "eval.limit": eval_limit,
    "eval.timed": eval_timed,
    "eval.replay": eval_replay,
    "eval.acceptance": eval_acceptance,
    "eval.tau": eval_tau,
    "eval.top_k": eval_top_k,
    "eval.recycle": eval_recycle,
    "eval.sweep": eval_sweep,
    "eval.max_new_tokens": eval_max_new_tokens,
    "eval.batch_size": eval_batch_size,
    "eval.gold": eval_gold,
    "eval.allow_code_execution": eval_allow_code_execution,
    "eval.time_limit": eval_time_limit,
    "eval.memory_limit": eval_memory_limit,
    "eval.chars_per_second": eval_chars_per_second,
    "report.before": one_of_three("before", 0),
    "report.after": one_of_three("after", 1),
    "report.quality_before": one_of_three("quality_before", 2),
    "report.bootstrap": report_bootstrap,
    "report.confidence": report_confidence,
    "report.replays": report_replays,
    "report.runs": report_runs,
    "report.force": report_force,
    "report.wandb": report_wandb,
}


def test_every_key_of_the_schema_has_a_check():
    keys = [f"{section}.{key}" for section, part in Recipe().model_dump().items() for key in part]
    assert keys == list(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_key_has_an_effect(name, here, request):
    check = CHECKS[name]
    wanted = check.__code__.co_varnames[1 : check.__code__.co_argcount]
    check(here, *(request.getfixturevalue(fixture) for fixture in wanted))
