"""Bidirectional masked-diffusion decoders: what is read, what it costs, and models that bring code of their own."""

import json

import pytest
import torch
from conftest import SIZES, real_tokenizer
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PretrainedConfig

from headstart.acceptance import everything, greedy
from headstart.bidirectional import BidirectionalDecoder
from headstart.decoder import Answer, PassCounter
from headstart.decoders import OneByOne
from headstart.family import FAMILIES, check_model, context_length, stop_ids
from headstart.model import load_model, load_tokenizer
from recipes.errors import UserError
from recipes.loader import parse
from recipes.schema import Model, Slots
from train import base

MASK, END = 96, 2
PROMPT = [11, 12, 13, 14, 15]
DRAFT = Answer((21, 22, 23, 24, 25, END), "end")


def tiny(**changes):
    """A tiny random model that attends both ways."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 97, "num_hidden_layers": 2, "sliding_window": 64, "query_pre_attn_scalar": 8}
    config = Gemma3TextConfig(**sizes, **{"use_bidirectional_attention": True, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model.eval()


def decoder(rule=greedy, shifted=False, limit=24, ends=(END,), **settings):
    slots = Slots(serial_blocks=2, **{"token_threshold": 0.3, **settings})
    return BidirectionalDecoder(tiny(), frozenset(ends), MASK, limit, slots, rule, shifted)


def read(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("hide", ["nothing", "draft", "each"])
def test_what_judges_a_draft(hide, shifted):
    judge = decoder(hide=hide, shifted=shifted)
    with PassCounter(judge.model) as counter:
        logits, drafted = judge.scores(PROMPT, DRAFT)
    assert drafted.tolist() == list(DRAFT.tokens)
    assert len(judge.calls) == (6 if hide == "each" else 1) == counter.texts
    for at in range(len(DRAFT.tokens)):
        text = [*PROMPT, *DRAFT.tokens]
        if hide == "draft":
            text[len(PROMPT) :] = [MASK] * len(DRAFT.tokens)
        elif hide == "each":
            text[len(PROMPT) + at] = MASK
        expected = read(judge.model, text)[len(PROMPT) + at - shifted]
        torch.testing.assert_close(logits[at], expected, rtol=0, atol=2e-4)


def test_a_token_that_is_seen_reaches_the_tokens_to_its_left():
    model, other = tiny(), [*PROMPT, 21, 22, 24]
    assert not torch.allclose(read(model, [*PROMPT, 21, 22, 23])[0], read(model, other)[0])
    with pytest.raises(UserError, match="use_bidirectional_attention is off"):
        check_model(FAMILIES["bidirectional"], tiny(use_bidirectional_attention=False))


def test_decoding_commits_at_least_a_token_a_pass_and_ends_at_an_end_token():
    for threshold, ends in ((1.0, (END,)), (0.0, (END,)), (0.3, tuple(range(20, 60)))):
        made = decoder(token_threshold=threshold, ends=ends)
        answer = made.decode(PROMPT, Answer())
        assert MASK not in answer.tokens
        assert answer.stop == "end" or len(answer.tokens) == 24
        assert not set(ends) & set(answer.written)
        blocks = -(-len(answer.tokens) // 12)
        assert blocks <= len(made.calls) <= 24
        if threshold == 1.0:
            assert len(made.calls) >= len(answer.tokens)


def test_a_kept_run_stands_and_the_rest_is_decoded_anew():
    made = decoder(rule=lambda logits, draft: torch.arange(len(draft)) < 3)
    verified = made.verify(PROMPT, DRAFT)
    assert verified.kept == 3
    assert verified.answer == Answer((21, 22, 23))
    assert made.decode(PROMPT, verified.answer).tokens[:3] == (21, 22, 23)
    (whole,) = OneByOne(decoder(rule=everything), 1).advance([PROMPT], [DRAFT])
    assert whole.answer == DRAFT
    assert whole.passes == 1


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput


class ToyConfig(PretrainedConfig):
    model_type = "llada"

    def __init__(self, vocab_size=0, max_sequence_length=512, **others):
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        super().__init__(**others)


class ToyModel(PreTrainedModel):
    config_class = ToyConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids=None, **others):
        return MaskedLMOutput(logits=self.table(input_ids))
"""


@pytest.fixture
def own_code(tmp_path):
    """A folder with a model of type llada whose code lies beside its weights. Stands in for the hub's: none is here."""
    (tmp_path / "toy.py").write_text(CODE)
    names = {}
    exec(CODE, names)
    config = names["ToyConfig"](vocab_size=40)
    config.auto_map = {"AutoConfig": "toy.ToyConfig", "AutoModel": "toy.ToyModel"}
    names["ToyModel"](config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": "llada"}))
    real_tokenizer("smollm2").save_pretrained(tmp_path)
    return tmp_path


def test_a_models_own_code_runs_only_when_it_is_asked_for(own_code, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    settings = Model(name=str(own_code), family="llada", dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"its own code.*model\.trust_remote_code=true"):
        load_model(settings)
    allowed = settings.model_copy(update={"trust_remote_code": True})
    model, tokens = load_model(allowed), load_tokenizer(allowed)
    assert type(model).__name__ == "ToyModel"
    assert tokens.eos_token == "<|im_end|>"
    ends = stop_ids(FAMILIES["llada"], tokens, model)  # the toy cannot generate: it has no generation config
    assert tokens.eos_token_id in ends
    decoder = BidirectionalDecoder(model, ends, 39, 8, Slots(serial_blocks=1), greedy, shifted=False)
    assert decoder.context == 512  # by LLaDA's own name for it
    assert len(decoder.decode([5, 6, 7], Answer()).tokens) == 8


def test_a_config_without_a_context_length_is_one_line():
    with pytest.raises(UserError, match="has no max_position_embeddings"):
        context_length(PretrainedConfig())


@pytest.mark.parametrize("name", ["slot_size=4", "slot_threshold=0.5", "keep=every", "scoring=ar", "paper_floor=true"])
def test_slots_that_such_a_model_has_no_use_for_are_refused(name):
    key = name.partition("=")[0]
    given = ["recipe=smollm2", "model.family=bidirectional", "eval.replay=full"]
    with pytest.raises(UserError, match=rf"slots\.{key}: model\.family=bidirectional has no use for it"):
        parse([*given, f"slots.{name}"])
    parse([*given, "slots.token_threshold=0.5", "slots.serial_blocks=2", "slots.hide=each"])


def test_a_hub_models_code_has_to_be_pinned(capsys):
    given = ["recipe=smollm2", "model.name=GSAI-ML/LLaDA-8B-Instruct", "model.family=llada", "eval.replay=full"]
    with pytest.raises(UserError, match=r"a pinned model\.revision"):
        parse([*given, "model.trust_remote_code=true"])
    with pytest.raises(UserError, match=r"a pinned model\.revision"):
        parse([*given, "model.trust_remote_code=true", "model.revision=main"])
    parse([*given, "model.trust_remote_code=true", f"model.revision={'a' * 40}"])


def test_a_bidirectional_model_is_not_trained():
    with pytest.raises(UserError, match="can be evaluated and audited, not trained"):
        base.check(parse(["recipe=smollm2", "model.family=bidirectional", "eval.replay=full"]).recipe)
