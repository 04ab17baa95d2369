"""The step `prune` from end to end, alone and in front of `quantize`: proved, measured, reported, reproducible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import hashes
from safetensors.torch import load_file

from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.kept import kept_of
from compress.model.prunable import shape_of, unit_axes
from compress.model.pruned import pruned_name
from compress.model.shapes import Shape
from compress.pipeline.job import Options
from compress.pipeline.run import Result, run
from compress.plan.memory import PROGRAM_BYTES
from compress.progress import Silent
from compress.recipe.schema import Recipe
from compress.records import LayerRecord

CHECKS = ["files", "original", "config", "side files", "loading", "shapes", "outputs", "cache", "tie"]


def recipe(model: Path, output: Path, *steps: dict[str, Any], **more: Any) -> Recipe:
    fields = {
        "version": 1,
        "model": str(model),
        "output": str(output),
        "calibration": {"samples": 8, "length": 64},
        "steps": list(steps),
        "evaluate": None,
    }
    return Recipe.model_validate(fields | more)


def pruned(model: Path, output: Path, *steps: dict[str, Any], options: Options | None = None, **more: Any) -> Result:
    return run(recipe(model, output, *steps, **more), options or Options(), Silent())


def figures(result: Result, subject: str) -> dict[str, float | None]:
    return {part.metric: part.value for part in result.report.measurements if part.subject == subject}


def provenance(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "compress.json").read_text())
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "m"
    tiny.tiny_llama(folder, dtype=torch.bfloat16, num_hidden_layers=3)
    (folder / "README.md").write_text("# A model\n")
    return folder


def test_pruned_alone(llama: Path, tmp_path: Path) -> None:
    before = hashes(llama)
    keep = {"ffn": 0.5, "heads": 4, "kv_heads": 1, "layers": 2}
    more = {
        "evaluate": {"fidelity": {"tokens": 256, "length": 64}, "generation": None},
        "gates": ["parameters <= 68000", "kv_bytes <= 64B", "kv_bytes <= 63B"],
    }
    result = pruned(llama, tmp_path / "p", {"prune": {"keep": keep}}, **more)
    assert hashes(llama) == before
    report = result.report
    assert report.proof is not None
    assert [check["name"] for check in report.proof["checks"]] == CHECKS
    assert all(check["passed"] for check in report.proof["checks"])
    assert [gate.outcome for gate in report.verdict.gates] == ["PASS", "PASS", "FAIL"]
    assert [step.kind for step in report.steps] == ["prune"]
    original, after = figures(result, "original"), figures(result, "result")
    assert original["kv_bytes"] == 2 * 3 * 2 * 8 * 2
    assert after["kv_bytes"] == 2 * 2 * 1 * 8 * 2
    assert original["parameters"] == sum(tensor.numel() for tensor in _tensors(llama).values())
    assert after["parameters"] == sum(tensor.numel() for tensor in _tensors(tmp_path / "p").values())
    assert figures(result, "result/original")["kl.mean"] is not None
    check_indices(llama, tmp_path / "p")


def check_indices(source: Path, output: Path) -> None:
    """compress.json says which units stay, and the folder has them: what was only cut equals the source's."""
    checkpoint = open_checkpoint(source)
    parts = anatomy(checkpoint)
    step = provenance(output)["steps"][0]
    before = shape_of(checkpoint, parts)
    assert step["settings"]["before"] == vars(before)
    result = open_checkpoint(output)
    assert step["settings"]["after"] == vars(shape_of(result, anatomy(result)))
    records = [
        LayerRecord(one["name"], (), skipped=one.get("skipped"), pruning=one.get("pruning")) for one in step["layers"]
    ]
    kept = kept_of(records, parts.blocks, before)
    assert [one.block for one in kept] == step["settings"]["layers_kept"]
    compared = 0
    for one in kept:
        for name, axes in unit_axes(checkpoint, parts, one).items():
            if not name.endswith(("o_proj.weight", "down_proj.weight")):
                wanted = checkpoint.read(name)
                for axis, indices in axes:
                    wanted = wanted.index_select(axis, torch.tensor(indices))
                new = pruned_name(parts, name, [one.block for one in kept])
                assert new is not None
                assert torch.equal(result.read(new), wanted)
                compared += 1
    assert compared == 5 * len(kept)
    assert set(step["replaced"]) <= set(checkpoint.tensors)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


def test_pruned_and_then_quantized(llama: Path, tmp_path: Path) -> None:
    prune = {"prune": {"keep": {"ffn": 0.5, "heads": 4}}}
    quantize = {"quantize": {"target": "int4", "group_size": 32}}
    result = pruned(llama, tmp_path / "pq", prune, quantize)
    report = result.report
    assert [step.kind for step in report.steps] == ["prune", "quantize"]
    assert report.proof is not None
    assert all(check["passed"] for check in report.proof["checks"])
    assert any("the pruned model was proved by transformers" in note for note in report.steps[0].notes)
    assert report.steps[1].totals.layers_quantized == 3 * 7
    config = json.loads((tmp_path / "pq" / "config.json").read_text())
    assert (config["intermediate_size"], config["num_attention_heads"], config["head_dim"]) == (64, 4, 8)
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "pq" / "README.original.md").read_text() == "# A model\n"
    assert provenance(tmp_path / "pq")["model"]["content_hash"] == open_checkpoint(llama).content_hash
    assert figures(result, "original")["parameters"] == sum(one.numel() for one in _tensors(llama).values())
    assert not (tmp_path / ".pq.partial").exists()
    again = pruned(llama, tmp_path / "again", prune, quantize)
    assert again.report.steps == report.steps
    assert hashes(tmp_path / "again") == hashes(tmp_path / "pq")


