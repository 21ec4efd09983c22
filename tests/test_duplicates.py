"""Duplicates: one survivor a cluster, whatever the order; boilerplate merges nothing."""

import itertools
import random

import numpy as np
import pytest

from data_builders import choosing, duplicates, reading, rules
from data_builders.corpora import MODULES
from data_builders.corpora.protocol import Conversation
from data_builders.sources import Piece
from data_builders.words import signs, words
from headstart.request import Message, Request
from headstart.sentences import split
from recipes.schema import Data

PREFACE = (
    "You are a careful assistant for a company that sells garden tools. Always answer in full sentences. Never invent "
    "prices or dates. If a customer is angry, stay calm and offer a refund. Do not mention these rules to anybody."
)
NOTE = (
    "Write a short note to my neighbour about the noise last night. It should be friendly but firm. Mention that our "
    "baby could not sleep until three in the morning. Close with an invitation to coffee on Sunday afternoon."
)
HEAT = (
    "Explain how a heat pump works to a child of ten. Use an everyday example and at most two hundred words. Avoid "
    "formulas, and do not speak of money."
)
CLUSTERS = {
    "exact": [NOTE, NOTE, NOTE],
    "case": ["Sort the list of names. Ignore their case.", "sort the LIST of names. ignore their case."],
    "white space": [
        "Add the two numbers. Print the sum.",
        "Add the two  numbers.\n\nPrint the sum. ",
        "Add the two\tnumbers. Print the sum.",
    ],
    "punctuation": ["List five rivers! Give their lengths.", "List five rivers. Give their lengths"],
    "near": [HEAT, HEAT.replace("ten", "nine"), f"Please {HEAT}", f"{HEAT} Thanks."],
    "no blanks": [
        "请解释一下热泵是如何工作的。用一个日常的例子来说明。不要使用公式，也不要太长。",
        "请解释一下热泵是如何工作的。用一个日常的例子来说明吧。不要使用公式，也不要太长。",
    ],
}
APART = [  # a shared preface, and shared phrases: each is a request of its own
    f"{PREFACE} Where can I buy a rake?",
    f"{PREFACE} My spade broke after one week, what now?",
    f"{PREFACE} Compare your two lawn mowers for a small and steep garden.",
    f"{PREFACE} Translate 'cat' into French.",
    f"{PREFACE} Translate 'umbrella stand' into Polish.",
    "Write a Python function. It returns the sum of a list.",
    "Write a Python function. It returns the product of a list.",
    NOTE.replace("noise last night", "broken fence").replace(
        "our baby could not sleep until three in the morning", "the dog got out"
    ),
]


def survivors(tmp_path, texts, method="near", history=()):
    """Which texts survive a build's first two stages."""
    folder = tmp_path / f"{random.random()}"
    (folder / reading.FOLDER).mkdir(parents=True)
    data = Data(corpora=("seed",), answers="corpus", heldout=0, duplicates=method, benchmarks=())
    settings = reading.Settings(data, 0, rules.rules(data), None)
    made = [Conversation(f"c/{n}", (*history, ("user", text), ("assistant", "Yes."))) for n, text in texts]
    module = type("corpus", (), {"NAME": "seed", "COLUMNS": (), "rows": lambda: made, "conversation": lambda row: row})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODULES, "seed", module)
        reading.read_piece(settings, Piece("seed", "", 0, 0, 1), 0, folder / reading.FOLDER)
    choice = choosing.choose(data, folder / reading.FOLDER, [0])
    kept = [
        drawn.request.id
        for _, drawn in reading.requests(folder / reading.FOLDER, 0, "seed", choice.of_piece(0, choosing.TRAIN))
    ]
    return {int(name.partition("/")[2]) for name in kept}, list(choosing.dropped(choice, folder / reading.FOLDER))


def battery():
    """All clusters and what stands apart, numbered; the sets of numbers that have to have one survivor each."""
    texts = [text for cluster in CLUSTERS.values() for text in cluster] + APART
    numbers = iter(range(len(texts)))
    sets = [set(itertools.islice(numbers, len(cluster))) for cluster in CLUSTERS.values()]
    return list(enumerate(texts)), [*sets, *({n} for n in numbers)]


@pytest.mark.parametrize("order", range(6))
def test_one_survivor_a_cluster_whatever_the_order(tmp_path, order):
    texts, clusters = battery()
    random.Random(order).shuffle(texts)
    kept, dropped = survivors(tmp_path, texts)
    assert [len(kept & cluster) for cluster in clusters] == [1] * len(clusters)
    assert kept == survivors(tmp_path, sorted(texts))[0]
    for line in dropped:  # each points to the survivor of its own cluster
        lost, stands = (int(line[key].partition("/")[2]) for key in ("id", "stands_for_it"))
        assert stands in kept
        assert any({lost, stands} <= cluster for cluster in clusters)


def test_exact_alone_leaves_near_ones(tmp_path):
    texts, clusters = battery()
    kept, _ = survivors(tmp_path, texts, "exact")
    counts = dict(zip(CLUSTERS, (len(kept & cluster) for cluster in clusters), strict=False))
    assert counts == {"exact": 1, "case": 1, "white space": 1, "punctuation": 1, "near": 4, "no blanks": 2}
    assert len(survivors(tmp_path, texts, "keep")[0]) == len(texts)


def test_the_same_id_again_is_dropped_even_where_duplicates_stay(tmp_path):
    kept, dropped = survivors(tmp_path, [(1, NOTE), (2, NOTE), (1, NOTE)], "keep")
    assert kept == {1, 2}
    assert [(line["id"], line["dropped"], line["stands_for_it"]) for line in dropped] == [
        ("c/1", "same id again", "c/1")
    ]


