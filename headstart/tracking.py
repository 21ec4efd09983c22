"""A wandb run of ours: what is sent is what we log, and nothing of this machine.

Whether it goes over the network is wandb's own switch (WANDB_MODE; `offline` leaves a folder for `wandb sync`), and so
is the key (`wandb login` or WANDB_API_KEY): neither is read here but to keep the key out of errors. No environment, no
command line, no source and no list of packages is sent along; our files have their own provenance.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.errors import UserError

QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


@contextmanager
def wandb_run(
    asked_by: str, project: str, name: str, kind: str, folder: Path, config: Mapping[str, Any]
) -> Iterator[Any]:
    """An open run; it ends, and an offline run's file is whole, when the context is left.

    Args:
        asked_by: the key of the recipe that asks for it, for errors.
        project: the wandb project.
        name: what the run is called.
        kind: wandb's job type.
        folder: where wandb keeps its own files, under `wandb/`.
        config: the run's config.

    Raises:
        UserError: where wandb refuses or cannot be reached; the line holds its reason and no key.
    """
    import wandb  # a second of start-up that nobody else pays

    try:
        try:
            run = wandb.init(
                project=project,
                name=name,
                job_type=kind,
                dir=folder,
                config={**config},
                settings=wandb.Settings(**QUIET),
            )
        except (OSError, ValueError) as error:
            raise UserError(f"{asked_by}: {without_key(error)}") from None
        with run:
            yield run
    except wandb.Error as error:
        raise UserError(f"{asked_by}: {without_key(error)}") from None
    finally:
        wandb.teardown()  # its own process writes the end of an offline run's file only when it is told to end


def place(run: Any) -> str:
    """Where a run goes, in words."""
    return run.url or f"not sent; to send it: wandb sync {run.settings.sync_dir}"


def without_key(error: Exception) -> str:
    """The error in one line, without the key should wandb name it."""
    said, key = " ".join(str(error).split()), os.environ.get("WANDB_API_KEY")
    return said.replace(key, "***") if key else said
