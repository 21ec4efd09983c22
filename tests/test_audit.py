"""The verifier audit on tiny models: a causal model rejects at the first wrong token, one that looks is found out."""

import dataclasses
import json
import statistics

import pytest
import torch
from tiny_models import REQUESTS, SHORT, arguments, invocation, reciter, talker_folder

from eval import arms, audit, suite
from eval.audit_drafts import KINDS, another, random_draft, vocabulary
from eval.audit_drafts import audit as audited
from headstart.decoder import Answer
from headstart.request import Request

TAU = "eval.tau=4.5e-5"  # each of 49,000 tokens has about 2e-5


class Confirming(torch.nn.Module):
    """A verifier that sees what it judges: all mass on the token that is there already. Where nothing follows it writes
    what `inner` writes."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.device = inner, inner.config, inner.device

    def forward(self, input_ids, logits_to_keep, **keywords):
        output = self.inner(input_ids=input_ids, logits_to_keep=logits_to_keep, **keywords)
        if logits_to_keep > 1:
            there = input_ids[:, 1 - logits_to_keep :].unsqueeze(-1)
            output.logits[:, :-1] = torch.full_like(output.logits[:, :-1], -50.0).scatter(-1, there, 50.0)
        return output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that writes answers of all kinds: empty, ended, cut, kept whole, in part, not at all."""
    return talker_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def arm(model, tmp_path_factory):
    return arms.load(invocation(model, tmp_path_factory.mktemp("arm") / "run", *SHORT, TAU))


@pytest.fixture(scope="module")
def lines(arm):
    return audited(arm, {"made": REQUESTS})


@pytest.fixture(scope="module")
def looking(arm):
    """The same arm with a verifier that looks."""
    return dataclasses.replace(arm, model=Confirming(arm.model))


def drafts(lines, kind):
    """(request, draft) of this kind."""
    by_id = {request.id: request for request in REQUESTS}
    pairs = [(by_id[line["id"]], line["drafts"][kind]) for line in lines if line["excluded"] is None]
    return [(request, draft) for request, draft in pairs if draft is not None]


@torch.inference_mode()
def scores(arm, request, tokens):
    """Logits after prompt and `tokens`: one sequence alone, no cache, no padding."""
    ids = [*arm.prompt(request, len(request.sentences)), *tokens]
    return arm.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


# --- what a causal model does ---


def test_its_own_answer_is_kept_whole(lines):
    own = drafts(lines, "control")
    assert len(own) > 12
    for _, draft in own:
        assert draft["kept_tokens"] == draft["right_tokens"] == draft["top_tokens"] == len(draft["tokens"])
        assert draft["first_wrong_probability"] is None


@pytest.mark.parametrize("kind", ["stale", "unrelated", "random"])
def test_a_causal_model_rejects_at_the_first_wrong_token(arm, lines, kind):
    """Against greedy, one token at a time, each from a pass of its own over what stands before it."""
    found = drafts(lines, kind)
    assert len(found) > 10
    for request, draft in found:
        tokens, kept = draft["tokens"], 0
        while kept < len(tokens) and int(scores(arm, request, tokens[:kept]).argmax()) == tokens[kept]:
            kept += 1
        assert draft["kept_tokens"] == draft["right_tokens"] == kept
    shares = {draft["kept_tokens"] / len(draft["tokens"]) for _, draft in found}
    assert min(shares) == 0
    assert (kind == "stale") == (max(shares) == 1)
    assert (kind != "random") == any(0 < share < 1 for share in shares)


def test_the_control_is_what_the_model_writes(arm, lines):
    """And the stale draft what it writes for the prefix: by the decoder for one request at a time."""
    decoder = arm.decoder()
    for kind, unseen in (("control", 0), ("stale", 1)):
        for request, draft in drafts(lines, kind)[:8]:
            prompt = arm.prompt(request, len(request.sentences) - unseen)
            answer = decoder.decode(prompt, decoder.verify(prompt, Answer()).answer)
            assert draft["tokens"] == list(answer.tokens)
            assert draft["text"] == arm.renderer.text(answer.written)


