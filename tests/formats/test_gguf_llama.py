"""The files in llama.cpp itself: probabilities and tokenizer. Skipped, and said so, without xllamacpp."""

from __future__ import annotations

import os

import pytest
import torch
from gguf_folders import MODELS, Q4, Q8, model, write
from safetensors.torch import load_file, save_file

from compress.formats.gguf_check import check_llama, llama_version
from compress.model.gguf_header import read_gguf_header
from compress.runtime.load import load_reference

pytestmark = pytest.mark.skipif(
    llama_version() is None, reason="llama.cpp was NOT run: pip install xllamacpp to check that it runs our files"
)
SCALED = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def logits_of(stage, target):
    """Our own answers on two windows."""
    reference = load_reference(stage, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for index in range(2):
        ids = torch.randint(256, (100,), generator=generator)
        with torch.inference_mode():
            tensors[f"logits.{index}"] = reference(input_ids=ids.unsqueeze(0)).logits[0].contiguous()
        tensors[f"window.{index}"] = ids
    save_file(tensors, target)
    return target


@pytest.mark.parametrize("name", MODELS)
def test_llama_finds_the_same_probabilities(name, tmp_path):
    folder = write(model(name, tmp_path / "m", initializer_range=0.2), tmp_path / "模 型", lambda _: Q4)
    check = check_llama(folder.stage, logits_of(folder.stage, tmp_path / "logits.safetensors"), 1)
    assert check.passed, check.detail


@pytest.mark.parametrize("kind", sorted(SCALED))
def test_scaled_rotary_embeddings(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0} | SCALED[kind]
    source = model("llama", tmp_path / "m", initializer_range=0.2, rope_parameters=rope)
    folder = write(source, tmp_path / "out", lambda _: Q8)
    check = check_llama(folder.stage, logits_of(folder.stage, tmp_path / "logits.safetensors"), 1)
    assert check.passed, check.detail


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
def test_it_sees_a_wrong_tensor(name, tmp_path):
    folder = write(model("llama", tmp_path / "m", initializer_range=0.3), tmp_path / "out", lambda _: Q4)
    logits = logits_of(folder.stage, tmp_path / "logits.safetensors")
    path = folder.stage / "model.gguf"
    place = next(tensor for tensor in read_gguf_header(path) if tensor.name == name)
    data = bytearray(path.read_bytes())
    rows = data[place.offset : place.offset + place.nbytes]
    row = len(rows) // place.shape[0]
    for index in range(0, place.shape[0], 2):  # neighbouring rows change places
        first, second = rows[index * row : (index + 1) * row], rows[(index + 1) * row : (index + 2) * row]
        rows[index * row : (index + 2) * row] = second + first
    data[place.offset : place.offset + place.nbytes] = rows
    path.write_bytes(data)
    check = check_llama(folder.stage, logits, 1)
    assert not check.passed
    assert "mean KL" in check.detail


def test_a_file_that_llama_cannot_load_fails_the_check(tmp_path):
    folder = write(model("llama", tmp_path / "m"), tmp_path / "out", lambda _: Q4)
    logits = logits_of(folder.stage, tmp_path / "logits.safetensors")
    (folder.stage / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    check = check_llama(folder.stage, logits, 1)
    assert not check.passed
    assert "does not run the file" in check.detail


def test_a_broken_installation_says_nothing_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    folder = write(model("llama", tmp_path / "m"), tmp_path / "out", lambda _: Q4)
    assert check_llama(folder.stage, logits_of(folder.stage, tmp_path / "logits.safetensors"), 1) is None


def test_numbers_that_are_none_are_said_to_be_so(tmp_path):
    """Values of 60,000 times more than one input overflow the float16 cache of llama.cpp."""
    source = model("llama", tmp_path / "m")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = 60000.0
    save_file(tensors, file, metadata={"format": "pt"})
    folder = write(source, tmp_path / "out", lambda _: Q8)
    check = check_llama(folder.stage, logits_of(folder.stage, tmp_path / "logits.safetensors"), 1)
    assert not check.passed
    assert "are not numbers" in check.detail
