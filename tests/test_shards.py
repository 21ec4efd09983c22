"""How the processes of a launch share out an evaluation, in one process that plays each of them in turn."""

import itertools
import json
from types import SimpleNamespace

import pytest
from tiny_models import REQUESTS, SHORT, invocation, talker_folder

from eval import arms, shards
from eval.replay import replay
from headstart import launch
from recipes import run_folder
from recipes.errors import UserError

SUITE = {"first.jsonl": REQUESTS[:9], "second.jsonl": REQUESTS[9:]}  # batches of 4: 3 and 4
BATCHES = 7


def process(rank, world):
    """What the code asks of accelerate's PartialState."""
    return SimpleNamespace(
        process_index=rank, num_processes=world, is_main_process=rank == 0, wait_for_everyone=lambda: None
    )


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    model = talker_folder(folder / "model")
    return arms.load(invocation(model, folder / "run", *SHORT, "eval.batch_size=4", "eval.replay=full"))


@pytest.fixture(scope="module")
def whole(arm, tmp_path_factory):
    """The bytes that one process writes."""
    return launched(arm, tmp_path_factory.mktemp("whole"), 1)


def launched(arm, folder, world):
    """Each process of a launch from its start to its end; the main one is the last to be through."""
    for rank in reversed(range(world)):
        shards.share(shards.replayed, arm, SUITE, folder / "requests.jsonl", process(rank, world))
    assert [path.name for path in folder.iterdir()] == ["requests.jsonl"]
    return (folder / "requests.jsonl").read_bytes()


def watched(monkeypatch):
    """The ids of each batch that is replayed from now on."""
    seen = []

    def counted(arm, requests, unfit):
        seen.append([request.id for request in requests])
        return replay(arm, requests, unfit)

    monkeypatch.setattr(shards, "replay", counted)
    return seen


def test_one_process_writes_the_lines_in_the_benchmarks_order(whole):
    lines = [json.loads(line) for line in whole.decode().split("\n")[:-1]]
    assert [(line["benchmark"], line["id"]) for line in lines] == [(b, r.id) for b, rows in SUITE.items() for r in rows]
    assert len({line["stream"]["text"] for line in lines if line["excluded"] is None}) > 2


@pytest.mark.parametrize("world", [2, 3, 9])
def test_any_number_of_processes_writes_the_same_bytes_and_replays_each_batch_once(
    arm, whole, tmp_path, monkeypatch, world
):
    seen = watched(monkeypatch)
    assert launched(arm, tmp_path, world) == whole
    plan = shards.batches(SUITE, 4)
    assert sorted(seen) == sorted([request.id for request in batch.requests] for batch in plan)
    assert [len(batch.requests) for batch in plan] == [4, 4, 1, 4, 4, 4, 3]


@pytest.mark.parametrize(("before", "after"), [*itertools.product((1, 2, 3), repeat=2)])
def test_a_killed_launch_resumes_with_any_number_of_processes(arm, whole, tmp_path, monkeypatch, before, after):
    """Killed when each process had done one batch and was writing down its second, maybe inside a character."""
    plan = shards.batches(SUITE, 4)
    for rank in range(before):
        parts = launch.Parts(tmp_path, rank, "requests")
        shards.work_on(shards.replayed, arm, plan[: rank + 1], parts, rank, before)
        parts.add(rank + before, ["字"])
        [written] = tmp_path.glob(f".*-{rank}.jsonl")
        written.write_bytes(written.read_bytes()[: -rank - 4])
    seen = watched(monkeypatch)
    assert launched(arm, tmp_path, after) == whole
    assert len(seen) == BATCHES - before


def test_a_launch_killed_while_it_was_timing_replays_nothing(arm, whole, tmp_path, monkeypatch):
    launched(arm, tmp_path, 2)
    launch.Parts(tmp_path, 1, "requests").add(0, [])  # killed before all parts were removed
    seen = watched(monkeypatch)
    assert launched(arm, tmp_path, 3) == whole
    assert not seen


