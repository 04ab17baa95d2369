"""Experts that no calibration token reached: counted, named, and no fallback."""

from __future__ import annotations

import pytest

from compress.pipeline.fallback import check_fallback
from compress.records import LayerRecord, StepRecord
from compress.report.build import step_part
from compress.report.loading import loading
from compress.report.remarks import fallback_remarks, uncalibrated_remarks


def step(algorithm: str = "gptq") -> StepRecord:
    experts = [f"model.layers.0.mlp.experts.{index}.up_proj" for index in range(10)]
    return StepRecord(
        "quantize",
        {"algorithm": algorithm},
        layers=(
            LayerRecord("a", (2, 2), target="int4", algorithm=algorithm, tokens=12),
            *(LayerRecord(name, (2, 2), target="int4", algorithm="rtn", tokens=0) for name in experts),
            LayerRecord("b", (2, 2), skipped="router, protected"),
        ),
    )


def test_they_are_counted_and_no_fallback() -> None:
    totals = step_part(step()).totals
    assert (totals.layers_quantized, totals.layers_uncalibrated, totals.layers_fallback) == (11, 10, 0)
    check_fallback(step(), 0.0)
    assert fallback_remarks([step()]) == []


def test_a_remark_names_some_of_them() -> None:
    (remark,) = uncalibrated_remarks([step()])
    assert remark.startswith("no calibration token reached 10 layers of experts, which were rounded to nearest: model.")
    assert remark.endswith("experts.7.up_proj and 2 more")


def test_rounding_that_was_asked_for_is_no_matter_of_calibration() -> None:
    assert step("rtn").layers_uncalibrated == 0
    assert uncalibrated_remarks([step("rtn")]) == []


@pytest.mark.parametrize("format_name", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("mixed", [False, True])
def test_experts_in_gptq_are_loaded_by_vllm_only(format_name: str, mixed: bool) -> None:
    how = loading(format_name, "decoder", "out", mixed=mixed, experts=True)
    assert how.install == "pip install vllm"
    assert how.transformers[-1] == 'model = LLM("out")'
    assert how.note is not None
    assert how.note.startswith("transformers cannot load it")
    assert loading("compressed-tensors", "decoder", "out", experts=True) == loading(
        "compressed-tensors", "decoder", "out"
    )
