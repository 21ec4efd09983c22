"""run.report_to: wandb in its offline mode, and TensorBoard, for real."""

import json
import struct
from pathlib import Path

import pytest
import tiny_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import train, write_recipe
from wandb.proto import wandb_internal_pb2

from train import sft

WATCHED = {"watch_every": 2, "watch_max_new_tokens": 8, "watch_requests": 3}


def records(file):
    """What an offline run's file holds: LevelDB's log format, 32 KiB blocks of records with a header of 7 bytes."""
    data, at, pending = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 0x8000 - at % 0x8000 < 7:  # too little is left in the block for a header
            at += 0x8000 - at % 0x8000
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            yield record
            pending = b""


def test_wandbs_offline_files_hold_config_loss_and_what_is_watched(tmp_path, monkeypatch, capsys):
    key = "0123456789abcdef" * 2 + "c0ffee00"
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", key)):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    recipe = write_recipe(tmp_path / "run", tiny_run.small_base(), "smollm2", steps=4, **WATCHED)
    adapter = train(recipe, "run.report_to=wandb")
    printed = capsys.readouterr().out
    folder = Path(next(line for line in printed.splitlines() if "wandb sync" in line).rpartition(" ")[2])
    found = list(records(next(folder.glob("*.wandb"))))
    config = {item.key: item.value_json for record in found for item in record.run.config.update}
    assert json.loads(config["train"])["steps"] == 4
    assert "dir" not in json.loads(config["run"])
    rows = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.history.item
    ]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert list(losses) == [1, 2, 3, 4]
    assert list(losses.values()) == tiny_run.losses(adapter)
    watched = {row["step"]: row["watch/drift"] for row in rows if "watch/drift" in row}
    looks = [json.loads(line) for line in (adapter / "watch.jsonl").read_text().splitlines()]
    assert watched == {look["step"]: look["drift"] for look in looks}
    assert list(watched) == [0, 2, 4]
    everything = [printed.encode(), *(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())]
    assert not any(key.encode() in text for text in everything)


def test_tensorboards_files_hold_loss_and_what_is_watched(tmp_path):
    recipe = write_recipe(tmp_path, tiny_run.small_base(), "smollm2", steps=4, **WATCHED)
    adapter = train(recipe, "run.report_to=tensorboard")
    events = EventAccumulator(str(adapter.parent / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(tiny_run.losses(adapter))
    assert [event.step for event in events.Scalars("watch/kept_share")] == [0, 2, 4]


def test_where_it_is_reported_to_is_no_setting_of_the_adapter(tmp_path, capsys):
    recipe = write_recipe(tmp_path, tiny_run.small_base(), "smollm2", steps=1)
    train(recipe)
    train(recipe, "run.report_to=tensorboard")
    assert "nothing to do" in capsys.readouterr().out


def test_wandb_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch, capsys):
    for name, value in (("WANDB_MODE", "online"), ("WANDB_API_KEY", "far-too-short"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    recipe = write_recipe(tmp_path, tiny_run.small_base(), "smollm2", steps=1)
    capsys.readouterr()
    assert sft.main([f"recipe={recipe}", "run.report_to=wandb"]) == 2
    error = capsys.readouterr().err
    assert "error: run.report_to=wandb: " in error
    assert "far-too-short" not in error
    assert not (tmp_path / "run" / "adapter").exists()
