"""`--gptq NAME=VALUE`: into the engine, into the provenance, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
from commandline import compress, hashes

FEW = ("--samples", "4", "--length", "64", "--no-bench", "--no-evaluate")


def settings_of(folder: Path) -> dict[str, Any]:
    (step,) = json.loads((folder / "compress.json").read_text())["steps"]
    return dict(step["settings"])


def test_switches_reach_the_engine_and_the_provenance(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    off = ("--gptq", "asymmetric=false", "--gptq", "local_search=0")
    for name, more in (("default", ()), ("off", off)):
        done = compress("quantize", tmp_path / "m", "--target", "int4", *FEW, *more, "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
    default, changed = settings_of(tmp_path / "default")["gptq"], settings_of(tmp_path / "off")["gptq"]
    assert changed == default | {"asymmetric": False, "local_search": 0}
    assert default != changed
    assert hashes(tmp_path / "default")["model.safetensors"] != hashes(tmp_path / "off")["model.safetensors"]


def test_without_gptq_there_are_none(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    done = compress("quantize", tmp_path / "m", "--target", "int8", *FEW, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "gptq" not in settings_of(tmp_path / "out")


def test_mistakes(tmp_path: Path) -> None:
    tiny.tiny_llama(tmp_path / "m")
    wrong = ("--gptq", "asymetric=false", "--gptq", "refit_scales=2", "--gptq", "local_search")
    done = compress("quantize", tmp_path / "m", "--target", "int4", *wrong, "-o", tmp_path / "out")
    assert done.returncode == 2
    for words in (
        "--gptq: unknown key `asymetric` (did you mean `asymmetric`?)",
        "--gptq refit_scales: must be true or false, not `2`",
        "--gptq: must be NAME=VALUE",
    ):
        assert words in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "out").exists()
