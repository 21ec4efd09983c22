"""Can this model be streamed at all? Offer its verifier stale, unrelated and random drafts, and print what it accepts.

    python eval/audit.py recipe=smollm2 eval.arm=message eval.limit=32

Writes <run>/eval/audit-<arm>: audit.jsonl (every draft with the probability of each token), audit.json.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval import arms, suite
from eval.audit_drafts import KINDS, audit
from eval.definitions import Estimator, Figure, Unit
from eval.metrics import columns_of, excluded
from eval.report_format import NOT_THERE, number, with_bounds
from eval.resampling import Array, estimate, interval, seed_for
from headstart import decoders
from headstart import model as loading
from headstart.prompt import renderer
from headstart.sentences import RULE_VERSION
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Report

KEYS = {"arm", "benchmarks", "paths", "limit", "tau", "max_new_tokens", "batch_size"}  # of `eval`, what matters here
RECOGNISED = 0.9  # of its own answer's tokens; bfloat16 flips a few in a hundred
TOLERATED = 0.1  # of the wrong tokens; a causal model accepts none, but where bfloat16 flips a near-tie

PAPER = "the paper's Dream-7B kept 96 of 96 tokens, median probability 0.999 (section 6.5)"

Line = Mapping[str, Any]


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, audit_arm)


def audit_arm(invocation: Invocation) -> None:
    """Audit one arm, write its folder and print it."""
    recipe = invocation.recipe
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("eval/audit.py runs as one process; launch it with --num_processes 1")
    found = suite.load(invocation)
    decoders.check(recipe, found.requests)
    settings = settings_of(invocation, found.data_hash)
    folder = invocation.run_dir / "eval" / f"audit-{recipe.eval.arm}"
    if invocation.dry_run:
        what = ", ".join(f"{len(rows)} requests of {name}" for name, rows in found.requests.items())
        run_folder.say_plan(folder, settings, f"would offer four drafts for each of {what}, and write {folder}")
        return
    with run_folder.step(invocation, folder, settings) as step:
        if step is not None:
            arm = arms.load(invocation)
            if arm.renderer.fingerprint != settings["renderer"]:
                raise UserError(f"arm {arm.name}: renders otherwise than the base's tokenizer does; merge anew")
            lines = audit(arm, found.requests)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            summary = {**summarise(lines, arm), **provenance(arm, settings)}
            run_folder.write_atomically(step.partial / "audit.jsonl", text)
            run_folder.write_atomically(step.partial / "audit.json", json.dumps(summary, indent=1) + "\n")
            run_folder.finish(step)
    show(json.loads((folder / "audit.json").read_text()))


def settings_of(invocation: Invocation, data_hash: str) -> dict[str, Any]:
    """What the outcome depends on."""
    recipe = invocation.recipe
    return {
        "eval": recipe.eval.model_dump(mode="json", include=KEYS),
        "model": recipe.model.model_dump(),
        "prompt": recipe.prompt.model_dump(),
        "seed": recipe.run.seed,
        "weights": arms.needed(invocation),
        **decoders.settings_of(recipe),
        "data": data_hash,
        "renderer": renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model)).fingerprint,
        "sentence_rule": RULE_VERSION,
    }


def provenance(arm: arms.Arm, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the figures rest on, as in an evaluation's summary."""
    return {
        "settings": {key: settings[key] for key in ("eval", "model", "prompt", "seed", "slots") if key in settings},
        "hashes": {**{key: settings[key] for key in ("data", "renderer", "sentence_rule")}, "weights": arm.weights},
        "versions": run_folder.versions(),
        "commit": run_folder.provenance()["commit"],
        "device": arms.device_name(arm.model.device),
        "definitions": {figure.name: figure.definition for figure in FIGURES},
    }


def _figure(
    name: str, label: str, estimator: Estimator, columns: tuple[str, ...], definition: str, unit: Unit = "share"
) -> Figure:
    return Figure(name, label, estimator, columns, unit, definition)


