"""The written report: complete, self-contained, safe with hostile text, and alive in a real browser."""

import csv
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from synthetic_arms import HOSTILE, records, write_arm, write_run

from eval import report as report_script
from eval.evidence import read_arms
from eval.report_pages import build_report
from eval.report_replay import embedded, replays
from eval.report_tables import TABLE3_COLUMNS, paper
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Report

SETTINGS = Report(bootstrap=200, replays=12)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a made-up run with two benchmarks."""
    folder = tmp_path_factory.mktemp("run")
    before, after, plain = write_run(folder, ("humaneval", "mbpp"))
    return build_report(before, after, plain, folder / "report", SETTINGS, 0, "smollm2")


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
    for name in ("report.html", "report.md", "report.json", "table3.csv", "figures/speedup.png", "figures/kept.svg"):
        assert (folder / name).stat().st_size > 0
    whole = json.loads((folder / "report.json").read_text())
    assert set(whole["arms"]) == {"message", "merged", "plain"}
    assert whole["arms"]["merged"]["hashes"]["renderer"] == "r1"
    assert whole["arms"]["merged"]["benchmarks"]["humaneval"]["n"] == 39
    assert whole["change"]["benchmarks"]["mbpp"]["figures"]["kept_share"]["p"] is not None
    assert {v["topic"] for v in whole["verdicts"]["humaneval"]} >= {"kept share", "quality"}


def test_table3_has_the_papers_rows_beside_ours(report: Path) -> None:
    with (report.parent / "table3.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == TABLE3_COLUMNS
    assert {"model", "benchmark", "quality_before", "quality_after", "n", "source"} <= set(TABLE3_COLUMNS)
    ours = [r for r in rows if r["source"] == "measured"]
    theirs = [r for r in rows if r["source"] == "paper"]
    assert {(r["benchmark"], r["count"], r["base_of"]) for r in ours} == {
        (b, c, o)
        for b in ("humaneval", "mbpp", "average")
        for c in ("max(1, N-k)", "1+N-k")
        for o in ("after", "before")
    }
    assert len(theirs) == 8
    assert theirs[1]["model"] == "Qwen3-8B"
    assert (theirs[1]["quality_after"], theirs[1]["median_speedup_after"], theirs[1]["n"]) == ("59.8", "3.44", "")
    assert {(r["quality_arm_before"], r["speed_arm_before"]) for r in ours} == {("plain", "message")}
    assert "| plain, message |" in (report.parent / "report.md").read_text()
    assert "<td>plain, message</td>" in report.read_text()
    whole = json.loads((report.parent / "report.json").read_text())
    expected = whole["change"]["quality"]["benchmarks"]["humaneval"]["figures"]["quality_stream"]
    assert float(ours[0]["quality_before"]) == pytest.approx(100 * expected["before"]["value"], abs=0.01)


def test_the_papers_numbers_are_those_of_the_record() -> None:
    shared = os.environ.get("HEADSTART_SHARED")
    if not shared or not (Path(shared) / "paper_numbers.yaml").exists():
        pytest.skip("HEADSTART_SHARED is not set: the record of the paper's numbers is not at hand")
    record = yaml.safe_load((Path(shared) / "paper_numbers.yaml").read_text())
    printed = [
        (r["quality_before"], r["quality_after"], r["median_speedup_before"], r["median_speedup_after"])
        for r in paper()["table3"]
    ]
    assert printed == [
        (*(r["quality"][k] for k in ("before", "after")), *(r["speedup_passes_median"][k] for k in ("before", "after")))
        for r in record["table3"]
    ]
    for row in paper()["table2"]:
        model = {"Gemma": "gemma3", "Llama": "llama3", "Qwen3": "qwen3"}[row["model"].split("-")[0]]
        known = record["table2"][model][row["benchmark"].lower()]
        assert (row["quality_base"], row["quality_stream"]) == (known["quality"]["base"], known["quality"]["stream"])
        assert row["mean_speedup"] == known["speedup_passes"]["mean"]
        assert row["median_speedup"] == known["speedup_passes"]["median"]


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
    shown = json.loads(block)["benchmarks"][0]["requests"][1]
    assert shown["sentences"][1] == HOSTILE.replace("\ud800", "\ufffd") + ". "


def test_hostile_names_and_reasons_stay_text(tmp_path: Path) -> None:
    found = records(1, 0.5, 10)
    found[3]["excluded"] = f"{HOSTILE}|`x`"
    before, after = (write_arm(tmp_path / a, a, found) for a in ("message", "merged"))
    page = build_report(before, after, None, tmp_path / "report", SETTINGS, 0, "<b>run</b>")
    tags = [tag for tag, _ in Tags(page.read_text()).tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "<img" not in markdown
    assert "<b>" not in markdown
    assert "\\|" in markdown


def test_names_are_no_markup_and_no_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "[/x] $a_{$ :smile:"
    before, after = (
        write_arm(tmp_path / f"arm{i}", f"{a}[/b]$a_{{$", records(i, 0.5, 8, name)) for i, a in enumerate("pq")
    )
    build_report(before, after, None, tmp_path / "report", SETTINGS, 0, "tiny")
    assert "$a_{$" in (tmp_path / "report" / "figures" / "kept.svg").read_text()
    report_script.show(json.loads((tmp_path / "report" / "report.json").read_text()))
    said = capsys.readouterr().out
    assert f"{name}: p[/b]$a_{{$ -> q[/b]$a_{{$, n = 7" in said
    assert "Quality, p[/b]$a_{$ against" in said


def test_a_quality_arm_of_other_requests_leaves_the_rest(tmp_path: Path) -> None:
    found = {"message": records(1, 0.5, 8), "merged": records(2, 0.5, 8), "plain": records(3, 0.5, 8, "mbpp")}
    before, after, plain = (write_arm(tmp_path / a, a, lines) for a, lines in found.items())
    page = build_report(before, after, plain, tmp_path / "report", SETTINGS, 0, "tiny")
    assert "quality is left out (plain shares no request with merged)" in page.read_text()
    assert "Quality is left out: plain and merged share no" in (tmp_path / "report" / "report.md").read_text()
    ours = next(csv.DictReader((tmp_path / "report" / "table3.csv").read_text().splitlines()))
    assert (ours["quality_arm_before"], ours["quality_before"], ours["speed_arm_before"]) == ("", "", "message")
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
        "humaneval humaneval/3: single sentence",
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
    page = build_report(before, after, None, tmp_path / "report", Report(bootstrap=50, replays=0), 0, "tiny")
    assert "set report.replays above 0" in page.read_text()
    assert "speedup in seconds, median" in (tmp_path / "report" / "report.json").read_text()


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
    assert found == [*places, True, 12, "mbpp/2"]


def test_a_failing_replay_says_so(report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace('id="replay-data">{', 'id="replay-data">{{', 1))
    dom, _ = browse(broken.as_uri(), tmp_path / "profile")
    assert "The replay could not be drawn" in dom
