"""Train the LoRA adapter on the pairs of data_builders/build.py.

    python train/sft.py recipe=smollm2
    accelerate launch train/sft.py recipe=qwen3 train.steps=1000

Writes <run>/adapter. A killed run resumes from its last checkpoint with the same command.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import get_peft_model
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import SFTConfig

from headstart import launch
from headstart import model as loading
from headstart.family import stop_ids, token_id
from headstart.prompt import Renderer, renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Recipe
from train import base
from train.adapter import adapted_modules, lora_config, prove_adapter, refuse_quantised, write_card, write_readme
from train.agreement import agree, read_launch
from train.checkpoints import Checkpoints, Log, last_whole, plain_errors, whole_weights
from train.distill import DistillCollator, DistillTrainer
from train.preflight import show_model, show_training
from train.reporting import reporting
from train.rows import Rows, in_order, tokens_read, training_rows, write_dropped
from train.slots import SlotCollator, SlotTrainer, counted
from train.trainer import LabelledTrainer
from train.watch import Watcher, watched_requests
from train.watching import Watch

DEAR = ".checkpoints/checkpoint-*"  # what other settings do not clear: hours may be in it
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, train)


def train(invocation: Invocation) -> None:
    recipe = invocation.recipe
    state = launch.processes(recipe.model)
    accumulation = accumulate(recipe, state.num_processes)
    launched = read_launch(os.environ, state.num_processes)
    agreed = agree(recipe, launched, accumulation, os.environ)
    base.check(recipe)
    if invocation.dry_run and not state.is_main_process:
        return  # one process draws
    refuse_quantised(recipe.model)
    base.check_generation(recipe.model)
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    if invocation.dry_run:
        show_model(recipe, rendering, launched, agreed, state.num_processes)
    data = invocation.run_dir / "data"
    record = run_folder.need(data, f"python data_builders/build.py {invocation.named}")
    made_with = {"data": recipe.data.deciding(), "system_message": recipe.prompt.system_message}
    run_folder.agree(data, record, {**made_with, "seed": recipe.run.seed})
    settings = {
        "train": recipe.train.model_dump(exclude={"tokens_per_second"}),
        "model": {**recipe.model.model_dump(), "weights": loading.weights_hash(recipe.model)},
        "seed": recipe.run.seed,
        "data": record["content"],
        "system_message": recipe.prompt.system_message,
        "renderer": rendering.fingerprint,
    }
    if recipe.train.watch_every:
        watched_requests(data / "heldout.jsonl", recipe.train.watch_requests, recipe.run.seed)
    folder = invocation.run_dir / "adapter"
    if invocation.dry_run:
        rows = training_rows(data, rendering, recipe.train, recipe.run.seed, recipe.prompt.system_message)
        ordered = in_order(rows.dataset, recipe.train, recipe.run.seed)
        show_training(recipe, rendering, rows, ordered, launched, state.num_processes)
        run_folder.say_plan(folder, settings, plan(recipe, rows, accumulation, state.num_processes), DEAR)
        return
    with plain_errors(folder), launch.shared_step(state, invocation, folder, settings, DEAR) as step:
        if step is not None:
            rows = training_rows(data, rendering, recipe.train, recipe.run.seed, recipe.prompt.system_message)
            if state.is_main_process:
                print(plan(recipe, rows, accumulation, state.num_processes))
            with reporting(invocation, state.is_main_process) as reports:
                fit(rows, rendering, accumulation, step, reports)


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


def fit(
    rows: Rows, rendering: Renderer, accumulation: int, step: run_folder.Step, reports: Sequence[TrainerCallback]
) -> None:
    """Train, save, prove, and give the folder its name."""
    recipe = step.invocation.recipe
    family = loading.family(recipe.model)
    frozen = base.load_base(recipe)
    modules = adapted_modules(frozen, family)
    stops = stop_ids(family, rendering.tokenizer, frozen)
    set_seed(recipe.run.seed)
    checkpoints = step.partial / ".checkpoints"
    log = Log(step.partial / "log.jsonl", recipe.train.steps)
    watching = watch(recipe, rendering, stops, step)
    ordered = in_order(rows.dataset, recipe.train, recipe.run.seed)
    if recipe.train.objective == "slot_diffusion":
        ordered = counted(ordered, recipe.train.effective_batch, recipe.run.seed)
    trainer = make_trainer(
        recipe,
        model=get_peft_model(frozen, lora_config(recipe.train, family)),
        args=arguments(recipe, checkpoints, accumulation),
        train_dataset=ordered,
        processing_class=rendering.tokenizer,
        callbacks=[log, *reports, *watching, Checkpoints()],
    )
    trainer.remove_callback(PrinterCallback)
    for callback in watching:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=last_whole(checkpoints))
    seconds, fed = log.seconds, tokens_read(ordered, log.first * recipe.train.effective_batch)
    weights = whole_weights(trainer)
    if trainer.accelerator.is_main_process:
        trained = seconds - sum(callback.seconds for callback in watching)
        print(f"trained in {trained:.1f} s: {fed / trained:.0f} tokens a second, padding not counted")
        adapter = trainer.accelerator.unwrap_model(trainer.model)
        adapter.save_pretrained(step.partial, state_dict=weights, save_embedding_layers=False)
        kept = recipe.train.steps
        for callback in watching:
            kept = callback.keep(step.partial)
            print(f"watching took {callback.seconds:.0f} s, {callback.seconds / seconds:.1%} of the run")
        write_card(step.partial, rendering, recipe.model, modules, kept, recipe.train.base_4bit)
        write_readme(step.partial, recipe, kept)
        write_dropped(rows, step.partial / "dropped")
        prove_adapter(step.partial, modules)
        run_folder.finish(step)
        for left in (".checkpoints", ".best"):
            shutil.rmtree(step.folder / left, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def make_trainer(recipe: Recipe, **common: Any) -> LabelledTrainer:
    """The trainer of the recipe's objective."""
    tokenizer = common["processing_class"]
    if recipe.train.objective == "sft":
        return LabelledTrainer(**common)
    pad = tokenizer.pad_token_id or 0
    if recipe.train.objective == "slot_diffusion":
        mask = token_id(tokenizer, str(loading.family(recipe.model).mask_token))
        slots = SlotCollator(pad, mask, recipe.train.effective_batch, recipe.run.seed)
        return SlotTrainer(data_collator=slots, **common)
    collator = DistillCollator(pad)
    settings = {"retain": recipe.train.retain, "temperature": recipe.train.teacher_temperature}
    return DistillTrainer(data_collator=collator, **settings, **common)


