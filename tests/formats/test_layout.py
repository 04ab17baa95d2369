from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compress.errors import UsageError
from compress.formats.layout import refusals, scale_dtype, stored_tensors
from compress.formats.stored import Shard, StoredTensor, shard_layout
from compress.formats.write import write_shard
from compress.model.anatomy import LinearLayer
from compress.model.safetensors_header import TensorInfo
from compress.scheme import Scheme

TORCH = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def layer(name: str = "model.layers.0.fc", out: int = 24, width: int = 64, **changes: object) -> LinearLayer:
    fields = {
        "name": name,
        "tensor": f"{name}.weight",
        "out": out,
        "width": width,
        "transposed": False,
        "block": 0,
        "fused": "model.layers.0:fc",
        "bias": f"{name}.bias",
        "dtype": "BF16",
    }
    return LinearLayer(**(fields | changes))  # type: ignore[arg-type]


def infos(*tensors: tuple[str, str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape, "model.safetensors") for name, dtype, shape in tensors}


names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
tensor_sets = st.dictionaries(names, st.tuples(st.sampled_from(sorted(TORCH)), shapes), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor_sets)
def test_files_equal_those_of_the_safetensors_library(tmp_path, tensors):
    generator = torch.Generator().manual_seed(len(tensors))
    filled = {}
    for name, (dtype, shape) in tensors.items():
        wide = torch.randint(0, 2, (*shape, 16), generator=generator, dtype=torch.uint8)
        size = torch.empty((), dtype=TORCH[dtype]).element_size()
        filled[name] = wide[..., :size].contiguous().reshape(-1).view(TORCH[dtype]).reshape(shape)
    stored = [StoredTensor(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    (shard,) = shard_layout(stored, 10**9)
    write_shard(tmp_path, shard, filled.items())
    save_file(filled, tmp_path / "library.safetensors", metadata={"format": "pt"})
    written = (tmp_path / shard.file).read_bytes()
    assert written == (tmp_path / "library.safetensors").read_bytes()
    assert len(written) == shard.nbytes


@settings(max_examples=60, deadline=None)
@given(tensor_sets, st.integers(1, 4000))
def test_shards_keep_every_tensor_once_and_respect_the_limit(tensors, limit):
    stored = [StoredTensor(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    shards = shard_layout(stored, limit)
    assert sorted(t.name for shard in shards for t in shard.tensors) == sorted(tensors)
    assert all(shard.data_bytes <= limit or sum(t.nbytes > 0 for t in shard.tensors) == 1 for shard in shards)
    firsts = [min(t.name for t in shard.tensors) for shard in shards]
    lasts = [max(t.name for t in shard.tensors) for shard in shards]
    assert all(last < first for last, first in zip(lasts, firsts[1:], strict=False))


def test_file_names_are_those_of_transformers():
    tensors = [StoredTensor(f"t{index}", "F32", (100,)) for index in range(3)]
    assert [shard.file for shard in shard_layout(tensors, 10_000)] == ["model.safetensors"]
    assert [shard.file for shard in shard_layout(tensors, 800)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize(
    ("format_name", "scheme", "expected"),
    [
        (
            "compressed-tensors",
            Scheme(4, 32),
            {"weight_packed": ("I32", (24, 8)), "weight_scale": ("BF16", (24, 2)), "weight_shape": ("I64", (2,))},
        ),
        (
            "compressed-tensors",
            Scheme(8, -1),
            {"weight_packed": ("I32", (24, 16)), "weight_scale": ("BF16", (24, 1)), "weight_shape": ("I64", (2,))},
        ),
        (
            "compressed-tensors",
            Scheme(8, -1, activation_bits=8),
            {"weight": ("I8", (24, 64)), "weight_scale": ("BF16", (24, 1))},
        ),
        (
            "gptq",
            Scheme(4, 32),
            {
                "qweight": ("I32", (8, 24)),
                "qzeros": ("I32", (2, 3)),
                "scales": ("F16", (2, 24)),
                "g_idx": ("I32", (64,)),
            },
        ),
        (
            "gptq",
            Scheme(8, -1),
            {
                "qweight": ("I32", (16, 24)),
                "qzeros": ("I32", (1, 6)),
                "scales": ("F16", (1, 24)),
                "g_idx": ("I32", (64,)),
            },
        ),
    ],
)
def test_tensors_of_a_quantized_layer(format_name, scheme, expected):
    tensors = infos(
        ("model.layers.0.fc.weight", "BF16", (24, 64)),
        ("model.layers.0.fc.bias", "F32", (24,)),
        ("model.norm.weight", "F32", (64,)),
    )
    stored = stored_tensors(format_name, tensors, [layer()], {"model.layers.0.fc": scheme})
    found = {t.name: (t.dtype, t.shape) for t in stored}
    kept = {"model.layers.0.fc.bias": ("F32", (24,)), "model.norm.weight": ("F32", (64,))}
    assert found == kept | {f"model.layers.0.fc.{part}": form for part, form in expected.items()}


def test_a_cast_rounds_floating_tensors_only():
    tensors = infos(
        *(("a", "F32", (3,)), ("b", "F16", (3,)), ("c", "I64", (3,)), ("d", "BOOL", (3,)), ("e", "F64", (3,)))
    )
    stored = stored_tensors("safetensors", tensors, [], {}, cast="bfloat16")
    assert [t.dtype for t in stored] == ["BF16", "BF16", "I64", "BOOL", "BF16"]


def test_scales_have_the_dtype_that_loaders_create_them_in():
    assert scale_dtype("gptq", "BF16") == "F16"
    assert [scale_dtype("compressed-tensors", dtype) for dtype in ("BF16", "F16", "F32")] == ["BF16", "F16", "F32"]


def test_everything_that_a_format_cannot_hold_is_named_at_once():
    layers = [layer("a", transposed=True), layer("b"), layer("c"), layer("d")]
    schemes = {
        "a": Scheme(4, 32),
        "b": Scheme(4, 48),
        "c": Scheme(8, 32, activation_bits=8),
        "d": Scheme(8, -1),
    }
    found = refusals("compressed-tensors", layers, schemes)
    assert [reason.partition(":")[0] for reason in found] == ["a", "b", "c"]
    tensors = infos(*((f"{name}.weight", "BF16", (24, 64)) for name in "abcd"))
    with pytest.raises(UsageError, match=r"(?s)a: .*b: .*c: "):
        stored_tensors("compressed-tensors", tensors, layers, schemes)


@pytest.mark.parametrize(
    ("format_name", "scheme"),
    [
        ("gptq", Scheme(8, -1, activation_bits=8)),
        ("gptq", Scheme(4, 32, symmetric=False)),
        ("gptq_v2", Scheme(8, -1, values="float", activation_bits=8)),
        ("compressed-tensors", Scheme(4, -1, activation_bits=8)),
        ("compressed-tensors", Scheme(4, 64, values="nf4")),
        ("safetensors", Scheme(4, 32)),
    ],
)
def test_a_format_refuses_what_it_cannot_say(format_name, scheme):
    assert len(refusals(format_name, [layer()], {"model.layers.0.fc": scheme})) == 1


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="awq"):
        stored_tensors("awq", {}, [], {})


def test_layout_needs_no_torch():
    heavy = ("torch", "numpy", "transformers")
    code = f"import sys, compress.formats.layout; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_header_is_valid_json_with_offsets():
    shard = Shard("model.safetensors", (StoredTensor("a", "F32", (2, 3)), StoredTensor("b", "I8", (5,))))
    header = shard.header()
    length = int.from_bytes(header[:8], "little")
    entries = json.loads(header[8:])
    assert length == len(header) - 8
    assert length % 8 == 0
    assert entries["b"] == {"dtype": "I8", "shape": [5], "data_offsets": [24, 29]}
