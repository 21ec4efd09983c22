"""What the paper says of slot diffusion and of bidirectional models, measured on the laboratory's models.

    python tests/bench_laboratory.py [FOLDER]     # runs/laboratory where none is given

Runs the project's own scripts on 200 held-out requests of each kind, in folders that keep their reports, and prints
what came as Markdown, with n and 95% intervals (what the scripts print goes to FOLDER/log.txt). Exits with 1 where a
claim fails; what is only measured decides nothing.
"""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from laboratory import DECODING, KINDS, PLACES, folder

from data_builders import build
from eval import audit, report, run
from eval.definitions import BY_NAME
from eval.report_format import number, with_bounds
from eval.resampling import estimate, interval, seed_for
from recipes.schema import Report, Slots
from train import merge, sft

REQUESTS = 200  # of each kind
AUDITED = 60  # of each kind
TIMED = 10  # of each kind
BLOCKS = ((1, 8), (9, 16), (17, 24), (25, PLACES))  # draft lengths between which an audit's passes are told apart
FIGURES = (
    "quality_base", "quality_stream", "base_passes_median", "stream_passes_median", "speedup_passes_median",
    "kept_share", "one_pass_share", "keeps_nothing_share", "keeps_some_share", "keeps_all_share",
)  # fmt: skip
VARIANTS = {
    "every token over tau kept, gaps filled": "slots.keep=every",
    "half-kept slots dropped": "slots.half_kept=drop",
    "first token of a slot judged by the token before it": "slots.scoring=ar",
    "the paper's floor": "slots.paper_floor=true",
}
TAUS = (0.3, 0.5, 0.7, 0.9, 0.99, 0.999)
ADAPTATION = (
    *("data.limit=null", "data.pairs=null", "data.heldout=24", "data.duplicates=exact", "data.workers=1"),
    *("data.benchmarks=[]", f"data.max_new_tokens={PLACES}"),
    *("train.steps=150", "train.warmup_steps=10", "train.effective_batch=16", "train.micro_batch=16"),
    *("train.learning_rate=1e-3", "train.save_every=1000", f"merge.max_new_tokens={PLACES}"),
)

MODELS = {  # a bidirectional model is not trained, and has no objective of its own
    "slots": ("model.family=refusion", "train.objective=slot_diffusion"),
    "bidirectional": ("model.family=bidirectional", "train.objective=sft"),
}
DEFAULT = "prefix-to-answer"  # the run whose plain arm is the model under the default settings

Line = Mapping[str, Any]
failed: list[str] = []


def main() -> None:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/laboratory").resolve()
    for part in (streamed, ablations, adapted, audits, over_tau):
        part(place)
    if failed:
        raise SystemExit("claims that fail: " + "; ".join(failed))


def streamed(place: Path) -> None:
    """Streaming on the slot-diffusion model. (The report with Table 1's columns is that of `adapted`.)"""
    found = evaluated(place, DEFAULT, "slots")
    print("\n## Streamed slot diffusion\n")
    table(FIGURES, {kind: found[kind] for kind in KINDS})
    spec, late = found["spec"], found["late"]
    for kind in KINDS:
        gained = change(lines(place, DEFAULT, kind), "stream_score", "base_score")
        holds(f"{kind}: streamed quality is not below base beyond its interval ({points(gained)})", gained["high"] >= 0)
    quarter = spec["base_passes_median"]["value"] / 4
    holds("spec: median residual passes at most base / 4", spec["stream_passes_median"]["value"] <= quarter)
    near = 0.6 < late["speedup_passes_median"]["value"] < 1.5  # a verification is one pass more, on a base of 2 to 4
    holds("late: median speedup in passes near 1 (0.6 to 1.5)", near)
    followed = [
        (earlier["kept_tokens"], later["kept_tokens"])
        for line in lines(place, DEFAULT, "spec")
        for earlier, later in itertools.pairwise(line["updates"])
        if earlier["kept_tokens"]
    ]
    revised = mean([float(later < earlier) for earlier, later in followed])
    said = "spec: the next sentence drops a token that was kept at the one before"
    print(f"- {said}: {with_bounds(revised, 'share')}, n {len(followed)}")
    whole = [line for kind in KINDS for line in lines(place, DEFAULT, kind) if kept_whole(line)]
    holds(f"a draft that is kept whole costs 1 pass ({len(whole)} requests)", passes(whole) == {1})


