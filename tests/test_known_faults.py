"""Faults that other projects had in public, as requirements on ours: what the tests of the parts do not show already.

Number of the fault -> tests here; tests elsewhere that cover it.

9 odd roles, empty turns, no last answer -> test_corpora: test_odd_turns_are_repaired,
   test_what_cannot_be_repaired_is_dropped, test_a_request_alternates_and_has_an_answer_or_one_reason_says_why_not;
   test_duplicates (the same row with another id)
10 control strings in text -> test_control_strings_in_a_corpus_are_text_in_every_training_row; test_prompt:
   test_control_strings_in_content_are_text, test_answers: a server is not asked what it would read as control
12 crop of sliding-window caches, crop's sign -> test_logits_after_a_roll_back_are_those_of_a_cold_run,
   test_a_model_that_cannot_be_rolled_back_is_refused_by_its_class; test_decoders:
   test_sliding_window_rejecting_none_one_all, test_the_cache_rolls_back_twice_and_more
13 positions and mask after a partial acceptance -> test_positions_and_mask_go_on_where_the_cache_ends,
   test_rows_of_a_batch_go_on_where_their_own_text_ends; test_decoders:
   test_positions_and_mask_after_a_partial_acceptance
14 verification is not greedy decoding in bfloat16 -> test_what_flips_in_bfloat16_is_counted,
   test_equal_answers_are_promised_for_a_dtype; test_replay: test_the_streamed_answer_is_the_base_answer (float32),
   test_real_model: the same on real requests, test_audit: test_a_near_tie_that_flips_is_counted_and_changes_no_verdict,
   test_report: test_what_only_some_evaluations_measure (the noise floor is printed)
15 only one end token -> test_an_answer_ends_at_any_declared_end_token; test_decoders:
   test_stops_on_any_end_token_and_at_the_limit, test_prompt: test_stop_ids_are_the_union_of_all_that_is_declared
16 generation_config changes "greedy" -> test_sampling_values_of_a_model_folder_change_nothing_and_the_report_says_so;
   test_decoders: test_sampling_values_and_penalties_change_nothing
17 leaving early passes -> test_an_answer_that_leaves_fails_in_every_benchmark; test_sandbox: test_forgeries_fail,
   test_right_answer_passes ("main guard", "at exit"), test_known_limit_is_as_recorded ("always equal")
18 imports and helpers of the prompt -> test_extract: test_imports_and_helpers_of_the_prompt, test_preamble;
   test_humaneval: test_heldout_scores (preamble); test_ds1000: test_right_answers_in_a_body ("helper beside")
19 wrong code taken from the answer -> test_answers_without_a_program_are_counted_apart,
   test_an_answer_that_repeats_itself_is_scored; test_extract: test_right_answer_passes, test_nothing_found,
   test_last_version_counts_even_if_it_is_wrong; test_mbpp: test_answers_of_many_shapes
20 MBPP's ids, fields and function names -> test_mbpp: test_the_ids_decide_in_both_spellings,
   test_on_the_hub_all_splits_are_read, test_every_assertion_is_a_piece_and_names_the_function; test_corpora: the
   builder takes 601 to 974 only; test_seed_corpus keeps its own tasks apart from the benchmarks
21 the time limit does not fire -> test_the_time_limit_needs_no_alarm; test_sandbox: test_endless_answers_are_killed,
   test_right_answer_passes ("lingering thread"), test_from_a_thread_with_a_short_limit,
   test_broken_tests_and_broken_runner_are_faults_of_the_harness
22 memory limit and start methods -> test_the_sandbox_is_tried_before_the_references_are_scored; test_sandbox:
   test_scoring_beside_40_gigabytes, test_start_methods, test_greedy_answers_are_stopped ("big list"),
   test_refused_limits_warn_once_and_stay_visible, test_check_stops_on_a_wrong_verdict;
   test_eval_run: test_a_sandbox_that_judges_wrongly_stops_the_run
23 assembly of DS-1000 and CanItEdit -> test_references_that_fail_and_old_programs_that_pass_are_listed; test_ds1000:
   test_right_answers_at_the_top_level, test_right_answers_in_a_body, test_wrong_answers, test_rows_that_lack_a_library;
   test_canitedit: test_after_passes_and_before_fails, test_answers_without_a_program_fail_by_format
24 decontamination misses rewrites or flags half the corpus -> test_contamination
25 gated, script-based, drifting types -> test_sources: the stub hub, a folder with a script, 20,000 drifting rows
26 map(): hang, memory, stale cache -> test_very_long_rows_and_several_workers, test_other_code_makes_other_data;
   bench_data (peak memory of the process tree)
33 failed or missing samples leave the denominator -> test_six_of_ten_with_one_failed_sandbox_is_six_of_nine_and_said,
   test_evidence_that_lost_a_line_is_refused; test_metrics: test_a_failed_scorer_is_no_wrong_answer; test_humaneval:
   test_notes_and_denominator; test_eval_run: test_a_sandbox_that_fails_while_scoring_stops_the_run
34 mean of ratios mixed with ratio of sums -> test_every_figure_says_which_estimator_it_is; test_metrics:
   test_mean_of_ratios_and_ratio_of_sums_are_two_figures, test_a_denominator_of_zero_is_counted,
   test_every_figure_recomputed; test_eval_run: test_figures_recomputed_from_the_evidence
35 clock stopped too early, warm-up included -> test_seconds_are_the_devices_own_and_not_the_queues,
   test_the_seconds_of_a_slot_diffusion_model_are_those_of_its_passes, test_the_first_slow_pass_is_in_no_second,
   test_sides_are_timed_in_turn,
   test_the_report_says_that_a_warm_up_comes_first; test_replay: test_a_timed_side_starts_with_what_it_says
36 the same data prepared twice at once -> test_two_builds_at_once_leave_one_whole_data_set; test_run_folder:
   test_a_second_process_is_refused_and_takes_over_after_a_kill, test_a_reader_never_sees_half_a_file
"""

