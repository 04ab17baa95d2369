"""Round trips of quantized weights through the formats, and what config.json says about them."""

from __future__ import annotations

import json
import re
import stat

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from written import W4, W8A8, W8A16, write

from compress.formats.read import Reader
from compress.model.checkpoint import open_checkpoint
from compress.scheme import Scheme

PAIRS = [
    ("compressed-tensors", W4),
    ("compressed-tensors", Scheme(4, -1)),
    ("compressed-tensors", W8A16),
    ("compressed-tensors", Scheme(8, 64)),
    ("compressed-tensors", W8A8),
    ("gptq", W4),
    ("gptq", Scheme(4, 64)),
    ("gptq", Scheme(4, -1)),
    ("gptq", W8A16),
    ("gptq", Scheme(8, 32)),
]


@pytest.fixture(scope="module")
def special_llama(tmp_path_factory):
    """A bfloat16 Llama with a zero row, a zero group, an all-positive and an all-negative group."""
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)
    return edit(folder, special_groups)


def special_groups(tensors):
    weight = tensors["model.layers.0.self_attn.q_proj.weight"]
    weight[5] = 0
    weight[7, :32] = 0
    weight[9, :32] = torch.linspace(0.1, 3.2, 32)
    weight[11, :32] = -torch.linspace(0.1, 3.2, 32)


def edit(folder, change):
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_equal(found, expected):
    assert found.scheme == expected.scheme
    assert found.codes.dtype == torch.int8
    assert torch.equal(found.codes, expected.codes)
    assert found.scale.dtype == expected.scale.dtype
    assert torch.equal(found.scale, expected.scale)
    assert (found.zero_point is None) == (expected.zero_point is None)
    if found.zero_point is not None:
        assert found.zero_point.dtype == torch.int8
        assert torch.equal(found.zero_point, expected.zero_point)


@pytest.mark.parametrize(("format_name", "scheme"), PAIRS, ids=lambda value: getattr(value, "label", value))
def test_the_reader_gives_back_what_was_written(special_llama, tmp_path, format_name, scheme):
    written = write(special_llama, tmp_path, format_name, scheme)
    reader = Reader(tmp_path)
    assert sorted(reader.quantized_names) == sorted(written.weights)
    for name, weight in written.weights.items():
        assert_equal(reader.quantized(name), weight)
    query = reader.quantized("model.layers.0.self_attn.q_proj")
    dense = query.dequantize(torch.float32)
    assert bool((query.scale > 0).all())
    assert not dense[5].any()
    assert not dense[7, :32].any()
    state = reader.state_dict(torch.float32)
    assert state.keys() == written.source.tensors.keys()
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], dense)


@pytest.mark.parametrize(("format_name", "scheme"), PAIRS, ids=lambda value: getattr(value, "label", value))
def test_files_are_exactly_as_large_as_predicted(special_llama, tmp_path, format_name, scheme):
    written = write(special_llama, tmp_path, format_name, scheme, max_shard_size=20_000)
    assert len(written.shards) > 3
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert sizes == {shard.file: shard.nbytes for shard in written.shards}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(shard.data_bytes for shard in written.shards)
    assert index["weight_map"] == {t.name: shard.file for shard in written.shards for t in shard.tensors}
    for shard in written.shards:
        with safe_open(tmp_path / shard.file, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert len(open_checkpoint(tmp_path).tensors) == len(index["weight_map"])


def test_sharding_does_not_change_the_weights(special_llama, tmp_path):
    whole = write(special_llama, tmp_path / "whole", "gptq", W4)
    write(special_llama, tmp_path / "split", "gptq", W4, max_shard_size=3_000)
    one, other = open_checkpoint(whole.stage), open_checkpoint(tmp_path / "split")
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)


