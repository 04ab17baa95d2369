"""What the step `prune` takes, told from shapes: the same as the parts that do the work say of themselves."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny

from compress.model.checkpoint import open_checkpoint
from compress.plan import pruning_cost
from compress.plan.estimate import estimate
from compress.plan.machine import Machine, machine
from compress.plan.memory import gradients_fit, gradients_needed, stopped_bytes
from compress.plan.planning import Plan, make_plan
from compress.recipe.schema import Recipe

LENGTH = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("m") / "m", num_hidden_layers=3)


def plan(model: Path, *steps: dict[str, Any], samples: int = 8, **prune: Any) -> Plan:
    fields = {
        "version": 1,
        "model": str(model),
        "calibration": {"samples": samples, "length": LENGTH},
        "steps": [{"prune": prune}, *steps],
        "evaluate": None,
    }
    return make_plan(Recipe.model_validate(fields), open_checkpoint(model))


def here(memory: float) -> Machine:
    return machine().limited(int(memory))


def test_the_whole_model_takes_what_gradients_and_search_take(model: Path) -> None:
    weights = 4 * sum(prod(info.shape) for info in open_checkpoint(model).tensors.values())
    found = plan(model, keep={"ffn": 0.5}).pruned
    assert found is not None
    short, long = (pruning_cost.whole_model_bytes(found, length) for length in (LENGTH, 2 * LENGTH))
    assert weights < short < long
    assert not pruning_cost.needs_whole_model(found)
    searched = plan(model, params="0.8x", importance="activation").pruned
    assert searched is not None
    assert pruning_cost.whole_model_bytes(searched, LENGTH) >= weights + 4 * 3 * (128**2 + 64**2)
    assert pruning_cost.needs_whole_model(searched)


@pytest.mark.parametrize(
    ("step", "needs", "takes"),
    [
        ({"keep": {"ffn": 0.5}}, False, True),
        ({"keep": {"ffn": 0.5}, "importance": "taylor"}, True, True),
        ({"keep": {"layers": 2}}, True, True),
        ({"keep": {"layers": 2}, "importance": "activation"}, False, False),
        ({"params": 0.8, "importance": "random"}, True, False),
    ],
)
def test_what_needs_the_whole_model(model: Path, step: dict[str, Any], needs: bool, takes: bool) -> None:
    found = plan(model, **step)
    assert found.pruned is not None
    assert pruning_cost.takes_gradients(found.pruned) == takes
    assert (gradients_needed(found) > 0) == needs
    if takes:
        limit = pruning_cost.whole_model_bytes(found.pruned, LENGTH)
        assert not gradients_fit(found, here(limit))
        assert gradients_fit(found, here(limit + 1e9))


def test_windows_wait_in_front_of_the_unpruned_channels_in_both_models(model: Path) -> None:
    found, tokens = plan(model, keep={"ffn": 64}), 8 * LENGTH
    assert stopped_bytes(found, machine()) == 2 * tokens * (128 + 3 * 64) * 4


def test_more_text_takes_longer_and_a_step_that_follows_is_added(model: Path) -> None:
    short, long = (plan(model, keep={"ffn": 64}, samples=samples) for samples in (4, 64))
    both = plan(model, {"quantize": {"target": "int4"}}, keep={"ffn": 64})
    assert estimate(short, machine()).seconds["prune"] < estimate(long, machine()).seconds["prune"]
    assert "quantize" not in estimate(short, machine()).seconds
    assert {"prune", "quantize"} <= estimate(both, machine()).seconds.keys()
    assert estimate(both, machine()).disk_bytes > estimate(short, machine()).disk_bytes
    without = plan(model, keep={"ffn": 64}, importance="magnitude", compensate=False)
    assert estimate(without, machine()).seconds["prune"] < estimate(short, machine()).seconds["prune"]