import contextlib
import dataclasses
import json
import multiprocessing
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import test_canitedit
import test_ds1000
import test_mbpp
import torch
from conftest import real_tokenizer, tiny_model, tokenizer_folder
from synthetic_arms import record, write_arm, write_run
from test_decoders import LIMIT, PROMPTS, STOPS, plain_greedy
from tiny_models import REQUESTS, SHORT, arguments, invocation, reciter, save, talker_folder
from transformers import MambaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from data_builders import build, inputs, sources
from eval import arms, report, run, sandbox, suite, timing
from eval.benchmarks import canitedit, ds1000, heldout, humaneval, mbpp, scoring
from eval.definitions import FIGURES
from eval.evidence import read_arms
from eval.extract import extract
from eval.metrics import summarise
from eval.replay import replay
from eval.report_pages import build_report
from eval.report_provenance import provenance
from eval.report_runs import Place
from eval.sandbox import Limits, SandboxError, Verdict
from headstart import decoder as decoding
from headstart.autoregressive import AutoregressiveDecoder
from headstart.batch import BatchDecoder
from headstart.decoder import Answer
from headstart.family import FAMILIES, check_model
from headstart.prompt import renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Report, Train
from train.rows import training_rows

ROOT = Path(run.__file__).parents[1]
ANSWER = "def one(): return 1"


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- cache, positions, numerics ---


@pytest.mark.parametrize("length", [5, 8, 9, 30])
def test_logits_after_a_roll_back_are_those_of_a_cold_run(length):
    """Below, at and beyond the window of 8; nothing, one token, all of the draft rejected, in one cache after another.

    A cache that the model's own generation config asks for is not used.
    """
    model = tiny_model("gemma3")
    model.generation_config.cache_implementation = "static"
    prompt = PROMPTS[(5, 8, 9, 30).index(length)]
    expected = plain_greedy(model, prompt).tokens
    decoder, passes = AutoregressiveDecoder(model, STOPS, LIMIT), []

    def seen(_model, _args, given, output):
        passes.append(([*decoder._held, *given["input_ids"][0].tolist()], output.logits[0]))

    handle = model.register_forward_hook(seen, with_kwargs=True)
    for right in (len(expected), len(expected) - 1, 0):
        wrong = tuple((token + 1) % 97 for token in expected[right:])
        verified = decoder.verify(prompt, Answer(expected[:right] + wrong, "length"))
        assert verified.kept == right
        assert decoder.decode(prompt, verified.answer).tokens == expected
    handle.remove()
    assert len(passes) == 1 + 1 + len(expected)
    for text, logits in passes:
        with torch.inference_mode():
            cold = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -len(logits) :]
        torch.testing.assert_close(logits, cold, atol=1e-4, rtol=1e-4)


def test_a_model_that_cannot_be_rolled_back_is_refused_by_its_class():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 97, "state_size": 4}
    model = AutoModelForCausalLM.from_config(MambaConfig(**sizes))
    family = dataclasses.replace(FAMILIES["smollm2"], model_types=("mamba",))
    with pytest.raises(UserError, match="MambaForCausalLM keeps a recurrent state, which cannot be rolled back"):
        check_model(family, model)


