"""Train the LoRA adapter on the pairs of data_builders/build.py.

    python train/sft.py recipe=smollm2
    accelerate launch train/sft.py recipe=qwen3 train.steps=1000

Writes <run>/adapter. A killed run resumes from its last checkpoint with the same command.
"""

import shutil
import sys
from pathlib import Path

from peft import get_peft_model
from transformers import PrinterCallback, set_seed
from trl import SFTConfig

from headstart import launch
from headstart import model as loading
from headstart.prompt import Renderer, renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Recipe
from train.adapter import adapted_modules, lora_config, prove_adapter, refuse_quantised, write_card
from train.checkpoints import Checkpoints, Log, last_whole
from train.rows import Rows, in_order, training_rows, write_dropped
from train.trainer import LabelledTrainer

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, train)


def train(invocation: Invocation) -> None:
    recipe = invocation.recipe
    data = invocation.run_dir / "data"
    record = run_folder.need(data, f"python data_builders/build.py {invocation.named}")
    made_with = {"data": recipe.data.deciding(), "system_message": recipe.prompt.system_message}
    run_folder.agree(data, record, {**made_with, "seed": recipe.run.seed})
    state = launch.processes(recipe.model)
    accumulation = accumulate(recipe, state.num_processes)
    refuse_quantised(recipe.model)
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    settings = {
        "train": recipe.train.model_dump(),
        "model": {**recipe.model.model_dump(), "weights": loading.weights_hash(recipe.model)},
        "seed": recipe.run.seed,
        "data": record["content"],
        "system_message": recipe.prompt.system_message,
        "renderer": rendering.fingerprint,
    }
    if invocation.dry_run:
        rows = training_rows(data, rendering, recipe.train.max_length)
        folder = invocation.run_dir / "adapter"
        run_folder.say_plan(folder, settings, plan(recipe, rows, accumulation, state.num_processes))
        return
    with launch.shared_step(state, invocation, invocation.run_dir / "adapter", settings) as step:
        if step is not None:
            rows = training_rows(data, rendering, recipe.train.max_length)
            if state.is_main_process:
                print(plan(recipe, rows, accumulation, state.num_processes))
            fit(recipe, rows, rendering, accumulation, step)


def accumulate(recipe: Recipe, world: int) -> int:
    """Gradient accumulation that keeps effective_batch. Raises UserError where it does not divide."""
    together = recipe.train.micro_batch * world
    if recipe.train.effective_batch % together:
        raise UserError(
            f"train.effective_batch={recipe.train.effective_batch} is no multiple of micro_batch x processes = "
            f"{recipe.train.micro_batch} x {world}; change one of them"
        )
    return recipe.train.effective_batch // together


def plan(recipe: Recipe, rows: Rows, accumulation: int, world: int) -> str:
    """What will be done, in words."""
    kept, dropped, steps = len(rows.dataset), len(rows.too_long), recipe.train.steps
    return (
        f"{kept} rows of {kept + dropped} pairs; {dropped} longer than {recipe.train.max_length} tokens dropped; "
        f"{rows.supervised_tokens / kept:.0f} supervised tokens a row\n"
        f"{steps} steps of {recipe.train.effective_batch} rows = "
        f"{steps * recipe.train.effective_batch / kept:.2f} epochs; "
        f"{world} process(es) x {recipe.train.micro_batch} rows x {accumulation} accumulated"
    )


def fit(recipe: Recipe, rows: Rows, rendering: Renderer, accumulation: int, step: run_folder.Step) -> None:
    """Train, save, prove, and give the folder its name."""
    family = loading.family(recipe.model)
    base = loading.load_model(recipe.model)
    modules = adapted_modules(base, family)
    set_seed(recipe.run.seed)
    checkpoints = step.partial / ".checkpoints"
    trainer = LabelledTrainer(
        model=get_peft_model(base, lora_config(recipe.train, family)),
        args=arguments(recipe, checkpoints, accumulation),
        train_dataset=in_order(rows.dataset, recipe.train.steps, recipe.train.effective_batch, recipe.run.seed),
        processing_class=rendering.tokenizer,
        callbacks=[Checkpoints(), Log(step.partial / "log.jsonl", recipe.train.steps)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_whole(checkpoints))
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # on every process: ZeRO-3 gathers here
    if trainer.accelerator.is_main_process:
        adapter = trainer.accelerator.unwrap_model(trainer.model)
        adapter.save_pretrained(step.partial, state_dict=weights, save_embedding_layers=False)
        write_card(step.partial, rendering, recipe.model, modules)
        write_dropped(rows, step.partial / "dropped")
        prove_adapter(step.partial, modules)
        run_folder.finish(step)
        shutil.rmtree(step.folder / ".checkpoints", ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def arguments(recipe: Recipe, checkpoints: Path, accumulation: int) -> SFTConfig:
    """TRL's settings. What its defaults would do is said no to here: cut rows, bfloat16 autocast, hide a NaN loss."""
    settings = recipe.train
    on_cpu = loading.device(recipe.model).type == "cpu"
    return SFTConfig(
        output_dir=str(checkpoints),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        activation_checkpointing=settings.gradient_checkpointing,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        save_steps=settings.save_every,
        save_total_limit=2,
        seed=recipe.run.seed,
        train_sampling_strategy="sequential",  # `in_order` has shuffled
        max_length=None,
        packing=False,
        bf16=False,
        ddp_find_unused_parameters=False,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    sys.exit(main())
