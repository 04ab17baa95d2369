"""Zero points in files (H04, H06), read by readers that are written here from the formats' descriptions alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from commandline import compress
from safetensors import safe_open
from test_formats import assert_equal
from test_gptq_check import edit_block
from test_proof import job
from written import W8A8, measure, write

from compress.errors import BrokenResultError, UsageError
from compress.formats import proof_worker
from compress.formats.pack import gptq_qzeros
from compress.formats.proof import loader_of
from compress.formats.read import Reader
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.scheme import Scheme

W4, W8 = Scheme(4, 32, symmetric=False), Scheme(8, -1, symmetric=False)
LAYER = "model.layers.0.self_attn.q_proj"
FORMATS = ["compressed-tensors", "gptq_v2"]


def file_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def bits_of(words: np.ndarray, bits: int) -> np.ndarray:
    """All fields along the last axis of int32 words, lowest first."""
    return (words.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & (1 << bits) - 1).reshape(
        *words.shape[:-1], -1
    )


def independent(folder: Path, name: str, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(unsigned codes [out, in], unsigned zeros [out, groups], scales [out, groups], weight [out, in])."""
    tensors = {key.removeprefix(f"{name}."): value for key, value in file_tensors(folder).items()}
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    if block["quant_method"] == "gptq":
        assert block["checkpoint_format"] == "gptq_v2"
        scales = tensors["scales"].float().numpy().T
        codes = bits_of(tensors["qweight"].numpy().T, bits)
        zeros = bits_of(tensors["qzeros"].numpy(), bits)[:, : len(scales)].T
        group = tensors["g_idx"].numpy()
    else:
        scales = tensors["weight_scale"].float().numpy()
        codes = bits_of(tensors["weight_packed"].numpy(), bits)
        zeros = bits_of(tensors["weight_zero_point"].numpy().T, bits)[:, : len(scales)].T
        group = np.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    codes, zeros = codes.astype(np.int64), zeros.astype(np.int64)
    return codes, zeros, scales, ((codes - zeros[:, group]) * scales[:, group]).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A group all positive, one all negative, a row and a group of zeros."""
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    weight = tensors[f"{LAYER}.weight"]
    weight[0, :32] = torch.arange(1, 33) / 10
    weight[1, :32] = -torch.arange(1, 33) / 10
    weight[5] = 0
    weight[7, :32] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("target", "bits"), [("int4", 4), ("int8-weight", 8)])
def test_what_is_evaluated_is_what_an_independent_reader_finds(tmp_path, model, format_name, target, bits):
    options = ("--target", target, "--format", format_name, "--group-size", "32", "--asymmetric")
    calibration = ("--samples", "4", "--length", "64", "--no-evaluate", "--no-bench")
    done = compress("quantize", model, *options, *calibration, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    codes, zeros, scales, weight = independent(tmp_path / "out", LAYER, bits)
    assert (zeros[0, 0], zeros[1, 0]) == (0, 2**bits - 1)
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert not weight[5].any()
    assert not weight[7, :32].any()
    reader = Reader(tmp_path / "out")
    for name in reader.quantized_names:
        found = reader.quantized(name)
        codes, zeros, _, weight = independent(tmp_path / "out", name, bits)
        assert np.array_equal(found.codes.numpy(), codes - 2 ** (bits - 1))
        assert np.array_equal(found.zero_point.numpy(), zeros - 2 ** (bits - 1))
        assert np.array_equal(found.dequantize(torch.float32).numpy(), weight)
    provenance = json.loads((tmp_path / "out" / "compress.json").read_text())
    layer = next(layer for layer in provenance["steps"][0]["layers"] if layer["name"] == LAYER)
    assert layer["scheme"] == f"W{bits}A16 g32 asymmetric"
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert report["proof"]["method"].endswith("dequantize=True" if format_name == FORMATS[0] else "independent reader")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [W4, W8], ids=lambda scheme: scheme.label)
def test_stock_transformers_dequantizes_one_scheme(tmp_path, dtype, scheme):
    written = write(tiny.tiny_llama(tmp_path / "m", dtype=dtype), tmp_path / "out", "compressed-tensors", scheme)
    logits = measure(written, tmp_path / "logits.safetensors")
    record = proof_worker.run(job(written, logits, "stock"))
    assert record.passed, record.checks
    assert record.method.endswith(", dequantize=True")
    assert record.kl_mean == 0


def test_a_zero_point_changed_in_the_file_fails_the_proof(tmp_path):
    from safetensors.torch import save_file

    written = write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "out", "compressed-tensors", W4)
    logits = measure(written, tmp_path / "logits.safetensors")
    tensors = file_tensors(tmp_path / "out")
    tensors[f"{LAYER}.weight_zero_point"][0, 0] += 1
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    record = proof_worker.run(job(written, logits, "stock"))
    assert not record.passed


def test_several_schemes_are_proved_by_the_reader(tmp_path):
    """transformers would give all layers the first scheme, so it is not even tried."""
    written = write(
        tiny.tiny_llama(tmp_path / "m"),
        tmp_path / "out",
        "compressed-tensors",
        lambda layer: W8A8 if layer.name.endswith("down_proj") else W4,
    )
    loader = loader_of("compressed-tensors", [W8A8, W4])
    assert loader == "reader"
    assert proof_worker.run(job(written, measure(written, tmp_path / "logits.safetensors"), loader)).passed
    with pytest.raises(UsageError, match="zero points beside another scheme"):
        load_original(open_checkpoint(tmp_path / "out"), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_v2_is_read_back_and_is_no_version_1(tmp_path, symmetric):
    scheme = Scheme(4, 32, symmetric)
    written = write(tiny.tiny_llama(tmp_path / "m", dtype=torch.bfloat16), tmp_path / "out", "gptq_v2", scheme)
    reader = Reader(tmp_path / "out")
    for name, weight in written.weights.items():
        assert_equal(reader.quantized(name), weight)
    logits = measure(written, tmp_path / "logits.safetensors")
    assert proof_worker.run(job(written, logits, "reader")).passed
    edit_block(tmp_path / "out", lambda block: block.update({"checkpoint_format": "gptq"}))
    assert not proof_worker.run(job(written, logits, "reader")).passed
    with pytest.raises(BrokenResultError, match=r"sym: found false, expected true|do not fit W4A16 g32"):
        Reader(tmp_path / "out").quantized(LAYER)


def test_version_1_refuses_the_lowest_zero_point():
    with pytest.raises(ValueError, match="zero point of 0"):
        gptq_qzeros(torch.tensor([[-8]], dtype=torch.int8), 4, 1)
    assert gptq_qzeros(torch.tensor([[-8]] * 8, dtype=torch.int8), 4, 2).tolist() == [[0]]
    assert gptq_qzeros(torch.tensor([[7]] + [[-8]] * 7, dtype=torch.int8), 4, 2).tolist() == [[15]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _weight: {"zero_point": None}, "it has no zero points"),
        (lambda weight: {"zero_point": weight.zero_point[:, :1]}, r"zero points are torch.int8 \[64, 1\] instead of"),
        (lambda weight: {"zero_point": weight.zero_point + 20}, "zero points reach from"),
    ],
)
def test_zero_points_of_another_form_are_not_written(tmp_path, change, message):
    from dataclasses import replace

    def broken(name, weight):
        return replace(weight, **change(weight)) if name == LAYER else weight

    with pytest.raises(BrokenResultError, match=message):
        write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "out", "gptq_v2", W4, change=broken)