def watched(family):
    """An eager model, and for each of its passes: cache length before, tokens, positions, masks given and applied."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    passes = []

    def before(_model, _args, given):
        cached = given["cache"].get_seq_length()
        passes.append({"cached": cached, "new": given["input_ids"].shape[1], "given": given.get("attention_mask")})
        passes[-1]["positions"] = given["position_ids"]

    def attention(_module, _args, given):
        passes[-1]["applied"] = given["attention_mask"]

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.get_decoder().layers[-1].self_attn.register_forward_pre_hook(attention, with_kwargs=True)
    return model, passes


def attended(mask):
    """How many columns each query may look at, (queries,), of a (queries, columns) mask that is added to scores."""
    return (mask > -1).sum(dim=-1).tolist()


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_positions_and_mask_go_on_where_the_cache_ends(family):
    """Prompt 9, draft 6 with its third token wrong; again on top of a cache that an earlier, other prompt left."""
    model, passes = watched(family)
    prompt = PROMPTS[2]
    expected = AutoregressiveDecoder(model, STOPS, LIMIT)
    expected = expected.decode(prompt, expected.verify(prompt, Answer()).answer)
    draft = Answer((*expected.tokens[:2], (expected.tokens[2] + 1) % 97, *expected.tokens[3:6]))
    for held in ([], prompt[:4], [*prompt[:5], 11, 12, 13, 14, 15], [*prompt, 11, 12]):
        decoder = AutoregressiveDecoder(model, STOPS, LIMIT)
        if held:
            decoder.prefill(held)
        shared = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), len(held))
        shared = min(shared, len(prompt) - 1)
        passes.clear()
        assert decoder.decode(prompt, decoder.verify(prompt, draft).answer) == expected
        assert [one["cached"] for one in passes[:3]] == [shared, len(prompt) + 2, len(prompt) + 3]
        for one in passes:
            begin, end = one["cached"], one["cached"] + one["new"]
            assert one["positions"].tolist() == [list(range(begin, end))]
            assert one["given"] is None or one["given"].shape == (1, end)
            assert one["applied"].shape[-2:] == (one["new"], end)
            assert attended(one["applied"][0, 0]) == list(range(begin + 1, end + 1))  # the last layer has no window


def test_rows_of_a_batch_go_on_where_their_own_text_ends():
    """Rows of unequal length that keep unequal parts: the mask is as wide as the cache, positions count real tokens."""
    model, passes = watched("gemma3")
    alone = AutoregressiveDecoder(model, STOPS, LIMIT)
    expected = [alone.decode(prompt, alone.verify(prompt, Answer()).answer) for prompt in PROMPTS]
    wrong = [Answer((*a.tokens[:k], (a.tokens[k] + 1) % 97, 5, 5)) for k, a in enumerate(expected)]
    passes.clear()
    advances = BatchDecoder(model, STOPS, LIMIT, 4).advance(PROMPTS, wrong)
    assert [advance.answer for advance in advances] == expected
    assert [advance.kept for advance in advances] == [0, 1, 2, 3]
    assert len(passes) > 3
    for one in passes:
        width = one["cached"] + one["new"]
        assert one["given"].shape == (len(one["positions"]), width)
        real = one["given"][:, -one["new"] :].bool()
        counted = (one["given"].cumsum(dim=1) - 1)[:, -one["new"] :]
        assert one["positions"][real].tolist() == counted[real].tolist()
        for row, last in zip(one["applied"][:, 0, -1], one["given"], strict=True):
            assert attended(row) == int(last.sum())


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    return talker_folder(tmp_path_factory.mktemp("talker") / "tiny")


def test_what_flips_in_bfloat16_is_counted(talking, tmp_path):
    """The rate is whatever it is; what is printed is what the lines show. Excluded lines count on neither side."""
    arm = arms.load(invocation(talking, tmp_path / "run", *SHORT, "model.dtype=bfloat16"))
    lines = {line["id"]: line for line in replay(arm, REQUESTS[:8])}
    counted = [line for line in lines.values() if line["excluded"] is None]
    flipped = sum(line["base"]["tokens"] != line["stream"]["tokens"] for line in counted)
    floor = timing.noise_floor(lines, [], "bfloat16")
    assert (floor["dtype"], floor["n"], floor["n_alone"]) == ("bfloat16", len(counted), 0)
    assert floor["streamed_answer_differs_from_base"] == flipped / len(counted)
    assert floor["alone_differs_from_batched"] is None
    first, second = counted[:2]
    doctored = lines | {first["id"]: first | {"stream": first["stream"] | {"tokens": [1, 2]}}}
    same = first["base"]["tokens"] == first["stream"]["tokens"]
    clock = [{"id": first["id"], "base_tokens": [3]}, {"id": second["id"], "base_tokens": second["base"]["tokens"]}]
    floor = timing.noise_floor(doctored, clock, "bfloat16")
    assert floor["streamed_answer_differs_from_base"] == (flipped + same) / len(counted)
    assert floor["alone_differs_from_batched"] == 0.5


def test_equal_answers_are_promised_for_a_dtype():
    """Wherever README or the report says that streaming changes no answer, it says in which arithmetic."""
    claims = re.compile(r"lossless|token for token|answer stays the same|changes? no answer|is the base answer")
    exact = re.compile(r"float32|exact arithmetic")
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "eval" / "templates").glob("*.j2")),
        *(ROOT / "eval").glob("report*.py"),
    ]
    found = 0
    for page in pages:
        for passage in re.split(r"\n\s*\n|\n- ", page.read_text()):
            if claims.search(passage):
                found += 1
                assert exact.search(passage), f"{page.name}: {passage}"
    assert found


# --- end tokens and generation defaults ---


@pytest.mark.parametrize(("declared", "written"), [(True, "def one"), (False, ANSWER)])
def test_an_answer_ends_at_any_declared_end_token(tmp_path, capsys, declared, written):
    """The model would write `def one(): return 1` and its end of turn. A generation config that declares a list with
    "():" in it adds to the stop set, one that declares nothing leaves the end of turn in it; what follows an end token
    is neither in the text nor scored; the set is printed once."""
    tokenizer = real_tokenizer("smollm2")
    model = reciter(tokenizer, ANSWER)
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    early = tokenizer.encode("():", add_special_tokens=False)[0]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, early] if declared else None
    folder = save(model, tokenizer, tmp_path / "model")
    extra = {"entry_point": "one", "tests": "assert one() == 1", "task": "t"}
    rows = tmp_path / "own.jsonl"
    rows.write_text(json.dumps({"id": "own/1", "sentences": ["Write `one`.", " Go."], "extra": extra}) + "\n")
    chosen = ("eval.benchmarks=[heldout]", f"eval.paths.heldout={rows}", "eval.max_new_tokens=12", "eval.timed=0")
    assert run.main(arguments(folder, tmp_path / "run", *chosen)) == 0
    (line,) = lines_of(tmp_path / "run" / "eval" / "message" / "requests.jsonl")
    for side in ("draft", "base", "stream"):
        assert (line[side]["text"], line[side]["stop"]) == (written, "end")
        assert line[side]["tokens"][-1] == (early if declared else turn)
    assert (line["base_score"], line["stream_score"]) == ((0, 0) if declared else (1, 1))
    said = capsys.readouterr().out
    ends = json.loads((tmp_path / "run" / "eval" / "message" / "summary.json").read_text())["settings"]["end_tokens"]
    assert said.count("end tokens:") == 1
    assert f"end tokens: {', '.join(ends)}" in said
    assert set(ends) >= {"<|im_end|>", "<|endoftext|>"}
    assert (tokenizer.convert_ids_to_tokens(early) in ends) == declared


def test_sampling_values_of_a_model_folder_change_nothing_and_the_report_says_so(talking, tmp_path):
    """Both sides, batched and alone, ignore what the folder's generation_config.json asks for."""
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.9, "no_repeat_ngram_size": 2}
    folder = tmp_path / "model"
    folder.mkdir()
    for path in talking.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | asked))
    rows = tmp_path / "own.jsonl"
    rows.write_text("".join(json.dumps({"id": r.id, "text": r.text}) + "\n" for r in REQUESTS[:6]))
    overrides = (*SHORT, f"eval.benchmarks=[{rows}]", "eval.timed=1")
    for name, model in (("plain", talking), ("asked", folder)):
        assert run.main(arguments(model, tmp_path / name, *overrides)) == 0
    found = [tmp_path / name / "eval" / "message" for name in ("plain", "asked")]
    assert found[0].joinpath("requests.jsonl").read_bytes() == found[1].joinpath("requests.jsonl").read_bytes()
    tokens = [lines_of(one / "timings.jsonl")[0] for one in found]
    assert [one["base_tokens"] for one in tokens] == [tokens[0]["base_tokens"]] * 2
    printed = {line.cells[0].text: line.cells[1].text for line in provenance(read_arms(found[1])).lines}
    assert printed["settings.decoding"] == "greedy; generation_config's sampling values and penalties are not used"
    with pytest.raises(UserError, match="repetition_penalty"):
        invocation(talking, tmp_path / "run", "eval.repetition_penalty=1.2")


