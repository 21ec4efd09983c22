"""What a row of each corpus becomes: a request, repaired or not, or dropped for one of a few reasons."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_builders import corpora, rules, sources
from data_builders.corpora import evol_codealpaca, jsonl, lmsys, magicoder, mbpp, seed
from data_builders.corpora.protocol import Conversation, Unusable
from data_builders.rules import BLANK, CONTROL, JOINED, LEADING, LINE_ENDS, SHORTENED, SURROGATES, TRAILING
from headstart.request import Message
from headstart.sentences import split
from recipes.errors import UserError
from recipes.schema import Data

ASKED = "Write a poem. Make it rhyme."
REASONS = {
    "flagged by moderation",
    "redacted",
    "other language",
    "odd role",
    "malformed row",
    "no answered turn",
    "prompt marker in the answer",
    "too long",
    "one sentence",
}
S, U, A, T = "system", "user", "assistant", "tool"


def by(**said):
    """The rules of a recipe whose answers are the corpus'."""
    return rules.rules(Data(**{"answers": "corpus", **said}))


def talk(*turns, **marks):
    return Conversation("c/1", turns, **marks)


def admitted(*turns, rule=None, **marks):
    """(history, text, answer, repairs) of turns."""
    request, repairs = rules.admit(talk(*turns, **marks), "made", rule or by())
    return [(m.role, m.content) for m in request.history], request.text, request.reference, repairs


def dropped(*turns, rule=None, **marks):
    """(reason, detail) of turns that no request is made of."""
    with pytest.raises(Unusable) as caught:
        rules.admit(talk(*turns, **marks), "made", rule or by())
    return caught.value.reason, caught.value.detail


def lmsys_row(*turns, flagged=(), **changes):
    """A made-up row in the schema's shape; `flagged` are the places of flagged messages."""
    names = ("harassment", "hate/threatening", "self-harm", "sexual/minors", "violence/graphic")
    moderation = [
        {
            "categories": dict.fromkeys(names, False),
            "category_scores": dict.fromkeys(names, 1e-6),
            "flagged": i in flagged,
        }
        for i in range(len(turns))
    ]
    return {
        "conversation_id": "0123456789abcdef0123456789abcdef",
        "model": "vicuna-13b",
        "conversation": [{"content": content, "role": role} for role, content in turns],
        "turn": len(turns) // 2,
        "language": "English",
        "openai_moderation": moderation,
        "redacted": False,
        **changes,
    }


def test_a_sound_row_of_lmsys_is_kept_byte_for_byte():
    text = "  What is 3.5 + 1?  Explain it.\n\n- one\n- two\tthree "
    row = lmsys_row((U, "Hi."), (A, "Hello, NAME_1!"), (U, text), (A, " 4.5\n"), unknown_column={"a": 1})
    request, repairs = rules.admit(lmsys.conversation(row), "lmsys", by())
    assert request.id == "lmsys/0123456789abcdef0123456789abcdef"
    assert request.source == "lmsys"
    assert request.history == (Message("user", "Hi."), Message("assistant", "Hello, NAME_1!"))
    assert request.sentences == tuple(split(text))
    assert (request.text, request.reference, repairs) == (text, " 4.5\n", [])


