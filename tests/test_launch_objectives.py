"""self_distill and slot_diffusion, watched, on two processes: the adapter and the figures of one."""

import json

import pytest
from test_launch import SETTINGS, launched
from tiny_run import distance, small_base, train, weights, write_recipe

WATCHED = {"watch_every": 3, "watch_requests": 5, "watch_max_new_tokens": 8}
DISTILLED = {**SETTINGS, "objective": "self_distill", "retain": 1.0, "retain_share": 0.5, **WATCHED}


def looks(adapter):
    """What was watched, without what differs from run to run."""
    found = [json.loads(line) for line in (adapter / "watch.jsonl").read_text().splitlines()]
    return [
        {name: pytest.approx(value, rel=1e-3) for name, value in look.items() if name != "seconds"} for look in found
    ]


OBJECTIVES = {"smollm2": DISTILLED, "refusion": {**SETTINGS, **WATCHED}}


@pytest.fixture(scope="module", params=OBJECTIVES)
def family(request):
    """The families whose objectives are not plain sft."""
    return request.param


@pytest.fixture(scope="module")
def alone(tmp_path_factory, family):
    """The adapter of one process."""
    return train(write_recipe(tmp_path_factory.mktemp("alone"), small_base(family), family, **OBJECTIVES[family]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_cpu", "zero2_cpu"])
def test_two_processes_train_and_watch_as_one(alone, tmp_path, name, family):
    recipe = write_recipe(tmp_path, small_base(family), family, **OBJECTIVES[family], micro_batch=2)
    adapter = launched(name, recipe)
    assert distance(weights(alone), weights(adapter)) < 1e-3
    found = [json.loads(line) for line in (adapter / "watch.jsonl").read_text().splitlines()]
    assert [{key: value for key, value in look.items() if key != "seconds"} for look in found] == looks(alone)
    assert [look["step"] for look in found] == [0, 3, 6]