FIGURES = (
    _figure("kept_share", "kept, greedy", "mean", ("kept_share",),
            "mean over drafts of tokens kept under greedy / tokens offered"),
    _figure("kept_share_pooled", "kept, greedy, pooled", "ratio", ("kept", "offered"),
            "sum of tokens kept under greedy / sum of tokens offered"),
    _figure("kept_share_threshold", "kept, p >= tau", "mean", ("kept_share_threshold",),
            "mean over drafts of the leading run of tokens with probability >= eval.tau / tokens offered"),
    _figure("keeps_all_share", "kept whole", "mean", ("keeps_all",), "share of drafts that greedy keeps whole"),
    _figure("top_share", "most likely", "ratio", ("top", "offered"),
            "tokens that are the most likely one in their place, after whatever stands before / tokens offered"),
    _figure("probability_median", "probability, median", "median", ("median_probability",),
            "median over drafts of the median probability of a draft's tokens"),
    _figure("first_wrong_probability_median", "of the first wrong token", "median", ("first_wrong_probability",),
            "median over drafts of the probability of the first token that is not the own answer's"),
    _figure("rejected_at_first_wrong_share", "stops there, greedy", "mean", ("stops_there",),
            "share of drafts with a wrong token whose run kept under greedy ends right before it"),
    _figure("wrong_kept_share", "wrong tokens kept", "ratio", ("wrong_kept", "wrong_offered"),
            "sum of tokens kept from the first wrong one on / sum of tokens offered from there on"),
    _figure("verify_passes_mean", "passes to verify", "mean", ("passes",),
            "mean over drafts of the forward passes that verifying took", "passes"),
)  # fmt: skip
LABELS = {figure.name: figure.label for figure in FIGURES}


def summarise(lines: Sequence[Line], arm: arms.Arm) -> dict[str, Any]:
    """Verdict, figures by benchmark and draft, and how often the kept run is not what the own answer says.

    Each figure is {"n", "value", "low", "high"}, its interval a bootstrap over requests; `pooled` takes all requests as
    one set. `otherwise` counts the drafts (and the causes) whose run kept under greedy is not the common prefix of
    draft and own answer: none in float32 for a causal model, near-ties in bfloat16.
    """
    inside = [line for line in lines if line["excluded"] is None]
    names = list(dict.fromkeys(line["benchmark"] for line in lines))
    seed, dtype = arm.recipe.run.seed, arm.recipe.model.dtype
    groups = {name: [line for line in inside if line["benchmark"] == name] for name in names}
    pooled = by_kind(inside, seed, "pooled")
    drafts = [draft for line in inside for draft in line["drafts"].values() if draft is not None]
    differ = sum(draft["kept_tokens"] != draft["right_tokens"] for draft in drafts)
    return {
        "arm": arm.name,
        "verdict": verdict(pooled, f"{arm.recipe.model.name} (arm {arm.name}, {dtype})"),
        "n": len(inside),
        "n_excluded": len(lines) - len(inside),
        "excluded": excluded(lines),
        "benchmarks": {name: by_kind(rows, seed, name) for name, rows in groups.items()},
        "pooled": pooled,
        "otherwise": {"dtype": dtype, "n": len(drafts), "differ": differ, "share": differ / max(1, len(drafts))},
        "ids": {name: [line["id"] for line in lines if line["benchmark"] == name] for name in names},
    }


def by_kind(lines: Sequence[Line], seed: int, name: str) -> dict[str, Any]:
    """Every figure of each kind of draft, and `n`, the drafts of that kind."""
    kinds = {kind: [line["drafts"][kind] for line in lines if line["drafts"][kind] is not None] for kind in KINDS}
    return {kind: {"n": len(drafts), **figures(drafts, seed, name)} for kind, drafts in kinds.items()}


def figures(drafts: Sequence[Line], seed: int, name: str) -> dict[str, Any]:
    """Each figure as {"n", "value", "low", "high"}; n counts the drafts for which it is defined."""
    table, standard, found = columns(drafts), Report(), {}
    for figure in FIGURES:
        stacked = columns_of(table, figure)
        defined = stacked[:, ~np.isnan(stacked).any(axis=0)]
        made = estimate(figure.estimator, defined, standard.bootstrap, seed_for(seed, name))
        found[figure.name] = {"n": made.n, **interval(made.value, made.draws, standard.confidence)}
    return found


