"""A quantized model as input: refused with the way out, and what `--dequantize` makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from commandline import base_environment, compress, hashes
from written import W4, write

from compress.model.checkpoint import open_checkpoint

QUICK = ("--no-evaluate", "--no-bench")
RTN = ("--target", "int8-weight", *QUICK)


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq"])
def test_a_quantized_model_is_refused_with_the_way_out_and_taken_with_it(tmp_path: Path, format_name: str) -> None:
    written = write(tiny.tiny_llama(tmp_path / "m", dtype=torch.bfloat16), tmp_path / "q", format_name, W4)
    before = hashes(tmp_path / "q")
    done = compress("quantize", tmp_path / "q", *RTN, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert f"quantized already ({format_name})" in done.stderr
    assert "--dequantize" in done.stderr
    assert not (tmp_path / "out").exists()
    done = compress("quantize", tmp_path / "q", *RTN, "--dequantize", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "q") == before
    assert not list(tmp_path.glob(".out.partial*"))
    provenance = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert provenance["recipe"]["dequantize"] is True
    assert provenance["model"]["content_hash"] == open_checkpoint(tmp_path / "q").content_hash
    (step,) = provenance["steps"]
    assert any(f"the model was quantized already ({format_name})" in note for note in step["notes"])
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    size = next(one for one in report["measurements"] if (one["metric"], one["subject"]) == ("size", "original"))
    assert size["value"] == pytest.approx(open_checkpoint(tmp_path / "m").weight_bytes / 1e6, rel=0.01)
    from compress.formats.read import Reader

    reader = Reader(tmp_path / "out")
    for name, weight in written.weights.items():
        wanted = weight.dequantize(torch.float32).bfloat16().float()
        found = reader.quantized(name).dequantize(torch.float32)
        assert float((found - wanted).abs().max()) <= float(wanted.abs().max()) / 127


def test_what_is_not_understood_starts_from_the_original(tmp_path: Path) -> None:
    write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "q", "gptq", W4)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    for more in ((), ("--dequantize",)):
        done = compress("quantize", tmp_path / "q", *RTN, *more, "-o", tmp_path / "out")
        assert done.returncode == 2
        assert "hint: Start from the original model.\n" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_dense_model_needs_no_dequantizing(tmp_path: Path) -> None:
    done = compress("quantize", tiny.tiny_llama(tmp_path / "m"), *RTN, "--dequantize", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "the model is not quantized" in done.stderr


def test_plan_shows_the_dense_model_and_reads_no_weights(tmp_path: Path) -> None:
    write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "q", "gptq", W4)
    weights = tmp_path / "q" / "model.safetensors"
    header = int.from_bytes(weights.read_bytes()[:8], "little") + 8
    broken = bytearray(weights.read_bytes())
    broken[header:] = b"\xff" * (len(broken) - header)
    weights.write_bytes(broken)
    recipe = tmp_path / "recipe.yaml"
    step = {"quantize": {"target": "int8-weight"}}
    recipe.write_text(json.dumps({"version": 1, "model": str(tmp_path / "q"), "dequantize": True, "steps": [step]}))
    done = compress("plan", recipe, "--json")
    assert done.returncode == 0, done.stderr
    assert "q_proj" in done.stdout
    shown = compress("plan", recipe).stdout
    assert "14 of 14 linear layers" in " ".join(shown.split())


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    write(tiny.tiny_llama(tmp_path / "m"), tmp_path / "q", "compressed-tensors", W4)
    options = ["--target", "int4", "--group-size", "64", "--samples", "8", "--length", "128", *QUICK, "--dequantize"]
    straight = compress("quantize", tmp_path / "q", *options, "-o", tmp_path / "straight" / "out")
    assert straight.returncode == 0, straight.stderr
    command = [sys.executable, "-m", "compress", "quantize", str(tmp_path / "q"), *options, "-o", str(tmp_path / "out")]
    journal = tmp_path / ".out.partial" / "journal.json"
    with subprocess.Popen(command, env=base_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and not (journal.is_file() and json.loads(journal.read_text())["parts"]):
            time.sleep(0.01)
        if run.poll() is None:
            os.kill(run.pid, signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    done = compress("quantize", tmp_path / "q", *options, "-o", tmp_path / "out", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Resuming after" in done.stderr
    found, wanted = hashes(tmp_path / "out"), hashes(tmp_path / "straight" / "out")
    for one in (found, wanted):
        del one["compress.json"]  # names the output
    assert found == wanted
