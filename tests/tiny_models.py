"""Tiny models with SmolLM2's tokenizer, saved as plain folders, that answer with few words and end by themselves; and
requests whose drafts, under the default talker, meet every fate."""

import itertools
from pathlib import Path
from typing import Any

import torch
from conftest import real_tokenizer, tiny_model

from data_builders import rules
from data_builders.corpora import seed
from headstart.request import Message, Request
from recipes.loader import Invocation, parse
from recipes.schema import Data

WORDS = (" return", " value", " list", " of", " words", " and", " numbers", " first", " é", "字")
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
KINDS = ("a list", "two words", "the first number", "an empty text")


def sentences(i: int) -> tuple[str, ...]:
    """Two to four sentences."""
    whole = (f"Write task{i}.", f" It takes {KINDS[i % 4]}.", f" It returns {KINDS[i % 3]}.", " Thanks."[: 4 + i % 5])
    return whole[: 2 + i % 3]


REQUESTS = [
    Request(
        f"made/{i}",
        "made",
        sentences(i),
        (Message("user", "Hi."), Message("assistant", "Hello!"))[: 2 * (i % 2)],
    )
    for i in range(24)
]
RULES = rules.rules(Data(answers="corpus"))


def seed_requests() -> list[Request]:
    """All requests of the seed corpus, as a build admits them."""
    return [rules.admit(seed.conversation(row), seed.NAME, RULES)[0] for row in seed.rows()]


SHORT = ("eval.max_new_tokens=12", "eval.batch_size=7")


def talker(tokenizer: Any, seed: int = 51, words: tuple[str, ...] = WORDS, end_weight: float = 3.0) -> Any:
    """A random model that says nothing but `words` and its end token; `end_weight` scales how likely the end is."""
    model = tiny_model("smollm2", len(tokenizer), seed, **SMALL)
    spoken = sorted({token for word in words for token in tokenizer.encode(word, add_special_tokens=False)})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        silent = torch.ones(len(head), dtype=torch.bool)
        silent[[*spoken, end]] = False
        head[silent] = 0
        head[end] *= end_weight
    return model


def reciter(tokenizer: Any, answer: str) -> Any:
    """A model that answers every prompt with `answer`: after each token it knows one successor, and nothing else.

    No token of `answer` may have two successors.
    """
    prompt_end = tokenizer.encode("\n", add_special_tokens=False)[-1]  # what the chat template's prompt ends with
    chain = [prompt_end, *tokenizer.encode(answer, add_special_tokens=False)]
    chain.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    successor = dict(itertools.pairwise(chain))
    assert all(successor[a] == b for a, b in itertools.pairwise(chain)), "a token has two successors"
    model: Any = tiny_model("smollm2", len(tokenizer), **{**SMALL, "hidden_size": 64, "num_attention_heads": 8})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for dimension, (token, following) in enumerate(successor.items()):
            model.get_input_embeddings().weight[token, dimension] = 1
            model.get_output_embeddings().weight[following, dimension] = 1
    return model


def counted(model: Any) -> list[int]:
    """The tokens of each of the model's calls from now on, by wrapping its forward."""
    calls, forward = list[int](), model.forward

    def wrapped(**kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].numel())
        return forward(**kwargs)

    model.forward = wrapped
    return calls


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    """A plain transformers folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def talker_folder(folder: Path, **changes: Any) -> Path:
    """A talker, saved."""
    tokenizer = real_tokenizer("smollm2")
    return save(talker(tokenizer, **changes), tokenizer, folder)


def invocation(model: Path, run: Path, *overrides: str) -> Invocation:
    """The command line that `arguments` gives, resolved."""
    return parse(arguments(model, run, *overrides))


# A message of their own: what a random model does with it is what the tests count on.
MESSAGE = (
    "The user is still typing: the request below may be incomplete. Answer it as you expect it to read once it is "
    "finished. Do not ask for the rest and do not mention that anything is missing; write the full answer at once."
)
RECIPE = f"""
model: {{family: smollm2, dtype: float32, device: cpu}}
prompt: {{system_message: "{MESSAGE}"}}
data: {{corpora: [seed], benchmarks: []}}
eval: {{allow_code_execution: true}}
"""


def arguments(model: Path, run: Path, *overrides: str) -> list[str]:
    """A command line: this model in float32 on the CPU, this run folder, then the overrides."""
    recipe = run.parent / "tiny.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(RECIPE)
    return [f"recipe={recipe}", f"model.name={model}", f"run.dir={run}", *overrides]
