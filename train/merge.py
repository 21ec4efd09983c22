"""Merge the adapter into its base, and prove the merged model in the same command.

    python train/merge.py recipe=smollm2

Writes <run>/merged: a plain transformers folder, ready to serve. The sum is made in float32 and stored in the base's
dtype (or merge.dtype). A failed proof leaves no output folder.
"""

import json
import shutil
import sys
from pathlib import Path

from transformers.utils import cached_file

from headstart import model as loading
from headstart.prompt import Renderer, baked_template, renderer
from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import Invocation, run_script
from recipes.schema import Model
from train.adapter import check_base, prove_adapter
from train.merging import Proof, load_adapted, merge_and_prove


def main(argv: list[str] | None = None) -> int:
    return run_script(__doc__, argv, merge)


def merge(invocation: Invocation) -> None:
    recipe = invocation.recipe
    adapter = invocation.run_dir / "adapter"
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
        out = invocation.run_dir / "merged"
        run_folder.say_plan(out, settings, f"would merge {adapter} into {recipe.model.name} and write {out}")
        return
    with run_folder.step(invocation, invocation.run_dir / "merged", settings) as step:
        if step is not None:
            try:
                rendering = renderer(loading.load_tokenizer(recipe.model), loading.family(recipe.model))
                proof = merge_and_prove(load_adapted(recipe.model, adapter), recipe, rendering, step.partial)
            except UserError:
                shutil.rmtree(step.partial)
                raise
            print("\n".join(proof.lines()))
            write_extras(step.partial, invocation, rendering, proof)
            run_folder.finish(step)


def write_extras(folder: Path, invocation: Invocation, rendering: Renderer, proof: Proof) -> None:
    """Tokenizer with the family's template arguments baked in, the proof, and a model card with provenance."""
    rendering.tokenizer.chat_template = baked_template(rendering)
    rendering.tokenizer.save_pretrained(folder)
    copy_processor(invocation.recipe.model, folder)
    (folder / "merge.json").write_text(json.dumps(proof.record(), indent=1) + "\n")
    (folder / "README.md").write_text(card(invocation, proof))


def copy_processor(settings: Model, folder: Path) -> None:
    """Copy a multimodal base's processor settings: servers ask for them though only language layers are adapted."""
    if "vision_config" in loading.load_config(settings).to_dict():
        for name in ("preprocessor_config.json", "processor_config.json"):
            found = cached_file(
                settings.name, name, revision=settings.revision, _raise_exceptions_for_missing_entries=False
            )
            if found is not None:
                shutil.copyfile(found, folder / name)


def card(invocation: Invocation, proof: Proof) -> str:
    """The model card."""
    recipe, origin = invocation.recipe, run_folder.provenance()
    trained = run_folder.read_step(invocation.run_dir / "adapter")
    return "\n".join(
        [
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
            *[f"- {line}" for line in proof.lines()],
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
