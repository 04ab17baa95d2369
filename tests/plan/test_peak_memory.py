"""The estimate of peak memory: what it grows with, and what not. Measured pairs are in scripts/bench_size.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from compress.model.checkpoint import open_checkpoint
from compress.plan.estimate import estimate
from compress.plan.machine import Machine, machine
from compress.plan.memory import LATE_BYTES, stops_fit, whole_fits
from compress.plan.planning import Plan, make_plan
from compress.recipe.schema import Recipe

WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 1024}
LITTLE, MUCH = 10**6, 10**12
STEPS: dict[str, dict[str, Any]] = {"gptq": {}, "rtn": {"algorithm": "rtn"}, "smooth": {"target": "int8"}}


def plan(folder: Path, model: dict[str, Any], *, samples: int = 4, length: int = 32, **step: Any) -> Plan:
    tiny.tiny_llama(folder, dtype=torch.bfloat16, **WIDE | model)
    fields = {
        "version": 1,
        "model": str(folder),
        "calibration": {"samples": samples, "length": length},
        "steps": [{"quantize": {"target": "int4"} | step}],
        "evaluate": None,
    }
    return make_plan(Recipe.model_validate(fields), open_checkpoint(folder))


def here(memory: int) -> Machine:
    return replace(machine(), memory_available=memory, instruction_sets=())


def peak(found: Plan, memory: int) -> int:
    return estimate(found, here(memory)).memory_bytes


@pytest.mark.parametrize("step", STEPS)
def test_with_little_memory_depth_costs_none_and_width_does(tmp_path: Path, step: str) -> None:
    shallow = plan(tmp_path / "a", {"num_hidden_layers": 2}, **STEPS[step])
    deep = plan(tmp_path / "b", {"num_hidden_layers": 9}, **STEPS[step])
    wide = plan(tmp_path / "c", {"num_hidden_layers": 2, "intermediate_size": 8192}, **STEPS[step])
    assert not whole_fits(deep, here(LITTLE))
    assert peak(shallow, LITTLE) == peak(deep, LITTLE) < peak(wide, LITTLE)


@pytest.mark.parametrize("step", STEPS)
def test_a_proof_of_the_whole_model_grows_with_its_parameters(tmp_path: Path, step: str) -> None:
    shallow = plan(tmp_path / "a", {"num_hidden_layers": 18}, **STEPS[step])
    deep = plan(tmp_path / "b", {"num_hidden_layers": 24}, **STEPS[step])
    grown = deep.parameters - shallow.parameters
    assert whole_fits(deep, here(MUCH))
    assert peak(deep, MUCH) - peak(shallow, MUCH) >= 4 * grown


def test_the_hessian_of_the_widest_layer_counts_quadratically(tmp_path: Path) -> None:
    one, two, four = (
        peak(plan(tmp_path / str(width), {"intermediate_size": width}), LITTLE) for width in (4096, 8192, 16384)
    )
    assert 3.4 < (four - two) / (two - one) < 4.1


def test_windows_count_only_where_they_fit(tmp_path: Path) -> None:
    few, many = (plan(tmp_path / str(count), {}, samples=count, length=64) for count in (8, 4096))
    assert stops_fit(many, here(MUCH))
    assert not stops_fit(many, here(LITTLE))
    assert peak(many, LITTLE) == peak(few, LITTLE)
    assert peak(many, MUCH) > peak(few, MUCH)


def test_embeddings_count_and_a_head_does_not(tmp_path: Path) -> None:
    """Block by block only the base model is walked through; its head is compared as it is stored."""
    rtn = {"algorithm": "rtn"}
    small = plan(tmp_path / "a", {"vocab_size": 30000}, **rtn)
    large = plan(tmp_path / "b", {"vocab_size": 60000}, **rtn)
    tied = plan(tmp_path / "c", {"vocab_size": 60000, "tie_word_embeddings": True}, **rtn)
    assert peak(large, LITTLE) - peak(small, LITTLE) == 30000 * 256 * (4 + 2 + LATE_BYTES)
    assert peak(tied, LITTLE) == peak(large, LITTLE)


def test_recorded_runs_were_predicted_within_a_fifth() -> None:
    records = json.loads((Path(__file__).parents[2] / "scripts" / "bench_size.json").read_text())
    told = [record for record in records if "predicted_memory_bytes" in record]
    assert len({record["model"] for record in told}) >= 3
    for record in told:
        assert abs(record["predicted_memory_bytes"] / max(record["run"]["peaks"]) - 1) <= 0.2, record["model"]