@pytest.mark.parametrize(
    ("turns", "history", "text", "answer", "repairs"),
    [
        ([(S, "Be brief."), (U, ASKED), (A, "Yes.")], [(S, "Be brief.")], ASKED, "Yes.", []),
        ([(U, "Hi."), (U, ASKED), (A, "Yes.")], [], f"Hi.\n\n{ASKED}", "Yes.", [JOINED]),
        ([(U, ASKED), (A, "Yes."), (A, "No.")], [], ASKED, "Yes.\n\nNo.", [JOINED]),
        ([(A, "Hello!"), (U, ASKED), (A, "Yes.")], [], ASKED, "Yes.", [LEADING]),
        ([(S, "Be brief."), (A, "Hello!"), (U, ASKED), (A, "Yes.")], [(S, "Be brief.")], ASKED, "Yes.", [LEADING]),
        ([(U, "  "), (A, "Hello!"), (U, ASKED), (A, "Yes.")], [], ASKED, "Yes.", [BLANK]),
        ([(U, ASKED), (A, "Yes."), (U, " "), (A, "You are welcome!")], [], ASKED, "Yes.", [BLANK]),
        ([(U, "Hi."), (A, "a"), (U, ""), (A, "b"), (U, ASKED), (A, "c")], [(U, "Hi."), (A, "a")], ASKED, "c", [BLANK]),
        ([(U, "👍"), (A, "Thanks!"), (U, ASKED), (A, "c")], [(U, "👍"), (A, "Thanks!")], ASKED, "c", []),
        ([(U, "?!"), (U, ASKED), (A, "Yes.")], [], f"?!\n\n{ASKED}", "Yes.", [JOINED]),
        ([(S, " "), (U, ASKED), (A, "Yes.")], [], ASKED, "Yes.", [BLANK]),
        ([(U, ASKED), (A, "Yes."), (U, "And now? Say.")], [], ASKED, "Yes.", [TRAILING]),
        ([(U, ASKED), (A, "Yes."), (U, "And?"), (A, "")], [], ASKED, "Yes.", [BLANK, TRAILING]),
        ([(U, "Hi."), (A, " \n"), (U, ASKED), (A, "Yes.")], [], f"Hi.\n\n{ASKED}", "Yes.", [BLANK, JOINED]),
        ([(U, ASKED), (A, ":)")], [], ASKED, ":)", []),
        ([("Human", ASKED), (" GPT ", "Yes.")], [], ASKED, "Yes.", []),
        ([("prompter", ASKED), ("model", "Yes.")], [], ASKED, "Yes.", []),
        ([(U, "One.\r\nTwo.\rThree."), (A, "a\r\n\r\nb")], [], "One.\nTwo.\nThree.", "a\n\nb", [LINE_ENDS] * 2),
        ([(U, "One\0.\x07 Two.\x85\x7f"), (A, "\ufeffa\tb")], [], "One. Two.", "a\tb", [CONTROL] * 2),
        ([(U, "One.\ud800 Two."), (A, "a\udfffb")], [], "One. Two.", "ab", [SURROGATES] * 2),
        ([(U, "\r\n\0\ud800"), (U, ASKED), (A, "a")], [], ASKED, "a", [LINE_ENDS, CONTROL, SURROGATES, BLANK]),
        ([(U, "One.\u2028Two. \U0001f600 é字"), (A, "a\xa0")], [], "One.\u2028Two. \U0001f600 é字", "a\xa0", []),
    ],
)
def test_odd_turns_are_repaired(turns, history, text, answer, repairs):
    assert admitted(*turns) == (history, text, answer, repairs)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no answered turn"),
        ([(S, "Be brief.")], "no answered turn"),
        ([(U, ASKED)], "no answered turn"),
        ([(A, "Yes.")], "no answered turn"),
        ([(U, ASKED), (A, "")], "no answered turn"),
        ([(U, "  "), (A, "Yes.")], "no answered turn"),
        ([(U, ASKED), (A, "\u2028 \xa0")], "no answered turn"),
        ([(U, ASKED), (A, "\u200b")], "no answered turn"),
        ([(U, ASKED), (A, "\0")], "no answered turn"),
        ([(U, "..."), (A, "Yes.")], "one sentence"),
        ([(U, ASKED), (T, "{}"), (A, "Yes.")], "odd role"),
        ([(U, ASKED), (S, "Be brief."), (A, "Yes.")], "odd role"),
        ([(S, "Be brief."), (S, "Be kind."), (U, ASKED), (A, "Yes.")], "odd role"),
        ([(U, ASKED), ("", "Yes.")], "odd role"),
        ([(U, ASKED), (None, "Yes.")], "odd role"),
        ([(U, ASKED), (A, None)], "malformed row"),
        ([(U, [{"type": "text", "text": ASKED}]), (A, "Yes.")], "malformed row"),
        ([(U, "Write a poem."), (A, "Yes.")], "one sentence"),
        ([(U, "x" * 24_000), (A, "Yes.")], "too long"),
    ],
)
def test_what_cannot_be_repaired_is_dropped(turns, reason):
    assert dropped(*turns)[0] == reason


