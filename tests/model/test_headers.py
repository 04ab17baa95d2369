"""Linear layers found by name in headers."""

from __future__ import annotations

import pytest

from compress.model.headers import Place, found_layers, kind_of_class, place_of, several_inputs
from compress.model.safetensors_header import TensorInfo


def headers(*names: str, shape: tuple[int, ...] = (64, 64), dtype: str = "F32") -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape, "model.safetensors") for name in names}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.up_proj", Place("model.layers", 3, "mlp.up_proj")),
        ("encoder.block.0.layer.1.DenseReluDense.wi", Place("encoder.block", 0, "layer.1.DenseReluDense.wi")),
        ("h.11.attn.q_proj", Place("h", 11, "attn.q_proj")),
        ("0.q", Place("", 0, "q")),
        ("classifier.0", None),  # the module is the numbered one itself
        ("lm_head", None),
    ],
)
def test_the_outermost_list_is_the_list_of_blocks(name: str, place: Place | None) -> None:
    assert place_of(name) == place
    if place is not None:
        assert f"{place.block}.{place.inside}" == name


def test_encoders_come_before_decoders_and_blocks_by_number() -> None:
    stored = headers(*(f"{stack}.{i}.q.weight" for stack in ("decoder.block", "encoder.block") for i in (0, 10, 2)))
    assert [one.place.block for one in found_layers(stored)] == [
        *("encoder.block.0", "encoder.block.2", "encoder.block.10"),
        *("decoder.block.0", "decoder.block.2", "decoder.block.10"),
    ]


def test_layers_that_engines_fuse_share_a_group() -> None:
    stem = "model.layers.0"
    stored = headers(
        *(f"{stem}.attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        *(f"{stem}.cross.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")),
        *(f"{stem}.mlp.{name}.weight" for name in ("wi_0", "wi_1", "wo")),
        f"{stem}.other.q_proj.weight",  # alone it is fused with nothing
    )
    groups = {one.name.removeprefix(f"{stem}."): one.group.removeprefix(f"{stem}.") for one in found_layers(stored)}
    assert {groups[f"attn.{name}_proj"] for name in "qkv"} == {"attn:qkv"}
    assert {groups[f"cross.{name}_proj"] for name in "qkv"} == {"cross:qkv"}
    assert groups["mlp.wi_0"] == groups["mlp.wi_1"] == "mlp:gate_up"
    assert groups["attn.out_proj"] == "attn:out_proj"
    assert groups["mlp.wo"] == "mlp:wo"
    assert groups["other.q_proj"] == "other:q_proj"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.ln.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.router.weight",
        "model.layers.0.conv1d.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "model.layers.0.embed_positions.weight",
        "feature_extractor.conv_layers.0.proj.weight",
        "classifier.0.dense.weight",
        "lm_head.weight",
        "classifier.0.weight",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.mixer.A_log",
    ],
)
def test_what_is_no_linear_layer_of_a_block_is_left_alone(name: str) -> None:
    assert found_layers(headers(name)) == ()


def test_other_shapes_and_dtypes_are_left_alone() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert found_layers(headers(name))
    assert found_layers(headers(name, shape=(64,))) == ()
    assert found_layers(headers(name, shape=(8, 64, 64))) == ()
    assert found_layers(headers(name, dtype="I8")) == ()
    assert found_layers(headers("model.layers.0.mlp.gate_proj.weight"))  # a gate that is no router


def test_kinds_and_inputs_are_told_by_the_config() -> None:
    assert kind_of_class(["GPTJForCausalLM"]) == "decoder"
    assert kind_of_class(["DebertaV2Model"]) == "other"
    assert kind_of_class([]) == "other"
    assert several_inputs({"text_config": {}, "vision_config": {}}) == ["text_config", "vision_config"]
    assert several_inputs({"text_config": {}}) == []
