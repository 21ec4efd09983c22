"""An arm: which weights answer, and under which prompt."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel

from headstart import decoders
from headstart import model as loading
from headstart.acceptance import rule
from headstart.batch import BatchDecoder
from headstart.family import stop_ids
from headstart.prompt import Renderer, renderer
from headstart.request import Request
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation
from recipes.schema import Recipe


@dataclass(frozen=True)
class Arm:
    """A loaded arm. `system` is the message for incomplete requests, None for the plain arm."""

    name: str
    model: Any
    renderer: Renderer
    stop_ids: frozenset[int]
    system: str | None
    weights: str
    recipe: Recipe

    def prompt(self, request: Request, sentences: int) -> list[int]:
        """Ids of the prompt for the request's first `sentences` sentences."""
        return self.renderer.prompt(request.prefix(sentences), request.history, self.system)

    @property
    def by_prefix(self) -> bool:
        """Whether a draft depends on its prefix alone, and not on the drafts before it."""
        return self.renderer.family.decoder == "autoregressive" and self.recipe.eval.acceptance == "greedy"

    def batch_decoder(self, benchmark: str = "") -> BatchDecoder | decoders.OneByOne:
        """Many requests of a benchmark, under the recipe's rule."""
        settings, slots = self.recipe.eval, self.recipe.slots.of(benchmark)
        size = (settings.max_new_tokens, settings.batch_size)
        return decoders.batch_decoder(self.model, self.renderer, self.stop_ids, *size, slots, rule(settings))

    def decoder(self, benchmark: str = "") -> decoders.SingleDecoder:
        """One request of a benchmark at a time, under the recipe's rule."""
        settings, slots = self.recipe.eval, self.recipe.slots.of(benchmark)
        limit = settings.max_new_tokens
        return decoders.single_decoder(self.model, self.renderer, self.stop_ids, limit, slots, rule(settings))


def needed(invocation: Invocation) -> dict[str, str]:
    """What the arm is made of, as hashes: base weights and, where it has one, its adapter or merged folder.

    Raises UserError where the adapter or merged folder is missing, or was made from other base weights.
    """
    recipe, run = invocation.recipe, invocation.run_dir
    found = {"base": loading.weights_hash(recipe.model)}
    commands = {"adapter": "accelerate launch train/sft.py", "merged": "python train/merge.py"}
    if recipe.eval.arm in commands:
        folder = run / recipe.eval.arm
        record = run_folder.need(folder, f"{commands[recipe.eval.arm]} {invocation.named}")
        made_from = record["settings"]["model"]["weights"]
        if made_from != found["base"]:
            raise UserError(
                f"{folder}: made from another base (weights {made_from}); {recipe.model.name} has {found['base']}"
            )
        message = {"system_message": recipe.prompt.system_message}
        run_folder.agree(folder, record, message if recipe.eval.arm == "adapter" else {"prompt": message})
        found[recipe.eval.arm] = record["content"]
    return found


def load(invocation: Invocation) -> Arm:
    """Load the recipe's `eval.arm`."""
    recipe, run = invocation.recipe, invocation.run_dir
    weights = needed(invocation)
    name = recipe.eval.arm
    merged = run / "merged" if name == "merged" else None
    tokenizer = loading.load_tokenizer(recipe.model, merged)
    model = loading.load_model(recipe.model, merged)
    if name == "adapter":
        model = PeftModel.from_pretrained(model, run / "adapter").eval().get_base_model()
    return Arm(
        name=name,
        model=model,
        renderer=renderer(tokenizer, loading.family(recipe.model)),
        stop_ids=stop_ids(loading.family(recipe.model), tokenizer, model),
        system=None if name == "plain" else recipe.prompt.system_message,
        weights=weights.get(name, weights["base"]),
        recipe=recipe,
    )


def device_name(device: torch.device) -> str:
    """The device in words, for the report."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