def test_marks_drop_a_row_as_the_recipe_says():
    sound = ((U, ASKED), (A, "Yes."))
    assert dropped(*sound, flagged=True) == ("flagged by moderation", "")
    assert admitted(*sound, flagged=True, rule=by(flagged="keep"))[1] == ASKED
    assert admitted(*sound, redacted=True)[1] == ASKED
    assert dropped(*sound, redacted=True, rule=by(redacted="drop")) == ("redacted", "")
    english = by(languages=["English"])
    assert dropped(*sound, language="unknown", rule=english) == ("other language", "unknown")
    assert dropped(*sound, language=["English"], rule=english)[0] == "other language"
    assert admitted(*sound, language="English", rule=english)[1] == ASKED
    assert admitted(*sound, language=None, rule=english)[1] == ASKED
    strict = by(languages=["English"], redacted="drop")
    assert dropped(*sound, flagged=True, redacted=True, language="Thai", rule=strict)[0] == "flagged by moderation"
    with pytest.raises(Unusable, match="malformed row"):  # no Parquet file could hold it
        rules.admit(Conversation("c/\ud800", sound), "made", by())


@pytest.mark.parametrize(
    "answer",
    [
        "Sure.\n### Human: What else?",
        "Sure.\n###Human",
        "### Instruction:\nWrite more.",
        "  ## Assistant : no",
        "Yes.<|im_end|>\n<|im_start|>user\nAnd?",
        "[INST] More. [/INST]",
        "\n\n\t[/INST]",
    ],
)
def test_a_prompt_marker_in_an_answer(answer):
    """A model that went on for the user teaches to do so; where the model answers itself, nothing of it is used."""
    assert dropped((U, ASKED), (A, answer)) == ("prompt marker in the answer", "")
    assert admitted((U, ASKED), (A, answer), rule=by(answers="self"))[2] == answer
    assert admitted((U, f"{answer}\n\n{ASKED}"), (A, "Yes."))[2] == "Yes."


def test_no_marker_is_seen_in_plain_markdown_and_blank_lines_take_no_time():
    plain = ("## User guide\nOne.", "Write `### Human:` first.", "### Humans: a history", "arr[INST]", "\n" * 200_000)
    assert [rules._MARKER.search(answer) for answer in plain] == [None] * 5


def test_an_unanswered_request_is_kept_where_the_model_answers_itself():
    own = by(answers="self")
    assert admitted((U, ASKED), rule=own) == ([], ASKED, None, [])
    assert admitted((U, ASKED), (A, " "), rule=own) == ([], ASKED, None, [BLANK])
    assert admitted((U, ASKED), (A, "Hello!"), (U, "And?"), rule=own) == ([], ASKED, "Hello!", [TRAILING])
    assert dropped((A, "Yes."), rule=own)[0] == "no answered turn"


