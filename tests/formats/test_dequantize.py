"""Quantized folders of ours and of other tools, written by hand here, as the dense models that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from written import FP8, W4, W8A8, W8A16, write

from compress.errors import UsageError
from compress.formats.dequantize import write_dense
from compress.formats.quantized_source import check_dense, dense_headers
from compress.model.checkpoint import open_checkpoint
from compress.progress import Silent
from compress.scheme import Scheme

ASYMMETRIC = Scheme(4, 32, symmetric=False)
LAYER = "model.layers.0.self_attn.q_proj"
BIT_WORD = 32


def dense(folder: Path, target: Path):
    """The dense folder, which must be what its headers foretold."""
    source = open_checkpoint(folder)
    planned, made = dense_headers(source), write_dense(source, target, progress=Silent())
    assert {name: (info.dtype, info.shape) for name, info in made.tensors.items()} == {
        name: (info.dtype, info.shape) for name, info in planned.tensors.items()
    }
    assert dict(made.shard_bytes) == dict(planned.shard_bytes)
    assert made.config == planned.config
    assert not made.is_quantized
    assert made.content_hash == source.content_hash
    return made


OURS = {
    "int4": ("compressed-tensors", W4),
    "int8-weight": ("compressed-tensors", W8A16),
    "int8": ("compressed-tensors", W8A8),
    "fp8": ("compressed-tensors", FP8),
    "zero points": ("compressed-tensors", ASYMMETRIC),
    "8 bits with zero points": ("compressed-tensors", Scheme(8, -1, symmetric=False)),
    "several schemes": ("compressed-tensors", lambda layer: W8A8 if layer.name.endswith("down_proj") else W4),
    "gptq": ("gptq", W4),
    "gptq, rules": ("gptq", lambda layer: W8A16 if layer.name.endswith("down_proj") else W4),
    "gptq_v2": ("gptq_v2", ASYMMETRIC),
    "a skipped layer": ("gptq_v2", lambda layer: None if layer.name.endswith("o_proj") else ASYMMETRIC),
}


@pytest.mark.parametrize("case", OURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_our_own_folders_give_the_weights_that_were_written(tmp_path, case, dtype):
    format_name, choose = OURS[case]
    written = write(tiny.tiny_llama(tmp_path / "m", dtype=dtype), tmp_path / "q", format_name, choose)
    made = dense(tmp_path / "q", tmp_path / "dense")
    for name, info in written.source.tensors.items():
        found, layer = made.read(name), name.removesuffix(".weight")
        assert found.dtype == dtype
        if layer in written.weights:
            expected = written.weights[layer].dequantize(torch.float32).to(dtype)
        else:
            expected = written.source.read(info.name)
        assert torch.equal(found, expected), name
    assert made.tensors.keys() == written.source.tensors.keys()
    assert made.config == written.source.config
    assert (made.folder / "tokenizer.json").read_bytes() == (written.source.folder / "tokenizer.json").read_bytes()


def test_conv1d_weights_are_turned_back(tmp_path):
    written = write(tiny.tiny_gpt2(tmp_path / "m"), tmp_path / "q", "gptq", W4)
    made = dense(tmp_path / "q", tmp_path / "dense")
    for name, weight in written.weights.items():
        tensor = written.layer(name).tensor
        assert torch.equal(made.read(tensor), weight.dequantize(torch.float32).T)


def packed_by_hand(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned [n, m] as one stream of bits down every column: int32 [ceil(n * bits / 32), m]."""
    stream = (values.unsqueeze(1) >> torch.arange(bits).reshape(1, -1, 1)) & 1  # [n, bits, m]
    stream = stream.reshape(-1, values.shape[1])
    stream = torch.cat([stream, stream.new_zeros(-len(stream) % BIT_WORD, values.shape[1])])
    words = stream.reshape(-1, BIT_WORD, values.shape[1]).long() << torch.arange(BIT_WORD).reshape(1, -1, 1)
    return words.sum(dim=1).to(torch.uint32).view(torch.int32)


def quantized_by(folder: Path, block: dict, layer_tensors, file: str | None = None) -> dict[str, torch.Tensor]:
    """Replaces all weights of blocks by what `layer_tensors` makes of (name, weight); returns what they stand for."""
    tensors, expected = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".layers." in name and tensor.dim() == 2:
            parts, expected[name] = layer_tensors(name, tensor.float())
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if file is None:
        config["quantization_config"] = block
    else:
        (folder / file).write_text(json.dumps(block))
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def act_order(bits: int, *, version: int, with_index: bool = True):
    """Columns in groups of 16 by a random order, zero points from 1 up (0 has no place in version 1)."""

    def make(name: str, weight: torch.Tensor):
        generator = torch.Generator().manual_seed(len(name))
        out, width = weight.shape
        groups = width // 16
        index = torch.arange(width) // 16
        if with_index:
            index = index[torch.randperm(width, generator=generator)]
        codes = torch.randint(2**bits, (width, out), generator=generator)
        zeros = torch.randint(1, 2**bits, (groups, out), generator=generator)
        scales = (torch.rand(groups, out, generator=generator) + 0.5).half()
        stored = zeros - 1 if version == 1 else zeros
        parts = {
            "qweight": packed_by_hand(codes, bits),
            "qzeros": packed_by_hand(stored.T, bits).T,
            "scales": scales,
        }
        parts |= {"g_idx": index.to(torch.int32)} if with_index else {}
        return parts, ((codes - zeros[index]).float() * scales[index].float()).T

    return make


def old_autogptq(bits: int) -> dict:
    """It names no method."""
    block = {"bits": bits, "group_size": 16, "damp_percent": 0.01, "desc_act": True, "sym": False}
    return block | {"true_sequential": True, "model_name_or_path": None, "model_file_base_name": "gptq_model-4bit-16g"}