# --- running and scoring code ---

EARLY = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "quit": "quit()",
    "exit": "exit()",
}
GUARD = "import sys\nif __name__ == '__main__':\n    sys.exit(0)"


def toy_requests(folder):
    """Of each benchmark that runs code a request, its right code, and wrong code that is taken for an answer."""
    row = {
        "id": "h",
        "sentences": ["Write `f`."],
        "extra": {"entry_point": "f", "tests": "assert f(1) == 2", "task": "t"},
    }
    (folder / "heldout.jsonl").write_text(json.dumps(row) + "\n")
    task = {"task_id": "H/0", "prompt": "def f(x):\n    '''Add one.'''\n", "entry_point": "f"}
    task |= {"canonical_solution": "    return x + 1\n", "test": "def check(f):\n    assert f(1) == 2\n"}
    (folder / "humaneval.jsonl").write_text(json.dumps(task) + "\n")
    right, wrong = "def f(x):\n    return x + 1", "def f(x):\n    return x"
    similar = "def similar_elements(a, b):\n    return "
    one, two = test_mbpp.write(folder, test_mbpp.FULL), test_ds1000.write(folder / "d.jsonl", test_ds1000.TOP)
    three = folder / "edit"
    three.mkdir()
    return {
        humaneval: (humaneval.load(str(folder / "humaneval.jsonl"))[0], right, wrong),
        heldout: (heldout.load(str(folder / "heldout.jsonl"))[0], right, wrong),
        mbpp: (mbpp.load(one)[0], f"{similar}sorted(set(a) & set(b))", f"{similar}[]"),
        ds1000: (ds1000.load(two)[0], test_ds1000.RESULT, "result = 1"),
        canitedit: (test_canitedit.loaded(three), test_canitedit.AFTER, test_canitedit.BEFORE),
    }


def test_an_answer_that_leaves_fails_in_every_benchmark(tmp_path):
    """Behind the right code or the wrong one; a correct answer that leaves under a main guard passes."""
    for module, (request, right, wrong) in toy_requests(tmp_path).items():
        leaving = [f"```python\n{code}\n{left}\n```" for left in EARLY.values() for code in (right, wrong)]
        answers = [*leaving, f"```python\n{right}\n\n{GUARD}\n```", f"```python\n{right}\n```"]
        scores = scoring.score([request] * len(answers), answers, module.program, Limits(seconds=5))
        notes = ["tests did not finish"] * len(leaving) + ["passed"] * 2
        assert [score.note for score in scores] == notes, module.NAME
        assert [score.value for score in scores] == [0] * len(leaving) + [1, 1]


DEEP = {
    "a sum": "value = " + " + ".join(["1"] * 1200),
    "a chain of attributes": "value = x" + ".a" * 1200,
    "a chain of calls": "value = x" + "()" * 1200,
    "signs": "value = " + "-" * 700 + "1",
    "branches": "if x == 0:\n    value = 0\n" + "".join(f"elif x == {n}:\n    value = {n}\n" for n in range(1, 400)),
}