def test_an_over_long_history_loses_its_oldest_exchanges():
    """Hundreds of turns: whole exchanges go, as few as will do; the system message stays while it fits."""
    turns = [turn for i in range(214) for turn in ((U, f"q{i:03}"), (A, f"a{i:03}"))]
    last = ((U, ASKED), (A, "Yes."))
    taken = len(ASKED) + len("Yes.")
    assert admitted(*turns, *last, rule=by(max_characters=taken + 8 * 214)) == (turns, ASKED, "Yes.", [])
    for left, kept in ((8 * 214 - 1, 213), (8 * 3, 3), (8 * 3 - 1, 2), (7, 0), (0, 0)):
        history, text, answer, repairs = admitted(*turns, *last, rule=by(max_characters=taken + left))
        assert (history, text, answer, repairs) == (turns[len(turns) - 2 * kept :], ASKED, "Yes.", [SHORTENED])
    short = by(max_characters=taken + 24)
    assert admitted((S, "s" * 16), *turns, *last, rule=short)[0] == [(S, "s" * 16), *turns[-2:]]
    assert admitted((S, "s" * 25), *turns, *last, rule=short)[::3] == (turns[-6:], [SHORTENED])
    assert admitted((S, "s" * 25), *last, rule=short)[::3] == ([], [SHORTENED])
    assert dropped(*turns, *last, rule=by(max_characters=taken - 1)) == ("too long", f"{taken} characters")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"openai_moderation": None}, None),
        ({"openai_moderation": []}, None),
        ({"redacted": None, "language": None}, None),
        ({"openai_moderation": [{"flagged": True}]}, "flagged by moderation"),
        ({"openai_moderation": [{"flagged": False}, {"flagged": True}]}, "flagged by moderation"),
        ({"openai_moderation": [None]}, "malformed row"),
        ({"openai_moderation": 1}, "malformed row"),
        ({"redacted": True}, "redacted"),
        ({"language": "Chinese"}, "other language"),
        ({"conversation": None}, "malformed row"),
        ({"conversation": "Hi."}, "malformed row"),
        ({"conversation": [{"content": "Hi."}]}, "malformed row"),
        ({"conversation": ["Hi."]}, "malformed row"),
        ({"conversation": []}, "no answered turn"),
        ({"conversation": [{"content": None, "role": "user"}]}, "malformed row"),
        ({"conversation_id": None}, "malformed row"),
        ({"conversation_id": 7}, "malformed row"),
    ],
)
def test_odd_rows_of_lmsys(change, reason):
    row = lmsys_row((U, ASKED), (A, "Yes."), **change)
    strict = by(languages=["English"], redacted="drop")
    if reason is None:
        assert rules.admit(lmsys.conversation(row), "lmsys", strict)[0].text == ASKED
        for column in change:
            row.pop(column)
        assert rules.admit(lmsys.conversation(row), "lmsys", strict)[0].text == ASKED
        return
    with pytest.raises(Unusable) as caught:
        rules.admit(lmsys.conversation(row), "lmsys", strict)
    assert caught.value.reason == reason


def test_one_flagged_message_flags_its_conversation():
    for place in range(2):
        assert lmsys.conversation(lmsys_row((U, ASKED), (A, "Yes."), flagged=(place,))).flagged
    assert not lmsys.conversation(lmsys_row((U, ASKED), (A, "Yes."))).flagged


contents = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", " ", "\r\n", ASKED, "Yes.", "\0", "\u200b", "### Human: a", "One.\ud800 Two.", None]),
)
roles = st.sampled_from([U, U, U, A, A, A, S, "human", "gpt", T, ""])


