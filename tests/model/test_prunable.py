"""The table of prunable model types: what it finds in a block, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_moe
import tiny_more
import transformers

from compress.errors import UsageError
from compress.model.anatomy import Anatomy, anatomy
from compress.model.architectures import ARCHITECTURES
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.prunable import (
    PRUNABLE,
    columns,
    head_size,
    heads_refusal,
    layers_refusal,
    output_of,
    producers_of,
    prunable,
    shape_of,
    unit_axes,
)
from compress.model.safetensors_header import TensorInfo
from compress.model.shapes import Kept, Shape


def opened(folder: Path) -> tuple[Checkpoint, Anatomy]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, anatomy(checkpoint)


def test_every_listed_dense_type_has_an_entry() -> None:
    assert set(PRUNABLE) == {name for name, entry in ARCHITECTURES.items() if entry.linears and not entry.experts}


@pytest.mark.parametrize("model_type", sorted(PRUNABLE))
def test_every_path_is_a_layer_of_the_architecture(model_type: str) -> None:
    entry = PRUNABLE[model_type]
    paths = [one.module for one in (*entry.attention_in, *entry.ffn_in)] + [entry.attention_out, entry.ffn_out]
    assert set(paths) <= {path for path, _ in ARCHITECTURES[model_type].linears}
    assert bool(entry.attention_in) != bool(entry.heads_fixed)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_shape_is_counted_in_the_tensors(kv_heads: int, tmp_path: Path) -> None:
    """MHA, GQA and MQA; no word of kv_heads or of the width is taken from config.json."""
    folder = tiny.tiny_llama(tmp_path / "m", num_key_value_heads=kv_heads)
    config = json.loads((folder / "config.json").read_text())
    for key in ("num_key_value_heads", "intermediate_size", "head_dim"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint, parts = opened(folder)
    assert shape_of(checkpoint, parts) == Shape(128, 8, kv_heads, 2)
    assert head_size(checkpoint, parts) == 8


def test_shape_of_a_fused_projection(tmp_path: Path) -> None:
    assert shape_of(*opened(tiny.tiny_phi3(tmp_path / "m"))) == Shape(128, 8, 2, 2)


def test_key_and_value_heads_that_are_only_stated(tmp_path: Path) -> None:
    assert shape_of(*opened(tiny.tiny_olmo2(tmp_path / "olmo2"))) == Shape(128, 8, 2, 2)
    assert shape_of(*opened(tiny.tiny_bert(tmp_path / "bert"))).kv_heads == 4


def test_qwen3_has_heads_larger_than_hidden_by_heads(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_qwen3(tmp_path / "m", head_dim=32))
    assert shape_of(checkpoint, parts) == Shape(128, 8, 2, 2)
    assert head_size(checkpoint, parts) == 32


def test_rows_and_columns_of_a_gated_block(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_qwen2(tmp_path / "m"))
    axes = unit_axes(checkpoint, parts, Kept(1, tuple(range(3, 128)), (4, 7), (1,)))
    stem = "model.layers.1."
    queries, values = columns((4, 7), 8), columns((1,), 8)
    assert axes == {
        f"{stem}mlp.gate_proj.weight": ((0, tuple(range(3, 128))),),
        f"{stem}mlp.up_proj.weight": ((0, tuple(range(3, 128))),),
        f"{stem}mlp.down_proj.weight": ((1, tuple(range(3, 128))),),
        f"{stem}self_attn.q_proj.weight": ((0, queries),),
        f"{stem}self_attn.q_proj.bias": ((0, queries),),
        f"{stem}self_attn.k_proj.weight": ((0, values),),
        f"{stem}self_attn.k_proj.bias": ((0, values),),
        f"{stem}self_attn.v_proj.weight": ((0, values),),
        f"{stem}self_attn.v_proj.bias": ((0, values),),
        f"{stem}self_attn.o_proj.weight": ((1, queries),),
    }


def test_what_loses_nothing_is_not_named(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_llama(tmp_path / "m"))
    everything = tuple(range(128))
    assert unit_axes(checkpoint, parts, Kept(0, everything, tuple(range(8)), (0, 1))) == {}
    fewer_queries = unit_axes(checkpoint, parts, Kept(0, everything, (0, 1, 4, 5), (0, 1)))
    assert set(fewer_queries) == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo"}


def test_conv1d_lies_on_its_side(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_gpt2(tmp_path / "m"))
    axes = unit_axes(checkpoint, parts, Kept(0, (1, 5), (0, 1, 2, 3), (0, 1, 2, 3)))
    assert axes == {
        "transformer.h.0.mlp.c_fc.weight": ((1, (1, 5)),),
        "transformer.h.0.mlp.c_fc.bias": ((0, (1, 5)),),
        "transformer.h.0.mlp.c_proj.weight": ((0, (1, 5)),),
    }


def test_both_halves_of_a_fused_layer(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny_more.tiny_modernbert(tmp_path / "m"))
    axes = unit_axes(checkpoint, parts, Kept(1, (0, 127), tuple(range(4)), tuple(range(4))))
    assert axes == {"layers.1.mlp.Wi.weight": ((0, (0, 127, 128, 255)),), "layers.1.mlp.Wo.weight": ((1, (0, 127)),)}
    assert [path.name for path, _ in producers_of(parts, 1, "ffn")] == ["layers.1.mlp.Wi"]
    assert output_of(parts, 1, "kv_heads").name == "layers.1.attn.Wo"


def test_a_base_model_in_a_headed_class_is_found_under_its_prefix(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    folder = tiny.save(transformers.BertForMaskedLM(config), tmp_path / "m")
    checkpoint, parts = opened(folder)
    assert shape_of(checkpoint, parts) == Shape(128, 4, 4, 2)
    names = set(unit_axes(checkpoint, parts, Kept(0, (0,), (0, 1, 2, 3), (0, 1, 2, 3))))
    assert names == {
        f"bert.encoder.layer.0.{name}"
        for name in ("intermediate.dense.weight", "intermediate.dense.bias", "output.dense.weight")
    }


def widened(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Checkpoint:
    tensors = dict(checkpoint.tensors)
    tensors[name] = TensorInfo(name, tensors[name].dtype, shape, tensors[name].shard)
    return replace(checkpoint, tensors=tensors)


def test_layers_that_differ_are_named(tmp_path: Path) -> None:
    checkpoint, _ = opened(tiny.tiny_llama(tmp_path / "m", num_hidden_layers=3))
    for name, shape in (("gate_proj", (96, 64)), ("up_proj", (96, 64)), ("down_proj", (64, 96))):
        checkpoint = widened(checkpoint, f"model.layers.1.mlp.{name}.weight", shape)
    with pytest.raises(UsageError, match="differ in shape") as caught:
        shape_of(checkpoint, anatomy(checkpoint))
    assert "model.layers.1.mlp.down_proj: 64 x 96 without bias instead of 64 x 128" in str(caught.value)
    assert "layers.0" not in str(caught.value)


def test_a_config_that_speaks_of_single_layers_is_refused(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_llama(tmp_path / "m"))
    odd = replace(checkpoint, config=dict(checkpoint.config) | {"per_layer_config": {"0": {"intermediate_size": 8}}})
    with pytest.raises(UsageError, match="per_layer_config"):
        shape_of(odd, parts)


@pytest.mark.parametrize("heads", [None, 0, 7, 128, "8", 12, 16])
def test_heads_that_do_not_fit_the_tensors(heads: Any, tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_llama(tmp_path / "m"))
    odd = replace(checkpoint, config=dict(checkpoint.config) | {"num_attention_heads": heads})
    with pytest.raises(UsageError, match="num_attention_heads"):
        shape_of(odd, parts)


def test_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    _, parts = opened(tiny_moe.tiny_mixtral(tmp_path / "m"))
    with pytest.raises(UsageError, match=r"mixtral: models with experts are not pruned: each expert"):
        prunable(parts)


def test_types_without_an_entry_are_refused(tmp_path: Path) -> None:
    _, parts = opened(tiny_more.tiny_t5(tmp_path / "m"))
    with pytest.raises(UsageError, match="t5") as caught:
        prunable(parts)
    assert caught.value.hint is not None
    assert "llama" in caught.value.hint


def test_reasons_that_a_model_has_of_its_own(tmp_path: Path) -> None:
    checkpoint, parts = opened(tiny.tiny_gpt2(tmp_path / "gpt2", scale_attn_by_inverse_layer_idx=True))
    assert "number of the layer" in str(layers_refusal(checkpoint))
    checkpoint, parts = opened(tiny.tiny_phi3(tmp_path / "phi3"))
    assert heads_refusal(checkpoint, parts) is None
    scaled = dict(checkpoint.config) | {"rope_parameters": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}}
    assert "rotary" in str(heads_refusal(replace(checkpoint, config=scaled), parts))
    checkpoint, parts = opened(tiny.tiny_olmo2(tmp_path / "olmo2"))
    assert "q_norm" in str(heads_refusal(checkpoint, parts))
