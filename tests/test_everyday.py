"""The everyday corpus: every row a request of some sentences, each once, none of them a benchmark's."""

from data_builders import build, contamination, rules
from data_builders.corpora import everyday
from eval import suite
from recipes.schema import Data

ASKED = rules.rules(Data(corpora=("everyday",), answers={"everyday": "self"}))
REQUESTS = [rules.admit(everyday.conversation(row), everyday.NAME, ASKED)[0] for row in everyday.rows()]
FILES = {
    "mbpp": "mbpp/mbpp.jsonl",
    "canitedit": "canitedit/canitedit.jsonl",
    "ds1000": "ds1000/test.jsonl.gz",
    "coedit": "coedit/validation_subset.jsonl",
    "chat": "ultrachat_200k/train_sft_sample.jsonl.gz",
    "mtbench": "mt_bench",
}


def test_every_row_is_a_request_of_some_sentences():
    assert len(REQUESTS) >= 250
    assert len({request.text for request in REQUESTS}) == len({request.id for request in REQUESTS}) == len(REQUESTS)
    assert all(2 <= len(request.sentences) <= 6 for request in REQUESTS)
    assert [request.text for request in REQUESTS] == [row["text"] for row in everyday.rows()]


def test_without_the_models_answers_there_is_no_pair(tmp_path, capsys):
    given = ["recipe=smollm2", f"run.dir={tmp_path / 'run'}", "data.corpora=[everyday]"]
    assert build.main(given) != 0
    assert "no answered turn" in capsys.readouterr().err


def test_no_row_holds_a_benchmarks_task(shared):
    tasks = [
        contamination.task(name, request)
        for name, file in FILES.items()
        for request in suite.benchmark(name).load(str(shared / "data" / file))
    ]
    index = contamination.Index(tasks)
    assert tasks
    assert not any(index.find_all([[request.text] for request in REQUESTS]))
