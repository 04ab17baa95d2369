"""Models with experts from the command line to a proved folder; experts that no token visited (H05)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_moe
import torch
from commandline import compress, hashes

from compress.model.checkpoint import open_checkpoint
from compress.model.experts import exact_experts
from compress.model.load import load_original
from compress.pipeline.job import Options
from compress.pipeline.run import Result, run
from compress.progress import Silent
from compress.recipe.schema import Recipe
from compress.runtime.load import load_reference
from compress.verdict import JUDGED_SUBJECTS

BUILDERS = {"mixtral": tiny_moe.tiny_mixtral, "qwen3_moe": tiny_moe.tiny_qwen3_moe}
ROUTERS = {"mixtral": "model.layers.0.block_sparse_moe.gate", "qwen3_moe": "model.layers.0.mlp.gate"}
WORST_KL = {"int4": 0.05, "int8-weight": 0.001}


def quantized(model: Path, output: Path, **step: Any) -> Result:
    content = {
        "version": 1,
        "model": str(model),
        "output": str(output),
        "calibration": {"samples": 4, "length": 64},
        "steps": [{"quantize": step}],
        "evaluate": {"fidelity": {"tokens": 512, "length": 64}},
    }
    return run(Recipe.model_validate(content), Options(), Silent())


def matrix() -> list[Any]:
    often = {("mixtral", "int4", "compressed-tensors"), ("qwen3_moe", "int4", "gptq")}
    rows = itertools.product(BUILDERS, WORST_KL, ("compressed-tensors", "gptq"))
    return [pytest.param(*row, marks=() if row in often else pytest.mark.slow) for row in rows]


def proof_of(result: Result) -> dict[str, Any]:
    proof = result.report.proof
    assert proof is not None
    assert proof["checks"]
    assert all(check["passed"] for check in proof["checks"])
    return proof


@pytest.mark.parametrize(("name", "target", "format_name"), matrix())
def test_experts_are_quantized_proved_and_measured(name: str, target: str, format_name: str, tmp_path: Path) -> None:
    model, output = BUILDERS[name](tmp_path / "m", dtype=torch.bfloat16), tmp_path / "out"
    result = quantized(model, output, target=target, format=format_name)
    (step,) = result.report.steps
    assert step.totals.layers_fallback == step.totals.layers_uncalibrated == 0
    proof = proof_of(result)
    stock = format_name == "compressed-tensors"
    assert proof["method"].startswith("transformers" if stock else "independent reader")
    weights = next(check for check in proof["checks"] if check["name"] == "weights")
    assert weights["detail"].startswith(f"{step.totals.layers_quantized} weights")
    skipped = {layer.name: layer.skipped for layer in step.layers if layer.skipped}
    assert skipped[ROUTERS[name]] == "router, protected"
    (kl,) = [
        part for part in result.report.measurements if part.metric == "kl.mean" and part.subject in JUDGED_SUBJECTS
    ]
    assert kl.value is not None
    assert 0 < kl.value < WORST_KL[target]
    if stock:
        ids = torch.arange(40).unsqueeze(0)
        loaded = load_original(open_checkpoint(output), dtype=torch.float32, device="cpu")
        exact_experts(loaded, torch.float32)
        with torch.no_grad():
            ours = load_reference(output, dtype=torch.float32, device="cpu")(input_ids=ids).logits
            assert torch.equal(loaded(input_ids=ids).logits, ours)
    else:
        assert "transformers cannot load it" in (output / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("mixtral", {"overrides": [{"layers": "experts.*", "target": "int8-weight"}]}),
        pytest.param(
            "qwen3_moe", {"overrides": [{"layers": "experts.*", "target": "int8-weight"}]}, marks=pytest.mark.slow
        ),
        ("mixtral", {"format": "gptq", "overrides": [{"layers": "*.0.*.experts.*", "target": "int8-weight"}]}),
        pytest.param("qwen3_moe", {"format": "gptq", "skip": ["*.2.mlp.experts.*"]}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"refine": 4}, marks=pytest.mark.slow),
        ("qwen3_moe", {"smooth": True}),
    ],
)
def test_other_ways(name: str, step: dict[str, Any], tmp_path: Path) -> None:
    result = quantized(BUILDERS[name](tmp_path / "m"), tmp_path / "out", target="int4", group_size=32, **step)
    assert proof_of(result)


def starved(folder: Path) -> tuple[str, ...]:
    """16 experts of which every token is sent to one, one line of 10 tokens."""
    tiny_moe.tiny_mixtral(folder / "m", num_local_experts=16, num_experts_per_tok=1)
    (folder / "line.txt").write_text("ten tokens\n", encoding="utf-8")
    return ("quantize", str(folder / "m"), "--target", "int4", "--calibration", str(folder / "line.txt"))


def test_experts_that_no_token_visited_are_rounded_counted_and_listed(tmp_path: Path) -> None:
    command = starved(tmp_path)
    for output in ("one", "two"):
        done = compress(*command, "--no-evaluate", "--no-bench", "-o", tmp_path / output, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (step,) = json.loads((tmp_path / "one" / "compress.json").read_text())["steps"]
    without = [layer for layer in step["layers"] if layer.get("tokens") == 0]
    for block in ("model.layers.0.", "model.layers.1."):
        experts = {layer["name"].rpartition(".")[0] for layer in without if layer["name"].startswith(block)}
        assert 6 <= len(experts) < 16
    assert all(layer["algorithm"] == "rtn" and "rounded to nearest" in layer["notes"][0] for layer in without)
    assert step["layers_uncalibrated"] == len(without)
    assert step["layers_fallback"] == 0
    assert step["layers_quantized"] == 2 * (4 + 16 * 3)
    assert f"no calibration token reached {len(without)} layers of experts" in " ".join(done.stdout.split())
    first, second = hashes(tmp_path / "one"), hashes(tmp_path / "two")
    assert {name: first[name] for name in first if name.endswith(".safetensors")}
    assert all(second[name] == digest for name, digest in first.items() if name != "compress.json")


def test_a_run_that_is_measured_in_full(tmp_path: Path) -> None:
    tiny_moe.tiny_qwen3_moe(tmp_path / "m")
    text = tiny.write_text(tmp_path / "text.jsonl", 16, seed=4)
    done = compress(
        *("quantize", tmp_path / "m", "--target", "int8-weight", "--evaluation", text, "--no-bench"),
        *("--gate", "kl.mean <= 0.01", "--gate", "size <= 1MB", "-o", tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    assert "9 checks passed" in done.stdout
    again = compress("eval", tmp_path / "m", tmp_path / "out", "--evaluation", text, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