def test_the_running_median_is_over_all_processes(arm, whole, tmp_path, capsys):
    lines = [json.loads(line) for line in whole.decode().split("\n")[:-1]]
    shards.work_on(shards.replayed, arm, shards.batches(SUITE, 4), launch.Parts(tmp_path, 1, "requests"), 1, 2)
    assert "median" not in capsys.readouterr().out
    shards.work_on(shards.replayed, arm, shards.batches(SUITE, 4), launch.Parts(tmp_path, 0, "requests"), 0, 2)
    said = [line for line in capsys.readouterr().out.splitlines() if "median" in line]
    assert [line.split(",")[0].split() for line in said] == [
        ["requests", "first.jsonl", "█" * 17 + "░" * 3, "8/9"],
        ["requests", "first.jsonl", "█" * 20, "9/9"],
        ["requests", "second.jsonl", "█" * 16 + "░" * 4, "12/15"],
        ["requests", "second.jsonl", "█" * 20, "15/15"],
    ]
    speedups = sorted(x["base_passes"] / x["stream_passes"] for x in lines[9:] if x["excluded"] is None)
    middle = len(speedups) // 2
    median = speedups[middle] if len(speedups) % 2 else (speedups[middle - 1] + speedups[middle]) / 2
    assert f"median speedup {median:.2f}x in passes" in said[-1]


def test_all_have_looked_before_the_main_process_can_be_through(arm, tmp_path):
    """A killed run had written the lines already: who looks later must not find the folder renamed, and start anew."""
    path, met = tmp_path / "requests.jsonl", []
    path.write_text("{}\n")
    late = process(1, 2)
    late.wait_for_everyone = lambda: (met.append("looked"), path.unlink())  # the main process goes on, and renames
    shards.share(shards.replayed, arm, SUITE, path, late)
    assert met == ["looked"]
    assert list(tmp_path.iterdir()) == []


# --- what launches are made of ---


def test_a_part_that_another_process_is_just_writing_is_seen_when_it_is_whole(tmp_path):
    reader, writer = launch.Parts(tmp_path, 0, "requests"), launch.Parts(tmp_path, 1, "requests")
    writer.add(4, [{"text": "é\u2028字"}])
    [path] = tmp_path.iterdir()
    written = path.read_bytes()
    for size in range(len(written)):
        path.write_bytes(written[:size])
        reader.refresh()
        assert reader.done == {}
    path.write_bytes(written)
    reader.refresh()
    assert reader.done == {4: [{"text": "é\u2028字"}]}


def test_a_part_that_cannot_be_seen_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "LAG", 0.0)
    parts = launch.Parts(tmp_path, 0, "requests")
    parts.add(0, "a")
    parts.add(2, "c")
    with pytest.raises(UserError, match="1 of 3 parts were done but cannot be seen"):
        parts.gather(3)
    launch.Parts(tmp_path, 1, "requests").add(1, "b")
    assert parts.gather(3) == ["a", "b", "c"]


def test_waiting_for_a_process_that_has_ended_is_one_line():
    def broken():
        raise RuntimeError("Connection closed by peer\n  frame #1")

    state = SimpleNamespace(process_index=1, wait_for_everyone=broken)
    with pytest.raises(UserError, match="process 1 of this launch waited in vain") as raised:
        launch.wait(state)
    assert "\n" not in str(raised.value)


def test_the_main_process_goes_first_and_what_it_raises_lets_nobody_pass(monkeypatch):
    order = []
    monkeypatch.setattr(launch, "wait", lambda state: order.append(f"wait {state.process_index}"))
    for rank in (0, 1):
        with launch.main_first(process(rank, 2)):
            order.append(f"work {rank}")
    assert order == ["work 0", "wait 0", "wait 1", "work 1"]
    order.clear()
    with pytest.raises(UserError), launch.main_first(process(0, 2)):
        raise UserError("a wrong path")
    assert order == []


def test_only_the_main_process_prints(capsys):
    for rank in (0, 1):
        with launch.main_prints(process(rank, 2)):
            print(f"from {rank}")
    assert capsys.readouterr().out == "from 0\n"


def test_a_process_works_in_the_folder_that_the_main_one_opened(tmp_path):
    made, folder = invocation(tmp_path / "model", tmp_path / "run"), tmp_path / "run" / "eval" / "message"

    def opened(rank, settings):
        return launch.shared_step(process(rank, 2), made, folder, settings)

    with pytest.raises(UserError, match=r"not seen by process 1; run\.dir has"):
        opened(1, {"a": 1}).__enter__()
    with opened(0, {"a": 1}) as first, opened(1, {"a": 1}) as second:
        assert first == second
        run_folder.finish(first)
    for rank in (0, 1):
        with opened(rank, {"a": 1}) as step:
            assert step is None
        with pytest.raises(UserError, match="made by other settings"):
            opened(rank, {"a": 2}).__enter__()
