"""Runs model-written Python against tests, contained as well as this machine allows.

Two kinds of sandbox. `bubblewrap`: own user, process, network, IPC and host-name namespaces; the root read-only;
home folders, the working folder, /proc, /sys and /run hidden; a small private /tmp; the environment cleared.
`interpreter`, where bubblewrap is missing: a fresh isolated Python whose audit hook refuses processes, signals to
others, the network, and files outside a private folder. That hook holds against Python code, not against machine
code: it is a guard rail for accidents, not a wall.

In both the time limit, the sum of memory, the number of processes and the amount of output are watched from outside,
and whatever is left is killed from outside. The verdict needs the proof that `sandbox_runner.py` describes, and that
file also says which forgeries it cannot stop. Not covered by either kind: faults of the kernel, and the sum of memory
and processes on systems without Linux's /proc. `Limits.native` lets ctypes in, through which an answer could find the
proof, and pass by the hook of `interpreter`.
"""

import contextlib
import functools
import marshal
import os
import re
import resource
import secrets
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from eval import bubblewrap, process_tree
from eval.interpreter import SandboxError, interpreter

RUNNER = Path(__file__).with_name("sandbox_runner.py")
START_SECONDS = 30.0  # how long the sandbox itself may take to start; not charged to the answer
POLL_SECONDS = 0.02

GOOD = "import collections, math, random, re, typing\n\ndef f(x):\n    return math.floor(x) + 1\n"
BAD = "def f(x):\n    return x\n"
CHECK_TESTS = "assert f(1) == 2\nassert f(2) == 3\n"

_unset: set[str] = set()  # limits that this system refused to set; they are part of `describe()`


