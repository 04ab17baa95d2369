"""Real faults of other tools (H03, H04, H05, H08, H09), reproduced on the command line.

H08 and H09 are also in test_end_to_end.py, the texts that hold nothing in test_bad_input.py.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import compress
from safetensors.torch import load_file, save_file

from compress.formats.read import Reader

QUICK = ("--no-bench", "--samples", "4", "--length", "64")
FEW = (*QUICK, "--no-evaluate")


def edit(folder: Path, changes: dict[str, Any]) -> None:
    """Writes numbers into tensors of the folder's only shard: {name: [(index, value), ...]}."""
    tensors = load_file(folder / "model.safetensors")
    for name, places in changes.items():
        for index, value in places:
            tensors[name][index] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def step_of(folder: Path) -> dict[str, Any]:
    (step,) = json.loads((folder / "compress.json").read_text())["steps"]
    return dict(step)


def test_h03_a_singular_hessian_is_damped_and_told(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    (tmp_path / "line.txt").write_text("8 tokens\n")
    text = ("--calibration", tmp_path / "line.txt", "--damping", "0")
    done = compress("quantize", tmp_path / "m", "--target", "int4", *FEW, *text, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    layers = [layer for layer in step_of(tmp_path / "out")["layers"] if "skipped" not in layer]
    assert len(layers) == 14
    for layer in layers:
        assert layer["damping"] > 0
        assert layer["rank_bound"] == layer["tokens"] == 8
        assert any("damping raised from 0" in note for note in layer["notes"])


@pytest.mark.parametrize("block", [0, 1])
def test_h03_b_statistics_that_are_not_finite_name_the_first_layer(block: int, tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    edit(folder, {f"model.layers.{block}.input_layernorm.weight": [(3, 1e20)]})
    done = compress("quantize", folder, "--target", "int4", *FEW, "-o", tmp_path / "out")
    assert done.returncode == 10
    assert re.search(rf"model\.layers\.{block}\.self_attn\.q_proj: .*not finite \(width 64, 256 tokens\)", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--target", "int4", "--group-size", "32"),
        ("--target", "int4", "--group-size", "32", "--format", "gptq"),
        ("--target", "int8"),
        ("--target", "int8-weight", "--algorithm", "gptq", "--group-size", "32"),
    ],
    ids=["int4", "int4 as gptq", "int8", "int8-weight"],
)
def test_h04_zeros_stay_zero_and_nothing_becomes_nan(options: tuple[str, ...], tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    zeros = [(5, 0.0), ((7, slice(0, 32)), 0.0)]
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    edit(folder, {f"{name}.weight": zeros for name in names})
    done = compress(
        "quantize", folder, *options, *QUICK, "--evaluation-tokens", "256", "-o", tmp_path / "out", "--json"
    )
    assert done.returncode == 0, done.stderr
    reader = Reader(tmp_path / "out")
    notes = {layer["name"]: layer.get("notes", []) for layer in step_of(tmp_path / "out")["layers"]}
    for name in names:
        weight = reader.quantized(name)
        dense = weight.dequantize(torch.float32)
        scale = weight.scale.float()
        assert bool((scale > 0).all())
        assert bool(torch.isfinite(scale).all())
        assert not dense[5].any()
        assert not dense[7, :32].any()
        assert any("zero" in note for note in notes[name])
    values = {part["metric"]: part["value"] for part in json.loads(done.stdout)["measurements"]}
    assert math.isfinite(values["kl.mean"])


def test_h08_a_skip_list_adds_to_what_is_protected(tmp_path: Path) -> None:
    folder = tiny.tiny_opt(tmp_path / "m")
    done = compress("quantize", folder, "--target", "int4", *FEW, "--skip", "q_proj", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in before if "embed_tokens" in name or "q_proj" in name]
    assert len(kept) == 5
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    assert not any(name.startswith("lm_head") for name in after)
    quantized = Reader(tmp_path / "out").quantized_names
    assert len(quantized) == 10
    assert not any("q_proj" in name or "embed" in name or "head" in name for name in quantized)
    reasons = {layer["name"]: layer.get("skipped", "") for layer in step_of(tmp_path / "out")["layers"]}
    assert reasons["lm_head"].startswith("tied")


def test_h09_one_very_long_line(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    (tmp_path / "long.txt").write_text("many words " * 9091)
    done = compress(
        *("quantize", folder, "--target", "int4", *FEW, "--calibration", tmp_path / "long.txt"),
        *("-o", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    assert {layer["tokens"] for layer in step_of(tmp_path / "out")["layers"] if "skipped" not in layer} == {256}
