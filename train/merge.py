"""Merge the adapter into its base, and prove the merged model in the same command.

    python train/merge.py recipe=smollm2
    python train/merge.py recipe=smollm2 --push NAMESPACE/NAME

Writes <run>/merged: a plain transformers folder, ready to serve. The sum is made in float32 and stored in the base's
dtype (or merge.dtype). A failed proof leaves no output folder. Nothing leaves this machine but with --push, which sends
the proved folder to the hub; a repository that is not there yet is made private.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from headstart import model as loading
from headstart.prompt import Renderer, baked_template, renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Model
from train.adapter import check_base, prove_adapter
from train.checkpoints import plain_errors
from train.hub import check_name, push
from train.merging import load_adapted, merge_and_prove

TRAINED_IN_4_BITS = "trained on a 4-bit base; merged into the full-precision one"


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, merge, flags={"--push": "NAMESPACE/NAME"})


def merge(invocation: Invocation) -> None:
    recipe, repo = invocation.recipe, invocation.flags.get("--push")
    if repo is not None:
        check_name(repo)
    adapter, out = invocation.run_dir / "adapter", invocation.run_dir / "merged"
    record = run_folder.need(adapter, f"accelerate launch train/sft.py {invocation.named}")
    prove_adapter(adapter, check_base(adapter, recipe.model))
    run_folder.agree(adapter, record, {"system_message": recipe.prompt.system_message})
    settings = {
        "merge": recipe.merge.model_dump(),
        "model": {**recipe.model.model_dump(), "weights": loading.weights_hash(recipe.model)},
        "prompt": recipe.prompt.model_dump(),
        "adapter": record["content"],
    }
    if invocation.dry_run:
        run_folder.say_plan(out, settings, f"would merge {adapter} into {recipe.model.name} and write {out}")
        if repo is not None:
            print(f"would push {out} to {repo}, made private where it is not there yet")
        return
    with run_folder.step(invocation, out, settings) as step:
        if step is not None:
            try:
                with plain_errors(out):
                    write_merged(step, record)
            except UserError:
                shutil.rmtree(step.partial)
                raise
    if repo is not None:
        print(f"{out}: pushed, {push(out, repo)}")


def write_merged(step: run_folder.Step, record: Mapping[str, Any]) -> None:
    """Merge the adapter whose record is given, prove it, write all that a server needs, and finish the step.

    Raises UserError where a proof fails.
    """
    recipe, adapter = step.invocation.recipe, step.invocation.run_dir / "adapter"
    rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
    proof = merge_and_prove(load_adapted(recipe.model, adapter), recipe, rendering, step.partial)
    lines = [*([TRAINED_IN_4_BITS] if trained_in_4_bits(record) else []), *proof.lines()]
    print("\n".join(lines))
    write_tokenizer(step.partial, recipe.model, rendering)
    proved = {**proof.record(), "trained_on_4bit_base": trained_in_4_bits(record)}
    (step.partial / "merge.json").write_text(json.dumps(proved, indent=1) + "\n")
    (step.partial / "README.md").write_text(card(step.invocation, record, lines))
    run_folder.finish(step)


def trained_in_4_bits(record: Mapping[str, Any]) -> bool:
    """Whether the adapter was trained on a base held in 4 bits; says its own record, not the recipe of today."""
    return bool(record["settings"]["train"].get("base_4bit"))


def write_tokenizer(folder: Path, settings: Model, rendering: Renderer) -> None:
    """The tokenizer with the family's template arguments baked in, and a multimodal base's processor settings.

    Servers ask for the latter though only language layers are adapted.
    """
    rendering.tokenizer.chat_template = baked_template(rendering)
    rendering.tokenizer.save_pretrained(folder)
    config = loading.load_config(settings)
    if "vision_config" not in config.to_dict():
        return
    for name in ("preprocessor_config.json", "processor_config.json"):
        found = cached_file(
            config.name_or_path, name, revision=settings.revision, _raise_exceptions_for_missing_entries=False
        )
        if found is not None:
            processor = json.loads(Path(found).read_text())
            processor.pop("chat_template", None)  # it would stand before the baked one
            (folder / name).write_text(json.dumps(processor, indent=1) + "\n")


def card(invocation: Invocation, trained: Mapping[str, Any], lines: Sequence[str]) -> str:
    """The model card; `trained` is the record of the adapter's folder, `lines` what the merge has to say."""
    recipe, origin = invocation.recipe, run_folder.provenance()
    on_hub = recipe.model.name != loading.EMBEDDED and not Path(recipe.model.name).exists()
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            *([f"base_model: {recipe.model.name}"] if on_hub else []),
            "---",
            "",
            f"# {Path(recipe.model.name).name}, adapted to incomplete requests",
            "",
            "A LoRA adapter trained by headstart, merged into its base. Put this system message in front of a request,",
            "whole or unfinished:",
            "",
            f"> {recipe.prompt.system_message or '(none)'}",
            "",
            f"- base: {recipe.model.name} (revision {recipe.model.revision or 'none given'}), "
            f"weights {trained['settings']['model']['weights']}",
            f"- recipe: {invocation.name}; data {trained['settings']['data']}; adapter {trained['content']}",
            f"- trained at commit {trained['provenance']['commit']}, merged at commit {origin['commit']}",
            f"- versions: {json.dumps(origin['versions'])}",
            "",
            "## Proof of the merge",
            "",
            *[f"- {line}" for line in lines],
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
