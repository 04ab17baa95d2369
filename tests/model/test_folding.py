"""Which groups have a producer that can take factors over, and which must not have one."""

from __future__ import annotations

import json

import pytest
import tiny
import tiny_more

from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.folding import producers

GATED = {
    "qkv": "input_layernorm",
    "o": "self_attn.v_proj",
    "gate_up": "post_attention_layernorm",
    "down": "mlp.up_proj",
}
EXPECTED = {
    tiny.tiny_llama: GATED,
    tiny.tiny_qwen2: GATED,
    tiny.tiny_qwen3: GATED,
    tiny.tiny_gemma2: GATED | {"gate_up": "pre_feedforward_layernorm"},
    tiny.tiny_gemma3: GATED | {"gate_up": "pre_feedforward_layernorm"},
    tiny.tiny_opt: {
        "qkv": "self_attn_layer_norm",
        "o": "self_attn.v_proj",
        "fc1": "final_layer_norm",
        "fc2": "fc1",
    },
    tiny.tiny_gpt2: {"qkv": "ln_1", "o": "attn.c_attn", "fc": "ln_2"},
    tiny.tiny_bert: {"o": "attention.self.value"},
    tiny_more.tiny_mpnet: {"o": "attention.attn.v"},
}


def found(folder):
    checkpoint = open_checkpoint(folder)
    return producers(checkpoint, anatomy(checkpoint))


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_every_block_has_the_producers_of_its_architecture(tmp_path, make):
    folder = make(tmp_path / "model")
    parts = anatomy(open_checkpoint(folder))
    expected = {
        f"{parts.block_name(block)}:{group}": f"{parts.block_name(block)}.{path}"
        for block in range(parts.depth)
        for group, path in EXPECTED[make].items()
    }
    assert {group: producer.module for group, producer in found(folder).items()} == expected
    tensors = open_checkpoint(folder).tensors
    for producer in found(folder).values():
        assert producer.weight in tensors
        assert (producer.bias is not None) == (producer.weight.removesuffix("weight") + "bias" in tensors)


def test_the_first_block_of_modernbert_has_no_norm_in_front_of_it(tmp_path):
    named = {group: producer.module for group, producer in found(tiny_more.tiny_modernbert(tmp_path / "m")).items()}
    later = {"qkv": "attn_norm", "o": "attn.Wqkv", "gate_up": "mlp_norm", "down": "mlp.Wi"}
    assert {group: path for group, path in named.items() if group.startswith("layers.1:")} == {
        f"layers.1:{group}": f"layers.1.{path}" for group, path in later.items()
    }
    first = {group.partition(":")[2] for group in named if group.startswith("layers.0:")}
    assert first == {"o", "gate_up", "down"}


def test_only_gemma_norms_multiply_by_one_more(tmp_path):
    norms = {
        make: [producer.plus_one for producer in found(make(tmp_path / make.__name__)).values()]
        for make in (tiny.tiny_llama, tiny.tiny_gemma3)
    }
    assert not any(norms[tiny.tiny_llama])
    assert norms[tiny.tiny_gemma3] == [True, False, True, False] * 3


def test_query_heads_of_a_group_share_the_channels_of_their_value_head(tmp_path):
    producer = found(tiny.tiny_llama(tmp_path / "model"))["model.layers.0:o"]  # 8 query heads on 2 value heads, of 8
    assert (producer.channels, producer.head_dim, producer.repeats) == (16, 8, 4)
    assert [producer.channel_of(i) for i in (0, 7, 8, 31, 32, 39, 63)] == [0, 7, 0, 7, 8, 15, 15]


def test_fused_values_are_the_last_third_of_the_rows(tmp_path):
    producer = found(tiny.tiny_gpt2(tmp_path / "model"))["transformer.h.1:o"]
    assert (producer.first_row, producer.channels, producer.repeats) == (128, 64, 1)


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_an_opt_config_rules_out_is_left_out(tmp_path):
    folder = tiny.tiny_opt(tmp_path / "model")
    change_config(folder, activation_function="gelu")
    assert {group.rpartition(":")[2] for group in found(folder)} == {"qkv", "o", "fc1"}
    change_config(folder, do_layer_norm_before=False)
    assert {group.rpartition(":")[2] for group in found(folder)} == {"o"}


def test_heads_that_do_not_divide_the_width_give_no_producer(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "model")
    change_config(folder, num_attention_heads=7)
    assert {group.rpartition(":")[2] for group in found(folder)} == {"qkv", "gate_up", "down"}


def test_a_group_with_a_layer_that_keeps_its_weight_is_left_out(tmp_path):
    checkpoint = open_checkpoint(tiny.tiny_llama(tmp_path / "model"))
    parts = anatomy(checkpoint)
    names = {layer.name for layer in parts.layers}
    assert producers(checkpoint, parts, names) == producers(checkpoint, parts)
    left = producers(checkpoint, parts, names - {"model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"})
    assert producers(checkpoint, parts).keys() - left.keys() == {"model.layers.1:qkv", "model.layers.0:gate_up"}
    assert left["model.layers.0:down"].module == "model.layers.0.mlp.up_proj"
