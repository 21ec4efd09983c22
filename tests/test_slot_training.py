"""Training runs under slot_diffusion: resumed as uninterrupted, only the adapter changes, drafts are what is shown."""

import json

import torch
from tiny_run import distance, losses, rows, small_base, train, weights, write_recipe

SETTINGS = {"steps": 6, "effective_batch": 4, "micro_batch": 4, "dropout": 0.0, "save_every": 2}


def test_batches_cut_otherwise_come_to_the_same_adapter(tmp_path):
    found = [
        weights(
            train(write_recipe(tmp_path / str(n), small_base("refusion"), "refusion", **{**SETTINGS, "micro_batch": n}))
        )
        for n in (4, 2, 1)
    ]
    assert distance(found[0], found[1]) < 1e-3
    assert distance(found[0], found[2]) < 1e-3


def test_a_run_that_is_watched_ends_with_the_same_adapter(tmp_path):
    watched = {"watch_every": 3, "watch_requests": 3, "watch_max_new_tokens": 8}
    plain = train(write_recipe(tmp_path / "plain", small_base("refusion"), "refusion", **SETTINGS))
    seen = train(write_recipe(tmp_path / "seen", small_base("refusion"), "refusion", **SETTINGS, **watched))
    assert all(torch.equal(one, weights(seen)[name]) for name, one in weights(plain).items())
    looks = [json.loads(line) for line in (seen / "watch.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [0, 3, 6]
    assert all(look["drift"] >= 0 for look in looks)


def test_a_draft_changes_what_is_trained(tmp_path):
    drafted = [row | {"draft": "no " * 12, "draft_sentences": 1, "draft_fate": "stale"} for row in rows()]
    plain = train(write_recipe(tmp_path / "plain", small_base("refusion"), "refusion", **SETTINGS))
    repaired = train(write_recipe(tmp_path / "draft", small_base("refusion"), "refusion", drafted, **SETTINGS))
    assert losses(plain) != losses(repaired)
    assert distance(weights(plain), weights(repaired)) > 1e-3