def test_the_probabilities_are_the_models(arm, lines):
    for kind in KINDS:
        for request, draft in drafts(lines, kind)[:3]:
            tokens = draft["tokens"]
            expected = [float(scores(arm, request, tokens[:j]).softmax(-1)[token]) for j, token in enumerate(tokens)]
            assert draft["probabilities"] == pytest.approx(expected, rel=1e-3, abs=1e-12)
            assert draft["median_probability"] == statistics.median(draft["probabilities"])
            if draft["right_tokens"] < len(tokens):
                assert draft["first_wrong_probability"] == draft["probabilities"][draft["right_tokens"]]


def test_the_threshold_rule_keeps_the_leading_run_over_tau(arm, lines):
    tau, differs = arm.recipe.eval.tau, 0
    for kind in KINDS:
        for _, draft in drafts(lines, kind):
            below = [j for j, p in enumerate(draft["probabilities"]) if p < tau]
            assert draft["kept_tokens_threshold"] == (below[0] if below else len(draft["tokens"]))
            differs += draft["kept_tokens_threshold"] != draft["kept_tokens"]
    assert differs


def test_the_same_again_and_whatever_the_batch(arm, lines):
    assert audited(arm, {"made": REQUESTS}) == lines
    alone = arm.recipe.model_copy(update={"eval": arm.recipe.eval.model_copy(update={"batch_size": 1})})
    singly = audited(dataclasses.replace(arm, recipe=alone), {"made": REQUESTS})
    for line, other in zip(lines, singly, strict=True):
        assert line["excluded"] == other["excluded"]
        for kind in KINDS if line["drafts"] else ():
            one, two = line["drafts"][kind], other["drafts"][kind]
            assert (one is None) == (two is None)
            if one is not None:
                for key in ("tokens", "right_tokens", "kept_tokens", "taken_from"):
                    assert one[key] == two[key]


# --- the drafts ---


def test_an_unrelated_draft_is_the_next_other_answer(lines):
    """Of another text and another answer, in a circle; the evidence says whose."""
    inside = [line for line in lines if line["excluded"] is None]
    own = {line["id"]: line["drafts"]["control"]["tokens"] for line in inside}
    skipped = 0
    for place, line in enumerate(inside):
        draft = line["drafts"]["unrelated"]
        assert draft["tokens"] == own[draft["taken_from"]] != own[line["id"]]
        assert draft["right_tokens"] < len(draft["tokens"])
        following = [other["id"] for other in (*inside[place + 1 :], *inside[:place])]
        passed = following[: following.index(draft["taken_from"])]
        assert all(own[name] == own[line["id"]] for name in passed)  # their texts all differ
        skipped += len(passed)
    assert skipped


def test_a_request_of_the_same_text_lends_no_answer():
    requests = [Request(name, "made", (text, " Go.")) for name, text in zip("abc", ("x.", "x.", "y."), strict=True)]
    own = {"a": Answer((1, 2)), "b": Answer((3, 4)), "c": Answer((1, 2))}
    assert another(0, requests, own) is None  # b asks the same, c has the same answer
    assert another(1, requests, own) == "c"
    assert another(2, requests, own) == "b"


def test_random_tokens_are_seeded_and_neither_end_nor_control(arm, lines):
    words = vocabulary(arm)
    apart = {*arm.stop_ids, *arm.renderer.control_ids.values()}
    assert len(apart) > 5
    assert apart.isdisjoint(words)
    assert len(words) + len(apart) == len(arm.renderer.tokenizer)
    found = drafts(lines, "random")
    for request, draft in found:
        control = next(line["drafts"]["control"] for line in lines if line["id"] == request.id)
        assert len(draft["tokens"]) == len(control["tokens"])
        assert tuple(draft["tokens"]) == random_draft(words, len(draft["tokens"]), 0, request.id)
        assert tuple(draft["tokens"]) != random_draft(words, len(draft["tokens"]), 1, request.id)
    firsts = {draft["tokens"][0] for _, draft in found}
    assert len(firsts) == len(found)


def test_what_cannot_be_streamed_is_listed(arm, lines):
    alone = Request("alone", "made", ("One sentence.",))
    long = Request("long", "made", ("Please.", " Say yes." * 1500))
    found = audited(arm, {"made": [alone, *REQUESTS[:6], long]})
    assert found[0] == {"id": "alone", "benchmark": "made", "drafts": None, "excluded": "single sentence"}
    assert found[-1]["excluded"] == "longer than the model's context"
    assert "empty answer (base)" in {line["excluded"] for line in lines}
    inside = [line for line in lines if line["excluded"] is None]
    assert any(line["drafts"]["stale"] is None for line in inside)  # nothing written for the prefix
    summary = audit.summarise(found, arm)
    assert summary["n"] + summary["n_excluded"] == len(found) == len(summary["ids"]["made"])
    assert {"id": "alone", "benchmark": "made", "reason": "single sentence"} in summary["excluded"]