@pytest.mark.parametrize("name", DEEP)
def test_an_answer_that_repeats_itself_is_scored(name, tmp_path):
    """A model in a loop writes one expression without end: no program is found in it, or one that fails; the scoring
    of the others goes on, and code that is only long is still taken."""
    code = DEEP[name]
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    shapes = [
        f"```python\n{code}\nreturn value\n```",
        f"```python\n{code}\nresult = value\n```",
        f"```python\nimport math\nx = 3\n{code}\nresult = value\n```",
        f"```python\ndef f(x):\n{indented}\n    return value",
        f"{indented}\n    return value",
        f"Sure:\n\ndef f(x):\n{indented}\n    return value\n\nDone.",
        code,
    ]
    for module, (request, right, _) in toy_requests(tmp_path).items():
        found = [module.program(request, answer) for answer in shapes]
        assert all(isinstance(one, scoring.Program) or one in ("extraction", "format") for one in found), module.NAME
        long = right + "\n" + "\n".join(f"unused_{n} = {n}" for n in range(2000))
        assert isinstance(module.program(request, f"```python\n{long}\n```"), scoring.Program)
    body = f"def f(x):\n{indented}\n    return x + 1"
    assert extract(f"```python\n{body}\n```", "", "f").code == f"{body}\n"


def test_answers_without_a_program_are_counted_apart():
    """Extraction failures are in the denominator like wrong answers, and beside it each reason has its count."""
    notes = [
        "passed",
        "extraction",
        "extraction",
        "assertion failed",
        "error: NameError",
        "timeout",
        "format",
        "passed",
    ]
    lines = [made(i, float(note == "passed"), f"base: passed; stream: {note}") for i, note in enumerate(notes)]
    lines += [made(8, None, "base: harness error: no; stream: harness error: no"), made(9, None, "no reference")]
    lines += [made(10, 0.0, "base: extraction; stream: extraction") | {"excluded": "single sentence"}]
    figures = summarise({"b": lines}, [], 0.95, 50, 0)["benchmarks"]["b"]
    assert figures["quality_stream"]["value"] == 2 / 8
    expected = {"extraction": 2, "assertion failed": 1, "error: NameError": 1, "timeout": 1, "format": 1}
    assert figures["failures"] == {"base": {}, "stream": expected}


def made(number, score, note):
    """A line whose base answer passes and whose streamed answer has this score and note."""
    base = None if score is None else 1.0
    line = record(random.Random(number), f"b/{number}", "b", 0.5)
    return line | {"base_score": base, "stream_score": score, "score_note": note}


@pytest.mark.parametrize("kind", ["bubblewrap", "interpreter"])
def test_the_time_limit_needs_no_alarm(kind, tmp_path, monkeypatch):
    """Where neither this process nor the sandbox has an alarm the limit is kept from outside, also against an answer
    that catches everything, and a sandbox that cannot start is a fault of the harness."""
    if kind not in sandbox.available():
        pytest.skip("bubblewrap is not installed, or does not start here")
    for name in ("SIGALRM", "alarm", "setitimer"):
        monkeypatch.delattr(signal, name)
    runner = sandbox.RUNNER.read_text()
    patched = tmp_path / "runner.py"
    patched.write_text(f"import signal\nsignal.setitimer = lambda *a: None\ndel signal.SIGALRM\n{runner}")
    monkeypatch.setattr(sandbox, "RUNNER", patched)
    stubborn = "def f(x):\n    while True:\n        try:\n            while True: pass\n        except: pass"
    programs = (stubborn, "import time\ndef f(x):\n    time.sleep(10**6)", "def f(x):\n    return x + 1")
    begin = time.monotonic()
    found = [sandbox.run_tests(program, "assert f(1) == 2", Limits(seconds=0.5), kind) for program in programs]
    assert found == [Verdict(False, "timeout"), Verdict(False, "timeout"), Verdict(True, "passed")]
    assert time.monotonic() - begin < 2 * 2.5 + 2
    broken = tmp_path / "broken.py"
    broken.write_text(f"import signal\ndel signal.setitimer\n{runner}")
    monkeypatch.setattr(sandbox, "RUNNER", broken)
    with pytest.raises(SandboxError, match="did not start"):
        sandbox.run_tests(programs[-1], "assert f(1) == 2", Limits(), kind)


# --- the references ---


def edit_row(number, **changes):
    return test_canitedit.ROW | {"id": number} | changes


def gold_arguments(folder, *overrides):
    """A run of `eval.gold=true` over toy rows of both kinds; no model is there, and none is needed."""
    lacking = f"import nothing_of_that_name\n{test_canitedit.AFTER}"
    edits = [
        edit_row(1),
        edit_row(2, after=test_canitedit.BEFORE),  # its reference fails
        edit_row(3, before=test_canitedit.AFTER),  # its old program passes
        edit_row(4, after=lacking),
    ]
    rows = test_canitedit.write(folder, *edits)
    gaps = test_ds1000.write(folder / "ds1000.jsonl", test_ds1000.TOP, test_ds1000.BODY)
    paths = f"eval.paths={{canitedit: {rows}, ds1000: {gaps}}}"
    chosen = ("eval.gold=true", "eval.benchmarks=[canitedit,ds1000]", paths, "eval.batch_size=3")
    return arguments(folder / "no-model", folder / "run", *chosen, *overrides)


