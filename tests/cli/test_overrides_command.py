"""`--override`, `--max-fallback` and `--refine` on the command line, and a mix from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from commandline import compress

FEW = ("--samples", "4", "--length", "64", "--no-bench", "--no-evaluate")


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq"])
def test_a_mix_from_options(tmp_path: Path, format_name: str) -> None:
    tiny.tiny_llama(tmp_path / "m")
    override = ("--override", "*.down_proj=int8-weight", "--override", "o_proj=int4:32")
    done = compress(
        *("quantize", tmp_path / "m", "--target", "int4", "--format", format_name, *override, *FEW),
        *("-o", tmp_path / "out", "--max-fallback", "0%"),
    )
    assert done.returncode == 0, done.stderr
    for words in ("10 x W4A16 g64", "2 x W8A16 channel: model.layers.*.mlp.down_proj", "2 x W4A16 g32"):
        assert words in done.stdout
    assert "checks passed" in done.stdout
    (step,) = json.loads((tmp_path / "out" / "compress.json").read_text())["steps"]
    assert step["settings"]["group_size"] is None
    assert step["settings"]["overrides"] == [
        {"layers": "*.down_proj", "target": "int8-weight", "group_size": None},
        {"layers": "o_proj", "target": "int4", "group_size": 32},
    ]
    assert step["layers_fallback"] == 0
    layers = {layer["name"]: layer for layer in step["layers"]}
    down = layers["model.layers.0.mlp.down_proj"]
    assert (down["target"], down["scheme"], down["algorithm"]) == ("int8-weight", "W8A16 channel", "gptq")


def test_plan_shows_the_scheme_of_every_group_of_layers(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    overrides = [{"layers": "*.1.mlp.down_proj", "target": "int8"}]
    step = {"quantize": {"target": "int4", "group_size": 32, "overrides": overrides}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"version": 1, "model": str(tmp_path / "m"), "steps": [step]}))
    done = compress("plan", path)
    assert done.returncode == 0, done.stderr
    assert "int4 + int8 as compressed-tensors, gptq: 14 of 14 linear layers" in " ".join(done.stdout.split())
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "down_proj" in line}
    assert "W4A16 g32" in rows["model.layers.0.mlp.down_proj"]
    assert "W8A8 channel" in rows["model.layers.1.mlp.down_proj"]


def test_errors_name_the_option(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    done = compress(
        *("quantize", tmp_path / "m", "--target", "int8", "--override", "q_proj", "--max-fallback", "5"),
        *("--refine", "3"),
    )
    assert done.returncode == 2
    for words in (
        "--override: must be GLOB=TARGET",
        "--max-fallback: must be a share",
        "--refine: only algorithm gptq",
    ):
        assert words in done.stderr
    done = compress("quantize", tmp_path / "m", "--target", "int4", "--override", "q_proj=int8", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "self_attn.[kqv]_proj" in done.stderr
    assert not (tmp_path / "out").exists()