def columns(drafts: Sequence[Line]) -> dict[str, Array]:
    """One column a quantity, one row a draft, (n,) each; NaN where a draft has no wrong token."""
    offered = _column(len(draft["tokens"]) for draft in drafts)
    right, kept = (_column(draft[key] for draft in drafts) for key in ("right_tokens", "kept_tokens"))
    wrong = offered > right
    return {
        "offered": offered,
        "kept": kept,
        "top": _column(draft["top_tokens"] for draft in drafts),
        "kept_share": kept / offered,
        "kept_share_threshold": _column(draft["kept_tokens_threshold"] for draft in drafts) / offered,
        "keeps_all": _column(kept == offered),
        "median_probability": _column(draft["median_probability"] for draft in drafts),
        "first_wrong_probability": _column(draft["first_wrong_probability"] for draft in drafts),
        "stops_there": np.where(wrong, kept == right, np.nan),
        "wrong_kept": np.where(wrong, np.maximum(kept - right, 0), np.nan),
        "wrong_offered": np.where(wrong, offered - right, np.nan),
        "passes": _column(draft["passes"] for draft in drafts),
    }


def _column(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def verdict(pooled: Mapping[str, Any], model: str) -> dict[str, Any]:
    """`can_be_streamed` (None where it cannot be told) and the sentence that says why."""
    found = pooled["unrelated"]
    known, wrong = pooled["control"]["top_share"]["value"], found["wrong_kept_share"]["value"]
    if wrong is None:
        why = "no request has a draft that answers another question; give more requests (eval.limit, eval.benchmarks)"
        return {"can_be_streamed": None, "sentence": f"{model} cannot be judged: {why}."}
    if wrong > TOLERATED:
        accepted = number(found["kept_share_pooled"]["value"], "share")
        why = f"it accepts {accepted} of a draft that answers another question"
    elif known < RECOGNISED:
        why = f"it would write only {number(known, 'share')} of its own answer's tokens again"
    else:
        sentence = f"{model} can be streamed: it judges a token without seeing it."
        return {"can_be_streamed": True, "sentence": sentence}
    return {"can_be_streamed": False, "sentence": f"{model} cannot be streamed: {why}."}


def show(summary: Mapping[str, Any]) -> None:
    """A table a benchmark, the numerics and the verdict, on the screen."""
    console = Console(width=118, markup=False, emoji=False)
    several = {"all benchmarks": summary["pooled"]} if len(summary["benchmarks"]) > 1 else {}
    for name, kinds in {**summary["benchmarks"], **several}.items():
        console.print(_table(f"{name}: what the verifier accepts, arm {summary['arm']}", kinds))
    for reason in dict.fromkeys(one["reason"] for one in summary["excluded"]):
        count = sum(one["reason"] == reason for one in summary["excluded"])
        console.print(f"{count} left out: {reason}")
    unrelated = summary["pooled"]["unrelated"]
    console.print(
        f"verifying a draft took {number(unrelated['verify_passes_mean']['value'], 'passes')} passes on average; of "
        f"answers to another question {number(unrelated['kept_share_threshold']['value'], 'share')} were kept at tau, "
        f"median probability {_chance(unrelated['probability_median']).split(chr(10))[0]}; {PAPER}"
    )
    otherwise = summary["otherwise"]
    ties = ": near-ties flip" if otherwise["dtype"] == "bfloat16" and summary["verdict"]["can_be_streamed"] else ""
    console.print(
        f"{otherwise['dtype']}: in {otherwise['differ']} of {otherwise['n']} drafts "
        f"({number(otherwise['share'], 'share')}) greedy does not keep exactly what the own answer begins with{ties}"
    )
    console.print(summary["verdict"]["sentence"])


def _table(title: str, kinds: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    shares = ("kept_share", "kept_share_threshold", "rejected_at_first_wrong_share")
    probabilities = ("probability_median", "first_wrong_probability_median")
    for label in ("draft", "n", *(LABELS[name] for name in (*shares[:2], *probabilities, shares[2]))):
        table.add_column(label, overflow="fold", no_wrap=label == "draft")
    for kind, found in kinds.items():
        cells = [_lines(with_bounds(found[name], "share")) for name in shares]
        chances = [_chance(found[name]) for name in probabilities]
        table.add_row(KINDS[kind], str(found["n"]), *cells[:2], *chances, cells[2])
    return table


def _chance(figure: Mapping[str, float | None]) -> str:
    """A probability with three digits, its interval below it."""
    value, low, high = (NOT_THERE if figure[key] is None else f"{figure[key]:.3f}" for key in ("value", "low", "high"))
    return value if figure["low"] is None else f"{value}\n[{low}, {high}]"


def _lines(text: str) -> str:
    return text.replace(" [", "\n[")


if __name__ == "__main__":
    sys.exit(main())
