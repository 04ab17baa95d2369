"""The lines that load a result, where the plain ones would not do."""

from __future__ import annotations

import pytest

from compress.report.loading import loading


def test_zero_points_are_loaded_dequantized() -> None:
    how = loading("compressed-tensors", "decoder", "m", zero_points=True)
    assert "dense = CompressedTensorsConfig(dequantize=True)" in how.transformers
    assert 'model = AutoModelForCausalLM.from_pretrained("m", quantization_config=dense)' in how.transformers
    assert how.vllm == "vllm serve m"
    assert how.note is not None
    assert "only with `dequantize=True`" in how.note
    assert "vLLM reads it" in how.note
    for line in how.transformers:
        compile(line, "card", "exec")


def test_zero_points_beside_another_scheme_are_for_vllm() -> None:
    how = loading("compressed-tensors", "decoder", "m", mixed=True, zero_points=True)
    assert how.install == "pip install vllm"
    assert "from vllm import LLM" in how.transformers
    assert how.note is not None
    assert how.note.startswith("transformers cannot load it")


def test_several_schemes_warn_of_dequantizing() -> None:
    how = loading("compressed-tensors", "decoder", "m", mixed=True)
    assert how.note is not None
    assert "would give all layers the first scheme" in how.note
    assert not any("dequantize" in line for line in how.transformers)


@pytest.mark.parametrize("format_name", ["gptq", "gptq_v2"])
def test_gptq_needs_no_word_on_zero_points(format_name: str) -> None:
    assert loading(format_name, "decoder", "m", zero_points=True).note is None
    assert "from gptqmodel import GPTQModel" in loading(format_name, "decoder", "m", mixed=True).transformers


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq", "gptq_v2", "bitsandbytes"])
def test_what_vllm_does_not_load_is_not_said_to_be_served(
    format_name: str, experts: bool, zero_points: bool, mixed: bool
) -> None:
    how = loading(format_name, "decoder", "m", mixed=mixed, zero_points=zero_points, experts=experts, served=False)
    assert how.vllm is None
    assert not any("vllm" in line for line in how.transformers)
    assert "vLLM reads it" not in (how.note or "")
    assert how.transformers or "--target bf16 --dequantize" in (how.note or "")
