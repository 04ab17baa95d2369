"""What the writer refuses, plain casts, and a full disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import os

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from written import W4, W8A8, write

from compress.errors import BrokenResultError, MissingResourceError
from compress.formats import plain
from compress.formats.stored import Shard, StoredTensor
from compress.formats.write import write_shard
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original

LAYER = "model.layers.1.mlp.up_proj"


def infinite_scale(weight):
    weight.scale[3, 0] = float("inf")
    return weight


def zero_scale(weight):
    weight.scale[3, 0] = 0
    return weight


def code_out_of_range(weight):
    weight.codes[1, 1] = 8
    return weight


def wrong_shape(weight):
    return dataclasses.replace(weight, codes=weight.codes.T.contiguous())


def wrong_scale_dtype(weight):
    return dataclasses.replace(weight, scale=weight.scale.double())


def wrong_scheme(weight):
    return dataclasses.replace(weight, scheme=W8A8)


@pytest.mark.parametrize(
    "spoil",
    [infinite_scale, zero_scale, code_out_of_range, wrong_shape, wrong_scale_dtype, wrong_scheme],
    ids=lambda function: function.__name__,
)
def test_a_broken_weight_is_refused_by_name(tmp_path, spoil):
    with pytest.raises(BrokenResultError, match=LAYER.replace(".", r"\.")):
        write(
            tiny.tiny_llama(tmp_path / "source"),
            tmp_path / "out",
            "compressed-tensors",
            W4,
            change=lambda name, weight: spoil(weight) if name == LAYER else weight,
        )


def cast(source, stage, dtype):
    return write(source, stage, "safetensors", lambda _layer: None, cast=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_rounds_weights_and_says_so_in_the_config(tmp_path, dtype):
    source = tiny.tiny_bert(tmp_path / "source")
    cast(source, tmp_path / "out", dtype)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name].to(getattr(torch, dtype))) for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    model = load_original(open_checkpoint(tmp_path / "out"), dtype=torch.float32, device="cpu")
    assert torch.equal(
        model.state_dict()["embeddings.word_embeddings.weight"], after["embeddings.word_embeddings.weight"].float()
    )


def test_a_cast_that_overflows_names_the_tensor(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e20
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match=r"model\.norm\.weight: 1 numbers"):
        cast(source, tmp_path / "out", "float16")


def test_a_cast_keeps_integers_and_infinities():
    ids = torch.arange(5)
    assert plain.cast_tensor("ids", ids, "float16") is ids
    mask = torch.tensor([0.0, float("-inf")])
    assert torch.equal(plain.cast_tensor("mask", mask, "float16"), mask.half())


def test_nested_configs_and_old_keys_follow_the_cast():
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32", "size": 1}, "other": {"size": 2}}
    assert plain.cast_config(config, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "size": 1},
        "other": {"size": 2},
    }
    assert plain.cast_config({"a": 1}, "float16") == {"a": 1, "dtype": "float16"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_says_which_file_needs_how_much(tmp_path):
    """/dev/full answers every write with "no space left on device"."""
    shard = Shard("model.safetensors", (StoredTensor("a", "F32", (100_000,)),))
    (tmp_path / shard.file).symlink_to("/dev/full")
    with pytest.raises(MissingResourceError, match=rf"model\.safetensors: .* {shard.nbytes:,} bytes, [\d,]+ are free"):
        write_shard(tmp_path, shard, {"a": torch.zeros(100_000)}.items())


def test_other_errors_of_the_system_pass_through(tmp_path):
    shard = Shard("model.safetensors", (StoredTensor("a", "F32", (1,)),))
    with pytest.raises(OSError) as caught:
        write_shard(tmp_path / "missing", shard, {"a": torch.zeros(1)}.items())
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)], ids=["shape", "dtype"])
def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path, wrong):
    shard = Shard("model.safetensors", (StoredTensor("a", "F32", (2,)),))
    with pytest.raises(BrokenResultError, match="a: planned as F32"):
        write_shard(tmp_path, shard, {"a": wrong}.items())


def test_views_of_one_memory_are_written_as_separate_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "row": base[1], "turned": base.T}
    stored = [StoredTensor(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_shard(tmp_path, Shard("model.safetensors", tuple(stored)), tensors.items())
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("shard", [10**9, 20_000])
def test_a_replaced_tensor_is_written_instead_of_the_sources(tmp_path, shard):
    source = tiny.tiny_llama(tmp_path / "source", dtype=torch.bfloat16)
    new = torch.linspace(1, 2, 64).bfloat16()
    write(source, tmp_path / "out", "compressed-tensors", W8A8, replaced={NORM: new}, max_shard_size=shard)
    before = load_file(source / "model.safetensors")
    after = {
        name: tensor for path in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert torch.equal(after[NORM], new)
    others = [name for name in before.keys() & after.keys() - {NORM} if not name.endswith("proj.weight")]
    assert others
    assert all(torch.equal(after[name], before[name]) for name in others)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (NORM, torch.ones(63).bfloat16(), r"\[63\] instead of BF16 \[64\]"),
        (NORM, torch.ones(64), "float32"),
        (NORM, torch.full((64,), float("nan")).bfloat16(), "not finite"),
        ("model.norm.bias", torch.ones(64).bfloat16(), "no such tensor"),
        (f"{LAYER}.weight", torch.ones(128, 64).bfloat16(), "is quantized"),
    ],
)
def test_a_replaced_tensor_of_another_form_is_refused(tmp_path, name, tensor, reason):
    source = tiny.tiny_llama(tmp_path / "source", dtype=torch.bfloat16)
    with pytest.raises(BrokenResultError, match=reason):
        write(source, tmp_path / "out", "compressed-tensors", W8A8, replaced={name: tensor})
    assert not (tmp_path / "out").exists()