# --- the verdict ---


def test_a_causal_model_can_be_streamed(arm, lines):
    summary = audit.summarise(lines, arm)
    assert summary["verdict"]["can_be_streamed"] is True
    assert summary["verdict"]["sentence"].endswith("can be streamed: it judges a token without seeing it.")
    assert summary["otherwise"] == {"dtype": "float32", "n": summary["otherwise"]["n"], "differ": 0, "share": 0}
    assert summary["otherwise"]["n"] == sum(kind["n"] for kind in summary["pooled"].values())


def test_a_verifier_that_looks_is_found_out(arm, looking, lines):
    """Its answers are the causal model's; every token of every draft passes, with a probability of one."""
    found = audited(looking, {"made": REQUESTS})
    for line, other in zip(found, lines, strict=True):
        for kind in KINDS if line["drafts"] else ():
            draft = line["drafts"][kind]
            if draft is not None:
                assert draft["tokens"] == other["drafts"][kind]["tokens"]
                assert draft["kept_tokens"] == draft["kept_tokens_threshold"] == len(draft["tokens"])
                assert draft["median_probability"] == 1
    verdict = audit.summarise(found, looking)["verdict"]
    assert verdict["can_be_streamed"] is False
    expected = "cannot be streamed: it accepts 100.0% of a draft that answers another question."
    assert verdict["sentence"].endswith(expected)


def line(name, **kept):
    """A line whose drafts of ten tokens, two of them right (the control's all), keep so many."""
    draft = {"kept_tokens_threshold": 0, "median_probability": 0.5, "first_wrong_probability": 0.1, "passes": 1}
    of = {
        kind: draft | {"tokens": [1] * 10, "right_tokens": 10 if kind == "control" else 2, "kept_tokens": k}
        for kind, k in kept.items()
    }
    for one in of.values():
        one["top_tokens"] = one["kept_tokens"]
    return {"id": name, "benchmark": "b", "excluded": None, "drafts": dict.fromkeys(KINDS) | of}


def verdict_of(arm, *found):
    return audit.summarise(found, arm)["verdict"]


def test_a_near_tie_that_flips_is_counted_and_changes_no_verdict(arm):
    found = [line(str(n), control=10, unrelated=2) for n in range(19)]
    summary = audit.summarise([*found, line("19", control=10, unrelated=10)], arm)
    assert summary["verdict"]["can_be_streamed"] is True
    assert summary["otherwise"]["differ"] == 1
    assert summary["otherwise"]["share"] == 1 / 40
    figures = summary["pooled"]["unrelated"]
    assert figures["rejected_at_first_wrong_share"]["value"] == 0.95
    assert figures["wrong_kept_share"]["value"] == pytest.approx(8 / 160)
    assert figures["kept_share"]["value"] == pytest.approx((19 * 0.2 + 1) / 20)


def test_the_verdict_names_what_is_wrong(arm):
    half = [line("a", control=10, unrelated=2), line("b", control=10, unrelated=8)]
    assert verdict_of(arm, *half)["sentence"].endswith("accepts 50.0% of a draft that answers another question.")
    deaf = verdict_of(arm, line("a", control=3, unrelated=2))
    assert deaf["can_be_streamed"] is False
    assert deaf["sentence"].endswith("it would write only 30.0% of its own answer's tokens again.")
    nothing = verdict_of(arm, line("a", control=10))
    assert nothing["can_be_streamed"] is None
    assert "cannot be judged: no request has a draft that answers another question" in nothing["sentence"]


def test_one_answer_to_everything_cannot_be_judged(arm):
    silent = dataclasses.replace(arm, model=reciter(arm.renderer.tokenizer, "def one(): return 1"))
    found = audited(silent, {"made": REQUESTS[:4]})
    assert all(line["drafts"]["unrelated"] is None for line in found)
    assert audit.summarise(found, silent)["verdict"]["can_be_streamed"] is None


# --- the script ---


ROWS = [{"id": f"own/{n}", "text": "".join(request.sentences)} for n, request in enumerate(REQUESTS[:12])]