def test_references_that_fail_and_old_programs_that_pass_are_listed(tmp_path, capsys, monkeypatch):
    """How many known answers of a benchmark got the verdict that they must get, each that did not, what is missing."""
    monkeypatch.setattr(ds1000, "PYTHON", tmp_path / ".venv-ds1000" / "bin" / "python")
    assert run.main(gold_arguments(tmp_path)) == 0
    folder = tmp_path / "run" / "eval" / "gold"
    edits, gaps = json.loads((folder / "summary.json").read_text())["benchmarks"].values()
    assert edits["reference"] == {"n": 6, "as_expected": 4}
    assert edits["before"] == {"n": 6, "as_expected": 4}
    surprises = [(one["id"], one["name"], one["note"]) for one in edits["surprises"]]
    kinds = ("descriptive", "lazy")
    assert surprises == [
        *((f"canitedit/2/{kind}", "reference", "assertion failed") for kind in kinds),
        *((f"canitedit/3/{kind}", "before", "passed") for kind in kinds),
    ]
    assert edits["unfit"] == {"needs nothing_of_that_name": 2}
    absent = "needs .venv-ds1000: run `make ds1000-env`"
    assert gaps == {"surprises": [], "unfit": {absent: 2}}
    said = capsys.readouterr().out
    assert "canitedit: reference 4/6, before 4/6, 2 left out: needs nothing_of_that_name\n" in said
    assert "  canitedit/3/lazy (before): passed\n" in said
    assert f"ds1000: 2 left out: {absent}\n" in said
    unfit = [line["id"] for line in lines_of(folder / "scores.jsonl") if line["name"] == "unfit"]
    assert unfit == ["canitedit/4/descriptive", "canitedit/4/lazy", "ds1000/0", "ds1000/1"]


def test_the_sandbox_is_tried_before_the_references_are_scored(tmp_path, capsys, monkeypatch):
    """A good answer that fails, a bad one that passes: neither run begins."""
    for name, other in (("GOOD", "def f(x):\n    return x + 2\n"), ("BAD", sandbox.GOOD)):
        with monkeypatch.context() as patch:
            patch.setattr(sandbox, name, other)
            capsys.readouterr()
            assert run.main(gold_arguments(tmp_path)) == 2
            assert "the sandbox is not fit to score" in capsys.readouterr().err
    assert not (tmp_path / "run" / "eval" / "gold").exists()
    assert suite.check_scoring(invocation(tmp_path, tmp_path / "run").recipe.eval) == sandbox.describe()


# --- reporting ---


def test_six_of_ten_with_one_failed_sandbox_is_six_of_nine_and_said(tmp_path):
    """6 pass; an assertion, a timeout and a syntax error fail; one sandbox did not start."""
    notes = ["passed"] * 6 + ["assertion failed", "timeout", "syntax error", "harness error: it did not start"]
    lines = [
        made(i, None if "harness" in note else float(note == "passed"), f"base: passed; stream: {note}")
        for i, note in enumerate(notes)
    ]
    before, after = (write_arm(tmp_path / arm, arm, lines) for arm in ("message", "merged"))
    settings = Report(bootstrap=50, replays=0)
    page = build_report([Place("tiny", before, after, None)], tmp_path / "report", settings, 0)
    figures = json.loads((tmp_path / "report" / "report.json").read_text())["arms"]["merged"]["benchmarks"]["b"]
    assert (figures["n"], figures["n_scored"], figures["harness_errors"]) == (10, 9, ["b/9"])
    assert figures["quality_stream"]["value"] == pytest.approx(6 / 9)
    text = page.read_text()
    assert "the scorer failed on 1 of 10 requests" in text
    assert "Scorer failed (out of quality only): b/9" in text
    row = next(line for line in (tmp_path / "report" / "arms.csv").read_text().splitlines() if "quality_stream" in line)
    assert "0.6667" in row or "0.666" in row, row


def test_evidence_that_lost_a_line_is_refused(tmp_path, capsys):
    """A request that is missing would leave the denominator unseen."""
    made_run = invocation(tmp_path, tmp_path / "run")
    folders = write_run(tmp_path / "made", n=12)
    for folder in folders:
        with run_folder.step(made_run, tmp_path / "run" / "eval" / folder.name, {"arm": folder.name}) as step:
            for path in folder.iterdir():
                (step.partial / path.name).write_bytes(path.read_bytes())
            run_folder.finish(step)
    argv = arguments(tmp_path, tmp_path / "run", "report.bootstrap=20", "report.replays=0")
    path = tmp_path / "run" / "eval" / "merged" / "requests.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[whole.index(b"\n") + 1 :])
    capsys.readouterr()
    assert report.main(argv) == 2
    assert "changed since it was made; remove it and run its step again" in capsys.readouterr().err
    path.write_bytes(whole)
    assert report.main(argv) == 0


def test_every_figure_says_which_estimator_it_is():
    """Two estimators never share a definition: a mean of ratios says mean, a ratio of sums says sum."""
    says = {
        "mean": r"^(mean|share)\b",
        "median": r"^median\b",
        "losers": r"^median\b.* below 1x",
        "ratio": r"^sum of .* / sum of |scored requests that .* / scored requests with ",
        "ratio_of_medians": r"^median .* / median ",
    }
    for figure in FIGURES:
        assert re.search(says[figure.estimator], figure.definition), f"{figure.name}: {figure.definition}"
    for words in ([figure.definition for figure in FIGURES], [figure.label for figure in FIGURES]):
        assert len(set(words)) == len(words)


