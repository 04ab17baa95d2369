"""Pruned models against stock transformers: sliced by the table, they compute what the masked original computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_more
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file

from compress.errors import UsageError
from compress.model.anatomy import Anatomy, anatomy
from compress.model.blocks import Recorder
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.prunable import PRUNABLE, Unit, output_of, shape_of, unit_axes
from compress.model.pruned import (
    becomes_mistral,
    pruned_checkpoint,
    pruned_config,
    pruned_name,
    source_name,
    stateable,
)
from compress.model.shapes import Kept, Shape

Builder = Callable[..., Path]

TINY: dict[str, tuple[Builder, dict[str, Any]]] = {
    "llama": (tiny.tiny_llama, {}),
    "mistral": (tiny.tiny_mistral, {}),
    "qwen2": (tiny.tiny_qwen2, {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}),
    "qwen3": (tiny.tiny_qwen3, {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}),
    "smollm3": (tiny.tiny_smollm3, {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8}),
    "olmo2": (tiny.tiny_olmo2, {}),
    "phi3": (tiny.tiny_phi3, {}),
    "gemma": (tiny.tiny_gemma, {}),
    "gemma2": (tiny.tiny_gemma2, {"sliding_window": 8}),
    "gemma3_text": (
        tiny.tiny_gemma3,
        {"sliding_window": 8, "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]},
    ),
    "opt": (tiny.tiny_opt, {}),
    "gpt2": (tiny.tiny_gpt2, {}),
    "gpt_neox": (tiny.tiny_gpt_neox, {}),
    "bert": (tiny.tiny_bert, {}),
    "roberta": (tiny.tiny_roberta, {}),
    "xlm-roberta": (tiny_more.tiny_xlm_roberta, {}),
    "distilbert": (tiny.tiny_distilbert, {}),
    "mpnet": (tiny_more.tiny_mpnet, {}),
    "modernbert": (tiny_more.tiny_modernbert, {"mlp_bias": True, "attention_bias": True}),
}
DEPTH = {"gpt2": "n_layer", "distilbert": "n_layers"}


def built(model_type: str, folder: Path, **overrides: Any) -> tuple[Checkpoint, Anatomy]:
    """Four layers, small windows."""
    build, fields = TINY[model_type]
    path = build(folder, **{DEPTH.get(model_type, "num_hidden_layers"): 4} | fields | overrides)
    checkpoint = open_checkpoint(path)
    return checkpoint, anatomy(checkpoint)


def some(before: Shape, after: Shape, blocks: tuple[int, ...], seed: int = 0) -> list[Kept]:
    """Random units, others in every block."""
    random = torch.Generator().manual_seed(seed)

    def pick(count: int, total: int) -> list[int]:
        return sorted(torch.randperm(total, generator=random)[:count].tolist())

    kept = []
    for block in blocks:
        kv = pick(after.kv_heads, before.kv_heads)
        group = before.heads // before.kv_heads
        heads = [one * group + head for one in kv for head in pick(after.heads // after.kv_heads, group)]
        kept.append(Kept(block, tuple(pick(after.ffn, before.ffn)), tuple(heads), tuple(kv)))
    return kept


def sliced(checkpoint: Checkpoint, parts: Anatomy, after: Shape, kept: list[Kept], folder: Path) -> Path:
    """The pruned folder, its weights cut by `unit_axes`."""
    layers = tuple(one.block for one in kept)
    planned = pruned_checkpoint(checkpoint, parts, after, layers)
    axes = {name: cut for one in kept for name, cut in unit_axes(checkpoint, parts, one).items()}
    state = {}
    for name, info in planned.tensors.items():
        tensor = checkpoint.read(source_name(parts, name, layers))
        for axis, indices in axes.get(source_name(parts, name, layers), ()):
            tensor = tensor.index_select(axis, torch.tensor(indices))
        assert tensor.shape == info.shape, name
        state[name] = tensor.contiguous()
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(planned.config))
    return folder


def masked(checkpoint: Checkpoint, parts: Anatomy, kept: list[Kept]) -> torch.nn.Module:
    """The original class and size: zeros in the columns of removed units, removed layers hand their input on."""
    model = stock(checkpoint.folder, checkpoint.config)
    blocks = model.get_submodule(parts.blocks[0].rpartition(".")[0])
    assert isinstance(blocks, torch.nn.ModuleList)
    before = shape_of(checkpoint, parts)
    for one in kept:
        named: list[tuple[Unit, tuple[int, ...]]] = [("ffn", one.ffn), ("heads", one.heads)]
        for unit, units in named:
            output = output_of(parts, one.block, unit)
            weight = model.get_submodule(output.name).get_parameter("weight").data
            size = output.width // getattr(before, unit)
            gone = [index for index in range(output.width) if index // size not in units]
            (weight if output.transposed else weight.T)[gone] = 0
    for index in set(range(parts.depth)) - {one.block for one in kept}:
        blocks[index] = Recorder(blocks[index], returns_tuple=parts.architecture.tuples)
    return model


def stock(folder: Path, config: Any) -> torch.nn.Module:
    """Loaded as anybody would, and nothing left at random."""
    cls = getattr(transformers, config["architectures"][0])
    model, told = cls.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


@torch.no_grad()
def answer(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(2, 256, (2, 48), generator=torch.Generator().manual_seed(1))
    output = model(input_ids=ids, use_cache=False) if not hasattr(model, "encoder") else model(input_ids=ids)
    return output.logits if "logits" in output else output.last_hidden_state


def shapes_of(model_type: str) -> list[tuple[int, int]]:
    if model_type in ("gemma2", "gemma3_text"):
        return [(4, 2), (2, 1)]
    if PRUNABLE[model_type].heads_fixed:
        return []
    return [(4, 2), (6, 2), (3, 1)]


CASES = [(name, None) for name in TINY] + [(name, pair) for name in TINY for pair in shapes_of(name)]


@pytest.mark.parametrize(("model_type", "heads"), CASES)
def test_a_sliced_model_is_the_masked_original(model_type: str, heads: tuple[int, int] | None, tmp_path: Path) -> None:
    checkpoint, parts = built(model_type, tmp_path / "m")
    before = shape_of(checkpoint, parts)
    after = Shape(before.ffn * 3 // 8, *(heads or (before.heads, before.kv_heads)), 3)
    kept = some(before, after, (0, 2, 3))
    folder = sliced(checkpoint, parts, after, kept, tmp_path / "p")
    again = open_checkpoint(folder)
    assert shape_of(again, anatomy(again)) == after
    ours, theirs = answer(stock(folder, again.config)), answer(masked(checkpoint, parts, kept))
    assert (ours - answer(stock(checkpoint.folder, checkpoint.config))).abs().max() > 1e-2
    assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


def test_a_llama_of_heads_that_do_not_divide_becomes_a_mistral(tmp_path: Path) -> None:
    """960 = 15 x 64 in small: 60 = 15 x 4, 9 of 15 heads."""
    sizes = {"hidden_size": 60, "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 4}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 16, "rope_theta": 5000.0}
    checkpoint, parts = built("llama", tmp_path / "m", rope_parameters=scaling, **sizes)
    before = shape_of(checkpoint, parts)
    after = Shape(before.ffn, 9, 3, 4)
    assert becomes_mistral(checkpoint, parts, 9)
    kept = some(before, after, (0, 1, 2, 3))
    folder = sliced(checkpoint, parts, after, kept, tmp_path / "p")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert (config["head_dim"], config["sliding_window"]) == (4, None)
    with pytest.raises(Exception, match="not a multiple"):
        transformers.LlamaConfig(**sizes | {"num_attention_heads": 9, "num_key_value_heads": 3})
    difference = answer(stock(folder, config)) - answer(masked(checkpoint, parts, kept))
    assert difference.abs().max() <= 1e-5


def test_a_llama_whose_heads_divide_stays_one(tmp_path: Path) -> None:
    checkpoint, parts = built("llama", tmp_path / "m")
    config = pruned_config(checkpoint, parts, Shape(128, 4, 2, 4), (0, 1, 2, 3))
    assert config["model_type"] == "llama"
    assert "sliding_window" not in config


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"mlp_bias": True}])
def test_a_llama_with_biases_cannot_become_a_mistral(fields: dict[str, bool], tmp_path: Path) -> None:
    checkpoint, parts = built("llama", tmp_path / "m", **fields)
    assert [heads for heads in range(1, 9) if stateable(checkpoint, parts, heads)] == [1, 2, 4, 8]
    assert not becomes_mistral(checkpoint, parts, 6)


def test_what_a_llama_leaves_out_is_stated_for_mistral(tmp_path: Path) -> None:
    """The two config classes have other defaults."""
    checkpoint, parts = built("llama", tmp_path / "m")
    bare = {key: value for key, value in checkpoint.config.items() if key != "max_position_embeddings"}
    short = replace(checkpoint, config=bare)
    config = pruned_config(short, parts, Shape(128, 6, 2, 4), (0, 1, 2, 3))
    before, after = transformers.LlamaConfig(**bare), transformers.MistralConfig(**config)
    for name in ("max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters", "vocab_size"):
        assert getattr(after, name) == getattr(before, name)


@pytest.mark.parametrize("model_type", [name for name in TINY if not PRUNABLE[name].heads_fixed])
def test_the_divisor_rule_is_the_config_classs_own(model_type: str, tmp_path: Path) -> None:
    checkpoint, parts = built(model_type, tmp_path / "m")
    for heads in range(1, 9):
        config = dict(checkpoint.config) | {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8}
        if model_type == "llama" and becomes_mistral(checkpoint, parts, heads):
            config["model_type"] = "mistral"
        try:
            transformers.AutoConfig.for_model(**config)
            accepted = True
        except StrictDataclassError:
            accepted = False
        assert stateable(checkpoint, parts, heads) == accepted, heads


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "gpt2", "opt"])
def test_where_heads_are_fixed_fewer_of_them_have_as_many_rows(model_type: str, tmp_path: Path) -> None:
    """Why the tool refuses: the class builds the same matrices, whatever the number of heads and head_dim."""
    checkpoint, parts = built(model_type, tmp_path / "m")
    fewer = dict(checkpoint.config) | {PRUNABLE[model_type].heads: 2, "head_dim": 16}
    with torch.device("meta"):
        model = getattr(transformers, fewer["architectures"][0])(transformers.AutoConfig.for_model(**fewer))
    assert model.get_submodule(output_of(parts, 0, "heads").name).get_parameter("weight").shape == (64, 64)
    assert not stateable(checkpoint, parts, 2)


LISTS = ("layer_types", "no_rope_layers")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "modernbert"])
def test_lists_that_config_json_leaves_to_the_class_keep_their_meaning(model_type: str, tmp_path: Path) -> None:
    build, fields = TINY[model_type]
    fields = {key: value for key, value in fields.items() if key != "layer_types"}
    sizes = {"num_hidden_layers": 13} | ({"layer_types": None} if model_type == "gemma3_text" else {})
    checkpoint = open_checkpoint(build(tmp_path / "m", **fields | sizes))
    parts, before = anatomy(checkpoint), shape_of(checkpoint, anatomy(checkpoint))
    stated = checkpoint.config
    bare = {key: value for key, value in stated.items() if key not in LISTS}
    short = replace(checkpoint, config=bare)
    kept = (0, 2, 3, 5, 7, 8, 11)
    after = Shape(before.ffn, before.heads, before.kv_heads, len(kept))
    for source in (checkpoint, short):
        config = pruned_config(source, parts, after, kept)
        loaded = transformers.AutoConfig.for_model(**config)
        for name in LISTS:
            if name in stated:
                assert config[name] == [stated[name][layer] for layer in kept]
                assert getattr(loaded, name) == config[name]
    if "max_window_layers" in stated:
        assert config["max_window_layers"] == sum(layer < stated["max_window_layers"] for layer in kept)


def test_names_before_and_after(tmp_path: Path) -> None:
    checkpoint, parts = built("gemma", tmp_path / "m")
    kept = (0, 3)
    after = Shape(64, 8, 2, 2)
    planned = pruned_checkpoint(checkpoint, parts, after, kept)
    for name in planned.tensors:
        assert pruned_name(parts, source_name(parts, name, kept), kept) == name
    assert source_name(parts, "model.layers.1.mlp.up_proj.weight", kept) == "model.layers.3.mlp.up_proj.weight"
    assert pruned_name(parts, "model.layers.1.mlp.up_proj.weight", kept) is None
    assert planned.tensors["model.embed_tokens.weight"].shape == (256, 64)
    assert "lm_head.weight" not in planned.tensors  # tied
    assert not planned.has_weights


def test_without_chosen_layers_the_first_ones_stand_for_them(tmp_path: Path) -> None:
    checkpoint, parts = built("modernbert", tmp_path / "m")
    shape = Shape(48, 4, 4, 3)
    first, other = pruned_checkpoint(checkpoint, parts, shape), pruned_checkpoint(checkpoint, parts, shape, (0, 2, 3))
    assert first.tensors == other.tensors
    assert first.config != other.config  # another layer has the wide attention


def test_what_other_versions_wrote_about_single_layers_is_dropped(tmp_path: Path) -> None:
    checkpoint, parts = built("bert", tmp_path / "m")
    old = dict(checkpoint.config) | {"pruned_heads": {"1": [0]}, "per_layer_config": None}
    source = replace(checkpoint, config=old)
    config = pruned_config(source, parts, Shape(64, 4, 4, 4), (0, 1, 2, 3))
    assert not {"pruned_heads", "per_layer_config", "head_dim"} & set(config)
    assert config["intermediate_size"] == 64


def test_a_list_of_another_length_is_refused(tmp_path: Path) -> None:
    checkpoint, parts = built("gemma2", tmp_path / "m")
    odd = replace(checkpoint, config=dict(checkpoint.config) | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(UsageError, match="layer_types has 3 items; the model has 4 layers"):
        pruned_config(odd, parts, Shape(128, 8, 2, 2), (0, 1))