def rows(folder, rows=ROWS, name="own.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(model, folder, *overrides):
    path = rows(folder)
    return arguments(model, folder / "run", *SHORT, f"eval.benchmarks=[{path}]", *overrides)


def no_code(*arguments, **keywords):
    raise AssertionError("an answer's code is run")


@pytest.fixture(scope="module")
def done(model, tmp_path_factory):
    """The folder of a whole audit."""
    folder = tmp_path_factory.mktemp("done")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "check_scoring", no_code)
        patch.setattr(suite.sandbox, "run_tests", no_code)
        assert audit.main(command(model, folder, "eval.allow_code_execution=false")) == 0
    return folder / "run" / "eval" / "audit-message"


def test_a_whole_audit(done):
    summary = json.loads((done / "audit.json").read_text())
    found = [json.loads(text) for text in (done / "audit.jsonl").read_text().split("\n")[:-1]]
    assert [one["id"] for one in found] == [row["id"] for row in ROWS]
    assert summary["verdict"]["can_be_streamed"] is True
    (name,) = summary["benchmarks"]
    assert summary["ids"] == {name: [row["id"] for row in ROWS]}
    assert set(summary["hashes"]) == {"data", "renderer", "sentence_rule", "weights"}
    assert set(summary["settings"]) == {"eval", "model", "prompt", "seed"}
    assert summary["versions"]["torch"]
    inside = [one["drafts"] for one in found if one["excluded"] is None]
    assert summary["n"] == len(inside) > 5
    for kind in KINDS:
        mine = [one[kind] for one in inside if one[kind] is not None]
        sizes, kept = [len(d["tokens"]) for d in mine], [d["kept_tokens"] for d in mine]
        wrong = [d for d in mine if d["first_wrong_probability"] is not None]
        expected = {
            "kept_share": statistics.mean(k / n for k, n in zip(kept, sizes, strict=True)),
            "kept_share_pooled": sum(kept) / sum(sizes),
            "kept_share_threshold": statistics.mean(d["kept_tokens_threshold"] / len(d["tokens"]) for d in mine),
            "keeps_all_share": statistics.mean(k == n for k, n in zip(kept, sizes, strict=True)),
            "top_share": sum(d["top_tokens"] for d in mine) / sum(sizes),
            "probability_median": statistics.median(d["median_probability"] for d in mine),
        }
        if wrong:
            firsts = [d["first_wrong_probability"] for d in wrong]
            expected |= {
                "first_wrong_probability_median": statistics.median(firsts),
                "rejected_at_first_wrong_share": 1,
                "wrong_kept_share": 0,
            }
        for scope in (summary["benchmarks"][name], summary["pooled"]):
            figures = scope[kind]
            assert figures["n"] == len(mine)
            assert {key: figures[key]["value"] for key in expected} == pytest.approx(expected)
            for key in expected:
                assert figures[key]["low"] <= figures[key]["value"] <= figures[key]["high"]
        assert figures["first_wrong_probability_median"]["n"] == len(wrong)
        assert bool(wrong) == (kind != "control")


def test_the_table_and_the_verdict_are_printed(done, capsys):
    audit.show(json.loads((done / "audit.json").read_text()))
    said = capsys.readouterr().out
    flat = " ".join(said.split())
    for words in (*KINDS.values(), "100.0%", "float32: in 0 of", "can be streamed: it judges a token without seeing"):
        assert words in flat
    assert all(len(row) <= 118 for row in said.split("\n") if row.startswith(("│", "┃")))


def test_running_again_does_nothing(done, model, capsys):
    """Whatever changes that the audit does not depend on; what it depends on is refused by name."""
    before = {path: path.stat().st_mtime_ns for path in done.iterdir()}
    folder = done.parents[2]
    assert audit.main(command(model, folder, "eval.timed=1", "eval.time_limit=3", "train.rank=3")) == 0
    said = capsys.readouterr().out
    assert "nothing to do" in said
    assert "can be streamed" in said
    assert {path: path.stat().st_mtime_ns for path in done.iterdir()} == before
    assert audit.main(command(model, folder, "eval.tau=0.25")) == 2
    assert f"{done}: made by other settings (eval.tau: 0.5 there, 0.25 here)" in capsys.readouterr().err