def ablations(place: Path) -> None:
    """Each setting of the verifier against the default, paired by request."""
    print(f"\n## Settings of the verifier, against the default (paired; {REQUESTS} requests of each kind)\n")
    print(
        "| setting | kind | F1, points | residual passes, mean | kept share, points |\n| --- | --- | --- | --- | --- |"
    )
    for name, setting in VARIANTS.items():
        where = setting.partition("=")[0].partition(".")[2]
        evaluated(place, where, "slots", setting)
        for kind in KINDS:
            before, after = lines(place, DEFAULT, kind), lines(place, where, kind)
            cells = (
                points(between(before, after, "stream_score")),
                plain(between(before, after, "stream_passes")),
                points(between(before, after, "kept_share")),
            )
            print(f"| {name} | {kind} | {' | '.join(cells)} |", flush=True)
    whole = {line["id"] for kind in KINDS for line in lines(place, DEFAULT, kind) if kept_whole(line)}
    floor = [line for kind in KINDS for line in lines(place, "paper_floor", kind) if line["id"] in whole]
    holds(f"under the paper's floor such a draft costs 3 passes ({len(floor)} requests)", passes(floor) == {3})


def audits(place: Path) -> None:
    """What each verifier accepts, and what that costs as the draft grows."""
    print(f"\n## Audit ({AUDITED} requests of each kind; {audit.PAPER})\n")
    shares = ("kept_share_pooled", "top_share", "wrong_kept_share", "rejected_at_first_wrong_share")
    labels = (
        "stale kept | unrelated kept | its tokens most likely | wrong tokens kept | stops at first wrong | random kept"
    )
    lengths = ", ".join(f"{low}-{high}" for low, high in BLOCKS)
    print(f"| verifier | {labels} | probability of unrelated, median | passes at {lengths} tokens |")
    print("| --- " * 9 + "|")
    found = {}
    sides = {
        "slots": ("slots", ()),
        "bidirectional": ("bidirectional", ()),
        "bidirectional, draft hidden": ("bidirectional", ("slots.hide=draft",)),
        "bidirectional, each hidden": ("bidirectional", ("slots.hide=each",)),
    }
    for name, (model, settings) in sides.items():
        where = "audit-" + name.replace(", ", "-").replace(" ", "-")
        ran(audit.main, place, where, model, "eval.arm=plain", f"eval.limit={AUDITED}", *settings)
        made = place / where / "eval" / "audit-plain"
        pooled = json.loads((made / "audit.json").read_text())["pooled"]
        found[name] = pooled
        unrelated = pooled["unrelated"]
        cells = [with_bounds(pooled["stale"]["kept_share_pooled"], "share")]
        cells += [with_bounds(unrelated[share], "share") for share in shares]
        cells += [with_bounds(pooled["random"]["kept_share_pooled"], "share")]
        cells += [f"{unrelated['probability_median']['value']:.3f}", by_length(made / "audit.jsonl")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    sees = found["bidirectional"]
    holds(
        "the bidirectional verifier keeps most of an unrelated draft",
        value(sees, "unrelated", "kept_share_pooled") > 0.5,
    )
    holds("and nearly no random token", value(sees, "random", "kept_share_pooled") < 0.05)
    holds("the causal one keeps nearly no wrong token", value(found["slots"], "unrelated", "wrong_kept_share") < 0.01)
    stops = value(found["slots"], "unrelated", "rejected_at_first_wrong_share")
    holds("it stops right at the unrelated draft's first wrong token, nearly always", stops > 0.95)


def over_tau(place: Path) -> None:
    """The bidirectional model streamed, over tau."""
    sweep = f"eval.sweep=[{','.join(map(str, TAUS))}]"
    evaluated(place, "bidirectional", "bidirectional", sweep, "slots.token_threshold=0.9")
    summary = summary_of(place, "bidirectional", "plain")
    print("\n## The bidirectional model, streamed, over tau: F1, median speedup in passes, kept share\n")
    print("| tau | " + " | ".join(KINDS) + " |\n| --- " + "| --- " * len(KINDS) + "|")
    base = by_kind(summary["benchmarks"])
    print("| base | " + " | ".join(with_bounds(base[kind]["quality_base"], "share") for kind in KINDS) + " |")
    for entry in summary["frontier"]:
        here = by_kind(entry["benchmarks"])
        shown = ("quality_stream", "share"), ("speedup_passes_median", "times"), ("kept_share", "share")
        cells = [", ".join(with_bounds(here[kind][figure], unit) for figure, unit in shown) for kind in KINDS]
        print(f"| {entry['tau']} | {' | '.join(cells)} |", flush=True)


def adapted(place: Path) -> None:
    """Both variants trained on the slot model, before against after."""
    plain_arm = place / DEFAULT / "eval" / "plain"
    for variant in (DEFAULT, "draft-refinement"):
        settings = (f"data.corpora=[{folder() / 'pairs.jsonl'}]", f"data.kind={variant}", *ADAPTATION)
        for script in (build, sft, merge):
            ran(script.main, place, variant, "slots", *settings)
        ran(run.main, place, variant, "slots", *settings, "eval.arm=merged")
        compared = (f"report.before={plain_arm}", f"report.quality_before={plain_arm}")
        ran(report.main, place, variant, "slots", *settings, "eval.arm=merged", *compared)
        print(f"\n## {variant}: plain -> merged, paired ({place / variant / 'report'})\n")
        print("| kind | F1, stream | its change, points | F1, base | speedup, median | kept share, points |")
        print("| --- " * 6 + "|")
        before = by_kind(summary_of(place, DEFAULT, "plain")["benchmarks"])
        after = by_kind(summary_of(place, variant, "merged")["benchmarks"])
        for kind in KINDS:
            sides = lines(place, DEFAULT, kind), lines(place, variant, kind, "merged")
            cells = (
                arrow(before[kind], after[kind], "quality_stream", "share"),
                points(between(*sides, "stream_score")),
                arrow(before[kind], after[kind], "quality_base", "share"),
                arrow(before[kind], after[kind], "speedup_passes_median", "times"),
                points(between(*sides, "kept_share")),
            )
            print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def ran(script: Callable[[list[str]], int], place: Path, where: str, model: str, *settings: str) -> None:
    """One of the project's scripts, on a model of the laboratory."""
    made = folder()
    files = ",".join(str(made / f"{kind}.jsonl") for kind in KINDS)
    decoding = {"slot_size", "serial_blocks", "slot_threshold", "token_threshold"}
    chosen = DECODING.model_dump(include=decoding if model == "slots" else decoding & Slots.BIDIRECTIONAL)
    given = [
        *("recipe=refusion-prefix-to-answer", f"run.dir={place / where}", f"model.name={made / model}"),
        *("model.revision=null", "model.dtype=float32", "model.device=cpu", "slots.benchmarks={}"),
        *(*MODELS[model], *(f"slots.{k}={v}" for k, v in chosen.items())),
        *(
            f"eval.benchmarks=[{files}]",
            f"eval.limit={REQUESTS}",
            f"eval.max_new_tokens={PLACES}",
            f"eval.timed={TIMED}",
        ),
    ]
    place.mkdir(parents=True, exist_ok=True)
    with (place / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
        failed_there = script([*given, *settings]) != 0
    if failed_there:
        raise SystemExit(f"{where}: a script failed; {place / 'log.txt'} has what it printed")


def evaluated(place: Path, where: str, model: str, *settings: str) -> dict[str, Any]:
    """The plain arm's figures by kind."""
    ran(run.main, place, where, model, "eval.arm=plain", *settings)
    return by_kind(summary_of(place, where, "plain")["benchmarks"])


def summary_of(place: Path, where: str, arm: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / where / "eval" / arm / "summary.json").read_text())
    return found


def by_kind(benchmarks: Mapping[str, Any]) -> dict[str, Any]:
    return {Path(name).stem: figures for name, figures in benchmarks.items()}


def lines(place: Path, where: str, kind: str, arm: str = "plain") -> list[dict[str, Any]]:
    """A kind's replayed requests that count, in order, with the share of their draft that was kept."""
    text = (place / where / "eval" / arm / "requests.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    counted = [one for one in found if Path(one["benchmark"]).stem == kind and one["excluded"] is None]
    return [{**one, "kept_share": one["kept_tokens"] / max(1, one["draft_tokens"])} for one in counted]


def kept_whole(line: Line) -> bool:
    return line["draft_tokens"] > 0 and line["kept_tokens"] == line["draft_tokens"]


def passes(found: Sequence[Line]) -> set[int]:
    return {line["stream_passes"] for line in found}


def change(found: Sequence[Line], after: str, before: str) -> dict[str, float | None]:
    """Mean over requests of one column less another, with its interval."""
    return mean([float(line[after]) - float(line[before]) for line in found])


def between(before: Sequence[Line], after: Sequence[Line], column: str) -> dict[str, float | None]:
    """Mean change of a column over the requests that count on both sides, with its interval."""
    earlier = {line["id"]: line for line in before}
    return mean([float(line[column]) - float(earlier[line["id"]][column]) for line in after if line["id"] in earlier])


def mean(values: Sequence[float]) -> dict[str, float | None]:
    standard = Report()
    found = estimate("mean", np.array([values]), standard.bootstrap, seed_for(0, "laboratory"))
    return interval(found.value, found.draws, standard.confidence)


def by_length(path: Path) -> str:
    """Mean passes of a verification by the draft's length."""
    costs: dict[tuple[int, int], list[int]] = {block: [] for block in BLOCKS}
    for line in map(json.loads, path.read_text().splitlines()):
        for draft in (line["drafts"] or {}).values():
            if draft is not None:
                block = next(block for block in BLOCKS if block[0] <= len(draft["tokens"]) <= block[1])
                costs[block].append(draft["passes"])
    return ", ".join(f"{np.mean(cost):.1f}" if cost else "none" for cost in costs.values())


def value(pooled: Mapping[str, Any], kind: str, figure: str) -> float:
    return float(pooled[kind][figure]["value"])


def table(figures: Sequence[str], columns: Mapping[str, Any]) -> None:
    """Figures down, kinds across."""
    heads = [f"{name}, n {found['n']}" for name, found in columns.items()]
    print(f"| figure | {' | '.join(heads)} |")
    print("| --- " * (1 + len(columns)) + "|")
    for figure in figures:
        unit = BY_NAME[figure].unit
        print(
            f"| {figure} | {' | '.join(with_bounds(found[figure], unit) for found in columns.values())} |", flush=True
        )


def arrow(before: Line, after: Line, figure: str, unit: Any) -> str:
    return f"{number(before[figure]['value'], unit)} -> {number(after[figure]['value'], unit)}"


def points(found: Mapping[str, float | None]) -> str:
    """A change of shares, in points."""
    return plain({key: None if at is None else 100 * at for key, at in found.items()})


def plain(found: Mapping[str, float | None]) -> str:
    if found["low"] is None or found["high"] is None:
        return f"{found['value']:+.1f}"
    return f"{found['value']:+.1f} [{found['low']:+.1f}, {found['high']:+.1f}]"


def holds(claim: str, true: bool) -> None:
    """Print a claim and whether it holds; remember it where it does not."""
    print(f"- {'holds' if true else 'FAILS'}: {claim}", flush=True)
    if not true:
        failed.append(claim)


if __name__ == "__main__":
    main()