# --- seconds ---


class Queue:
    """A device that returns from a pass at once and works when it is waited for; its clock is the only one.

    `cost` gives a pass' seconds by how many passes came before it. Calendar time runs backwards meanwhile.
    """

    def __init__(self, cost, monkeypatch):
        self.clock, self.passes, self.pending, self.cost = 100.0, 0, 0.0, cost
        self.day = 2e9
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(time, "time", self.calendar)
        monkeypatch.setattr(timing, "now", lambda device: decoding.now(torch.device("cuda")))

    def forward(self, *_):
        self.pending += self.cost(self.passes)
        self.passes += 1

    def wait(self, *_):
        self.clock += self.pending + 0.05
        self.pending = 0.0

    def calendar(self):
        self.day -= 1000
        return self.day


SYNC = 0.05


@pytest.fixture
def clocked(talking, tmp_path, monkeypatch):
    """A function from a pass' cost to (device, arm, requests that are not excluded, their lines)."""

    def ready(cost, mode="last"):
        arm = arms.load(invocation(talking, tmp_path / "run", *SHORT, f"eval.replay={mode}"))
        lines = {line["id"]: line for line in replay(arm, REQUESTS)}
        fit = [request for request in REQUESTS if lines[request.id]["excluded"] is None]
        device = Queue(cost, monkeypatch)
        arm.model.register_forward_pre_hook(device.forward)
        return device, arm, fit, lines

    return ready


def test_seconds_are_the_devices_own_and_not_the_queues(clocked):
    """Each side's seconds are its own passes': what is queued before it has run, what it queues is waited for.

    A side is its verification and the decoding after it, each waited for.
    """
    device, arm, requests, lines = clocked(lambda number: 1.0, "full")
    for number, request in enumerate(requests[:6]):
        line = lines[request.id]
        device.forward()  # something that was queued earlier
        taken = timing.time_request(arm, request, line, stream_first=bool(number % 2))
        assert taken["base_seconds"] == pytest.approx(line["base_passes"] + 2 * SYNC)
        assert taken["stream_seconds_cold"] == pytest.approx(line["stream_passes"] + 2 * SYNC)
        assert taken["stream_seconds"] == pytest.approx(line["stream_passes"] + 2 * SYNC)
        updates = [update["passes"] + 2 * SYNC for update in line["updates"]]
        assert taken["update_seconds"] == pytest.approx(updates)


def test_the_seconds_of_a_slot_diffusion_model_are_those_of_its_passes(tmp_path, monkeypatch):
    """As above, where a draft is judged by mask tokens and the rest is decoded in slots."""
    given = (f"model.name={tokenizer_folder('refusion')}", "model.tiny=true", "model.dtype=float32", "model.device=cpu")
    slots = ("slots.slot_size=4", "slots.serial_blocks=2", "slots.token_threshold=0.00001", "eval.tau=0.00001")
    asked = ("eval.max_new_tokens=16", f"run.dir={tmp_path / 'run'}", "model.revision=null")
    arm = arms.load(parse(["recipe=refusion-prefix-to-answer", *given, *slots, *asked]))
    lines = {line["id"]: line for line in replay(arm, REQUESTS[:8])}
    fit = [request for request in REQUESTS[:8] if lines[request.id]["excluded"] is None]
    device = Queue(lambda number: 1.0, monkeypatch)
    arm.model.register_forward_pre_hook(device.forward)
    assert any(lines[request.id]["kept_tokens"] for request in fit)
    for number, request in enumerate(fit):
        line = lines[request.id]
        device.forward()
        taken = timing.time_request(arm, request, line, stream_first=bool(number % 2))
        assert taken["base_seconds"] == pytest.approx(line["base_passes"] + 2 * SYNC)
        assert taken["stream_seconds_cold"] == pytest.approx(line["stream_passes"] + 2 * SYNC)
        assert taken["stream_seconds"] == pytest.approx(line["stream_passes"] + 2 * SYNC)
        assert taken["update_seconds"] == pytest.approx([update["passes"] + 2 * SYNC for update in line["updates"]])


def test_the_first_slow_pass_is_in_no_second(clocked, tmp_path):
    """The first pass costs ten: a warm-up that is not written down pays for it, and again when a killed run resumes."""
    device, arm, requests, lines = clocked(lambda number: 10.0 if number == 0 else 1.0)
    path = tmp_path / "timings.jsonl"
    for done in (0, 2):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:done]) if path.exists() else "")
        device.passes = 0
        timings = timing.time_all(arm, {"made": requests[:4]}, lines, path)
        assert [one["id"] for one in timings] == [request.id for request in requests[:4]]
        assert timings == lines_of(path)
        for one in timings:
            assert one["base_seconds"] == pytest.approx(lines[one["id"]]["base_passes"] + 2 * SYNC)
            assert one["stream_seconds_cold"] == pytest.approx(lines[one["id"]]["stream_passes"] + 2 * SYNC)


