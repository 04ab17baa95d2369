"""model.gguf: exact bytes, codes carried over, and the dense model that it stands for."""

from __future__ import annotations

import re

import gguf
import pytest
import torch
from commandline import hashes
from gguf_folders import MODELS, Q4, Q8, decoded, halves, model, write

from compress.errors import BrokenResultError, UsageError
from compress.formats.gguf_read import GgufReader
from compress.formats.read import open_reader
from compress.model.checkpoint import open_checkpoint
from compress.model.gguf_header import read_gguf_header
from compress.model.load import load_original
from compress.runtime.load import load_reference


def mixed(layer):
    return {"down_proj": Q8, "o_proj": None}.get(layer.name.rpartition(".")[2], Q4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("choose", [lambda _: Q4, lambda _: Q8, mixed], ids=["int4", "int8", "mixed"])
def test_the_file_holds_what_was_planned(name, choose, tmp_path):
    source = model(name, tmp_path / "m")
    folder = write(source, tmp_path / "out", choose)
    path = folder.stage / "model.gguf"
    assert "model.gguf" in folder.names
    assert path.stat().st_size == folder.planned.nbytes
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in read_gguf_header(path)}
    assert found == {tensor.name: (tensor.dtype, tensor.shape) for tensor in folder.planned.tensors}
    reader = GgufReader(folder.stage)
    assert set(reader.quantized_names) == set(folder.weights)
    for layer, weight in folder.weights.items():
        again = reader.quantized(layer)
        assert torch.equal(again.codes, weight.codes)
        assert torch.equal(again.scale, weight.scale)
        assert again.scheme == weight.scheme


@pytest.mark.parametrize("name", MODELS)
def test_the_dense_model_is_what_the_file_holds(name, tmp_path):
    """Through a decoder of the test's own, with rows and norms put back by the test."""
    source = model(name, tmp_path / "m")
    folder = write(source, tmp_path / "out", mixed)
    original = open_checkpoint(source)
    state = open_reader(folder.stage).state_dict(torch.float32)
    assert state.keys() == {n for n in original.tensors if not (n == "lm_head.weight" and name == "gemma3")}
    raw = (folder.stage / "model.gguf").read_bytes()
    dense_name = dict(zip([t.name for t in folder.planned.tensors], folder.planned.sources, strict=True))
    for tensor in read_gguf_header(folder.stage / "model.gguf"):
        dense = dense_name[tensor.name]
        values = decoded(raw[tensor.offset : tensor.offset + tensor.nbytes], tensor.dtype, tensor.shape)
        if name in ("llama", "mistral") and re.search(r"[qk]_proj", dense):
            values = halves(values, 8 if "q_proj" in dense else 2)
        if name == "gemma3" and dense.endswith("norm.weight"):
            values = values - 1
        assert torch.equal(state[dense], values), dense
        stem = dense.removesuffix(".weight")
        expected = original.read(dense).float()
        if stem in folder.weights:
            expected = folder.weights[stem].dequantize(torch.float32)
        assert torch.allclose(values, expected, atol=0 if stem in folder.weights else 1e-4, rtol=1e-3), dense


def test_the_reference_path_answers_like_the_original(tmp_path):
    source = model("llama", tmp_path / "m")
    folder = write(source, tmp_path / "out", lambda _: Q8)
    ids = torch.arange(40).unsqueeze(0)
    before = load_original(open_checkpoint(source), dtype=torch.float32, device="cpu")(input_ids=ids).logits
    after = load_reference(folder.stage, dtype=torch.float32, device="cpu")(input_ids=ids).logits
    assert (before - after).abs().max() < 0.15 * before.std()


def test_equal_inputs_give_equal_bytes(tmp_path):
    source = model("gemma3", tmp_path / "m")
    first = write(source, tmp_path / "名 one", mixed)
    second = write(source, tmp_path / "two", mixed)
    assert hashes(first.stage) == hashes(second.stage)


def test_the_package_reads_the_metadata(tmp_path):
    folder = write(model("gemma3", tmp_path / "m"), tmp_path / "out", lambda _: Q4)
    reader = gguf.GGUFReader(folder.stage / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "gemma3"
    assert fields["gemma3.block_count"] == 3
    assert fields["gemma3.attention.head_count_kv"] == 2
    assert fields["gemma3.attention.sliding_window"] == 32
    assert fields["gemma3.attention.sliding_window_pattern"] == 2
    assert fields["general.file_type"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == 256
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert "output.weight" not in {tensor.name for tensor in reader.tensors}  # tied
    for tensor in reader.tensors:
        assert (tensor.tensor_type.name == "F32") == (len(tensor.shape) == 1)


def test_llama3_scaling_is_a_tensor(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    source = model("llama", tmp_path / "m", rope_parameters=rope, head_dim=16)
    folder = write(source, tmp_path / "out", lambda _: Q4)
    place = next(t for t in read_gguf_header(folder.stage / "model.gguf") if t.name == "rope_freqs.weight")
    raw = (folder.stage / "model.gguf").read_bytes()[place.offset : place.offset + place.nbytes]
    rotary = load_original(open_checkpoint(source), dtype=torch.float32, device="cpu").model.rotary_emb
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / decoded(raw, "F32", place.shape), rotary.inv_freq, rtol=1e-5)


def test_a_sliding_window_of_all_layers_ends_the_context(tmp_path):
    folder = write(model("mistral", tmp_path / "m", sliding_window=48), tmp_path / "out", lambda _: Q4)
    fields = gguf.GGUFReader(folder.stage / "model.gguf").fields
    assert fields["llama.context_length"].contents() == 48


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "scaled by dynamic"),
        ("qwen3", {"attention_bias": True}, r"q_proj\.bias: llama\.cpp adds no such bias"),
        ("gemma3", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar is 16"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (
            "gemma3",
            {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            "regular steps",
        ),
    ],
)
def test_models_that_llama_computes_otherwise_are_refused(name, overrides, reason, tmp_path):
    source = model(name, tmp_path / "m", **overrides)
    with pytest.raises(UsageError, match=reason):
        write(source, tmp_path / "out", lambda _: Q4)
    assert not (tmp_path / "out" / "model.gguf").exists()


@pytest.mark.parametrize("keep", [3, 30, 5000, -1])
def test_a_file_that_was_cut_short_is_refused(keep, tmp_path):
    folder = write(model("llama", tmp_path / "m"), tmp_path / "out", lambda _: Q4)
    path = folder.stage / "model.gguf"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"model\.gguf"):
        open_checkpoint(folder.stage)


def test_a_value_beyond_float16_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    source = model("llama", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][0, 0] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match=r"embed_tokens\.weight: 1 values are larger than float16"):
        write(source, tmp_path / "out", lambda _: Q4)
