"""Runs from end to end: quantized, proved by a fresh process, measured, reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commandline import compress, hashes
from safetensors.torch import load_file

from compress.model.checkpoint import open_checkpoint
from compress.pipeline.job import Options
from compress.pipeline.run import Result, run
from compress.progress import Silent
from compress.recipe.schema import Recipe
from compress.scheme import TARGETS
from compress.verdict import JUDGED_SUBJECTS

MODELS = ["llama", "gemma3", "gpt2", "bert"]
"""One of each kind; test_contract.py has all of them, without measurements."""
ENCODERS = ("bert",)
PAIRS = [(target.name, name) for target in TARGETS.values() for name in target.formats if name != "gguf"]
EVERY_TIME = {("int4", "compressed-tensors"), ("int8", "compressed-tensors")}
WORST_KL = {"int4": 0.06, "nf4": 0.06, "fp8": 0.02, "int8": 0.004, "int8-bnb": 0.004, "int8-weight": 0.001}
WORST_KL |= {"fp16": 1e-5, "bf16": 1e-3}
FOR_CONV1D = {("int4", "gptq"), ("int8-weight", "gptq"), ("fp16", "safetensors"), ("bf16", "safetensors")}


def recipe(model: Path, output: Path, **step: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "model": str(model),
            "output": str(output),
            "calibration": {"samples": 4, "length": 64},
            "steps": [{"quantize": step}],
            "evaluate": {"fidelity": {"tokens": 512, "length": 64}},
        }
    )


def quantized(model: Path, output: Path, **step: Any) -> Result:
    return run(recipe(model, output, **step), Options(), Silent())


def figures(result: Result) -> dict[str, float | None]:
    return {part.metric: part.value for part in result.report.measurements if part.subject in JUDGED_SUBJECTS}


def matrix() -> list[Any]:
    rows = []
    for name in MODELS:
        for pair in PAIRS:
            if name == "gpt2" and pair not in FOR_CONV1D:
                continue
            often = pair in EVERY_TIME or (name == "gpt2" and pair == ("int4", "gptq"))
            rows.append(pytest.param(name, *pair, marks=() if often else pytest.mark.slow))
    return rows


@pytest.mark.parametrize(("name", "target", "format_name"), matrix())
def test_model_and_format(name: str, target: str, format_name: str, tmp_path: Path) -> None:
    source = getattr(tiny, f"tiny_{name}")(tmp_path / "m")
    before = hashes(source)
    result = quantized(source, tmp_path / "out", target=target, format=format_name)
    assert hashes(source) == before
    report = result.report
    assert report.proof is not None
    assert all(check["passed"] for check in report.proof["checks"])
    assert report.verdict.exit_code == 0
    totals = report.steps[0].totals
    layers = len([layer for layer in report.steps[0].layers if layer.skipped is None])
    assert totals.layers_quantized == layers
    assert (layers == 0) == (TARGETS[target].cast is not None)
    assert totals.layers_fallback == 0
    found = figures(result)
    assert found["size.ratio"] is not None
    assert found["size.ratio"] < 1
    if name in ENCODERS:
        assert found["cosine.mean"] is not None
        assert found["cosine.mean"] > (0.9 if target == "int4" else 0.99)
    else:
        assert found["kl.mean"] is not None
        assert 0 <= found["kl.mean"] < WORST_KL[target]
    check_biases(source, tmp_path / "out")
    check_provenance(tmp_path / "out")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ENCODERS])
def test_the_bounds_above_would_see_a_broken_model(name: str, tmp_path: Path) -> None:
    """With all block weights zero the KL lies far above the bound that the real results keep."""
    from compress.data.text import read_corpus
    from compress.data.windows import decoder_windows
    from compress.measure.fidelity import compare_logits
    from compress.model.anatomy import anatomy
    from compress.model.load import load_original, load_tokenizer

    checkpoint = open_checkpoint(getattr(tiny, f"tiny_{name}")(tmp_path / "m"))
    original = load_original(checkpoint, dtype=torch.float32, device="cpu")
    broken = load_original(checkpoint, dtype=torch.float32, device="cpu")
    for layer in anatomy(checkpoint).layers:
        weight = broken.get_submodule(layer.name).weight
        assert isinstance(weight, torch.Tensor)
        weight.data.zero_()
    corpus = read_corpus("default", part="evaluation")
    windows = decoder_windows(corpus, load_tokenizer(checkpoint.folder), length=64, tokens=512)
    assert compare_logits(original, broken, windows, Silent()).kl.mean() > 3 * WORST_KL["int4"]


def check_biases(source: Path, output: Path) -> None:
    """H07: has bias in = has bias out, the same values in the same dtype (a cast changes the dtype alone)."""
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    names = {name for name in before if name.endswith(".bias")}
    assert {name for name in after if name.endswith(".bias")} == names
    for name in names:
        assert torch.equal(before[name].to(after[name].dtype), after[name])


def check_provenance(output: Path) -> None:
    provenance = json.loads((output / "compress.json").read_text())
    assert provenance["files"] == {name: value for name, value in hashes(output).items() if name != "compress.json"}
    assert (output / "report" / "report.json").is_file()
    assert (output / "report" / "report.md").is_file()


def test_same_run_same_bytes(tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m", dtype=torch.bfloat16)
    quantized(source, tmp_path / "a", target="int4")
    quantized(source, tmp_path / "b", target="int4")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_plan_predicts_every_weight_file_to_the_byte(tmp_path: Path) -> None:
    """Several shards, so that the index and the names are in it too."""
    from compress.plan.planning import make_plan

    source = tiny.tiny_llama(tmp_path / "m", dtype=torch.bfloat16)
    wanted = recipe(source, tmp_path / "out", target="int4", max_shard_size="40kB")
    plan = make_plan(wanted, open_checkpoint(source))
    run(wanted, Options(), Silent())
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert {shard.file: shard.nbytes for shard in plan.shards} == written
    assert len(written) > 1


def test_tied_head_survives_a_skip_list(tmp_path: Path) -> None:
    """H08: lm_head and embed_tokens unchanged, still one storage after a stock reload, q_proj float."""
    import transformers

    source = tiny.tiny_opt(tmp_path / "m")
    quantized(source, tmp_path / "out", target="int4", skip=["q_proj"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    head, embedding = model.lm_head.weight, model.model.decoder.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()
    before = load_file(source / "model.safetensors")
    assert torch.equal(embedding, before["model.decoder.embed_tokens.weight"])
    after = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.decoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(before[name], after[name])
    assert "model.decoder.layers.0.self_attn.k_proj.weight" not in after


def test_tokenizer_without_pad_bos_and_eos(tmp_path: Path) -> None:
    """H10: nothing needs a pad token, list-valued ids work, and tokenizer files come out byte-equal."""
    source = tiny.tiny_llama(tmp_path / "m")
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": [3, 4]}
    (source / "config.json").write_text(json.dumps(config))
    quantized(source, tmp_path / "out", target="int4")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (source / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_short_lines_are_packed_and_counted(tmp_path: Path) -> None:
    """H09, first case: 20 lines under a window's length."""
    source = tiny.tiny_llama(tmp_path / "m")
    lines = [f"Line {index} is short." for index in range(20)]
    (tmp_path / "short.txt").write_text("\n".join(lines))
    wanted = recipe(source, tmp_path / "out", target="int4").model_dump(mode="json")
    wanted["calibration"] = {"source": str(tmp_path / "short.txt"), "samples": 64, "length": 128}
    report = run(Recipe.model_validate(wanted), Options(), Silent()).report
    facts = report.inputs.calibration
    assert facts is not None
    packed = len("\n\n".join(lines)) // 128 * 128  # a byte is a token here
    assert report.steps[0].totals.calibration_tokens == packed
    assert facts["samples_asked"] == 64
    assert all(layer.tokens == packed for layer in report.steps[0].layers if layer.skipped is None)


