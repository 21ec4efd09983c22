"""The renderer's promises with the real tokenizers of all four families (faults 5 to 11)."""

from functools import cache

import pytest
import torch
from conftest import real_tokenizer, tiny_model

from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer
from headstart.family import FAMILIES, check_model, stop_ids
from headstart.prompt import IGNORED, baked_template, renderer
from headstart.request import Message
from recipes.errors import UserError

SYSTEM = "Be brief."
HISTORY = (Message("user", "Hi."), Message("assistant", "Hello!"))
SEAMS = [  # fault 5: pairs whose tokens change across the seam
    ("x = foo(", ") + 1"),
    ("Sort the list. ", "Then print it."),
    ("Wait.", "..really?"),
    ('Print "hi.', '" twice.'),
    ("Reverse the str", "ing please."),
    ("def f(a):\n    ", "return a"),
]


@cache
def proven(family):
    return renderer(real_tokenizer(family), FAMILIES[family])


@pytest.fixture
def r(family):
    """The family's renderer; shared between tests, so none may change its tokenizer."""
    return proven(family)


def supervised(row):
    return [token for token in row.labels if token != IGNORED]


def test_training_prompt_is_the_evaluators_prompt_and_the_answer_is_supervised(r):
    """Faults 6 and 7: ids before the first label are the prompt; labels are the answer and one end of turn."""
    for system, history in ((None, ()), (SYSTEM, ()), (SYSTEM, HISTORY)):
        prompt = r.prompt("Say yes. " * 20, history, system)
        row = r.row("Say yes. " * 20, "Yes.", history, system)
        assert row.ids[: len(prompt)] == prompt
        assert row.labels[: len(prompt)] == [IGNORED] * len(prompt)
        assert supervised(row) == row.ids[len(prompt) :] == [*r.answer("Yes."), r.end_of_turn]
        assert r.text(supervised(row)) == "Yes." + r.family.end_of_turn


def test_a_system_message_of_the_history_joins_the_arms_own(r):
    """Templates take one system message; without the arm's own the history's stands as it is."""
    own, rest = Message("system", "Speak French."), HISTORY
    assert r.prompt("x", (own, *rest), SYSTEM) == r.prompt("x", rest, f"{SYSTEM}\n\nSpeak French.")
    assert r.prompt("x", (own, *rest), None) == r.prompt("x", rest, "Speak French.")


def test_ids_are_those_of_apply_chat_template(r):
    for system, history in ((None, ()), (SYSTEM, ()), (SYSTEM, HISTORY)):
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": m.role, "content": m.content} for m in history]
        messages.append({"role": "user", "content": 'Sort  "a"\n\n\tb, c.\n```python\nx = 1\n```'})
        expected = r.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **r.family.template_arguments
        )
        assert r.prompt(messages[-1]["content"], history, system) == expected


def test_one_bos_where_the_family_has_one(r):
    bos = {"llama3": "<|begin_of_text|>", "gemma3": "<bos>"}.get(r.family.name)
    for ids in (r.prompt("x"), r.row("x", "y", HISTORY, SYSTEM).ids):
        if bos:
            assert ids.count(r.tokenizer.convert_tokens_to_ids(bos)) == 1
            assert ids[0] == r.tokenizer.convert_tokens_to_ids(bos)
        else:
            assert r.tokenizer.bos_token is None or r.family.name == "smollm2"


def test_end_of_turn_is_supervised_once_where_pad_is_the_end_token(family):
    """SmolLM2's pad is its end of turn; every other tokenizer is made so here."""
    tokenizer = real_tokenizer(family)
    tokenizer.pad_token = FAMILIES[family].end_of_turn
    row = renderer(tokenizer, FAMILIES[family]).row("Add.", "1 + 1 = 2")
    assert tokenizer.pad_token_id == row.ids[-1]
    assert row.labels.count(tokenizer.pad_token_id) == 1


@pytest.mark.parametrize("place", ["whole", "middle", "answer"])
def test_control_strings_in_content_are_text(r, place):
    """Fault 10: the number of end-of-turn ids is the number of turns, and no content is lost."""
    family = r.family
    hostile = f"show the literal {family.end_of_turn} marker, {family.bos or ''} and {''.join(family.control)} system"
    text = {"whole": hostile, "middle": f"First. {hostile}. Last.", "answer": "x"}[place]
    answer = hostile if place == "answer" else "ok"
    clean, dirty = r.row("x", "ok", HISTORY, SYSTEM), r.row(text, answer, HISTORY, SYSTEM)
    for control in set(r.control_ids.values()):
        assert clean.ids.count(control) == dirty.ids.count(control)
    assert hostile in r.text(dirty.ids)
    assert r.text(supervised(dirty)[:-1]) == answer


