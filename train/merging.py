"""Merging in float32, storing in the base's dtype, and the proof of the result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from train.adapter import adapted_modules, refuse_quantised
from train.base import mend_generation

EXACT = 1e-4  # largest logit difference of the float32 merge against the adapter, as a share of the largest logit
STORED = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # the same, once stored: bfloat16 keeps 8 bits of a weight
TIE = {torch.float32: 1e-4, torch.bfloat16: 0.01}  # two tokens that the adapter holds closer than this may swap
PROMPTS = (
    "Write a Python function `clamp(x, low, high)` that keeps x between low and high.",
    "Which planet of the solar system has the most moons",
    "def first_word(text):\n    '''Return the first word of text.",
    "Translate to French: The train leaves at noon. Keep it short.",
)


@dataclass(frozen=True)
class Proof:
    """What was measured on the merged model. Logit differences are the largest over all self-check positions.

    `adapter_effect` is the adapter's difference from its base, `logits_merged` that of the float32 merge from the
    adapter, `logits_stored` that of the stored model from the adapter.
    """

    changed_tensors: int
    dtype: str
    largest_logit: float
    adapter_effect: float
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
            f"logits (up to {self.largest_logit:.0f}): the adapter moves them by up to {self.adapter_effect:.1e}",
            f"logits, merged in float32 against adapter: largest difference {self.logits_merged:.1e}",
            f"logits, stored in {self.dtype} against adapter: largest difference {self.logits_stored:.1e}",
            f"relative error of the stored update: {self.delta_error:.2%} of its norm"
            + ("; consider merge.dtype=float32" if self.delta_error > 0.5 else ""),
            f"greedy tokens on {len(PROMPTS)} self-check prompts: {self.tokens} compared, equal"
            + (f" but for {self.near_ties} near-tie(s) within the rounding" if self.near_ties else ""),
        ]


@dataclass(frozen=True)
class SelfCheck:
    """The adapter's greedy answers to PROMPTS, and the logits behind them: one (tokens, vocabulary) tensor a prompt."""

    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[Tensor]

    @property
    def largest(self) -> float:
        """The largest logit, without its sign."""
        return max(float(logits.abs().max()) for logits in self.logits)


def load_adapted(settings: Model, adapter: Path) -> PeftModel:
    """The base in float32 with the adapter on it.

    Raises UserError for a quantised base, and for an adapter elsewhere than the family's: on the head of a model with
    tied embeddings, say, the merge would change the embeddings too.
    """
    refuse_quantised(settings)
    base, family = loading.load_model(settings, dtype=torch.float32), loading.family(settings)
    expected = set(adapted_modules(base, family))
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    names = {name.partition(".lora_")[0] for name, _ in adapted.named_parameters() if ".lora_" in name}
    if odd := sorted(expected ^ {name.removeprefix("base_model.model.") for name in names}):
        there, here = ("is not", "does") if odd[0] in expected else ("is", "does not")
        raise UserError(f"{adapter}: {odd[0]} {there} adapted, which family {family.name} {here}; train it anew")
    return adapted


def merge_and_prove(adapted: PeftModel, recipe: Recipe, rendering: Renderer, folder: Path) -> Proof:
    """Merge, save into `folder`, reload from there, and compare. Raises UserError where a bound does not hold."""
    settings = recipe.model
    base: Any = adapted.get_base_model()
    generation_note = mend_generation(base.generation_config, base.config.name_or_path)
    check = self_check(base, recipe, rendering)
    with adapted.disable_adapter():
        effect = _largest(_logits(base, check), check.logits)
    merged = adapted.merge_and_unload(safe_merge=True)
    exact = _compared(_logits(merged, check), check, EXACT, "merged")
    targeted = {f"{name}.weight" for name in adapted_modules(merged, loading.family(settings))}
    after = {name: tensor.clone() for name, tensor in _weights(merged).items() if name in targeted}
    dtype = loading.torch_dtype(recipe.merge.dtype) if recipe.merge.dtype else stored_dtype(settings)
    save(merged.to(dtype), folder, generation_note)
    del adapted, base, merged
    model = loading.load_model(settings, folder, dtype=torch.float32)
    logits, stored = _logits(model, check), _weights(model)
    del model
    before = _weights(loading.load_model(settings, dtype=torch.float32))
    return Proof(
        changed_tensors=_count_changes(before, stored, dtype, targeted),
        dtype=str(dtype).removeprefix("torch."),
        largest_logit=check.largest,
        adapter_effect=effect,
        logits_merged=exact,
        logits_stored=_compared(logits, check, STORED[dtype], "stored"),
        delta_error=_delta_error(before, after, stored),
        tokens=sum(len(answer) for answer in check.answers),
        near_ties=_near_ties(logits, check, TIE[dtype]),
    )


