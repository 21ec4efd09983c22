"""What `accelerate launch` was asked for, held against the recipe before anything is loaded.

The launcher hands its file to the processes as environment variables, and a DeepSpeed file by its path. Batch sizes,
accumulation, clipping, precision and the optimizer are the recipe's; a launch file that says otherwise is an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.schema import Recipe

AUTO = "auto"  # in a launch file: taken from the recipe
BUCKET = 500_000_000  # elements; DeepSpeed's own defaults
LIVE = 1_000_000_000


@dataclass(frozen=True)
class Launch:
    """How the launch shares the work.

    `stage` is what is shared out among the processes: 0 nothing, 1 Adam's states, 2 gradients too, 3 weights too.
    `bucket` is the number of gradients that are passed on at a time (None: the square of the model's width), `live` the
    most weights that are gathered at a time.
    """

    kind: str
    stage: int
    bucket: int | None = None
    live: int = 0
    file: Path | None = None


def read_launch(environment: Mapping[str, str], world: int) -> Launch:
    """The launch of this process. Raises UserError where a DeepSpeed file cannot be read."""
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        return Launch("FSDP", 3)
    if environment.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return Launch("data parallel" if world > 1 else "one process", 0)
    named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named is None:
        stage = int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
        return Launch(f"DeepSpeed ZeRO-{stage}", stage, BUCKET, LIVE)
    zero = _settings(Path(named)).get("zero_optimization", {})
    bucket = zero.get("reduce_bucket_size", BUCKET)
    stage = int(zero.get("stage", 0))
    return Launch(
        f"DeepSpeed ZeRO-{stage}",
        stage,
        None if bucket == AUTO else int(bucket),
        int(zero.get("stage3_max_live_parameters", LIVE)),
        Path(named),
    )


def agree(recipe: Recipe, launch: Launch, accumulation: int, environment: Mapping[str, str]) -> list[str]:
    """What was compared and agrees, a line each.

    Raises UserError that names the launch file's key and both values where it says otherwise than the recipe.
    """
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise UserError(
            f"the launch has mixed_precision: {precision}, the recipe model.dtype={recipe.model.dtype}, which decides; "
            "take mixed_precision out of the accelerate file"
        )
    agreed = [f"precision: model.dtype={recipe.model.dtype}, no autocast"]
    if launch.kind == "FSDP":
        _agree_fsdp(recipe, environment)
    elif launch.kind.startswith("DeepSpeed"):
        agreed += _agree_deepspeed(recipe, launch, accumulation, environment)
    return agreed


def _agree_fsdp(recipe: Recipe, environment: Mapping[str, str]) -> None:
    if recipe.model.device == "cpu" or environment.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        raise UserError("the launch has distributed_type: FSDP, which needs GPUs; take ddp_cpu.yaml or zero3_cpu.yaml")
    if environment.get("FSDP_ACTIVATION_CHECKPOINTING", "false").lower() == "true":
        raise UserError(
            "the launch has fsdp_activation_checkpointing: true, the recipe train.gradient_checkpointing="
            f"{recipe.train.gradient_checkpointing}, which decides; take it out of the accelerate file"
        )


def _agree_deepspeed(recipe: Recipe, launch: Launch, accumulation: int, environment: Mapping[str, str]) -> list[str]:
    wanted: dict[str, tuple[str, float]] = {
        "gradient_accumulation_steps": ("the recipe's batches", accumulation),
        "gradient_clipping": ("train.max_grad_norm", recipe.train.max_grad_norm),
    }
    if launch.file is None:
        given: dict[str, Any] = {key: environment.get(f"ACCELERATE_{key.upper()}", AUTO) for key in wanted}
        return [_same("the accelerate file", key, given[key], *wanted[key]) for key in wanted]
    given = _settings(launch.file)
    wanted["train_micro_batch_size_per_gpu"] = ("train.micro_batch", recipe.train.micro_batch)
    wanted["train_batch_size"] = ("train.effective_batch", recipe.train.effective_batch)
    for key in ("optimizer", "scheduler"):
        if key in given:
            raise UserError(f"{launch.file}: {key}: section train of the recipe decides; take it out of the file")
    for key in ("bf16", "fp16"):
        enabled = given.get(key, {}).get("enabled", False)
        if enabled not in (False, AUTO):
            raise UserError(
                f"{launch.file}: {key}.enabled: {json.dumps(enabled)}, the recipe model.dtype={recipe.model.dtype}, "
                f"which decides; take {key} out of the file"
            )
    return [_same(str(launch.file), key, given.get(key), *wanted[key]) for key in wanted]


def _same(file: str, key: str, value: Any, whose: str, wanted: float) -> str:
    """The line that says that a launch file's value agrees. DeepSpeed reads a key that is not there as 1 or off."""
    if value is None:
        raise UserError(f'{file}: {key} is missing, {whose} is {wanted:g}; set it to "auto"')
    try:
        differs = value != AUTO and float(value) != wanted
    except (TypeError, ValueError):
        differs = True
    if differs:
        raise UserError(f'{file}: {key}: {value}, but {whose} is {wanted:g}; change one of them, or set it to "auto"')
    return f"{key}: {wanted:g} ({whose})"


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable DeepSpeed file ({error}); launch from headstart's folder") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("zero_optimization"), dict):
        raise UserError(f"{path}: has no zero_optimization; give the stage there")
    return settings
