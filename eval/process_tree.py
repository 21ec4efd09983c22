"""The processes below the sandbox, seen and ended from outside. Where there is no Linux /proc, nothing is seen."""

import contextlib
import os
import resource
import signal
from pathlib import Path


def descendants(root: int, most: int) -> list[int]:
    """Process ids below `root`, parents first, the search ended after `most`; empty where /proc does not tell."""
    found = [root]
    for pid in found:  # grows while it is walked; a process may end at any moment
        if len(found) > most:
            break
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found[1:]


def resident_bytes(pid: int) -> int:
    """Memory that a process really holds; 0 when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def marked(mark: str) -> list[int]:
    """Living processes that carry this run's mark in their environment, wherever they hang in the tree."""
    found = []
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