def test_a_killed_audit_is_redone_to_the_same_bytes(done, model, tmp_path, monkeypatch):
    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    (tmp_path / "run" / "eval").mkdir(parents=True)
    argv = command(model, tmp_path, f"eval.benchmarks=[{done.parents[2] / 'own.jsonl'}]")
    with monkeypatch.context() as patch:
        patch.setattr(audit, "summarise", interrupt)
        assert audit.main(argv) == 130
    assert not (tmp_path / "run" / "eval" / "audit-message").exists()
    (tmp_path / "run" / "eval" / ".audit-message.partial" / "audit.jsonl").write_text('{"id": "own/0"}\n{"i')
    assert audit.main(argv) == 0
    again = tmp_path / "run" / "eval" / "audit-message"
    assert (again / "audit.jsonl").read_bytes() == (done / "audit.jsonl").read_bytes()
    one, two = (json.loads((folder / "audit.json").read_text()) for folder in (done, again))
    assert one | {"commit": None} == two | {"commit": None}


def test_a_model_that_looks_is_found_out_by_the_script(model, looking, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arms, "load", lambda invocation: looking)
    assert audit.main(command(model, tmp_path, TAU)) == 0
    assert "cannot be streamed: it accepts 100.0% of a draft that answers another" in " ".join(
        capsys.readouterr().out.split()
    )


def test_dry_run_says_what_would_be_done_and_writes_nothing(model, tmp_path, capsys):
    assert audit.main(command(model, tmp_path, "eval.limit=3", "--dry-run")) == 0
    said = capsys.readouterr().out
    assert f"would offer four drafts for each of 3 requests of {tmp_path / 'own.jsonl'}" in said
    assert str(tmp_path / "run" / "eval" / "audit-message") in said
    assert not (tmp_path / "run").exists()


def test_help_says_what_is_written(capsys):
    assert audit.main(["--help"]) == 0
    assert "audit.jsonl" in capsys.readouterr().out


def test_bad_input_is_one_line(model, tmp_path, capsys, monkeypatch):
    def said(*overrides):
        capsys.readouterr()
        assert audit.main(command(model, tmp_path, *overrides)) == 2
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert text.count("\n") == 1
        return text

    assert "no benchmark 'humanevil'" in said("eval.benchmarks=[humanevil]")
    assert f"{tmp_path}/none.jsonl: cannot be read" in said(f"eval.benchmarks=[{tmp_path}/none.jsonl]")
    broken = rows(tmp_path, [*ROWS[:2], {"id": "x"}], "broken.jsonl")
    assert f"{broken}, line 3: " in said(f"eval.benchmarks=[{broken}]")
    assert "unknown key 'eval.tua'" in said("eval.tua=1")
    assert f"train/merge.py recipe={tmp_path / 'tiny.yaml'} run.dir={tmp_path / 'run'}" in said("eval.arm=merged")
    assert "cannot be loaded" in said(f"model.name={tmp_path / 'nowhere'}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "eval/audit.py runs as one process" in said()
    assert not (tmp_path / "run" / "eval").exists()


def test_an_arm_that_renders_otherwise_is_refused(model, arm, tmp_path, capsys, monkeypatch):
    other = dataclasses.replace(arm, renderer=dataclasses.replace(arm.renderer, fingerprint="other"))
    monkeypatch.setattr(arms, "load", lambda invocation: other)
    assert audit.main(command(model, tmp_path)) == 2
    assert "renders otherwise than the base's tokenizer does; merge anew" in capsys.readouterr().err
    assert not (tmp_path / "run" / "eval" / "audit-message").exists()


def test_two_benchmarks_are_one_list(arm, capsys):
    """The last request of one borrows from the next benchmark; each has figures of its own."""
    found = audited(arm, {"first": REQUESTS[:9], "second": REQUESTS[9:18]})
    assert [one["benchmark"] for one in found] == ["first"] * 9 + ["second"] * 9
    last = [one for one in found[:9] if one["excluded"] is None][-1]
    assert last["drafts"]["unrelated"]["taken_from"] in {one["id"] for one in found[9:]}
    summary = audit.summarise(found, arm)
    parts = [part["control"]["n"] for part in summary["benchmarks"].values()]
    assert min(parts) > 2
    assert summary["pooled"]["control"]["n"] == sum(parts) == summary["n"]
    audit.show(json.loads(json.dumps(summary)))
    said = capsys.readouterr().out
    assert [title in said for title in ("first: what", "second: what", "all benchmarks: what")] == [True] * 3