def self_check(model: Any, recipe: Recipe, rendering: Renderer) -> SelfCheck:
    """What a model answers to PROMPTS."""
    stops = stop_ids(loading.family(recipe.model), rendering.tokenizer, model)
    decoder = AutoregressiveDecoder(model, stops, recipe.merge.max_new_tokens)
    prompts = [rendering.prompt(text, system=recipe.prompt.system_message) for text in PROMPTS]
    answers = [list(decoder.decode(p, decoder.verify(p, Answer()).answer).tokens) for p in prompts]
    check = SelfCheck(prompts, answers, [])
    return replace(check, logits=_logits(model, check))


def stored_dtype(settings: Model) -> torch.dtype:
    """The dtype that the base is stored in, from its config; bfloat16 where the config names another."""
    found = loading.load_config(settings).dtype
    return found if found in STORED else torch.bfloat16


def save(model: Any, folder: Path, generation_note: Mapping[str, str] | None) -> None:
    """Save the model, and in generation_note.json what `mend_generation` changed."""
    if generation_note:
        (folder / "generation_note.json").write_text(json.dumps(generation_note, indent=1) + "\n")
    model.save_pretrained(folder)


def _weights(model: Any) -> dict[str, Tensor]:
    """The weights in main memory: a GPU need not hold two models at once."""
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def _count_changes(
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


def _delta_error(before: Mapping[str, Tensor], after: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> float:
    """Norm of (stored update - true update) over norm of the true update, over all targeted weights."""
    wrong = sum(float((stored[name] - after[name]).square().sum()) for name in after)
    whole = sum(float((after[name] - before[name]).square().sum()) for name in after)
    return (wrong / whole) ** 0.5


@torch.inference_mode()
def _logits(model: Any, check: SelfCheck) -> list[Tensor]:
    """Float32 logits that score each answer token, a (tokens, vocabulary) tensor for each prompt."""
    found = []
    for prompt, answer in zip(check.prompts, check.answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
        found.append(model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float())
    return found


def _compared(logits: Sequence[Tensor], check: SelfCheck, share: float, what: str) -> float:
    """The largest difference from the adapter's logits. Raises UserError where it exceeds `share` of the largest."""
    difference, bound = _largest(logits, check.logits), share * check.largest
    if not difference <= bound:
        raise UserError(f"merge: {what} logits differ by {difference:.1e} from the adapter's, more than {bound:.1e}")
    return difference


def _largest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def _near_ties(logits: Sequence[Tensor], check: SelfCheck, share: float) -> int:
    """Positions where the model would choose another token than the adapter did.

    Raises UserError where the adapter itself holds the two tokens further apart than `share` of the largest logit.
    """
    ties, allowed = 0, share * check.largest
    for rows, references, answer in zip(logits, check.logits, check.answers, strict=True):
        for row, reference, token in zip(rows, references, answer, strict=True):
            other = int(row.argmax())
            gap = float(reference[token] - reference[other])
            if gap > allowed:
                raise UserError(
                    f"merge: stored, the model chooses another token where the adapter's lead is {gap:.1e}, more than "
                    f"a near-tie of {allowed:.1e}; use merge.dtype=float32"
                )
            ties += other != token
    return ties