def test_gates_decide_the_exit_code_and_all_outputs_agree(tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m")
    quick = ("--target", "int4", "--no-bench", "--samples", "4", "--length", "64", "--evaluation-tokens", "512")
    done = compress("quantize", source, *quick, "-o", tmp_path / "a", "--gate", "kl.mean <= 9", "--gate", "size <= 1MB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PASS")
    done = compress("quantize", source, *quick, "-o", tmp_path / "b", "--gate", "kl.mean <= 0.000001", "--json")
    assert done.returncode == 3
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == 3
    assert answer["verdict"]["outcome"] == "FAIL"
    report = json.loads((tmp_path / "b" / "report" / "report.json").read_text())
    assert report["verdict"] == answer["verdict"]
    assert "FAIL" in (tmp_path / "b" / "report" / "report.md").read_text()
    again = compress("quantize", source, *quick, "-o", tmp_path / "b")
    assert again.returncode == 2
    assert "not empty" in again.stderr
    assert compress("quantize", source, *quick, "-o", tmp_path / "b", "--overwrite").returncode == 0


def test_bench_of_a_tiny_model(tmp_path: Path) -> None:
    source = tiny.tiny_llama(tmp_path / "m")
    wanted = recipe(source, tmp_path / "out", target="int8").model_dump(mode="json")
    wanted |= {"bench": {"prompt": 16, "new_tokens": 4, "budget": 1}, "evaluate": None}
    report = run(Recipe.model_validate(wanted), Options(), Silent()).report
    subjects = {(part.metric, part.subject) for part in report.measurements}
    for metric in ("latency.ttft", "latency.tpot", "memory.peak"):
        assert {(metric, "original"), (metric, "result")} <= subjects
    assert ("latency.tpot.ratio", "original/original") in subjects, "the A/A floor"
    raw = (tmp_path / "out" / "report" / "latency.jsonl").read_text().splitlines()
    assert any(json.loads(line)["kind"] == "sample" for line in raw)