@given(
    st.lists(st.tuples(roles, contents), max_size=9),
    st.sampled_from(["corpus", "self"]),
    st.sampled_from([10, 60, 24_000]),
)
@settings(max_examples=400, deadline=None)
def test_a_request_alternates_and_has_an_answer_or_one_reason_says_why_not(turns, answers, most):
    try:
        request, repairs = rules.admit(talk(*turns), "made", by(answers=answers, max_characters=most))
    except Unusable as why:
        if why.reason not in REASONS:
            raise
        return
    history = [message.role for message in request.history]
    system = history[:1] == [S]
    assert history[system:] == [U, A] * ((len(history) - system) // 2)
    assert len(request.sentences) > 1
    assert all(request.sentences)
    said = [request.text, *(message.content for message in request.history if message.role != A)]
    assert all(text.strip(" \n\u200b") for text in said)
    answered = [request.reference, *(message.content for message in request.history if message.role == A)]
    assert all(text.strip(" \n\u200b") for text in answered if text is not None)
    assert request.reference is not None or answers == "self"
    everything = "".join(message.content for message in request.history) + request.text + (request.reference or "")
    assert len(everything) <= most
    everything.encode()
    assert not set(everything) & {"\r", "\0"}
    assert set(history) | {U} <= {rules.ROLES.get(role) for role, _ in turns}
    if not repairs:
        assert [text for _, text in turns] == [
            *(message.content for message in request.history),
            request.text,
            *([] if request.reference is None else [request.reference]),
        ]


def mbpp_row(number, spelling="text", **changes):
    return {
        "task_id": number,
        spelling: "Write a function to find the shared elements of two lists.",
        "code": "def similar_elements(a, b):\r\n    return set(a) & set(b)",
        "test_list": ["assert similar_elements((3, 4), (4, 5)) == {4}", "assert similar_elements((), ()) == set()"],
        **changes,
    }


@pytest.mark.parametrize("spelling", ["text", "prompt"])
@pytest.mark.parametrize("number", [5, 10, 11, 510, 511, 600, 601, 974, 975])
def test_mbpp_gives_its_training_part_and_shows_the_functions_name(number, spelling):
    row = mbpp_row(number, spelling, split="train")
    if number not in (601, 974):
        with pytest.raises(Unusable) as caught:
            mbpp.conversation(row)
        assert (caught.value.reason, caught.value.detail) == ("not of the training part", f"mbpp/{number}")
        return
    request, repairs = rules.admit(mbpp.conversation(row), "mbpp", by())
    assert request.id == f"mbpp/{number}"
    assert request.sentences == (
        "Write a function to find the shared elements of two lists.",
        "\n\nThe function must pass these tests:",
        "\nassert similar_elements((3, 4), (4, 5)) == {4}",
        "\nassert similar_elements((), ()) == set()",
    )
    assert request.reference == "```python\ndef similar_elements(a, b):\n    return set(a) & set(b)\n```"
    assert repairs == []


@pytest.mark.parametrize(
    "change",
    [
        {"task_id": "601"},
        {"code": None},
        {"test_list": []},
        {"test_list": ["assert ("]},
        {"test_list": ["assert True"]},
        {"test_list": ["assert f('\ud800')"]},
        {"test_list": ["assert f(" + "-" * 50_000 + "1)"]},
    ],
)
def test_a_broken_row_of_mbpp_is_one_row(change):
    with pytest.raises(Unusable) as caught:
        mbpp.conversation(mbpp_row(601, **change))
    assert caught.value.reason == "malformed row"
    assert caught.value.detail


MAGICODER = {
    "lang": "python",
    "raw_index": 12,
    "index": 3,
    "seed": "x",
    "openai_fingerprint": "fp",
    "problem": ASKED,
    "solution": "```python\nx = 1\n```",
}


def test_magicoder():
    request, repairs = rules.admit(magicoder.conversation(MAGICODER), "magicoder", by())
    assert (request.id, request.text, request.reference) == ("magicoder/12/3", ASKED, MAGICODER["solution"])
    assert dict(request.extra) == {"lang": "python"}
    assert repairs == []
    with pytest.raises(Unusable, match="malformed row"):  # what goes into a Parquet file has to be text
        rules.admit(magicoder.conversation({**MAGICODER, "lang": "\ud800"}), "magicoder", by())
    for change in ({"raw_index": None}, {"index": "3"}, {"problem": None}, {"solution": 1}, {"lang": None}):
        with pytest.raises(Unusable, match="malformed row"):
            magicoder.conversation({**MAGICODER, **change})


def test_evol_codealpaca_in_both_spellings():
    found = [evol_codealpaca.conversation({"instruction": ASKED, name: "Yes."}) for name in ("output", "response")]
    assert found[0] == found[1]
    assert found[0].turns == ((U, ASKED), (A, "Yes."))
    assert found[0].id != evol_codealpaca.conversation({"instruction": ASKED, "output": "No."}).id
    assert evol_codealpaca.conversation({"instruction": "\ud800", "output": "a"}).id.startswith("evol_codealpaca/")
    for begin in ("Increase", "Please increase", "\n increase"):
        with pytest.raises(Unusable, match="leaked prompt"):
            evol_codealpaca.conversation(
                {"instruction": f"{begin} the difficulty of the given programming test problem a bit.", "output": "a"}
            )
    for row in ({"instruction": ASKED}, {"output": "a"}, {"instruction": ASKED, "output": None}):
        with pytest.raises(Unusable, match="malformed row"):
            evol_codealpaca.conversation(row)


def test_seed():
    row = next(iter(seed.rows()))
    request, repairs = rules.admit(seed.conversation(row), "seed", by())
    assert (request.id, request.text, request.reference) == (row["id"], row["text"], row["answer"])
    assert request.extra["entry_point"] == request.extra["task"]
    assert repairs == []
    assert all(rules.admit(seed.conversation(row), "seed", by())[1] == [] for row in seed.rows())


PLAIN = ((U, ASKED), (A, "Yes."))
MESSAGES = [{"role": U, "content": ASKED}, {"role": A, "content": "Yes."}]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": MESSAGES, "system": None, "anything": {"a": 1}}, PLAIN),
        ({"messages": [{"role": S, "content": "Be brief.", "name": "x"}, *MESSAGES]}, ((S, "Be brief."), *PLAIN)),
        ({"conversations": [{"from": "human", "value": ASKED}]}, (("human", ASKED),)),
        ({"text": ASKED, "reference": "Yes."}, PLAIN),
        ({"text": ASKED}, PLAIN[:1]),
        ({"text": ASKED, "reference": None, "messages": None}, PLAIN[:1]),
        ({"prompt": ASKED, "completion": "Yes."}, PLAIN),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, PLAIN),
        ({"prompt": MESSAGES[:1], "completion": "Yes."}, PLAIN),
        ({"messages": []}, ()),
    ],
)
def test_rows_of_your_own(row, turns):
    found = jsonl.conversation(row)
    assert found.turns == turns
    assert found.id == jsonl.conversation({**row, "other": 1}).id
    assert jsonl.conversation({**row, "id": "haiku"}).id == "own/haiku"
    assert jsonl.conversation({**row, "id": 0}).id == "own/0"
    assert jsonl.conversation({**row, "language": "German"}).language == "German"


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"text": None},
        {"text": 3},
        {"messages": "Hi."},
        {"messages": 3},
        {"messages": {"role": U, "content": ASKED}},
        {"messages": [{"role": U}]},
        {"messages": [{"from": U, "value": ASKED}]},
        {"messages": [{"role": U, "content": {"image": b"\x89PNG"}}, {"role": A, "content": "Yes."}]},
        {"prompt": ASKED, "completion": ["Yes."]},
        {"text": ASKED, "reference": 3},
    ],
)
def test_malformed_rows_of_your_own(row):
    with pytest.raises(Unusable, match="malformed row"):
        rules.admit(jsonl.conversation(row), "jsonl", by(answers="self"))


