"""One step's output folder: written under another name, renamed when whole, known by the settings that made it.

A step hashes its own sections of the recipe and its inputs' hashes. A folder that is complete and was made by the same
settings is left alone; one made by other settings is refused by name. A killed step leaves `.<name>.partial`, which
the same settings continue and other settings clear; what took hours is not cleared unasked.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.loader import Invocation, to_yaml

PACKAGES = ("headstart", "torch", "transformers", "tokenizers", "peft", "trl", "datasets", "accelerate", "deepspeed")
STEP_FILE = "step.json"


@dataclass(frozen=True)
class Step:
    """An open step: write into `partial`; `finish` renames it to `folder`."""

    folder: Path
    partial: Path
    settings: Mapping[str, Any]
    invocation: Invocation

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return digest(self.settings)


@contextmanager
def step(invocation: Invocation, folder: Path, settings: Mapping[str, Any], dear: str = "") -> Iterator[Step | None]:
    """Open `folder` for writing; yields None where it is already complete and made by the same settings.

    The caller fills `Step.partial` and then calls `finish`. Raises UserError where the folder was made by other
    settings, where another process works on it, or where a killed step of other settings left what matches the pattern
    `dear`: that is not cleared unasked.
    """
    partial = _partial(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        if is_complete(folder, settings):
            print(f"{folder}: complete and made by these settings; nothing to do")
            yield None
            return
        _prepare(partial, settings, dear)
        yield Step(folder, partial, settings, invocation)


def is_complete(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `folder` holds this step's whole output. Raises UserError where other settings made it."""
    if not folder.exists():
        return False
    made_by = _unchanged(folder)["settings"]
    if digest(made_by) == digest(settings):
        return True
    changed = ", ".join(_differences(made_by, json.loads(canonical(settings)))[:4])
    raise UserError(f"{folder}: made by other settings ({changed}); remove it, or set run.dir to another folder")


def finish(step: Step) -> None:
    """Record settings, content hash, recipe and provenance beside the output, and give it its final name."""
    content = content_hash(step.partial)
    record = {"settings": step.settings, "key": step.key, "content": content, "provenance": provenance()}
    (step.partial / STEP_FILE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    (step.partial / "recipe.yaml").write_text(to_yaml(step.invocation.recipe))
    write_atomically(step.invocation.run_dir / "recipe.yaml", to_yaml(step.invocation.recipe))
    _readable(step.partial)
    step.partial.rename(step.folder)
    (step.folder / "partial.json").unlink()  # only now: without it a killed step would begin anew
    print(f"{step.folder}: done")


def read_step(folder: Path) -> dict[str, Any]:
    """What `finish` recorded. Raises UserError where the folder holds no finished step."""
    try:
        record = json.loads((folder / STEP_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: no finished step here ({STEP_FILE} is missing); remove it or run its step"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / STEP_FILE}: not readable ({error}); remove the folder and run its step") from error
    if not isinstance(record, dict) or not {"settings", "content", "provenance"} <= record.keys():
        raise UserError(f"{folder / STEP_FILE}: not a step's record; remove the folder and run its step")
    return record


def need(folder: Path, command: str) -> dict[str, Any]:
    """The record of an input step. Raises UserError where it is not there, not finished, or changed since."""
    if not folder.exists():
        raise UserError(f"{folder}: not there yet; first run: {command}")
    return _unchanged(folder)


def agree(folder: Path, record: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise UserError where the step in `folder` was made with other settings than `expected` (some of its keys)."""
    found = {key: record["settings"].get(key) for key in expected}
    if digest(found) != digest(expected):
        changed = ", ".join(_differences(found, json.loads(canonical(expected)))[:4])
        raise UserError(f"{folder}: made by other settings ({changed}); give those, or make it anew in another run.dir")


def say_plan(folder: Path, settings: Mapping[str, Any], plan: str, dear: str = "") -> None:
    """What a dry run prints: the plan, or that there is nothing to do. Raises UserError as the step itself would."""
    if is_complete(folder, settings):
        print(f"{folder}: complete; nothing would be done")
        return
    _spare(_partial(folder), settings, dear)
    print(plan)


def _unchanged(folder: Path) -> dict[str, Any]:
    record = read_step(folder)
    if content_hash(folder) != record["content"]:
        raise UserError(f"{folder}: changed since it was made; remove it and run its step again")
    return record


def digest(value: Any) -> str:
    """A short hash of JSON-like data, independent of key order."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]


def canonical(value: Any) -> str:
    """JSON with sorted keys and no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_hash(folder: Path) -> str:
    """A hash of every file under `folder` (checkpoints, records and hidden files apart)."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = name.startswith(".") or "/." in name
        if path.is_file() and name not in (STEP_FILE, "recipe.yaml", "partial.json") and not hidden:
            total.update(f"{name}\0{file_hash(path)}\n".encode())
    return total.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(text)
    temporary.rename(path)


def versions() -> dict[str, str]:
    """Versions of the packages that decide a result."""
    return {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)}


def provenance() -> dict[str, Any]:
    """Git commit of the source (with "+changes" where the tree differs from it) and package versions."""
    return {"commit": _commit(), "versions": versions()}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _commit() -> str | None:
    source = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "status", "--porcelain"], cwd=source, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _prepare(partial: Path, settings: Mapping[str, Any], dear: str) -> None:
    marker = partial / "partial.json"
    if partial.exists() and not partial.is_dir():
        raise UserError(f"{partial}: a file stands where this step works; remove it")
    _spare(partial, settings, dear)
    made_by = marker.read_text() if marker.is_file() else ""
    if partial.exists() and made_by != canonical(settings):
        print(f"{partial}: left by other settings; starting anew")
        shutil.rmtree(partial)
    if partial.exists():
        print(f"{partial}: continuing what a killed run left")
    partial.mkdir(parents=True, exist_ok=True)
    if made_by != canonical(settings):
        write_atomically(marker, canonical(settings))


def _spare(partial: Path, settings: Mapping[str, Any], dear: str) -> None:
    """Raise UserError where a killed run of other settings left what is `dear`."""
    marker = partial / "partial.json"
    made_by = marker.read_text() if marker.is_file() else ""
    if dear and made_by != canonical(settings) and any(partial.glob(dear)):
        changed = ", ".join(_differences(_loaded(made_by), json.loads(canonical(settings)))[:4])
        raise UserError(
            f"{partial}: a killed run of other settings can be resumed here ({changed}); give those, or remove it"
        )


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _readable(folder: Path) -> None:
    """Give every file the mode of a new one: safetensors writes files that nobody else may read."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~mask)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    path = folder.with_name(f".{folder.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is working on it; wait for it to end") from None
        file.write(str(os.getpid()))
        yield


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if old == new else [f"{path}: {_short(old)} there, {_short(new)} here"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