@dataclass(frozen=True)
class Limits:
    """What one answer and its tests may use. `memory_mb` holds for each process and for the sum of all.

    `python` is another interpreter with packages of its own, ours when None. `native` lets through what pandas, scipy,
    scikit-learn and matplotlib cannot do without: ctypes, shared memory, and asking what an object refers to.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20
    processes: int = 32
    python: str | None = None
    native: bool = False


@dataclass(frozen=True)
class Verdict:
    """`note` is "passed" or the reason: "assertion failed", "error: NAME", "syntax error", "timeout", "memory",
    "output", "processes", or "tests did not finish" (the answer left, crashed or cut the line before the end)."""

    passed: bool
    note: str


def run_tests(program: str, tests: str, limits: Limits | None = None, kind: str | None = None) -> Verdict:
    """Executes `program` as a module, then `tests` with its names, in a fresh sandbox.

    Passed means that the last line of `tests` was reached. `kind` is one of `available()`, by default its first.
    Names of the program that hide a builtin are not visible to the tests, so `abs = ...` cannot soften an assert.
    Raises SandboxError when the sandbox does not start or `tests` do not compile.
    """
    limits = limits or Limits()
    kind = kind or available()[0]
    try:
        compile(tests, "<tests>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise SandboxError(f"the tests do not compile: {error}") from None
    try:
        with _private_folder(kind) as folder:
            return _run(_job(program, tests, limits, kind, folder), limits, kind, folder)
    except OSError as error:
        raise SandboxError(f"the sandbox did not start: {error}") from None


def _private_folder(kind: str) -> contextlib.AbstractContextManager[str]:
    """Where the answer may write; under bubblewrap that is its own /tmp, and nothing is needed outside."""
    if kind == "bubblewrap":
        return contextlib.nullcontext("/")
    return tempfile.TemporaryDirectory(prefix="headstart-", ignore_cleanup_errors=True)


def _run(job: bytes, limits: Limits, kind: str, folder: str) -> Verdict:
    ours, theirs = socket.socketpair()
    with ours, theirs, _started(kind, theirs, folder, limits.python) as process:
        theirs.close()
        _hand_over(process, ours, job)
        token = secrets.token_hex(32).encode()
        with contextlib.suppress(OSError):  # it may have ended by now; what it said is still to be read
            ours.sendall(token)
        return _watch(process, ours, token, limits)


def run_many(
    jobs: Sequence[tuple[str, str]], limits: Limits | None = None, *, workers: int = 2, kind: str | None = None
) -> list[Verdict | SandboxError]:
    """`run_tests` on pairs (program, tests), `workers` at a time, in order; a harness fault stands as a value."""

    def one(job: tuple[str, str]) -> Verdict | SandboxError:
        try:
            return run_tests(*job, limits, kind)
        except SandboxError as error:
            return error

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, jobs))


def check(limits: Limits | None = None, kind: str | None = None) -> None:
    """Runs a known-good and a known-bad answer in the sandbox that is about to score; call it before every scoring.

    Raises SandboxError when either verdict is wrong: a hidden interpreter would otherwise score everything 0.
    """
    for program, expected in ((GOOD, "passed"), (BAD, "assertion failed")):
        note = run_tests(program, CHECK_TESTS, limits, kind).note
        if note != expected:
            raise SandboxError(
                f"the sandbox is not fit to score: a known answer got {note!r} instead of {expected!r}; "
                f"raise eval.time_limit or eval.memory_limit, or look at: {describe(kind)}"
            )


@functools.cache
def available() -> tuple[str, ...]:
    """The kinds that work on this machine, the better one first. Bubblewrap is tried out, not only looked up."""
    return ("interpreter",) if _bubblewrap_fault() else ("bubblewrap", "interpreter")


def describe(kind: str | None = None) -> str:
    """One line for the report: the sandbox in force, what it does not cover, and the limits that could not be set."""
    kind = kind or available()[0]
    if kind == "bubblewrap":
        text = "bubblewrap: no network, read-only root, hidden home folders, private /tmp, own process namespace"
    else:
        text = (
            f"isolated interpreter ({_bubblewrap_fault() or 'by choice'}): resource limits and an audit hook only; "
            "it does not cover machine code, and has no namespaces"
        )
    return text + (f"; limits that this system refused: {', '.join(sorted(_unset))}" if _unset else "")


@functools.cache
def _bubblewrap_fault() -> str | None:
    """Why bubblewrap cannot be used here, or None."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        run_tests(GOOD, CHECK_TESTS, None, "bubblewrap")
    except SandboxError as error:
        return f"bubblewrap is installed but {error}"
    return None


# --- starting ---