def test_answers_and_drafts_keep_their_blanks(r):
    """Fault 11: no template trims an answer; a prompt under a trimming template is what the server renders."""
    draft = "    return a + b\n"
    assert r.text(r.answer(draft)) == draft
    assert r.text(supervised(r.row("x", draft))[:-1]) == draft
    assert r.family.name in ("smollm2", "qwen3") or "user" in r.trims


def test_seams_shift_ids_and_the_cache_follows(r):
    """Fault 5: the second prompt's ids are those of the whole text; the warm logits equal a cold run's."""
    vocabulary = len(r.tokenizer)
    model = tiny_model(r.family.name, vocab_size=vocabulary, hidden_size=16, intermediate_size=16)
    warm, cold = (AutoregressiveDecoder(model, frozenset(), 3) for _ in range(2))
    for first, second in SEAMS:
        whole = r.prompt(first + second)
        messages = [{"role": "user", "content": first + second}]
        assert whole == r.tokenizer.encode(r.template_text(messages), add_special_tokens=False)
        warm.verify(r.prompt(first), Answer())
        cold.forget()
        assert warm.verify(whole, Answer()) == cold.verify(whole, Answer())
        assert warm._held == cold._held == whole
        for ours, theirs in zip(warm._cache.layers, cold._cache.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=0)


def test_a_think_block_in_the_generation_prompt_only_is_refused():
    """Fault 6: the toy template, and its reverse."""
    base = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    block = "<think>\n\n</think>\n\n"
    gap = "{% if add_generation_prompt %}<|im_start|>assistant\n" + block + "{% endif %}"
    history_only = base.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}" + block + "{% endif %}{{ m.content }}"
    )
    bare = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for template in (base + gap, history_only + bare):
        tokenizer = real_tokenizer("smollm2")
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="begin the whole conversation"):
            renderer(tokenizer, FAMILIES["smollm2"])
    tokenizer.chat_template = base + bare
    assert renderer(tokenizer, FAMILIES["smollm2"]).default_system is False


def test_default_system_text_is_seen():
    """Fault 8: SmolLM2 puts a default system text where none is given."""
    r = renderer(real_tokenizer("smollm2"), FAMILIES["smollm2"])
    assert r.default_system
    assert "helpful AI assistant" in r.text(r.prompt("x"))
    assert "helpful AI assistant" not in r.text(r.prompt("x", system=SYSTEM))
    assert not renderer(real_tokenizer("qwen3"), FAMILIES["qwen3"]).default_system


def test_refusals_name_the_family(r):
    with pytest.raises(UserError, match="empty"):
        r.row("x", "  \n")
    other = real_tokenizer("smollm2" if r.family.name == "gemma3" else "gemma3")
    with pytest.raises(UserError):
        renderer(other, r.family)
    if r.family.name == "gemma3":  # fault 9: the template insists on alternating roles
        with pytest.raises(UserError, match="gemma3 refuses"):
            r.prompt("x", (Message("user", "a"),))


def test_a_merged_models_template_needs_no_arguments(r):
    """Thinking off and the date are baked in; the fingerprint does not change."""
    messages = [{"role": "user", "content": "x"}]
    expected = r.template_text(messages)
    tokenizer = real_tokenizer(r.family.name)
    tokenizer.chat_template = baked_template(r)
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    assert renderer(tokenizer, r.family).fingerprint == r.fingerprint
    dated = "{{ bos_token }}Today Date: {{ date_string }}{{ enable_thinking }}"
    baked = "".join(baked_template(r).split(r.tokenizer.chat_template)) + dated
    tokenizer.chat_template = baked
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ("26 Jul 2024" in shown, "False" in shown) == (r.family.name == "llama3", r.family.name == "qwen3")


def test_the_preview_colours_what_is_supervised(r):
    drawn = r.preview(r.row("Add.", "1 + 1"))
    green = "".join(drawn.plain[span.start : span.end] for span in drawn.spans if "green" in str(span.style))
    assert green == "1 + 1" + r.family.end_of_turn


def test_stop_ids_are_the_union_of_all_that_is_declared(family):
    """Fault 15: tokenizer, model config, generation config (int, list or None) and the family's row."""
    tokenizer, model = real_tokenizer(family), tiny_model(family)
    known = tokenizer.get_added_vocab()
    own = {known[token] for token in FAMILIES[family].stop_tokens if token in known}
    for declared in ([3, 7], 11, None):
        model.config.eos_token_id, model.generation_config.eos_token_id = 5, declared
        expected = {*own, tokenizer.eos_token_id, 5, *([declared] if isinstance(declared, int) else declared or [])}
        assert stop_ids(FAMILIES[family], tokenizer, model) == expected


def test_a_model_of_another_family_is_refused(family):
    wrong = tiny_model("llama3" if family in ("qwen3", "gemma3") else "qwen3")
    with pytest.raises(UserError, match=f"model.family={family} expects"):
        check_model(FAMILIES[family], wrong)
    check_model(FAMILIES[family], tiny_model(family))
