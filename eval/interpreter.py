"""The Python interpreters that may run an answer: ours, or one with packages of its own."""

import functools
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass

# Asked of an interpreter other than ours: itself without a virtual environment's link, its folders, its packages
_ABOUT = """import json, os, sys, sysconfig
real, packages = os.path.realpath, {sysconfig.get_path(name) for name in ("purelib", "platlib")}
print(json.dumps([real(sys.executable), [real(sys.base_prefix), real(sys.prefix)], sorted(map(real, packages))]))"""


class SandboxError(Exception):
    """The sandbox failed, not the answer: such a request has no score, and is never counted as a wrong answer."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to run answers: the real executable, the folders that it must see, the folders of its packages."""

    executable: str
    prefixes: tuple[str, ...]
    packages: tuple[str, ...]


@functools.cache
def interpreter(python: str | None = None) -> Interpreter:
    """The interpreter at the path `python`, which is started to ask it; ours for None.

    Raises SandboxError where it does not start.
    """
    if python is None:
        packages = sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
        return Interpreter(os.path.realpath(sys.executable), (), tuple(packages))  # our own folders are shown anyway
    try:
        said = subprocess.run(
            [python, "-I", "-c", _ABOUT], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        executable, prefixes, packages = json.loads(said)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(f"the interpreter {python} does not start: {error}") from None
    return Interpreter(executable, tuple(prefixes), tuple(packages))