def test_names_of_corpora():
    assert all(name == corpora.module(name).NAME for name in corpora.MODULES)
    assert {corpora.module(f"my{suffix}") for suffix in corpora.OWN} == {jsonl}
    with pytest.raises(UserError, match="no corpus 'lmsis'; there are lmsys, mbpp, "):
        corpora.module("lmsis")


def read(name, file, rule):
    """Counts of what becomes of a file's rows, and the requests."""
    module, counts, requests = corpora.module(name), Counter(), []
    for piece in sources.plan(name, file):
        for _, row in sources.rows(piece, module.COLUMNS):
            try:
                found = module.conversation(row)
                request, repairs = rules.admit(found, module.NAME, rule)
            except Unusable as why:
                counts[f"dropped: {why.reason}"] += 1
                continue
            counts["kept"] += 1
            counts.update({f"repaired: {repair}": 1 for repair in repairs})
            requests.append(request)
            assert request.text == found.turns[-2][1]
            assert request.reference == found.turns[-1][1]
    return dict(counts), requests


@pytest.mark.parametrize(
    ("name", "file", "counts"),
    [
        ("mbpp", "mbpp/mbpp.jsonl", {"kept": 374, "dropped: not of the training part": 600}),
        (
            "evol_codealpaca",
            "evol_codealpaca/sample.jsonl",
            {"kept": 329, "dropped: one sentence": 70, "dropped: leaked prompt": 1},
        ),
        ("magicoder", "magicoder_oss_instruct/one_row.jsonl", {"kept": 1}),
        (
            "ultrachat.jsonl.gz",
            "ultrachat_200k/train_sft_sample.jsonl.gz",
            {"kept": 313, "dropped: one sentence": 187, "repaired: oldest history taken out": 1},
        ),
    ],
)
def test_real_rows(shared, name, file, counts):
    found, requests = read(name, shared / "data" / file, by())
    print(json.dumps({name: found}))
    assert found == counts
    assert len({request.id for request in requests}) == len(requests)