def test_gptq_in_the_file_follows_the_description_of_the_format(special_llama, tmp_path):
    written = write(special_llama, tmp_path, "gptq", W4)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    weight = written.weights[name]
    codes, scales = tensors[f"{name}.qweight"], tensors[f"{name}.scales"]
    zeros, groups = tensors[f"{name}.qzeros"], tensors[f"{name}.g_idx"]
    assert groups.tolist() == [column // 32 for column in range(128)]
    dense = weight.dequantize(torch.float32)
    for row, column in [(0, 0), (3, 17), (63, 127), (40, 64)]:
        code = (int(codes[column // 8, row]) >> (4 * (column % 8))) & 15
        zero = ((int(zeros[column // 32, row // 8]) >> (4 * (row % 8))) & 15) + 1
        assert zero == 8
        assert float(scales[column // 32, row]) * (code - zero) == float(dense[row, column])


@pytest.mark.parametrize("scheme", [W4, W8A16], ids=lambda scheme: scheme.label)
def test_conv1d_weights_are_stored_like_those_of_an_equal_linear_layer(tmp_path, scheme):
    """attn.c_proj is square: a transposition would raise nothing, so numbers are compared."""
    written = write(tiny.tiny_gpt2(tmp_path / "gpt2"), tmp_path / "out", "gptq", scheme)
    assert len(written.weights) == 8
    assert not any("lm_head" in name for name in open_checkpoint(tmp_path / "out").tensors)
    reader = Reader(tmp_path / "out")
    state = reader.state_dict(torch.float32)
    for name, weight in written.weights.items():
        layer = written.layer(name)
        stem = layer.tensor.removesuffix(".weight")
        assert_equal(reader.quantized(stem), weight)
        assert torch.equal(state[layer.tensor], weight.dequantize(torch.float32).T)
        error = (state[layer.tensor] - written.source.read(layer.tensor)).abs().max()
        assert error <= weight.scale.float().max() * 0.51


def test_gpt2_is_refused_where_stock_loaders_would_leave_its_weights_at_random(tmp_path):
    from compress.errors import UsageError

    with pytest.raises(UsageError, match="Conv1D") as caught:
        write(tiny.tiny_gpt2(tmp_path / "gpt2"), tmp_path / "out", "compressed-tensors", W4)
    assert str(caught.value).count("Conv1D") == 8
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("make", [tiny.tiny_qwen2, tiny.tiny_opt, tiny.tiny_llama], ids=lambda f: f.__name__)
def test_biases_are_neither_lost_nor_invented(tmp_path, make, format_name):
    def threes(tensors):
        for name, tensor in tensors.items():
            if name.endswith(".bias"):
                tensor.fill_(3.0)

    source = edit(make(tmp_path / "source", dtype=torch.bfloat16), threes)
    written = write(source, tmp_path / "out", format_name, W4)
    before = {name: info for name, info in written.source.tensors.items() if name.endswith(".bias")}
    result = open_checkpoint(tmp_path / "out")
    after = {name: info for name, info in result.tensors.items() if name.endswith(".bias")}
    assert after.keys() == before.keys()
    for name, info in after.items():
        assert (info.dtype, info.shape) == ("BF16", before[name].shape)
        assert bool((result.read(name) == 3.0).all())


def test_a_tied_head_is_written_once_and_named_as_untouched(tmp_path):
    written = write(
        tiny.tiny_opt(tmp_path / "opt"),
        tmp_path / "out",
        "compressed-tensors",
        lambda layer: None if layer.name.endswith("q_proj") else W4,
    )
    result = open_checkpoint(tmp_path / "out")
    assert "lm_head.weight" not in result.tensors
    embedding = "model.decoder.embed_tokens.weight"
    assert torch.equal(result.read(embedding), written.source.read(embedding))
    query = "model.decoder.layers.0.self_attn.q_proj"
    assert torch.equal(result.read(f"{query}.weight"), written.source.read(f"{query}.weight"))
    ignore = result.config["quantization_config"]["ignore"]
    assert {"lm_head", query, "model.decoder.layers.1.self_attn.q_proj"} <= set(ignore)
    assert not set(ignore) & set(written.weights)


def test_one_scheme_applies_to_the_class_and_several_have_patterns(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    write(source, tmp_path / "one", "compressed-tensors", W8A8)
    config = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "int-quantized"
    assert config["quantization_status"] == "compressed"
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["input_activations"]["dynamic"] is True
    mixed = write(
        source,
        tmp_path / "mixed",
        "compressed-tensors",
        lambda layer: W8A8 if layer.name.endswith("down_proj") else W4,
    )
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert sorted(map(len, targets)) == [1, 6]
    assert [r"re:(?:.*\.)?layers\.\d+\.mlp\.down_proj$"] in targets
    reader = Reader(tmp_path / "mixed")
    assert reader.scheme("model.layers.0.mlp.down_proj") == W8A8
    for name, weight in mixed.weights.items():
        assert_equal(reader.quantized(name), weight)


def test_gptq_config_names_exceptions_only_where_there_are_some(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    write(source, tmp_path / "all", "gptq", W4)
    config = json.loads((tmp_path / "all" / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }
    assert json.loads((tmp_path / "all" / "quantize_config.json").read_text()) == config
    skipped = ("q_proj", "k_proj", "v_proj")
    write(source, tmp_path / "skip", "gptq", lambda layer: None if layer.name.endswith(skipped) else W4)
    config = json.loads((tmp_path / "skip" / "config.json").read_text())["quantization_config"]
    rules = [rule.removeprefix("-:") for rule in config["dynamic"]]
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.qkv_proj"):
        assert any(re.match(rule, name) for rule in rules)
    assert not any(re.match(rule, "model.layers.0.self_attn.o_proj") for rule in rules)
    (inside,) = config["modules_in_block_to_quantize"]
    assert inside == ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def test_gptq_with_two_schemes_reads_back(tmp_path):
    written = write(
        tiny.tiny_llama(tmp_path / "source"),
        tmp_path / "out",
        "gptq",
        lambda layer: W8A16 if layer.name.endswith("down_proj") else W4,
    )
    reader = Reader(tmp_path / "out")
    for name, weight in written.weights.items():
        assert_equal(reader.quantized(name), weight)


def test_config_keeps_everything_of_the_source(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", W4)
    before = (tmp_path / "source" / "config.json").read_text()
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    del after["quantization_config"]
    assert json.dumps(after, indent=2, sort_keys=True).strip() == before.strip()
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= set(written.names)
    assert list(written.names) == sorted(path.name for path in (tmp_path / "out").iterdir())


def test_files_get_the_umasks_permissions(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "gptq", W4, max_shard_size=30_000)
    probe = tmp_path / "probe"
    probe.write_text("")
    expected = stat.S_IMODE(probe.stat().st_mode)
    modes = {name: stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) for name in written.names}
    assert set(modes.values()) == {expected}


def test_the_same_input_gives_the_same_bytes(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    contents = []
    for name in ("first", "second"):
        written = write(source, tmp_path / name, "compressed-tensors", W4, max_shard_size=30_000)
        contents.append({file: (tmp_path / name / file).read_bytes() for file in written.names})
    assert contents[0] == contents[1]
