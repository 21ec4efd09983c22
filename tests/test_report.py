"""The written report: complete, self-contained, safe with hostile text, and alive in a real browser."""

import csv
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from synthetic_arms import HASHES, HOSTILE, SETTINGS, looked_up, records, swept, timings, write_arm, write_run

from eval import report as report_script
from eval.evidence import read_arms
from eval.report_figures import edges
from eval.report_pages import build_report
from eval.report_paper import paper
from eval.report_replay import embedded, replays
from eval.report_runs import Place
from eval.typing_time import time_to_draft
from eval.upload import upload
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Report

SETTINGS_OF_REPORT = Report(bootstrap=200, replays=12)
QUICK = Report(bootstrap=30, replays=2)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BOTH = ("humaneval", "mbpp")
TABLES = {
    *(
        "table1",
        "table2",
        "table3",
        "change",
        "arms",
        "kept",
        "by_kept",
        "risk",
        "ceiling",
        "pooled",
        "cost",
        "answers",
    ),
    *("unseen", "noise", "frontier", "recycle", "typing", "excluded", "provenance"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a made-up run with two benchmarks."""
    folder = tmp_path_factory.mktemp("run")
    place = Place("smollm2", *write_run(folder, BOTH))
    return build_report([place], folder / "report", SETTINGS_OF_REPORT, 0)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of three made-up runs: two of one model, whose before-arms are equal, and one of another."""
    folder = tmp_path_factory.mktemp("runs")
    places = []
    for name, family in (("one", "smollm2"), ("two", "smollm2"), ("other", "qwen3")):
        model = {"settings": SETTINGS | {"model": {"family": family, "name": family, "dtype": "bfloat16"}}}
        hashes = HASHES | {"renderer": family, "weights": family}
        arms = {arm: model | {"hashes": hashes} for arm in ("message", "plain")}
        arms["merged"] = model | {"hashes": hashes | {"weights": name}}
        places.append(Place(name, *write_run(folder / name, n=12, **arms)))
    return build_report(places, folder / "report", QUICK, 0)


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a run with everything that is optional: recycled drafts, a swept tau, the time to draft."""
    folder = tmp_path_factory.mktemp("rich")
    arms = []
    for seed, arm in enumerate(("message", "merged")):
        found = [r for name in BOTH for r in looked_up(records(seed, 0.5, 12, name))]
        clock = [
            t | {"update_seconds": [0.9, 0.3, 0.3]}
            for t in timings([r for r in found if r["updates"] is not None], every=1)
        ]
        by_benchmark = {name: [r for r in found if r["benchmark"] == name] for name in BOTH}
        noise = {"dtype": "bfloat16", "streamed_answer_differs_from_base": 0.25, "n": 20}
        more: dict[str, Any] = {
            "frontier": swept(BOTH),
            "typing": time_to_draft(by_benchmark, clock, 40 * 5 / 60, 0.95, 50, 0),
            "noise_floor": noise | {"alone_differs_from_batched": None, "n_alone": 0},
        }
        arms.append(write_arm(folder / arm, arm, found, **more))
        (arms[-1] / "timings.jsonl").write_text("".join(json.dumps(t) + "\n" for t in clock))
    return build_report([Place("rich", *arms, None)], folder / "report", QUICK, 0)


def rows(report: Path, table: str) -> list[dict[str, str]]:
    with (report.parent / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def json_of(report: Path) -> Any:
    return json.loads((report.parent / "report.json").read_text())


def section(report: Path, name: str) -> str:
    """A section's text, as a reader sees it."""
    page = report.read_text()
    body = page.split(f'<section id="{name}"')[1].split("</section>")[0]
    return " ".join(" ".join(Tags(body).text).split())


class Tags(HTMLParser):
    """Every start tag with its attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text.append(data)


def test_every_file_is_there(report: Path) -> None:
    folder = report.parent
    assert {path.stem for path in folder.glob("*.csv")} == TABLES
    for name in ("report.html", "report.md", "report.json", "figures/speedup.png", "figures/kept.svg"):
        assert (folder / name).stat().st_size > 0
    whole = json_of(report)
    assert set(whole["arms"]) == {"message", "merged", "plain"}
    assert whole["arms"]["merged"]["hashes"]["renderer"] == "r1"
    assert whole["arms"]["merged"]["benchmarks"]["humaneval"]["n"] == 39
    assert whole["change"]["benchmarks"]["mbpp"]["figures"]["kept_share"]["p"] is not None
    assert {v["topic"] for v in whole["verdicts"]["humaneval"]} >= {"plain", "kept share", "quality"}
    assert (whole["forced"], whole["shared"]) == ([], [])


def test_no_cell_is_empty_and_what_is_missing_has_its_reason(report: Path, several: Path, rich: Path) -> None:
    for page in (report, several, rich):
        for path in page.parent.glob("*.csv"):
            for row in rows(page, path.stem):
                for key, value in row.items():
                    assert value not in ("nan", "None", "inf"), (path, key)
                    assert value or key == "reason", (path, row)
                    stem = re.sub("_(low|high)$", "", key)
                    if value == "n/a":
                        assert (
                            f"{key}: " in row["reason"]
                            or f"{stem}: " in row["reason"]
                            or "intervals: " in row["reason"]
                        )
        assert not re.search(r"\b(nan|inf)\b|None(?!, some)", " ".join(Tags(page.read_text()).text))


def test_tables_1_and_2_have_the_papers_rows_beside_ours(report: Path) -> None:
    for table, theirs in (
        ("table1", {"ReFusion-8B"}),
        ("table2", {"Gemma-3-12B-IT", "Llama-3.1-8B-Instruct", "Qwen3-8B"}),
    ):
        found = rows(report, table)
        ours = [r for r in found if r["source"] == "measured"]
        assert {r["model"] for r in found if r["source"] == "paper"} == theirs
        names = ("HumanEval (pass@1)", "MBPP (pass@1)", "average")
        assert [(r["model"], r["benchmark"]) for r in ours] == [
            (m, b) for m in ("message", "merged", "plain") for b in names
        ]
        merged = json_of(report)["arms"]["merged"]["benchmarks"]["humaneval"]
        row = next(r for r in ours if r["model"] == "merged")
        assert float(row["quality_stream"]) == pytest.approx(100 * merged["quality_stream"]["value"], abs=0.01)
        assert float(row["speedup_passes_paper_median"]) == pytest.approx(
            merged["speedup_passes_paper_median"]["value"], abs=1e-4
        )
        assert float(row["speedup_seconds_mean_low"]) == pytest.approx(merged["speedup_seconds_mean"]["low"], abs=1e-4)
        assert (row["n"], row["hardware"]) == ("39", "cpu")
    assert {r["hardware"] for r in rows(report, "table1") if r["source"] == "paper"} == {"NVIDIA RTX A6000"}
    assert {r["hardware"] for r in rows(report, "table2") if r["source"] == "paper"} == {"NVIDIA A100 80 GB"}
    gemma = next(r for r in rows(report, "table2") if r["model"].startswith("Gemma") and r["benchmark"] == "average")
    assert (gemma["speedup_passes_paper_median"], gemma["speedup_passes_median"]) == ("14.42", "n/a")
    median = next(r for r in rows(report, "table1") if r["model"] == "ReFusion-8B")
    assert (median["base_passes_median"], median["stream_passes_paper_median"]) == ("16.0", "3.0")
    said = section(report, "paper")
    assert (
        said.count("The paper does not agree with itself")
        == sum(len(d["about"]) for d in paper()["disagreements"] if d["about"] != ["risk"]) - 1
    )
    assert "ratios of seconds do not carry over" in said


def test_table3_has_the_papers_rows_beside_ours(report: Path) -> None:
    found = rows(report, "table3")
    ours = [r for r in found if r["source"] == "measured"]
    theirs = [r for r in found if r["source"] == "paper"]
    assert {(r["benchmark"], r["count"], r["base_of"]) for r in ours} == {
        (b, c, o)
        for b in ("HumanEval (pass@1)", "MBPP (pass@1)", "average")
        for c in ("max(1, N-k)", "1+N-k")
        for o in ("after", "before")
    }
    assert len(theirs) == 8
    assert theirs[1]["model"] == "Qwen3-8B"
    assert (theirs[1]["quality_after"], theirs[1]["median_speedup_after"], theirs[1]["n"]) == ("59.8", "3.44", "n/a")
    assert {(r["quality_arm_before"], r["speed_arm_before"]) for r in ours} == {("plain", "message")}
    expected = json_of(report)["change"]["quality"]["benchmarks"]["humaneval"]["figures"]["quality_stream"]
    assert float(ours[0]["quality_before"]) == pytest.approx(100 * expected["before"]["value"], abs=0.01)


def test_the_papers_numbers_are_those_of_the_record() -> None:
    """Every number of eval/paper.yaml that the record has under a name; what is computed there is checked here."""
    shared = os.environ.get("HEADSTART_SHARED")
    if not shared or not (Path(shared) / "paper_numbers.yaml").exists():
        pytest.skip("HEADSTART_SHARED is not set: the record of the paper's numbers is not at hand")
    record = yaml.safe_load((Path(shared) / "paper_numbers.yaml").read_text())

    def mean_median(found: dict[str, float]) -> list[float]:
        return [found["mean"], found["median"]]

    def row(found: dict[str, Any]) -> dict[str, Any]:
        passes = found.get("passes_after_final_token")
        return {
            "quality": [found["quality"]["base"], found["quality"]["stream"]],
            **({"passes": [passes["base"], passes["stream"]]} if passes else {}),
            "by_passes": mean_median(found["speedup_passes"]),
            "by_seconds": mean_median(found["speedup_seconds"]),
        }

    derived = record["table1"]["derived"]["macro"]
    first = {name: row(found) for name, found in record["table1"]["refusion"].items()}
    assert paper()["table1"]["refusion"] == first | {"computed": row(derived) | {"passes": [None, None]}}
    models = ("gemma3", "llama3", "qwen3")
    assert paper()["table2"] == {m: {name: row(r) for name, r in record["table2"][m].items()} for m in models}
    assert [(r["model"], r["scope"], r.get("variant"), r["quality"], r["median"]) for r in paper()["table3"]] == [
        (r["model"], r["scope"], r["variant"], [*r["quality"].values()], [*r["speedup_passes_median"].values()])
        for r in record["table3"]
    ]
    for name, found in paper()["models"].items():
        assert found == {key: record["models"][name][key] for key in ("name", "hardware")}
    six = record["section6"]["refusion"]
    kept = next(row for row in paper()["kept"] if row["scope"] == "pooled")
    assert {key: kept[key] for key in ("none", "some", "all")} == six["kept_at_final_update_percent"]
    assert kept["n"] == six["pooled"]["n"]
    given, none = six["partial_percent"], six["keeps_nothing_percent"]
    refusion = {row["scope"]: row for row in paper()["kept"] if row["model"] == "refusion" and row is not kept}
    assert {scope: row["some"] for scope, row in refusion.items() if "some" in row} == given
    assert {"_".join(scope.split()): row["none"] for scope, row in refusion.items() if "none" in row} == {
        scope: value for scope, value in none.items() if value is not None
    }
    one_pass = record["section6"]["autoregressive"]["one_pass_percent"]
    assert next(row["one_pass"] for row in paper()["kept"] if row["model"] == "gemma3") == one_pass["gemma3"]
    seven = record["section7"]["qwen3"]
    for row, side in zip((r for r in paper()["kept"] if r["model"] == "qwen3"), ("before", "after"), strict=True):
        assert row["one_pass"] == seven["one_pass_percent"][side]
        assert row["kept_share"] == pytest.approx(100 * seven["kept_share"][side])
    risk = paper()["risk"][0]
    assert [risk[key] for key in ("below_1x", "below_09x", "below_08x")] == list(six["below"].values())
    assert risk["losers_median"] == six["median_of_losers"]
    for row_ in paper()["ceiling"]:
        assert row_["ceiling"] == six["ceiling_of_median_request"][row_["scope"]]
        assert row_["reached"] == six["ceiling_reached_percent"][row_["scope"]]
        assert [row_["base_passes"], row_["median"]] == [
            first[row_["scope"]]["passes"][0],
            first[row_["scope"]]["by_passes"][1],
        ]
    pooled = {r["model"]: r for r in paper()["pooled"]}
    assert pooled["refusion"]["removed"] == six["pooled"]["passes_removed_percent"]
    assert mean_median(pooled["refusion"]) == mean_median(six["pooled"]["speedup_passes"])
    for key in ("mean", "median"):
        assert {m: pooled[m][key] for m in models} == record["section6"]["autoregressive"][f"pooled_{key}"]
    assert len(paper()["disagreements"]) == len(record["disagreements_in_the_paper"])
    assert paper()["source"] == record["source"]
    assert {key: name.split(" (") for key, name in paper()["benchmarks"].items()} == {
        key: [found["name"], f"{found['metric']})"] for key, found in record["benchmarks"].items()
    }
    for remark, numbers in remarked(record).items():
        said = re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\w)-[\d.]+\w*|[Ss]ection \d", "", paper()["remarks"][remark]))
        assert {float(n) for n in said} >= numbers, remark


def remarked(record: dict[str, Any]) -> dict[str, set[float]]:
    """The numbers of the record that the remarks of eval/paper.yaml hold in their sentences."""
    six, seven, limits = record["section6"]["refusion"], record["section7"]["qwen3"], record["limitations"]
    wrong, ranges = limits["fast_but_wrong"], limits["total_passes_over_base"]
    macro = [seven[f"macro_speedup_{name}"] for name in ("passes_mean", "seconds_mean", "passes_median")]
    medians = [seven["speedup_passes_median"][name] for name in ("canitedit", "coedit")]
    refined = record["section7"]["refusion"]["quality_change_points"]["draft-refinement"]
    return {
        "risk": set(six["below_1x_per_benchmark_percent"].values()),
        "cost": {*ranges["refusion"].values(), *ranges["two_largest_gains"].values()},
        "answers": {
            *wrong["refusion_chat"].values(),
            wrong["refusion_canitedit_example_speedup"],
            -record["section6"]["quality_change"]["worst_code_or_edit"],
        }
        - {2},  # "at least twice"
        "table3": {value for pair in (*macro, *medians) for value in pair.values()}
        | {refined[name] for name in ("ds1000", "canitedit", "coedit")},
    }


def test_the_page_needs_nothing_from_outside(report: Path) -> None:
    page = report.read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    for tag, attributes in Tags(page).tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)


def test_hostile_text_stays_text(report: Path) -> None:
    page = report.read_text()
    scripts = [attributes for tag, attributes in Tags(page).tags if tag == "script"]
    assert [s.get("id") for s in scripts] == ["replay-data", None]
    block = page.split('id="replay-data">')[1].split("</script>")[0]
    assert not set(block) & set("<>&\u2028\u2029")
    shown = json.loads(block)["runs"][0]["benchmarks"][0]["requests"][1]
    assert shown["sentences"][1] == HOSTILE.replace("\ud800", "\ufffd") + ". "


def test_hostile_names_and_reasons_stay_text(tmp_path: Path) -> None:
    found = records(1, 0.5, 10)
    found[3]["excluded"] = f"{HOSTILE}|`x`"
    before, after = (write_arm(tmp_path / a, a, found) for a in ("message", "merged"))
    page = build_report([Place("<b>run</b>", before, after, None)], tmp_path / "report", QUICK, 0)
    tags = [tag for tag, _ in Tags(page.read_text()).tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "<img" not in markdown
    assert "<b>" not in markdown
    assert "\\|" in markdown
    assert rows(page, "excluded")[0]["why"] == f"{HOSTILE}|`x`".replace("\ud800", "?")


def test_names_are_no_markup_and_no_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "[/x] $a_{$ :smile:"
    before, after = (
        write_arm(tmp_path / f"arm{i}", f"{a}[/b]$a_{{$", records(i, 0.5, 8, name)) for i, a in enumerate("pq")
    )
    build_report([Place("tiny", before, after, None)], tmp_path / "report", QUICK, 0)
    assert "$a_{$" in (tmp_path / "report" / "figures" / "kept.svg").read_text()
    report_script.show(json.loads((tmp_path / "report" / "report.json").read_text()))
    said = capsys.readouterr().out
    assert f"tiny, {name}: p[/b]$a_{{$ -> q[/b]$a_{{$, n = 7" in said
    assert "Quality, p[/b]$a_{$ against" in said


def test_a_quality_arm_of_other_requests_leaves_the_rest(tmp_path: Path) -> None:
    found = {"message": records(1, 0.5, 8), "merged": records(2, 0.5, 8), "plain": records(3, 0.5, 8, "mbpp")}
    before, after, plain = (write_arm(tmp_path / a, a, lines) for a, lines in found.items())
    page = build_report([Place("tiny", before, after, plain)], tmp_path / "report", QUICK, 0)
    assert "quality is left out (plain shares no request with merged)" in page.read_text()
    assert "quality not judged: no request was scored" in (tmp_path / "report" / "report.md").read_text()
    assert "Quality is left out: plain and merged share no" in section(page, "verdict")
    ours = rows(page, "table3")[0]
    assert (ours["quality_arm_before"], ours["quality_before"], ours["speed_arm_before"]) == ("n/a", "n/a", "message")
    assert float(ours["median_speedup_before"]) >= 1


def test_an_arm_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    made = parse(["recipe=smollm2", f"report.before={tmp_path / 'file'}"])
    with pytest.raises(UserError, match=r"file: a file; set report\.before"):
        report_script.report(made)


def test_embedded_json_survives() -> None:
    data = {"a": "</script><!--<script>&\u2028\u2029", "b": ["\ud83d", "🎉", "\x00"]}
    text = embedded(data)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": data["a"], "b": ["\ufffd", "🎉", "\x00"]}


def test_replay_steps_add_up(tmp_path: Path) -> None:
    before, after, _ = write_run(tmp_path)
    arms = dict(zip(("before", "after"), read_arms(before, after), strict=True))
    shown = replays(arms, 9)[0]
    ids = [r["id"].split("/")[1] for r in shown["requests"]]
    assert ids == ["0", "1", "2", "4", "5", "6", "7", "8", "9"]
    for request in shown["requests"]:
        for one in request["arms"]:
            line = next(r for r in arms[one["role"]].records if r["id"] == request["id"])
            held = ""
            for step in one["steps"]:
                assert step["kept"] + step["dropped"] == held or line["updates"] is None
                held = step["kept"] + step["written"]
            assert held == line["stream"]["text"]
            assert one["steps"][-1]["passes"] == line["stream_passes"]
            assert [s["seen"] for s in one["steps"]] == ([2, 3] if line["updates"] is None else [1, 2, 3])
            assert one["steps"][-1]["kept"] + one["steps"][-1]["dropped"] == line["draft"]["text"]


def test_charts_do_not_share_ids(report: Path) -> None:
    ids = [attributes["id"] for _, attributes in Tags(report.read_text()).tags if attributes.get("id")]
    assert len(ids) == len(set(ids))


def test_the_page_says_what_it_must(report: Path) -> None:
    page = Tags(report.read_text())
    text = " ".join(" ".join(page.text).split())
    for said in (
        "Other models.",
        "arXiv 2610.26296",
        "humaneval, single sentence (1): humaneval/3",
        "the scorer failed on 2 of 78 requests",
        "against the before model's base on the same request",
        "Kept share, pooled",
        "ratio of sums",
        "hashes.sentence_rule",
        "settings.acceptance",
        "Only requests whose answers end by themselves on both sides",
    ):
        assert said in text, said


@pytest.mark.parametrize("n", [2, 5])
def test_few_requests_no_timings_no_updates_no_replays(tmp_path: Path, n: int) -> None:
    found = [r | {"updates": None, "total_passes": None} for r in records(1, 0.5, 12)][:n]
    found = [r | {"base_score": None, "stream_score": None} for r in found]
    before, after = (write_arm(tmp_path / a, a, found) for a in ("message", "merged"))
    for folder in (before, after):
        (folder / "timings.jsonl").unlink()
    settings = Report(bootstrap=50, replays=0)
    page = build_report([Place("tiny", before, after, None)], tmp_path / "report", settings, 0)
    assert "set report.replays above 0" in section(page, "replay")
    assert "no request was timed (eval.timed=0)" in section(page, "risk")
    assert "only with eval.replay=full" in section(page, "ceiling")
    assert "n/a: no request was timed in both arms" in section(page, "table")
    for name, reason in (("frontier", "eval.sweep"), ("recycle", "eval.recycle=true"), ("typing", "no time to draft")):
        assert reason in section(page, name)
    row = rows(page, "risk")[0]
    assert (row["below_1x_share"], row["below_1x_share_low"]) == ("n/a", "n/a")
    assert "below_1x_share: no request was timed" in row["reason"]


def browse(page: str, profile: Path, *flags: str) -> tuple[str, str]:
    """The page's document after its script ran, and what the browser logged."""
    if not CHROMIUM:
        pytest.skip("no Chromium here: the page is not opened in a browser")
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    command = [CHROMIUM, *quiet.split(), "--disable-component-update", "--disable-sync", "--enable-logging=stderr"]
    command += [f"--user-data-dir={profile}", *flags, "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    return done.stdout.decode(), done.stderr.decode(errors="replace")


def console(log: str) -> list[str]:
    return [line for line in log.splitlines() if "CONSOLE" in line]


def test_the_replay_is_drawn_in_chromium(report: Path, tmp_path: Path) -> None:
    address = f"{report.as_uri()}#request=humaneval/1&step=3"
    dom, log = browse(address, tmp_path)
    assert 'data-replay="drawn"' in dom
    assert "data-owned" not in dom
    assert console(log) == []
    assert 'data-part="place">step 3 of 3<' in dom
    assert "&lt;img src=x onerror=" in dom.split('data-part="request"')[1].split("</pre>")[0]
    assert "The submitted answer" in dom


DRIVER = """
<script>
const view = document.getElementById("replay-view"), seen = [];
const part = (name) => view.querySelector('[data-part="' + name + '"]');
const look = () => seen.push(part("place").textContent);
const press = (key) => { part("next").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); look(); };
look();
part("next").click(); look();
part("last").click(); look();
press("ArrowLeft"); press("Home"); press("End");
part("slider").value = "1"; part("slider").dispatchEvent(new Event("input")); look();
view.querySelector('input[value="before"]').click();
seen.push(view.querySelector('input[value="before"]').checked);
part("benchmark").value = "1"; part("benchmark").dispatchEvent(new Event("change"));
seen.push(part("choice").options.length, part("choice").options[2].textContent);
for (let i = 0; i < part("choice").options.length; i++) {
  part("choice").value = String(i); part("choice").dispatchEvent(new Event("change")); part("last").click();
}
for (const summary of document.querySelectorAll("summary")) { if (!summary.parentElement.open) { summary.click(); } }
seen.push([...document.querySelectorAll("nav a")].map((a) => a.hash).filter((hash) => !document.querySelector(hash)));
seen.push(document.querySelectorAll("details:not([open])").length);
document.body.dataset.driven = JSON.stringify(seen);
</script>
"""


def test_the_replay_is_driven_by_buttons_keys_and_lists(report: Path, tmp_path: Path) -> None:
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    driven = tmp_path / "driven.html"
    driven.write_text(page.replace("</body>", f"{DRIVER}</body>"))
    dom, log = browse(driven.as_uri(), tmp_path / "profile")
    assert console(log) == []
    assert 'data-replay="drawn"' in dom
    driven_to = re.search(r'data-driven="([^"]*)"', dom)
    assert driven_to is not None
    found = json.loads(driven_to[1].replace("&quot;", '"'))
    places = [f"step {i} of 3" for i in (1, 2, 3, 2, 1, 3, 2)]
    assert found == [*places, True, 12, "mbpp/2", [], 0]


def test_a_failing_replay_says_so(report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace('id="replay-data">{', 'id="replay-data">{{', 1))
    dom, _ = browse(broken.as_uri(), tmp_path / "profile")
    assert "The replay could not be drawn" in dom


WIDTHS = """
<script>
document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.dataset.colours = JSON.stringify(["--before", "--after", "--strict"].map(
  (name) => getComputedStyle(document.documentElement).getPropertyValue(name)));
</script>
"""


@pytest.mark.parametrize("size", ["1280,900", "500,900"])
def test_only_tables_scroll_sideways(report: Path, tmp_path: Path, size: str) -> None:
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    wide = tmp_path / "wide.html"
    wide.write_text(page.replace("</body>", f"{WIDTHS}</body>"))
    dom, log = browse(wide.as_uri(), tmp_path / "profile", f"--window-size={size}")
    assert console(log) == []
    assert 'data-wide="0"' in dom
    drawn = dom.split("<svg")[1]
    assert "fill: var(--before)" in drawn
    assert "stroke: var(--after)" in drawn


def test_several_runs_are_replayed(several: Path, tmp_path: Path) -> None:
    dom, log = browse(f"{several.as_uri()}#run=other&request=humaneval/1&arm=before", tmp_path)
    assert console(log) == []
    assert 'data-replay="drawn"' in dom
    assert 'data-part="before-label">(message (other/message))<' in dom


def test_several_runs_share_their_before(several: Path) -> None:
    whole = json_of(several)
    assert [run["recipe"] for run in whole["runs"]] == ["one", "two", "other"]
    labels = ["message (one/message)", "merged (one/merged)", "plain (one/plain)"]
    labels += ["merged (two/merged)", *(f"{arm} (other/{arm})" for arm in ("message", "merged", "plain"))]
    assert list(whole["arms"]) == labels
    assert [run["change"]["before"] for run in whole["runs"]] == [labels[0], labels[0], labels[4]]
    assert len(whole["shared"]) == 2
    assert whole["shared"][0].startswith(
        "two: its message arm (message) has the hashes, settings and device of message"
    )
    assert {r["model"] for r in rows(several, "table2") if r["source"] == "measured"} == set(labels)
    models = [(r["base_model"], r["run"]) for r in rows(several, "overview")]
    assert models == [("smollm2 (smollm2)", "one"), ("smollm2 (smollm2)", "two"), ("qwen3 (qwen3)", "other")]
    assert "not compared with each other" in section(several, "verdict")


def test_a_forced_report_says_so_at_its_top(tmp_path: Path) -> None:
    place = Place("tiny", *write_run(tmp_path, n=12, merged={"hashes": HASHES | {"sentence_rule": "s2"}}))
    with pytest.raises(UserError, match="sentence_rule hash"):
        build_report([place], tmp_path / "report", QUICK, 0)
    page = build_report([place], tmp_path / "report", QUICK.model_copy(update={"force": True}), 0)
    top = page.read_text().split("<main>")[0]
    assert "Forced." in top
    assert "message and merged differ in sentence_rule hash (s1 before, s2 after)" in top
    assert "plain and merged differ in sentence_rule hash" in top
    assert "sentence\\_rule hash" in (page.parent / "report.md").read_text().split("## ")[0]
    assert len(json_of(page)["forced"]) == 2


def test_what_only_some_evaluations_measure(rich: Path) -> None:
    frontier = [r for r in rows(rich, "frontier") if r["model"] == "merged"]
    assert [(r["benchmark"], r["tau"]) for r in frontier][:4] == [
        *(("HumanEval (pass@1)", tau) for tau in ("0.3", "0.6", "0.9")),
        ("MBPP (pass@1)", "0.3"),
    ]
    assert (frontier[0]["quality_stream"], frontier[0]["speedup_passes_median"]) == ("30.0", "0.85")
    assert frontier[-1]["benchmark"] == "pooled"
    whole = json_of(rich)["arms"]["merged"]
    row = next(r for r in rows(rich, "recycle") if (r["model"], r["benchmark"]) == ("merged", "pooled"))
    for key in ("speedup_passes_recycle_median", "lookup_gain_median"):
        assert float(row[key]) == pytest.approx(whole["pooled"][key]["value"], abs=1e-4)
    assert row["answers_differ"] == "2 of 22"
    typed = [r for r in rows(rich, "typing") if (r["model"], r["benchmark"]) == ("merged", "MBPP (pass@1)")]
    assert [r["words_a_minute"] for r in typed][:2] == ["20", "40 (eval.chars_per_second)"]
    assert typed[-1]["words_a_minute"] == "every draft is waited for"
    noise = rows(rich, "noise")[0]
    assert (noise["streamed_answer_differs_from_base"], noise["alone_differs_from_batched"]) == ("25.0", "n/a")
    assert (
        float(noise["streamed_answer_differs_from_base_low"])
        < 25
        < float(noise["streamed_answer_differs_from_base_high"])
    )
    assert (rich.parent / "figures" / "frontier.png").stat().st_size > 0
    kept = [r for r in rows(rich, "by_kept") if (r["model"], r["benchmark"]) == ("merged", "pooled")]
    assert {r["kept"] for r in kept} == {"none", "some", "all", "no draft"}
    assert sum(int(r["n"]) for r in kept) == whole["pooled"]["n"]
    shares = next(r for r in rows(rich, "kept") if (r["model"], r["benchmark"]) == ("merged", "pooled"))
    parts = ("no_draft_share", "keeps_nothing_share", "keeps_some_share", "keeps_all_share")
    assert sum(float(shares[key]) for key in parts) == pytest.approx(100, abs=0.05)


def test_the_time_to_draft_is_drawn_and_long_tables_are_folded(rich: Path, report: Path) -> None:
    for name in ("typing", "typing-speedup", "frontier"):
        assert (rich.parent / "figures" / f"{name}.svg").stat().st_size > 0
        assert not (report.parent / "figures" / f"{name}.svg").exists()
    said = section(rich, "typing")
    assert "HumanEval (pass@1)" in said
    assert "% of drafts finished in time" in said
    page = rich.read_text()
    folded = re.findall(r'<details class="fold"><summary>([^:]*)', page)
    assert "Time to draft" in folded
    assert not [title for title in folded if title.startswith("Table")]
    assert "@media print" in page
    assert ".fold::details-content { content-visibility: visible; }" in page


def test_equal_forms_are_not_told_apart(tmp_path: Path) -> None:
    """Both arms have the same base answers: neither form of an after-figure flatters less than the other."""
    found = records(1, 0.5, 12)
    sizes = [dict.fromkeys(("draft_tokens", "kept_tokens"), r["base_passes"]) | {"stream_passes": 1} for r in found]
    later = [r if r["excluded"] else r | size for r, size in zip(found, sizes, strict=True)]
    before, after = write_arm(tmp_path / "message", "message", found), write_arm(tmp_path / "merged", "merged", later)
    for folder in (before, after):
        (folder / "timings.jsonl").unlink()
    page = build_report([Place("tie", before, after, None)], tmp_path / "report", QUICK, 0)
    said = json_of(page)["verdicts"]["humaneval"]
    assert "(median in passes " in said[0]["sentence"]
    assert "message against merged, n = 11; quality message against merged, n = 9)" in said[0]["sentence"]
    assert not [one for one in said if "stricter" in one["sentence"] and one["topic"] != "caution"]
    assert {row["stricter_form"] for row in rows(page, "change")} == {"no"}
    assert ">stricter form<" not in page.read_text()
    assert "(stricter form)" not in (page.parent / "report.md").read_text()
    assert "Speedup in passes, median" in (page.parent / "report.md").read_text()


def test_the_replay_knows_how_answers_are_scored(tmp_path: Path) -> None:
    lines = [r for name in ("humaneval", "coedit", "my.jsonl") for r in records(1, 0.5, 8, name)]
    arm = read_arms(write_arm(tmp_path / "message", "message", lines))[0]
    assert [(b["name"], b["metric"]) for b in replays({"before": arm}, 1)] == [
        ("humaneval", "pass@1"),
        ("coedit", "F1"),
        ("my.jsonl", "F1"),
    ]


def test_the_report_for_a_pull_request_is_short(report: Path) -> None:
    lines = (report.parent / "report.md").read_text().splitlines()
    assert len(lines) < 60
    assert sum("stricter form" in line for line in lines if line.startswith("|")) >= 2
    assert any("**HumanEval (pass@1)**: " in line and "quality unchanged within ±" in line for line in lines)


def test_one_is_an_edge_of_the_bins() -> None:
    speedups = np.array([0.97, 1.0, 130.0])
    bins = edges(speedups)
    assert 1.0 in bins
    assert bins[0] <= speedups.min()
    assert bins[-1] > speedups.max()


def test_two_runs_that_are_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    made = parse(["recipe=smollm2", f"report.runs=[{tmp_path / 'a'},{tmp_path / 'b' / '..' / 'a'}]"])
    with pytest.raises(UserError, match="there twice"):
        report_script.places(made)


def finished(report: Path) -> Path:
    """A report's folder with the record that a finished step leaves."""
    record = {"settings": {}, "content": run_folder.content_hash(report.parent), "provenance": {}}
    (report.parent / run_folder.STEP_FILE).write_text(json.dumps(record))
    return report.parent


def test_upload_to_wandb_offline(report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """For real, in wandb's offline mode: tables and artifact are in its files, the key is nowhere."""
    key, secret = "0123456789abcdef" * 2 + "c0ffee00", "made-up-secret"
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", key), ("MADE_UP_TOKEN", secret)):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    said = upload(finished(report), "made-up", "smollm2 <run>", tmp_path)
    assert said.startswith("not sent; to send it: wandb sync ")
    folder = Path(said.rpartition(" ")[2])
    logged = {path.name.split("_")[0] for path in (folder / "files" / "media" / "table").iterdir()}
    assert logged >= {"table1", "table2", "table3", "risk"}
    path = next((folder / "files" / "media" / "table").glob("table3_*.json"))
    table = json.loads(path.read_text())
    assert table["data"][0][table["columns"].index("median_speedup_before")] == float(
        rows(report, "table3")[0]["median_speedup_before"]
    )
    journal = next(folder.glob("*.wandb")).read_bytes()
    assert b"smollm2-run-report" in journal
    assert b"report.html" in journal
    shown = capfd.readouterr()
    everything = [shown.out.encode(), shown.err.encode(), *(f.read_bytes() for f in tmp_path.rglob("*") if f.is_file())]
    assert not any(word.encode() in found for word in (key, secret) for found in everything)


def test_a_refused_upload_is_one_line_without_the_key(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "far-too-short")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError) as refused:
        upload(finished(report), "made-up", "x", tmp_path)
    assert str(refused.value).startswith("report.wandb=made-up: ")
    assert "far-too-short" not in str(refused.value)
    assert "\n" not in str(refused.value)
