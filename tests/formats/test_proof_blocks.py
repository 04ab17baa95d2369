"""The proof of one block at a time passes for folders that are right, and fails for each way of being wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from written import FP8, LLM_INT8, NF4, W4, W8A8, proof_job, write

from compress.formats import proof_worker
from compress.formats.proof import prove
from compress.formats.proof_blocks import METHOD, meant_outputs
from compress.model.load import load_original


def tokens():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (length,), generator=generator) for length in (24, 16)]


def block_job(written, folder, *, cast=None):
    """The folder against what its weights give block by block."""
    windows = tokens()
    found = meant_outputs(
        written.source,
        written.anatomy,
        windows,
        layers=[layer for layer in written.anatomy.layers if layer.name in written.weights],
        quantized=written.weights.__getitem__,
        replaced={},
        cast=cast,
    )
    named = {f"window.{index}": ids for index, ids in enumerate(windows)}
    save_file(named | {f"logits.{index}": states for index, states in enumerate(found)}, folder / "outputs.safetensors")
    return replace(proof_job(written, folder / "outputs.safetensors", "reader"), by_block=True)


CASES = {
    "llama w4": (tiny.tiny_llama, "compressed-tensors", W4),
    "gemma3 w8a8": (tiny.tiny_gemma3, "compressed-tensors", W8A8),
    "bert fp8": (tiny.tiny_bert, "compressed-tensors", FP8),
    "gpt2 nf4": (tiny.tiny_gpt2, "bitsandbytes", NF4),
    "opt int8-bnb": (tiny.tiny_opt, "bitsandbytes", LLM_INT8),
    "gpt2 gptq w4": (tiny.tiny_gpt2, "gptq", W4),
    "bert gptq w4": (tiny.tiny_bert, "gptq", W4),
}


@pytest.mark.parametrize("case", CASES)
def test_a_right_folder_passes_every_check(tmp_path, case):
    make, format_name, scheme = CASES[case]
    source = make(tmp_path / "source", dtype=torch.bfloat16)
    written = write(source, tmp_path / "out", format_name, scheme, max_shard_size=40_000)
    record = proof_worker.run(block_job(written, tmp_path).as_json())
    assert record.passed, record.checks
    assert record.method == METHOD
    names = [check.name for check in record.checks]
    assert names == ["files", "original", "config", "side files", "outputs", "weights"]
    assert (record.windows, record.tokens, record.max_logit_difference) == (2, 40, 0.0)


def test_it_runs_in_a_fresh_process(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", W4)
    assert prove(block_job(written, tmp_path)).passed


def test_a_plain_cast_has_no_quantized_weight_to_compare(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    written = write(source, tmp_path / "out", "safetensors", lambda _layer: None, cast="bfloat16")
    record = proof_worker.run(block_job(written, tmp_path, cast="bfloat16").as_json())
    assert record.passed, record.checks
    assert "weights" not in [check.name for check in record.checks]


@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_bert], ids=lambda function: function.__name__)
def test_what_it_walks_through_is_what_the_stock_model_computes(tmp_path, make):
    """Nothing quantized: the walk's outputs are the original's, to the last bits of a sum."""
    source = make(tmp_path / "source")
    written = write(source, tmp_path / "out", "safetensors", lambda _layer: None)
    model = load_original(written.source, dtype=torch.float32, device="cpu")
    found = meant_outputs(
        written.source, written.anatomy, tokens(), layers=[], quantized={}.__getitem__, replaced={}, cast=None
    )
    with torch.no_grad():
        for ids, states in zip(tokens(), found, strict=True):
            expected = model.base_model(ids.unsqueeze(0)).last_hidden_state[0]
            torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale"])
def test_one_wrong_number_in_one_layer_is_found(tmp_path, part):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", W4)
    asked = block_job(written, tmp_path)
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.mlp.down_proj.{part}"
    tensors[name].view(torch.uint8)[0, 0] ^= 0x10
    save_file(tensors, path, metadata={"format": "pt"})
    record = proof_worker.run(asked.as_json())
    failed = {check.name: check.detail for check in record.checks if not check.passed}
    assert "model.layers.1.mlp.down_proj: the weight differs from ours" in failed["weights"]


def test_outputs_of_another_model_are_found(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", W4)
    asked = block_job(written, tmp_path)
    cases = load_file(asked.logits)
    cases["logits.1"][3, 5] += 0.1
    save_file(cases, asked.logits)
    record = proof_worker.run(asked.as_json())
    assert [check.name for check in record.checks if not check.passed] == ["outputs"]
