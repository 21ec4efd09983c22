"""Merging in float32, storing in the base's dtype, and the proof of the result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from headstart import model as loading
from headstart.autoregressive import AutoregressiveDecoder
from headstart.decoder import Answer
from headstart.family import stop_ids
from headstart.prompt import Renderer
from recipes.errors import UserError
from recipes.schema import Model, Recipe
from train.adapter import adapted_modules

EXACT = 1e-4  # largest logit difference of the float32 merge against the adapter
STORED = {torch.float32: 1e-4, torch.bfloat16: 0.5}  # the same, after storing; bfloat16 keeps 8 bits of a weight
PROMPTS = (
    "Write a Python function `clamp(x, low, high)` that keeps x between low and high.",
    "Which planet of the solar system has the most moons",
    "def first_word(text):\n    '''Return the first word of text.",
    "Translate to French: The train leaves at noon. Keep it short.",
)


@dataclass(frozen=True)
class Proof:
    """What was measured on the merged model. Logit differences are the largest over all self-check positions."""

    changed_tensors: int
    dtype: str
    logits_merged: float
    logits_stored: float
    delta_error: float
    tokens: int
    near_ties: int

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For the screen and the model card."""
        return [
            f"{self.changed_tensors} tensors changed: those that the adapter targets, and no other",
            f"logits, merged in float32 against adapter: largest difference {self.logits_merged:.1e}",
            f"logits, stored in {self.dtype} against adapter: largest difference {self.logits_stored:.1e}",
            f"relative error of the stored update: {self.delta_error:.2%} of its norm"
            + ("; consider merge.dtype=float32" if self.delta_error > 0.5 else ""),
            f"greedy tokens on {len(PROMPTS)} self-check prompts: {self.tokens} compared, equal"
            + (f" but for {self.near_ties} near-tie(s) within the rounding" if self.near_ties else ""),
        ]


def load_adapted(settings: Model, adapter: Path) -> PeftModel:
    """The base in float32 with the adapter on it."""
    base = loading.load_model(settings, dtype=torch.float32)
    if getattr(base.config, "quantization_config", None) is not None:
        raise UserError(
            f"model.name={settings.name}: a quantised base cannot take a merge; give the full-precision one"
        )
    return PeftModel.from_pretrained(base, adapter).eval()


def merge_and_prove(adapted: PeftModel, recipe: Recipe, rendering: Renderer, folder: Path) -> Proof:
    """Merge, save into `folder`, reload from there, and compare. Raises UserError where a bound does not hold."""
    family = loading.family(recipe.model)
    stops = stop_ids(family, rendering.tokenizer, adapted.get_base_model())
    prompts = [rendering.prompt(text, system=recipe.prompt.system_message) for text in PROMPTS]
    answers = [_greedy(adapted.get_base_model(), prompt, stops, recipe.merge.max_new_tokens) for prompt in prompts]
    reference = _logits(adapted.get_base_model(), prompts, answers)
    merged = adapted.merge_and_unload(safe_merge=True)
    difference = _largest(_logits(merged, prompts, answers), reference)
    if not difference <= EXACT:
        raise UserError(
            f"merge: logits differ by {difference:.1e} from the adapter's, more than {EXACT:.0e}; not saved"
        )
    targeted = {f"{name}.weight" for name in adapted_modules(merged, family)}
    after = {name: tensor.clone() for name, tensor in merged.state_dict().items() if name in targeted}
    dtype = loading.torch_dtype(recipe.merge.dtype) if recipe.merge.dtype else stored_dtype(recipe.model)
    _save(merged.to(dtype), folder)
    del adapted, merged
    before = loading.load_model(recipe.model, dtype=torch.float32).state_dict()
    stored = loading.load_model(recipe.model, folder, dtype=torch.float32)
    changed = _check_changes(before, stored.state_dict(), dtype, targeted)
    logits = _logits(stored, prompts, answers)
    bound = _largest(logits, reference)
    if not bound <= STORED[dtype]:
        raise UserError(f"merge: stored logits differ by {bound:.1e} from the adapter's, more than {STORED[dtype]:.0e}")
    ties = _near_ties(logits, reference, answers, bound)
    error = _delta_error(before, after, stored.state_dict(), targeted)
    tokens = sum(len(answer) for answer in answers)
    return Proof(changed, str(dtype).removeprefix("torch."), difference, bound, error, tokens, ties)


def stored_dtype(settings: Model) -> torch.dtype:
    """The dtype that the base is stored in, from its config."""
    config = loading.load_config(settings)
    return config.dtype if config.dtype in STORED else torch.bfloat16


def _save(model: Any, folder: Path) -> None:
    """Save the model; sampling values that its generation config holds without do_sample are kept, made valid."""
    generation = model.generation_config
    sampling = [name for name in ("temperature", "top_p", "top_k") if getattr(generation, name) is not None]
    if sampling and not generation.do_sample:
        generation.do_sample = True
        note = f"do_sample set to true: the base gives {', '.join(sampling)}, which transformers saves with it only"
        (folder / "generation_note.json").write_text(json.dumps({"changed": note}) + "\n")
    model.config.use_cache = True
    model.save_pretrained(folder)


def _check_changes(
    before: Mapping[str, Tensor], stored: Mapping[str, Tensor], dtype: torch.dtype, targeted: set[str]
) -> int:
    """How many targeted tensors changed; raises UserError where none did or an untargeted one did."""
    if before.keys() != stored.keys():
        odd = sorted(before.keys() ^ stored.keys())[0]
        raise UserError(f"merge: the saved model has other tensors than its base, e.g. {odd}")
    changed = {name for name in before if not torch.equal(before[name].to(dtype), stored[name].to(dtype))}
    if changed - targeted:
        raise UserError(f"merge: {sorted(changed - targeted)[0]} changed though the adapter does not target it")
    if not changed:
        raise UserError(f"merge: no weight changed when stored in {dtype}; use merge.dtype=float32 or train longer")
    return len(changed)


def _delta_error(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], stored: Mapping[str, Tensor], targeted: set[str]
) -> float:
    """Norm of (stored update - true update) over norm of the true update, over all targeted weights."""
    wrong = sum(float((stored[name] - after[name]).square().sum()) for name in targeted)
    whole = sum(float((after[name] - before[name]).square().sum()) for name in targeted)
    return (wrong / whole) ** 0.5


def _greedy(model: Any, prompt: Sequence[int], stops: frozenset[int], limit: int) -> list[int]:
    decoder = AutoregressiveDecoder(model, stops, limit)
    return list(decoder.decode(prompt, decoder.verify(prompt, Answer()).answer).tokens)


@torch.inference_mode()
def _logits(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Tensor]:
    """Float32 logits that score each answer token, a (tokens, vocabulary) tensor for each prompt."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
        found.append(model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float())
    return found


def _largest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def _near_ties(
    logits: Sequence[Tensor], reference: Sequence[Tensor], answers: Sequence[Sequence[int]], bound: float
) -> int:
    """Positions where the stored model would choose another token.

    Allowed only where the adapter itself holds the two tokens closer than twice the largest logit difference; any
    other one raises UserError.
    """
    ties = 0
    for stored, true, answer in zip(logits, reference, answers, strict=True):
        for row, want, token in zip(stored, true, answer, strict=True):
            other = int(row.argmax())
            ties += other != token
            if other != token and float(want[token] - want[other]) > 2 * bound:
                raise UserError("merge: the stored model's greedy tokens are not the adapter's; not saved")
    return ties