def _job(program: str, tests: str, limits: Limits, kind: str, folder: str) -> bytes:
    resources = [
        ("RLIMIT_AS", resource.RLIMIT_AS, limits.memory_mb << 20),
        ("RLIMIT_FSIZE", resource.RLIMIT_FSIZE, limits.file_bytes),
        ("RLIMIT_CORE", resource.RLIMIT_CORE, 0),
        ("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, 256),
    ]
    data = marshal.dumps(
        {
            "program": program,
            "tests": tests,
            "limits": resources,
            "seconds": limits.seconds,
            "path": list(interpreter(limits.python).packages),
            "contained": kind == "bubblewrap",
            "native": limits.native,
            "folder": folder,
        },
        4,  # the format that every interpreter from 3.4 on reads
    )
    return len(data).to_bytes(8, "big") + data


@contextlib.contextmanager
def _started(kind: str, channel: socket.socket, folder: str, python: str | None) -> Iterator["subprocess.Popen[bytes]"]:
    """The runner as a process, and nothing left of it afterwards."""
    mark = secrets.token_hex(8)
    # The interpreter behind a virtual environment, without `site`: a fixed hash seed keeps verdicts repeatable.
    chosen = interpreter(python)
    command = [
        chosen.executable,
        "-P",
        "-s",
        "-S",
        "-B",
        os.path.realpath(RUNNER),
        str(channel.fileno()),
    ]
    private = "/tmp" if kind == "bubblewrap" else folder
    environment = {"LANG": "C.UTF-8", "HOME": private, "TMPDIR": private, "PYTHONHASHSEED": "0", "SANDBOX_RUN": mark}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if kind == "bubblewrap":
        command = [*bubblewrap.command(str(RUNNER), *chosen.prefixes), *command]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            _end(process, kind, mark)


def _hand_over(process: "subprocess.Popen[bytes]", channel: socket.socket, job: bytes) -> None:
    """Sends the job and waits for "ready"; up to here every fault is the harness's own."""
    channel.settimeout(START_SECONDS)
    answer = b""
    try:
        channel.sendall(job)
        while not answer.endswith(b"\n"):
            piece = channel.recv(1)  # no more than the line: the rest is the verdict's
            if not piece:
                break
            answer += piece
    except OSError as error:
        answer = str(error).encode()
    if not answer.startswith(b"ready"):
        process.kill()
        said = process.stdout.read(4000).decode("utf-8", "replace").strip() if process.stdout else ""
        raise SandboxError(
            f"the sandbox did not start: {(said or answer.decode() or 'no reason given').splitlines()[-1]}"
        )
    fresh = {name for name in answer.decode().removeprefix("ready").strip().split(",") if name} - _unset
    if fresh:
        _unset.update(fresh)
        warnings.warn(f"the sandbox runs without {', '.join(sorted(fresh))}: not supported here", stacklevel=4)


# --- watching and ending ---


def _watch(process: "subprocess.Popen[bytes]", channel: socket.socket, token: bytes, limits: Limits) -> Verdict:
    """Waits for the one line that counts, the time limit, or a broken limit, whatever comes first."""
    deadline = time.monotonic() + limits.seconds
    assert process.stdout is not None
    said, printed = b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            ended = process.poll() is not None  # before the read, so that nothing said is missed
            ready = [key.fileobj for key, _ in selector.select(0 if ended else min(left, POLL_SECONDS))]
            if process.stdout in ready:
                data = os.read(process.stdout.fileno(), 65536)
                printed += len(data)
                if not data:
                    selector.unregister(process.stdout)
            if channel in ready:
                piece = channel.recv(4096)
                said += piece
                if not piece or b"\n" in said or len(said) > 4096:
                    return _read_verdict(said, token)
            elif ended:
                return _read_verdict(said, token)
            if printed > limits.output_bytes:
                return Verdict(False, "output")
            if note := _overdrawn(process.pid, limits):
                return Verdict(False, note)
    return Verdict(False, "timeout")


def _read_verdict(said: bytes, token: bytes) -> Verdict:
    """Only the exact token passes. Any other line is the answer's own word, so it is read as a reason to fail."""
    line = said.partition(b"\n")[0]
    if secrets.compare_digest(line, token):
        return Verdict(True, "passed")
    note = line.decode("ascii", "replace")
    known = note in ("syntax error", "assertion failed", "memory") or re.fullmatch(r"error: \w{1,60}", note)
    return Verdict(False, note if known else "tests did not finish")


def _overdrawn(root: int, limits: Limits) -> str | None:
    """The name of the limit that the whole tree of processes has passed, if any."""
    most = limits.processes + 2  # bubblewrap's own two
    tree = process_tree.descendants(root, most + 1)
    if len(tree) > most:
        return "processes"
    return "memory" if sum(map(process_tree.resident_bytes, tree)) > limits.memory_mb << 20 else None


def _end(process: "subprocess.Popen[bytes]", kind: str, mark: str) -> None:
    """Kills all that the runner started and returns when it is gone."""
    if kind == "bubblewrap":
        # The first child is the namespace's first process: the kernel ends all others with it, then bubblewrap ends.
        for pid in process_tree.descendants(process.pid, 1):
            process_tree.kill(pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    else:
        for pid in process_tree.descendants(process.pid, 1000):
            process_tree.kill(pid)
    process.kill()
    process.wait()
    while kind == "interpreter" and (left := process_tree.marked(mark)):
        for pid in left:
            process_tree.kill(pid)
        time.sleep(0.01)