GPTQ = {
    "act order": ({"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": False}, act_order(4, version=1), None),
    "2 bits": ({"quant_method": "gptq", "bits": 2}, act_order(2, version=1), None),
    "3 bits": ({"quant_method": "gptq", "bits": 3}, act_order(3, version=1), None),
    "8 bits": ({"quant_method": "gptq", "bits": 8}, act_order(8, version=1), None),
    "version 2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, act_order(4, version=2), None),
    "no g_idx": ({"quant_method": "gptq", "bits": 4}, act_order(4, version=1, with_index=False), None),
    "old AutoGPTQ": (old_autogptq(4), act_order(4, version=1), "quantize_config.json"),
}


@pytest.mark.parametrize("case", GPTQ)
def test_gptq_of_other_tools(tmp_path, case):
    block, make, file = GPTQ[case]
    folder = tiny.tiny_llama(tmp_path / "m", dtype=torch.float32)
    expected = quantized_by(folder, block, make, file)
    made = dense(folder, tmp_path / "dense")
    assert len(expected) == 14
    for name, weight in expected.items():
        assert torch.equal(made.read(name), weight), name


def compressed(kind: str):
    def make(name: str, weight: torch.Tensor):
        generator = torch.Generator().manual_seed(len(name))
        out, width = weight.shape
        if kind == "act order":
            index = (torch.arange(width) // 16)[torch.randperm(width, generator=generator)]
            codes = torch.randint(-8, 8, (out, width), generator=generator)
            scale = torch.rand(out, width // 16, generator=generator) + 0.5
            parts = {"weight_packed": packed_by_hand((codes + 8).T, 4).T, "weight_scale": scale}
            parts |= {"weight_shape": torch.tensor([out, width]), "weight_g_idx": index.to(torch.int32)}
            return parts, codes * scale[:, index]
        if kind == "unpacked zero points":
            codes = torch.randint(-128, 128, (out, width), generator=generator).to(torch.int8)
            zeros = torch.randint(-128, 128, (out, 1), generator=generator).to(torch.int8)
            scale = torch.rand(out, 1, generator=generator)
            return {"weight": codes, "weight_zero_point": zeros, "weight_scale": scale}, (codes.float() - zeros) * scale
        codes = torch.randn(out, width, generator=generator).to(torch.float8_e4m3fn)
        if kind == "blocks":
            scale = torch.rand(-(-out // 24), -(-width // 24), generator=generator)
            spread = scale.repeat_interleave(24, 0)[:out].repeat_interleave(24, 1)[:, :width]
        else:
            scale = torch.rand(1, generator=generator)
            spread = scale
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.float() * spread

    return make


def group(**weights: object) -> dict:
    return {"g": {"targets": ["Linear"], "weights": weights}}


COMPRESSED = {
    "act order": group(num_bits=4, type="int", symmetric=True, strategy="group", group_size=16, actorder="group"),
    "unpacked zero points": group(num_bits=8, type="int", symmetric=False, strategy="channel"),
    "tensor": group(num_bits=8, type="float", symmetric=True, strategy="tensor"),
    "blocks": group(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[24, 24]),
}


@pytest.mark.parametrize("case", COMPRESSED)
@pytest.mark.parametrize("key", ["quant_method", "config_groups"])
def test_compressed_tensors_of_other_tools(tmp_path, case, key):
    """Old blocks name no method."""
    folder = tiny.tiny_llama(tmp_path / "m", dtype=torch.float32)
    block = {"config_groups": COMPRESSED[case], "format": "naive-quantized"}
    block |= {"quant_method": "compressed-tensors"} if key == "quant_method" else {}
    expected = quantized_by(folder, block, compressed(case))
    made = dense(folder, tmp_path / "dense")
    for name, weight in expected.items():
        assert torch.equal(made.read(name), weight), name
    assert len(expected) == 14
    assert not any(name.endswith(("scale", "zero_point", "shape", "g_idx", "packed")) for name in made.tensors)


def test_old_compression_config_and_scales_of_the_cache(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "m", dtype=torch.float32)
    quantized_by(folder, {}, compressed("tensor"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    config["compression_config"] = {"config_groups": COMPRESSED["tensor"], "kv_cache_scheme": {"num_bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors") | {f"{LAYER[:-7]}.k_scale": torch.ones(1)}
    save_file(tensors, folder / "model.safetensors")
    made = dense(folder, tmp_path / "dense")
    assert not any("scale" in name for name in made.tensors)


def edited(folder: Path, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda block: block.update(checkpoint_format="marlin"), "its weights are packed as marlin"),
        (lambda block: block.update(quant_method="awq"), "this model is quantized with awq"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, change, words):
    write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "q", "gptq", W4)
    edited(tmp_path / "q", change)
    with pytest.raises(UsageError, match=words) as caught:
        check_dense(open_checkpoint(tmp_path / "q"), dequantize=True)
    assert caught.value.hint == "Start from the original model."


def test_tensors_that_contradict_each_other_name_the_layer(tmp_path):
    write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "q", "gptq", W4)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors[f"{LAYER}.g_idx"][3] = 99
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.raises(UsageError, match=rf"{LAYER} cannot be dequantized: columns belong to groups 0 to 99 of 2"):
        write_dense(open_checkpoint(tmp_path / "q"), tmp_path / "dense", progress=Silent())


def test_a_dense_model_is_not_dequantized(tmp_path):
    with pytest.raises(UsageError, match="the model is not quantized"):
        check_dense(open_checkpoint(tiny.tiny_llama(tmp_path / "m")), dequantize=True)
