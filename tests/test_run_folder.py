"""Run folders: nothing half-written under a final name, nothing done twice, nothing mixed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recipes import run_folder
from recipes.errors import UserError
from recipes.loader import parse, to_yaml

SETTINGS = {"train": {"rank": 8, "names": ("a", "b")}, "data": "f00"}
HOLDER = """
import sys
from pathlib import Path
from recipes import run_folder
from recipes.loader import parse

invocation = parse(["recipe=smollm2", f"run.dir={sys.argv[1]}"])
with run_folder.step(invocation, Path(sys.argv[1]) / "adapter", {"rank": 8}) as step:
    (step.partial / "half").write_text("half")
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def invocation(tmp_path):
    return parse(["recipe=smollm2", f"run.dir={tmp_path / 'run'}"])


@pytest.fixture
def folder(invocation):
    return invocation.run_dir / "adapter"


def make(invocation, folder, settings=None, text="whole"):
    """Run a step that writes one file; returns whether there was anything to do."""
    with run_folder.step(invocation, folder, settings or SETTINGS) as step:
        if step is not None:
            assert not folder.exists()
            (step.partial / "weights").write_text(text)
            assert not folder.exists()
            run_folder.finish(step)
        return step is not None


def broken_off(invocation, folder, settings=None):
    """A step that is left in the middle."""
    with run_folder.step(invocation, folder, settings or SETTINGS) as step:
        (step.partial / "half").write_text("half")
    assert not folder.exists()
    return step.partial