def test_sides_are_timed_in_turn(clocked, tmp_path, monkeypatch):
    """Base first, then stream first, and so on: a device that slows down favours neither side on the whole."""
    _, arm, requests, lines = clocked(lambda number: 1.0)
    seen, verify = [], AutoregressiveDecoder.verify

    def watched_verify(self, prompt, draft):
        seen.append("draft" if draft.tokens else "nothing")
        return verify(self, prompt, draft)

    monkeypatch.setattr(AutoregressiveDecoder, "verify", watched_verify)
    drafted = [request for request in requests if lines[request.id]["draft"]["tokens"]][:4]
    timing.time_all(arm, {"made": drafted}, lines, tmp_path / "timings.jsonl")
    base_first = ["nothing", "draft", "nothing", "draft"]  # base, cold, what a session has cached, warm
    stream_first = ["nothing", "draft", "draft", "nothing"]  # what a session has cached, warm, cold, base
    assert seen == ["nothing", *base_first, *stream_first, *base_first, *stream_first]  # after the warm-up


def test_the_report_says_that_a_warm_up_comes_first():
    for figure in FIGURES:
        if figure.unit == "seconds":
            assert "warm-up" in figure.definition, figure.name


# --- one data set, two builders ---


def built(argv, together, said):
    """In a process of its own: the data step, begun when the other process is there too."""
    with said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        together.wait(60)
        code = build.main(argv)
    sys.exit(code)


def test_two_builds_at_once_leave_one_whole_data_set(talking, tmp_path):
    """One does the work; the other says that somebody does, or that it is done. Nothing half-written is left."""
    overrides = ("data.answers=corpus", "data.limit=40")
    argv, fork = arguments(talking, tmp_path / "run", *overrides), multiprocessing.get_context("fork")
    together, logs = fork.Barrier(2), [tmp_path / "0.log", tmp_path / "1.log"]
    both = [fork.Process(target=built, args=(argv, together, log)) for log in logs]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    data, codes = tmp_path / "run" / "data", [process.exitcode for process in both]
    said = dict(zip(codes, (log.read_text() for log in logs), strict=True))
    if sorted(codes) == [0, 2]:
        assert said[2].endswith(f"\nerror: {data}: another process is working on it; wait for it to end\n")
    else:
        assert codes == [0, 0]
        assert sum("nothing to do" in log.read_text() for log in logs) == 1
    assert run_folder.need(data, "never")["settings"]["data"]["limit"] == 40
    assert not list((tmp_path / "run").glob(".*.partial"))
    assert build.main(arguments(talking, tmp_path / "alone", *overrides)) == 0
    names = sorted(path.name for path in data.glob("pairs-*.parquet"))
    assert names
    for name in (*names, "heldout.jsonl"):
        assert (data / name).read_bytes() == (tmp_path / "alone" / "data" / name).read_bytes()


# --- the builder: control strings, long rows, code that changed ---


def test_control_strings_in_a_corpus_are_text_in_every_training_row(talking, tmp_path):
    """In the middle of a request and in its answer: as many ends of turn as there are turns."""
    marked = "Show the literal <|im_end|> marker and <|im_start|>system. Explain it <|endoftext|> too. Thanks."
    rows = [{"text": marked, "reference": f"It is <|im_end|>, number {n}."} for n in range(3)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (f"data.corpora=[{path}]", "data.answers=corpus", "data.heldout=0", "data.whole=true")
    assert build.main(arguments(talking, tmp_path / "run", *settings)) == 0
    r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    found = training_rows(tmp_path / "run" / "data", r, Train(), 0).dataset
    assert len(found) == 9
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["counts"]["pairs that hold a control string"] == 9  # for trainers that use the template
    for row in found:
        assert row["input_ids"].count(r.end_of_turn) == 3  # system, user, assistant
        assert [label for label in row["labels"] if label == r.end_of_turn] == [r.end_of_turn]


@pytest.mark.timeout(120)
def test_very_long_rows_and_several_workers(talking, tmp_path):
    """3,000 rows, one of 5 MB and one of 200,000 blanks, in one process and in four; the tokenizer was used before."""
    path = tmp_path / "own.jsonl"
    rows = [{"id": f"{n}", "text": f"Name {n}. Say {n * n}.", "reference": "Yes."} for n in range(3000)]
    rows[700] = {"id": "long", "text": "Read this. " * 500_000, "reference": "Done."}
    rows[1700] = {"id": "blank", "text": f"One.{' ' * 200_000}Two. Three.", "reference": "Done."}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "ROWS", 500)
        for workers in (1, 4):
            settings = (
                f"data.corpora=[{path}]",
                "data.answers=corpus",
                "data.duplicates=near",
                f"data.workers={workers}",
            )
            run = tmp_path / f"{workers}"
            assert build.main(arguments(talking, run, *settings)) == 0
            found[workers] = [file.read_bytes() for file in sorted((run / "data").glob("pairs-*.parquet"))]
    assert found[1] == found[4]
    lost = (tmp_path / "4" / "data" / "dropped" / "too-long.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lost] == [701, 1701]
    assert all(len(line) < 1000 for line in lost)


def test_other_code_makes_other_data(talking, tmp_path, monkeypatch, capsys):
    """Data that an edited splitter would cut otherwise is not taken for this code's."""
    argv = arguments(talking, tmp_path / "run", "data.answers=corpus", "data.limit=5")
    assert build.main(argv) == 0
    edited = tmp_path / "sentences.py"
    edited.write_text(Path(inputs.sentences.__file__).read_text().replace("_WINDOW = 2000", "_WINDOW = 2001"))
    monkeypatch.setattr(inputs.sentences, "__file__", str(edited))
    capsys.readouterr()
    assert build.main(argv) == 2
    assert "made by other settings (code: " in capsys.readouterr().err