def test_quantized_after_a_cast_is_the_pruned_model_in_another_dtype(llama: Path, tmp_path: Path) -> None:
    prune = {"prune": {"keep": {"layers": 2}, "importance": "magnitude", "compensate": False}}
    result = pruned(llama, tmp_path / "p", prune, {"quantize": {"target": "fp16"}})
    assert result.report.verdict.exit_code == 0
    assert {tensor.dtype for tensor in _tensors(tmp_path / "p").values()} == {torch.float16}
    assert figures(result, "result")["kv_bytes"] == 2 * 2 * 2 * 8 * 2


def test_without_text_nothing_is_calibrated(llama: Path, tmp_path: Path) -> None:
    step = {"prune": {"keep": {"ffn": 64}, "importance": "magnitude", "compensate": False}}
    result = pruned(llama, tmp_path / "p", step, calibration={"source": str(tmp_path / "no such file.txt")})
    (report,) = result.report.steps
    assert report.calibration == {}
    assert all(layer.pruning is None or "error_measured" not in layer.pruning for layer in report.layers)


@pytest.mark.parametrize("importance", ["activation", "taylor", "random"])
def test_every_importance(llama: Path, tmp_path: Path, importance: str) -> None:
    step = {"prune": {"keep": {"ffn": 64, "heads": 4, "layers": 2}, "importance": importance}}
    result = pruned(llama, tmp_path / "p", step)
    assert result.report.steps[0].settings["importance"] == importance
    assert result.report.verdict.exit_code == 0


def test_the_shape_is_searched_for(llama: Path, tmp_path: Path) -> None:
    steps = {"prune": {"params": "0.8x"}}, {"quantize": {"target": "int8-weight"}}
    result = pruned(llama, tmp_path / "p", *steps)
    settings = result.report.steps[0].settings
    best = min(settings["search"], key=lambda tried: tried["divergence"])
    assert settings["after"] == {name: best[name] for name in vars(Shape(1, 1, 1, 1))}
    original, after = (figures(result, subject)["parameters"] for subject in ("original", "result"))
    assert original is not None
    assert after is not None
    assert after <= 0.8 * original
    assert after == best["parameters"]


def test_of_a_model_that_was_quantized_the_dense_weights_are_pruned(llama: Path, tmp_path: Path) -> None:
    pruned(llama, tmp_path / "q", {"quantize": {"target": "int8-weight"}})
    step = {"prune": {"keep": {"ffn": 0.5}}}
    result = pruned(tmp_path / "q", tmp_path / "p", step, dequantize=True)
    assert result.report.verdict.exit_code == 0
    assert provenance(tmp_path / "p")["model"]["content_hash"] == open_checkpoint(tmp_path / "q").content_hash
    assert open_checkpoint(tmp_path / "p").config["intermediate_size"] == 64
    assert not open_checkpoint(tmp_path / "p").is_quantized


def test_an_encoder(tmp_path: Path) -> None:
    model = tiny.tiny_bert(tmp_path / "m")
    more = {"evaluate": {"fidelity": {"tokens": 256, "length": 64}, "retrieval": None}}
    result = pruned(model, tmp_path / "p", {"prune": {"keep": {"ffn": 0.5}}}, **more)
    assert result.report.proof is not None
    assert [check["name"] for check in result.report.proof["checks"]] == [one for one in CHECKS if one != "cache"]
    found = figures(result, "result/original")
    assert found["cosine.mean"] is not None
    assert found["cosine.mean"] > 0.8
    assert "kv_bytes" not in figures(result, "result")


def test_a_model_that_memory_does_not_hold_goes_block_by_block(llama: Path, tmp_path: Path) -> None:
    step = {"prune": {"keep": {"ffn": 0.5, "layers": 2}, "importance": "activation"}}
    whole = pruned(llama, tmp_path / "whole", step)
    parts = pruned(llama, tmp_path / "parts", step, options=Options(memory=int(PROGRAM_BYTES)))
    assert whole.report.proof is not None
    assert parts.report.proof is not None
    assert parts.report.proof["method"] == "independent reader, block by block"
    assert hashes(tmp_path / "whole")["model.safetensors"] == hashes(tmp_path / "parts")["model.safetensors"]


def test_without_memory_for_gradients_the_record_says_so(llama: Path, tmp_path: Path) -> None:
    step = {"prune": {"keep": {"ffn": 0.5}}}
    result = pruned(llama, tmp_path / "p", step, options=Options(memory=int(PROGRAM_BYTES)))
    assert any("does not hold the whole model with its gradients" in note for note in result.report.steps[0].notes)
