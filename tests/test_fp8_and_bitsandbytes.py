"""fp8, nf4 and int8-bnb from the command line to a folder that stock transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from commandline import ROOT, compress, hashes
from safetensors.torch import load_file, save_file

from compress.formats import bitsandbytes
from compress.formats.read import Reader
from compress.pipeline.job import Options
from compress.pipeline.run import Result, run
from compress.progress import Silent
from compress.recipe.schema import Recipe
from compress.runtime.load import load_reference

QUICK = ("--no-bench", "--evaluation-tokens", "512")
IDS = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))


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


def outputs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS)[0]
    return found


CASES = [
    pytest.param("llama", "fp8"),
    pytest.param("gpt2", "nf4"),
    pytest.param("bert", "int8-bnb"),
    pytest.param("opt", "int8-bnb", marks=pytest.mark.slow),
    pytest.param("qwen2", "fp8", marks=pytest.mark.slow),
    pytest.param("qwen2", "nf4", marks=pytest.mark.slow),
    pytest.param("opt", "nf4", marks=pytest.mark.slow),
    pytest.param("bert", "nf4", marks=pytest.mark.slow),
    pytest.param("llama", "int8-bnb", marks=pytest.mark.slow),
    pytest.param("gpt2", "int8-bnb", marks=pytest.mark.slow),
]
WORST_KL = {"fp8": 0.01, "nf4": 0.08, "int8-bnb": 0.002}


@pytest.mark.parametrize(("name", "target"), CASES)
def test_stock_loading_gives_what_was_measured(name: str, target: str, tmp_path: Path) -> None:
    """Quantized without calibration, proved, and loaded as a user would; zero rows (H04) stay zero."""
    source = getattr(tiny, f"tiny_{name}")(tmp_path / "m")
    zeroed = {
        "gpt2": "transformer.h.0.mlp.c_fc",
        "opt": "model.decoder.layers.0.fc1",
        "bert": "encoder.layer.0.output.dense",
    }
    layer = zeroed.get(name, "model.layers.0.self_attn.q_proj")
    tensors = load_file(source / "model.safetensors")
    weight = tensors[f"{layer}.weight"]
    (weight.T if name == "gpt2" else weight)[5] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = quantized(source, tmp_path / "out", target=target).report
    assert report.proof is not None
    assert all(check["passed"] for check in report.proof["checks"])
    assert report.proof["method"].startswith("transformers")
    assert report.steps[0].totals.layers_skipped < report.steps[0].totals.layers_quantized
    assert report.steps[0].settings["smooth"] is False
    assert report.inputs.calibration is None
    found = {part.metric: part.value for part in report.measurements if part.subject == "result/original"}
    assert found.get("kl.mean", 0.0) < WORST_KL[target]
    assert found.get("cosine.mean", 1.0) > 0.98
    stored = Reader(tmp_path / "out").quantized(layer)
    assert (stored.scale > 0).all()
    assert not stored.dequantize(torch.float32)[5].any()
    auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    stock = auto.from_pretrained(tmp_path / "out")
    bitsandbytes.exact(stock)  # not as the processor's own instructions for bfloat16 would have it
    reference = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    assert torch.equal(outputs(stock), outputs(reference))


@pytest.mark.parametrize(
    "target", ["nf4", pytest.param("fp8", marks=pytest.mark.slow), pytest.param("int8-bnb", marks=pytest.mark.slow)]
)
def test_from_the_command_line(target: str, tmp_path: Path) -> None:
    """A bfloat16 model with a path of spaces and Chinese characters; biases are kept as they are (H07)."""
    source = tiny.tiny_qwen2(tmp_path / "模 型", dtype=torch.bfloat16)
    done = compress("quantize", source, "--target", target, *QUICK, "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert "bitsandbytes" not in done.stderr.replace("the bitsandbytes format", "")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    biases = [name for name in before if name.endswith(".bias")]
    assert biases
    assert all(torch.equal(before[name], after[name]) for name in biases)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    label = {"fp8": "FP8 channel", "nf4": "NF4 g64", "int8-bnb": "LLM.int8 channel"}[target]
    assert f"Weights: {label}, chosen by rtn." in card
    provenance = json.loads((tmp_path / "out" / "compress.json").read_text(encoding="utf-8"))
    assert provenance["steps"][0]["layers_quantized"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fp8", "nf4", "int8-bnb"])
def test_the_same_bytes_again(target: str, tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m")
    for folder in ("one", "other"):
        done = compress("quantize", source, "--target", target, "--no-bench", "--no-evaluate", "-o", tmp_path / folder)
        assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "one") == hashes(tmp_path / "other")


def test_fp8_beside_integers_in_one_folder(tmp_path: Path) -> None:
    """The integer layers are calibrated and smoothed; the fp8 ones are rounded, which is no falling back."""
    overrides = [{"layers": "*.down_proj", "target": "int4"}, {"layers": "*.o_proj", "target": "int8-weight"}]
    source = tiny.tiny_llama(tmp_path / "m")
    report = quantized(source, tmp_path / "out", target="fp8", overrides=overrides, refine=2).report
    assert report.proof is not None
    assert all(check["passed"] for check in report.proof["checks"])
    totals = report.steps[0].totals
    assert (totals.layers_quantized, totals.layers_fallback) == (14, 0)
    layers = {layer.name: layer for layer in report.steps[0].layers}
    assert layers["model.layers.1.mlp.down_proj"].algorithm == "gptq"
    assert layers["model.layers.1.mlp.up_proj"].algorithm == "rtn"
    assert layers["model.layers.1.mlp.up_proj"].smoothing is None
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block["format"] == "mixed-precision"
    assert {group["format"] for group in block["config_groups"].values()} == {"float-quantized", "pack-quantized"}


REFUSED = {
    "two settings": (["--target", "nf4", "--override", "*.down_proj=int8-bnb"], "either nf4 or int8-bnb"),
    "other format": (["--target", "nf4", "--format", "gptq"], "cannot be written as gptq"),
    "groups": (["--target", "nf4", "--group-size", "32"], "has blocks of 64 weights"),
    "smoothing": (["--target", "fp8", "--smooth"], "as exact beside outliers"),
    "gptq": (["--target", "nf4", "--algorithm", "gptq"], "only rounded to nearest"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_the_work(case: str, tmp_path: Path) -> None:
    arguments, sentence = REFUSED[case]
    source = tiny.tiny_llama(tmp_path / "m")
    done = compress("quantize", source, *arguments, *QUICK, "-o", tmp_path / "out", COLUMNS="1000")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_widths_that_nf4_cannot_hold_are_listed_and_can_be_skipped(tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m", intermediate_size=96)
    done = compress("quantize", source, "--target", "nf4", *QUICK, "-o", tmp_path / "out", COLUMNS="1000")
    assert done.returncode == 2
    assert "blocks of 64 weights" in done.stderr
    assert all(f"model.layers.{block}.mlp.down_proj: width 96" in done.stderr for block in range(2))
    report = quantized(source, tmp_path / "out", target="nf4", skip=["down_proj"]).report
    assert report.steps[0].totals.layers_quantized == 12


def test_without_bitsandbytes_nothing_begins(tmp_path: Path) -> None:
    (tmp_path / "broken" / "bitsandbytes").mkdir(parents=True)
    (tmp_path / "broken" / "bitsandbytes" / "__init__.py").write_text("raise OSError('no libcudart.so')")
    source = tiny.tiny_llama(tmp_path / "m")
    done = compress(
        *("quantize", source, "--target", "int8-bnb", *QUICK, "-o", tmp_path / "out"),
        PYTHONPATH=f"{tmp_path / 'broken'}:{ROOT}",
    )
    assert done.returncode == 9
    assert "no libcudart.so" in done.stderr
    assert "pip install bitsandbytes" in done.stderr
    assert not (tmp_path / "out").exists()


def test_skip_leaves_the_tied_head_alone(tmp_path: Path) -> None:
    """H08: transformers protects heads only where config.json has no list of its own."""
    source = tiny.tiny_opt(tmp_path / "m")
    quantized(source, tmp_path / "out", target="nf4", skip=["q_proj"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    head, embedding = model.lm_head.weight, model.model.decoder.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()
    before = load_file(source / "model.safetensors")
    assert torch.equal(embedding, before["model.decoder.embed_tokens.weight"])
    query = model.model.decoder.layers[0].self_attn.q_proj
    assert type(query) is torch.nn.Linear
    assert torch.equal(query.weight, before["model.decoder.layers.0.self_attn.q_proj.weight"])
