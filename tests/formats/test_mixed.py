"""Folders whose layers have several schemes: read back, loaded by stock transformers, followed as other loaders do."""

from __future__ import annotations

import json
import re

import pytest
import tiny
import torch
from test_formats import assert_equal
from test_gptq_check import edit_block
from test_proof import failures, job
from written import W4, W8A8, W8A16, measure, write

from compress.errors import BrokenResultError
from compress.formats import proof_worker
from compress.formats.compressed_tensors import patterns
from compress.formats.gptq import override
from compress.formats.read import Reader
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.scheme import Scheme


def down_is(scheme):
    return lambda layer: scheme if layer.name.endswith("down_proj") else W4


def by_block(layer):
    """Three schemes, a skipped layer, and blocks that differ."""
    if layer.name.endswith("0.mlp.down_proj"):
        return None
    if layer.fused.endswith("qkv"):
        return W8A16 if layer.block == 0 else Scheme(4, 64)
    return W4


MIXES = {
    "int4 and int8-weight": ("compressed-tensors", down_is(W8A16), "pack-quantized"),
    "int4 and int8": ("compressed-tensors", down_is(W8A8), "mixed-precision"),
    "blocks that differ": ("compressed-tensors", by_block, "pack-quantized"),
    "gptq": ("gptq", down_is(W8A16), None),
    "gptq, blocks that differ": ("gptq", by_block, None),
}


@pytest.mark.parametrize("case", MIXES)
def test_a_mix_is_read_back_and_proved(tmp_path, case):
    """compressed-tensors by stock transformers, gptq by the independent reader."""
    format_name, choose, written_format = MIXES[case]
    source = tiny.tiny_llama(tmp_path / "source", dtype=torch.bfloat16)
    written = write(source, tmp_path / "out", format_name, choose, max_shard_size=40_000)
    reader = Reader(tmp_path / "out")
    assert sorted(reader.quantized_names) == sorted(written.weights)
    for name, weight in written.weights.items():
        assert_equal(reader.quantized(name), weight)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert sizes == {shard.file: shard.nbytes for shard in written.shards}
    block = open_checkpoint(tmp_path / "out").config["quantization_config"]
    assert block.get("format") == written_format
    loader = "reader" if format_name == "gptq" else "stock"
    record = proof_worker.run(job(written, measure(written, tmp_path / "logits.safetensors"), loader))
    assert record.passed, record.checks
    assert record.kl_mean == 0


def test_the_bare_model_finds_the_schemes_too(tmp_path):
    """AutoModel's names lack the prefix `model.`; a layer that no group matches would be left at random."""
    from transformers import AutoModel

    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", down_is(W8A16))
    ids = torch.arange(24).unsqueeze(0)
    with torch.inference_mode():
        full = load_original(open_checkpoint(written.stage), dtype=torch.float32, device="cpu")
        expected = full(ids, output_hidden_states=True).hidden_states[-1]
        bare = AutoModel.from_pretrained(written.stage, dtype=torch.float32)
        assert torch.equal(bare(ids).last_hidden_state, expected)


@pytest.mark.parametrize(
    "make", [tiny.tiny_llama, tiny.tiny_opt, tiny.tiny_bert], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("case", ["every block", "one block"])
def test_patterns_match_their_layers_and_no_other(tmp_path, make, case):
    layers = write(make(tmp_path / "source"), tmp_path / "out", "compressed-tensors", W4).anatomy.layers
    mine = [x for x in layers if x.fused.endswith(("o", "down", "fc2", "output")) and (case[0] == "e" or x.block == 1)]
    targets = patterns(mine, layers)
    assert len(targets) == len({x.name.partition(f".{x.block}.")[2] for x in mine})
    for layer in layers:
        for name in (layer.name, layer.name.partition(".")[2]):
            found = any(re.match(target.removeprefix("re:"), name) for target in targets)
            assert found == (layer in mine), name


def test_a_wrong_group_fails_the_proof(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", down_is(W8A16))
    task = job(written, measure(written, tmp_path / "logits.safetensors"), "stock")
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace("down_proj$", "o_proj$"))
    assert "loading" in failures(proof_worker.run(task))


class TestRulesOfGptq:
    @pytest.fixture
    def folder(self, tmp_path):
        """q/k/v at 8 bits: a whole fused group apart from the rest."""
        source = tiny.tiny_llama(tmp_path / "source")
        write(source, tmp_path / "out", "gptq", lambda x: W8A16 if x.fused.endswith("qkv") else W4)
        return tmp_path / "out"

    def test_every_loader_reads_the_same(self, folder):
        block = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert (block["bits"], block["group_size"]) == (4, 32)
        attention = "model.layers.1.self_attn"
        for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):  # the last is vLLM's
            assert override(block, f"{attention}.{name}") == {"bits": 8, "group_size": -1}
        for name in (f"{attention}.o_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.down_proj"):
            assert override(block, name) == {}
        assert "modules_in_block_to_quantize" not in block

    def test_a_fused_matrix_that_is_read_as_another_scheme_is_refused(self, folder):
        def unfuse(block):
            block["dynamic"] = {rule.replace("|qkv_proj", ""): change for rule, change in block["dynamic"].items()}

        edit_block(folder, unfuse)
        message = "qkv_proj: found W4A16 g32, expected W8A16 channel as q_proj has"
        with pytest.raises(BrokenResultError, match=re.escape(message)):
            Reader(folder)

    def test_dropped_rules_are_found(self, folder):
        edit_block(folder, lambda block: block.pop("dynamic"))
        reader = Reader(folder)
        with pytest.raises(BrokenResultError, match="q_proj"):
            reader.quantized("model.layers.0.self_attn.q_proj")