def watch(recipe: Recipe, rendering: Renderer, stops: frozenset[int], step: run_folder.Step) -> list[Watch]:
    """The callback that watches, where the recipe wants one and the launch allows it."""
    if not recipe.train.watch_every:
        return []
    if base.zero_stage() == 3:  # each of its passes would gather all weights, token by token
        print("train.watch_every: nothing is watched under ZeRO-3; launch under zero2.yaml to watch")
        return []
    heldout = step.invocation.run_dir / "data" / "heldout.jsonl"
    return [Watch(Watcher(recipe, rendering, stops, heldout), recipe.train, step.partial)]


def arguments(recipe: Recipe, checkpoints: Path, accumulation: int) -> SFTConfig:
    """TRL's settings. What its defaults would do is said no to here: cut rows, bfloat16 autocast, hide a NaN loss."""
    settings = recipe.train
    on_cpu = loading.device(recipe.model).type == "cpu"
    made = SFTConfig(
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
        remove_unused_columns=False,
        max_length=None,
        packing=False,
        bf16=False,
        ddp_find_unused_parameters=False,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        report_to="none",
        disable_tqdm=True,
    )
    made._n_gpu = min(made.n_gpu, 1)  # a process has one device; else one process would spread its rows over all
    return made


if __name__ == "__main__":
    sys.exit(main())
