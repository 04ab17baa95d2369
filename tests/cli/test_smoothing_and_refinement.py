"""Smoothing and `--refine` from end to end: what they change in the folder, and what is left as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import compress, hashes
from safetensors.torch import load_file, save_file

from compress.pipeline.job import Options
from compress.pipeline.run import run
from compress.progress import Silent
from compress.recipe.schema import Recipe

FEW = ("--samples", "6", "--length", "64", "--no-bench", "--no-evaluate")
BIASED = {"opt": tiny.tiny_opt, "qwen2": tiny.tiny_qwen2, "bert": tiny.tiny_bert}


def recipe(model: Path, output: Path, **step: Any) -> Recipe:
    fields = {
        "version": 1,
        "model": str(model),
        "output": str(output),
        "calibration": {"samples": 6, "length": 64},
        "steps": [{"quantize": {"target": "int8"} | step}],
        "evaluate": None,
    }
    return Recipe.model_validate(fields)


def with_outliers(folder: Path) -> Path:
    """Few channels of the inputs far larger than the rest: what factors are for."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight")):
            tensor[3:5] *= 30
        if name.endswith(("v_proj.bias", "value.bias")):
            tensor[7] += 20
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def changed(source: Path, result: Path) -> set[str]:
    """Tensors that are not quantized and yet have other values than the source's."""
    before, after = load_file(source / "model.safetensors"), load_file(result / "model.safetensors")
    kept = [name for name in before.keys() & after.keys() if before[name].dtype == after[name].dtype]
    return {name for name in kept if not torch.equal(before[name], after[name])}


def step_of(folder: Path) -> Mapping[str, Any]:
    (step,) = json.loads((folder / "compress.json").read_text())["steps"]
    return dict(step)


def test_int8_smooths_norms_and_says_which(tmp_path: Path) -> None:
    source = with_outliers(tiny.tiny_llama(tmp_path / "m"))
    done = compress("quantize", source, "--target", "int8", *FEW, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    step = step_of(tmp_path / "out")
    found = changed(source, tmp_path / "out")
    assert found == set(step["replaced"])
    assert "model.layers.0.input_layernorm.weight" in found
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert all(check["passed"] for check in report["proof"]["checks"])
    assert any("folded into" in remark for remark in report["remarks"])
    run(recipe(source, tmp_path / "plain", smooth=False), Options(), Silent())
    assert changed(source, tmp_path / "plain") == set()
    assert not step_of(tmp_path / "plain").get("replaced")


@pytest.mark.parametrize("name", BIASED)
def test_biases_keep_their_values_unless_smoothing_is_asked_for(name: str, tmp_path: Path) -> None:
    source = with_outliers(BIASED[name](tmp_path / "m"))

    def found(output: Path, **more: Any) -> set[str]:
        run(recipe(source, output, **more), Options(), Silent())
        names = changed(source, output)
        assert names == set(step_of(output)["replaced"])
        return names

    by_default = found(tmp_path / "default")
    assert not any(tensor.endswith(".bias") for tensor in by_default)
    assert bool(by_default) == (name == "qwen2"), "only its norms have no bias"
    assert any(tensor.endswith(".bias") for tensor in found(tmp_path / "asked", smooth=True))


def test_refined_twice_is_the_same_bytes(tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m")
    for name in ("first", "second"):
        done = compress("quantize", source, "--target", "int4", *FEW, "--refine", "8", "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "first") == hashes(tmp_path / "second")
    report = json.loads((tmp_path / "first" / "report" / "report.json").read_text())
    assert any("refinement (8 steps) was kept in blocks with " in remark for remark in report["remarks"])


def test_one_window_is_not_enough_to_refine(tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m")
    one = ("--samples", "1", *FEW[2:])
    done = compress("quantize", source, "--target", "int4", *one, "--refine", "3", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "refine needs at least 2 windows of calibration text" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