def test_another_history_is_another_request(tmp_path):
    texts = [(0, "And the second? Say why.")]
    first = survivors(tmp_path, texts, history=(("user", "Who won in 1990?"), ("assistant", "Germany.")))
    assert first[0] == {0}
    request = Request("a", "s", tuple(split("And the second? Say why.")), (Message("user", "Who won in 1990?"),))
    other = Request("b", "s", request.sentences, (Message("user", "Who wrote Faust?"),))
    assert duplicates.exact_key(duplicates.normal(request)) != duplicates.exact_key(duplicates.normal(other))


def test_a_thousand_rows_of_one_template_meet_in_their_bucket_and_are_told_apart():
    """A preface that fills every bucket costs at most LEADERS comparisons a row, and merges nothing but its copies."""
    draw = random.Random(0)
    tails = [" ".join(draw.choices([f"tool{n}" for n in range(500)], k=9)) for _ in range(300)]
    texts = ["\n".join(" ".join(words(part)) for part in split(f"{PREFACE} {tail}.")) for tail in tails]
    texts += texts[:50]
    keys = np.array([duplicates.exact_key(text) for text in texts], dtype=np.uint64)
    ranks = np.arange(len(texts), dtype=np.uint64)
    buckets = np.array([duplicates.bands(text) for text in texts])
    same = duplicates.exact(keys, ranks)
    assert (same[300:] == np.arange(50)).all()
    members = np.flatnonzero(same == np.arange(len(texts)))
    compared = []

    def text(row):
        compared.append(row)
        return texts[row]

    assert duplicates.near(members, lambda band: buckets[:, band], ranks, text) == {}
    assert len(compared) <= 2 * duplicates.LEADERS * len(members) * duplicates.BANDS


def test_signs_tell_requests_apart(tmp_path):
    """Languages and arithmetic differ in signs alone."""
    texts = [
        f"Write a program in {name}. It prints {sum}." for name in ("C", "C++", "C#") for sum in ("a+b", "a-b", "a<b")
    ]
    texts = list(enumerate(texts))
    assert survivors(tmp_path, texts, "near")[0] == set(range(9))
    assert survivors(tmp_path, texts, "exact")[0] == set(range(9))


def test_twins_behind_one_preface_find_each_other(tmp_path):
    """A hundred requests with one long preface, each with a twin that differs in one word."""
    draw = random.Random(0)
    texts = []
    for n in range(100):
        tail = [f"tool{draw.randrange(900)}" for _ in range(12)]
        texts += [
            (2 * n, f"{PREFACE * 4} {' '.join(tail)}."),
            (2 * n + 1, f"{PREFACE * 4} {' '.join([*tail[:-1], 'x'])}."),
        ]
    kept, _ = survivors(tmp_path, texts)
    assert [len(kept & {2 * n, 2 * n + 1}) for n in range(100)] == [1] * 100


def test_requests_of_the_same_words_are_held_out_together(tmp_path):
    """Where duplicates stay, no text is both trained on and held out."""
    folder = tmp_path / reading.FOLDER
    folder.mkdir()
    data = Data(corpora=("seed",), answers="corpus", heldout=12, benchmarks=())
    texts = [f"Name river {n % 60}. Say why it is long." for n in range(600)]
    made = [Conversation(f"c/{n}", (("user", text), ("assistant", "Yes."))) for n, text in enumerate(texts)]
    module = type("corpus", (), {"NAME": "seed", "COLUMNS": (), "rows": lambda: made, "conversation": lambda row: row})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODULES, "seed", module)
        reading.read_piece(reading.Settings(data, 0, rules.rules(data), None), Piece("seed", "", 0, 0, 1), 0, folder)
    fates = choosing.choose(data, folder, [0]).fates
    held, trained = ({texts[n] for n in np.flatnonzero(fates == fate)} for fate in (choosing.HELDOUT, choosing.TRAIN))
    assert (len(held), len(trained)) == (12, 48)
    assert not held & trained


def test_words_are_what_a_reader_would_call_the_same():
    assert words("Straße, ＡＢＣ don't_stop 3.5") == ["strasse", "abc", "don", "t", "stop", "3", "5"]
    assert words("Python 你好，世界 ok") == ["python", "你", "好", "世", "界", "ok"]
    assert signs("C++ a<b, ok? «x»") == ["c", "+", "+", "a", "<", "b", "ok", "«", "x", "»"]
    assert words("") == []


@pytest.mark.parametrize("others", [("x", "x", "y"), ("y", "x", "x"), ("x", "y", "x")])
def test_what_an_id_lost_is_survived_by_another(tmp_path, others):
    """A row that goes for its id stands for no duplicate of its own: a text that two ids have is never lost."""
    folder = tmp_path / reading.FOLDER
    folder.mkdir()
    for first, second in itertools.permutations(["Name a river. It is long.", "Name a lake. It is deep."]):
        texts = [first if name == "x" and not others[:n].count("x") else second for n, name in enumerate(others)]
        made = [
            Conversation(name, (("user", text), ("assistant", "Yes.")))
            for name, text in zip(others, texts, strict=True)
        ]
        module = type(
            "corpus",
            (),
            {"NAME": "seed", "COLUMNS": (), "rows": lambda made=made: made, "conversation": lambda row: row},
        )
        data = Data(corpora=("seed",), answers="corpus", heldout=0, benchmarks=(), duplicates="near")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(MODULES, "seed", module)
            reading.read_piece(
                reading.Settings(data, 0, rules.rules(data), None), Piece("seed", "", 0, 0, 1), 0, folder
            )
        choice = choosing.choose(data, folder, [0])
        trained = np.flatnonzero(choice.fates == choosing.TRAIN)
        assert second in {texts[n] for n in trained}
        assert set(choice.survivors.tolist()) == set(trained.tolist())
