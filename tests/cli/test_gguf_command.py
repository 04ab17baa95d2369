"""`--format gguf` from the command line: made, proved, measured, overwritten, and refused with the reason."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from commandline import compress

SHORT = ("--samples", "4", "--length", "64", "--evaluation-tokens", "256", "--no-bench")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.tiny_llama(tmp_path_factory.mktemp("a b") / "模型", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    output = tmp_path_factory.mktemp("out put") / "量化"
    options = ("--target", "int4", "--format", "gguf", "--override", "*.down_proj=int8-weight", "--skip", "*.o_proj")
    done = compress("quantize", model, *options, "-o", output, *SHORT, "--json")
    assert done.returncode == 0, done.stderr
    return output, json.loads(done.stdout)


def test_the_folder_and_its_report(made):
    output, answer = made
    files = {path.name for path in output.iterdir()}
    assert {"model.gguf", "config.json", "tokenizer.json", "README.md", "compress.json", "report"} <= files
    assert not [name for name in files if name.endswith(".safetensors")]
    assert "quantization_config" not in json.loads((output / "config.json").read_text())
    report = json.loads((output / "report" / "report.json").read_text())
    checks = {check["name"]: check for check in report["proof"]["checks"]}
    assert {"files", "original", "config", "weights", "outputs", "cache"} <= checks.keys()
    assert all(check["passed"] for check in checks.values())
    found = {(part["metric"], part["subject"]): part["value"] for part in report["measurements"]}
    assert found["size", "result"] == (output / "model.gguf").stat().st_size / 1e6
    assert found["kl.mean", "result/original"] < 0.06
    assert answer["exit_code"] == 0
    assert "model.gguf" in (output / "README.md").read_text()


def test_the_plan_knows_every_byte(model, made):
    output, _ = made
    recipe = json.loads((output / "compress.json").read_text())["recipe"]
    path = output.parent / "again.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    done = compress("plan", path, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    plan = plan.get("plan", plan)
    assert plan["files"] == {"model.gguf": (output / "model.gguf").stat().st_size}


def test_it_can_be_compared_and_overwritten_but_not_quantized_again(model, made):
    output, _ = made
    done = compress("eval", model, output, "--evaluation-tokens", "256", "--json")
    assert done.returncode == 0, done.stderr
    done = compress("bench", model, output, "--prompt", "16", "--new-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    notes = [m["note"] for m in json.loads(done.stdout)["measurements"] if m["metric"] == "latency.ttft"]
    assert any("llama.cpp runs this file" in (note or "") for note in notes)
    done = compress("quantize", output, "--target", "int4", "-o", output.parent / "x", *SHORT)
    assert done.returncode == 2
    assert "quantized already" in done.stderr
    again = ("--target", "int8-weight", "--format", "gguf", "--no-evaluate", "--no-bench", "-o", output)
    assert compress("quantize", model, *again).returncode == 2
    done = compress("quantize", model, *again, "--overwrite")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--group-size", "64"), "blocks of 32 values"),
        (("--group-size", "-1"), "blocks of 32 values"),
        (("--override", "*.down_proj=int8-weight:64"), "overrides[0]"),
        (("--asymmetric",), "symmetric codes"),
        (("--smooth",), "GGUF"),
    ],
)
def test_settings_that_the_format_has_not(model, options, reason, tmp_path):
    done = compress("quantize", model, "--target", "int4", "--format", "gguf", *options, "-o", tmp_path / "o", *SHORT)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


def test_int8_weight_takes_groups_of_32_by_itself(model, tmp_path):
    output = tmp_path / "o"
    options = ("--target", "int8-weight", "--format", "gguf", "--no-evaluate", "--no-bench", "-o", output)
    assert compress("quantize", model, *options).returncode == 0
    record = json.loads((output / "compress.json").read_text())
    assert record["steps"][0]["settings"]["group_size"] == 32


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("gpt2", {}, "llama, mistral, qwen2, qwen3, gemma3_text"),
        ("llama", {"intermediate_size": 144}, "mlp.down_proj: width 144"),
    ],
)
def test_models_that_cannot_be_written(name, overrides, reason, tmp_path):
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / "m", **overrides)
    done = compress("quantize", folder, "--target", "int4", "--format", "gguf", "-o", tmp_path / "o", *SHORT)
    assert done.returncode == 2
    assert reason in done.stderr


def test_without_the_package(model, tmp_path):
    """A module of that name that does not import stands in front of the real one, as a broken installation does."""
    (tmp_path / "gguf.py").write_text('raise ImportError("no gguf here")\n', encoding="utf-8")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from compress.__main__ import main; main()"
    import subprocess
    import sys

    from commandline import base_environment

    command = [sys.executable, "-c", code, str(tmp_path), "quantize", str(model), "--target", "int4"]
    command += ["--format", "gguf", "-o", str(tmp_path / "o"), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, env=base_environment(), check=False)
    assert done.returncode == 9, done.stderr
    assert "pip install gguf" in done.stderr
    assert not (tmp_path / "o").exists()