def test_a_finished_step_has_its_output_its_record_and_its_recipe(invocation, folder):
    assert make(invocation, folder)
    record = run_folder.read_step(folder)
    assert (folder / "weights").read_text() == "whole"
    assert record["settings"] == json.loads(json.dumps(SETTINGS))
    assert record["key"] == run_folder.digest(SETTINGS)
    assert record["content"] == run_folder.content_hash(folder)
    assert "torch" in record["provenance"]["versions"]
    assert "commit" in record["provenance"]
    for saved in (folder / "recipe.yaml", invocation.run_dir / "recipe.yaml"):
        assert saved.read_text() == to_yaml(invocation.recipe)
        assert parse([f"recipe={saved}"]).recipe == invocation.recipe
    visible = sorted(path.name for path in invocation.run_dir.iterdir() if not path.name.startswith("."))
    assert visible == ["adapter", "recipe.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == ["recipe.yaml", "step.json", "weights"]


def test_the_same_settings_again_are_nothing_to_do(invocation, folder, capsys):
    make(invocation, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert not make(invocation, folder, json.loads(json.dumps(SETTINGS)), "other")
    assert capsys.readouterr().out == f"{folder}: complete and made by these settings; nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_other_settings_are_refused_and_named(invocation, folder):
    make(invocation, folder)
    with pytest.raises(UserError) as error:
        make(invocation, folder, {"train": {"rank": 9, "names": ("a", "b")}, "seed": 1})
    said = str(error.value)
    assert str(folder) in said
    assert "train.rank: 8 there, 9 here" in said
    assert "data: f00 there, None here" in said
    assert "seed: None there, 1 here" in said
    assert "names" not in said
    assert "\n" not in said
    assert (folder / "weights").read_text() == "whole"


def test_a_long_value_is_cut_in_the_message(invocation, folder):
    make(invocation, folder, {"message": "x" * 500})
    with pytest.raises(UserError) as error:
        make(invocation, folder, {"message": "y" * 500})
    assert len(str(error.value)) < 300 + len(str(folder))


def test_a_broken_off_step_is_continued_by_the_same_settings(invocation, folder, capsys):
    partial = broken_off(invocation, folder)
    with run_folder.step(invocation, folder, SETTINGS) as step:
        assert step.partial == partial
        assert (step.partial / "half").read_text() == "half"
        (step.partial / "half").unlink()
        run_folder.finish(step)
    assert "continuing what a killed run left" in capsys.readouterr().out
    assert not partial.exists()
    assert not make(invocation, folder)


def test_the_mark_of_a_broken_off_step_is_not_written_again(invocation, folder):
    """A kill in the middle of that would leave settings that nobody gave."""
    mark = broken_off(invocation, folder) / "partial.json"
    before = mark.stat()
    with run_folder.step(invocation, folder, SETTINGS):
        assert (mark.stat().st_ino, mark.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_broken_off_step_of_other_settings_is_cleared(invocation, folder, capsys):
    partial = broken_off(invocation, folder, {"rank": 1})
    assert make(invocation, folder)
    assert "left by other settings; starting anew" in capsys.readouterr().out
    assert not (folder / "half").exists()
    assert not partial.exists()


def test_what_is_dear_in_a_broken_off_step_is_not_cleared_unasked(invocation, folder):
    partial = broken_off(invocation, folder, {**SETTINGS, "data": "bar"})
    with (
        pytest.raises(
            UserError, match=r"a killed run of other settings can be resumed here \(data: bar there, f00 here\)"
        ),
        run_folder.step(invocation, folder, SETTINGS, dear="ha*"),
    ):
        pass
    assert (partial / "half").read_text() == "half"
    with run_folder.step(invocation, folder, SETTINGS, dear="other*") as step:
        assert not (step.partial / "half").exists()
    assert not folder.exists()


def test_a_file_in_the_place_of_the_partial_folder_is_named(invocation, folder):
    folder.parent.mkdir(parents=True)
    folder.with_name(".adapter.partial").write_text("")
    with pytest.raises(UserError, match="a file stands where this step works; remove it"):
        make(invocation, folder)


def test_a_finished_folder_can_be_read_by_others(invocation, folder):
    with run_folder.step(invocation, folder, SETTINGS) as step:
        (step.partial / "weights").write_text("secret no more")
        (step.partial / "weights").chmod(0o600)
        run_folder.finish(step)
    expected = (folder.parent / "recipe.yaml").stat().st_mode
    assert (folder / "weights").stat().st_mode == expected


def test_a_partial_folder_without_a_readable_mark_is_cleared(invocation, folder):
    partial = broken_off(invocation, folder)
    (partial / "partial.json").write_text('{"train":')
    make(invocation, folder)
    assert not (folder / "half").exists()


@pytest.mark.parametrize(("name", "time"), [("rename", 1), ("rename", 2), ("unlink", 1)])
def test_a_kill_while_finishing_loses_nothing(invocation, folder, monkeypatch, name, time):
    """Whatever the point at which `finish` breaks off, the next run ends with the whole output."""
    real, calls = getattr(Path, name), []

    def killed(self, *arguments):
        calls.append(self)
        if len(calls) == time:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as patch, run_folder.step(invocation, folder, SETTINGS) as step:
        (step.partial / "weights").write_text("whole")
        patch.setattr(Path, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run_folder.finish(step)
    with run_folder.step(invocation, folder, SETTINGS) as step:
        if step is not None:
            assert (step.partial / "weights").read_text() == "whole"  # continued, not begun anew
            run_folder.finish(step)
    assert (folder / "weights").read_text() == "whole"
    assert run_folder.read_step(folder)["content"] == run_folder.content_hash(folder)
    assert run_folder.is_complete(folder, SETTINGS)


def hold(run_dir):
    """Another process that has the step open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "open\n"
    return process


def test_a_second_process_is_refused_and_takes_over_after_a_kill(invocation, folder, capsys):
    process = hold(invocation.run_dir)
    try:
        with pytest.raises(UserError) as error, run_folder.step(invocation, folder, {"rank": 8}):
            pytest.fail("two processes have the step open")
        assert str(error.value) == f"{folder}: another process is working on it; wait for it to end"
        assert make(invocation, folder.with_name("merged"))  # another step of the run is free
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        assert not folder.exists()
        with run_folder.step(invocation, folder, {"rank": 8}) as step:
            assert (step.partial / "half").read_text() == "half"
    finally:
        process.kill()
        process.communicate()


def test_a_folder_without_a_record_is_refused(invocation, folder):
    folder.mkdir(parents=True)
    (folder / "something").write_text("mine")
    with pytest.raises(UserError, match=r"no finished step here \(step.json is missing\)"):
        make(invocation, folder)
    (folder / "step.json").write_text('{"settings"')
    with pytest.raises(UserError, match=r"step\.json: not readable"):
        make(invocation, folder)
    assert (folder / "something").read_text() == "mine"


def test_an_input_that_is_not_there_names_the_command(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/data: not there yet; first run: python build.py recipe=x"):
        run_folder.need(tmp_path / "data", "python build.py recipe=x")


def test_content_hash_sees_names_and_bytes_but_no_hidden_file_and_no_record(tmp_path):
    def written(**files):
        folder = tmp_path / f"f{len(list(tmp_path.iterdir()))}"
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return run_folder.content_hash(folder)

    plain = written(a="1", sub__b="2")
    assert plain == written(sub__b="2", a="1")
    assert plain == written(a="1", sub__b="2", DOTx="3", sub__DOTx="3", DOTcheckpoints__y="4", sub__DOTz__deep="5")
    assert plain == written(a="1", sub__b="2", stepDOTjson="{}", recipeDOTyaml="x", partialDOTjson="y")
    others = [written(a="2", sub__b="2"), written(c="1", sub__b="2"), written(a="1"), written(a="1", sub__b="2", c="")]
    others.append(written(a="1", sub__b="2", sub__stepDOTjson="{}"))
    assert len({plain, *others}) == 6


def test_digest_ignores_the_order_of_keys_and_tuples_are_lists():
    assert run_folder.digest({"a": 1, "b": (1, 2)}) == run_folder.digest({"b": [1, 2], "a": 1})
    assert run_folder.digest({"a": 1}) != run_folder.digest({"a": "1"})
    assert run_folder.digest({"a": None}) != run_folder.digest({})


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "summary.json"
    run_folder.write_atomically(path, "0" * 1000)
    done = threading.Event()
    seen = set()

    def read():
        while not done.is_set():
            seen.add((len(text := path.read_text()), *set(text)))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(100):
        run_folder.write_atomically(path, str(n % 10) * 1000)
    done.set()
    reader.join()
    assert all(length == 1000 and len(rest) == 1 for length, *rest in seen)
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_folder_that_was_changed_is_refused(tmp_path):
    """By a later step that needs it, and by its own step, which would otherwise say that there is nothing to do."""
    run = parse(["recipe=smollm2", f"run.dir={tmp_path}"])
    folder = tmp_path / "data"
    with run_folder.step(run, folder, {"a": 1}) as step:
        (step.partial / "x.txt").write_text("x")
        run_folder.finish(step)
    assert run_folder.need(folder, "make it")["settings"] == {"a": 1}
    run_folder.agree(folder, run_folder.read_step(folder), {"a": 1})
    with pytest.raises(UserError, match="a: 1 there, 2 here"):
        run_folder.agree(folder, run_folder.read_step(folder), {"a": 2})
    (folder / "x.txt").write_text("y")
    for look in (lambda: run_folder.need(folder, "make it"), lambda: run_folder.is_complete(folder, {"a": 1})):
        with pytest.raises(UserError, match="changed since it was made"):
            look()


@pytest.mark.parametrize("record", ["{}", "[1]", "not json", b"\xff"])
def test_a_broken_record_is_one_line(tmp_path, record):
    (tmp_path / "step.json").write_bytes(record if isinstance(record, bytes) else record.encode())
    with pytest.raises(UserError, match="step"):
        run_folder.read_step(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no finished step"):
        run_folder.read_step(tmp_path / "file")
