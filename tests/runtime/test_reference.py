"""The reference model against stock transformers on the same folder."""

from __future__ import annotations

import pytest
import tiny
import torch
from written import W4, W8A8, W8A16, write

from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.runtime.load import load_reference

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))


def outputs(model):
    with torch.inference_mode():
        return model(IDS)[0].float()


def mixed(layer):
    return W8A8 if layer.name.endswith(("down_proj", "fc2", "output.dense")) else W4


CASES = {
    "llama w4": (tiny.tiny_llama, W4, torch.float32),
    "llama w8": (tiny.tiny_llama, W8A16, torch.float32),
    "llama mixed": (tiny.tiny_llama, mixed, torch.float32),
    "llama w4 bfloat16": (tiny.tiny_llama, W4, torch.bfloat16),
    "llama w8a8 bfloat16": (tiny.tiny_llama, W8A8, torch.bfloat16),
    "opt w8a8": (tiny.tiny_opt, W8A8, torch.float32),
    "bert w8a8": (tiny.tiny_bert, W8A8, torch.float32),
    "bert mixed": (tiny.tiny_bert, mixed, torch.float32),
    "gemma3 w8a8": (tiny.tiny_gemma3, W8A8, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_answers_as_stock_transformers_does(tmp_path, case):
    make, choose, dtype = CASES[case]
    source = make(tmp_path / "source", dtype=dtype)
    write(source, tmp_path / "out", "compressed-tensors", choose)
    stock = load_original(open_checkpoint(tmp_path / "out"), dtype=dtype, device="cpu")
    reference = load_reference(tmp_path / "out", dtype=dtype, device="cpu")
    assert torch.equal(outputs(reference), outputs(stock))
    original = outputs(load_original(open_checkpoint(source), dtype=dtype, device="cpu"))
    assert not torch.equal(outputs(reference), original)


def test_inputs_of_w8a8_layers_only_are_rounded(tmp_path):
    write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", mixed)
    model = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    rounded = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    assert rounded == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}


def test_gpt2_through_gptq_stays_close_to_the_original(tmp_path):
    source = tiny.tiny_gpt2(tmp_path / "source")
    write(source, tmp_path / "out", "gptq", W8A16)
    original = outputs(load_original(open_checkpoint(source), dtype=torch.float32, device="cpu"))
    reference = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    span = float(original.max() - original.min())
    assert float((outputs(reference) - original).abs().max()) < 0.02 * span
    assert reference.lm_head.weight is reference.transformer.wte.weight


def test_a_file_without_the_base_models_prefix_is_read(tmp_path):
    """GPT-2's own files say "h.0.attn.c_attn" where the class says "transformer.h.0.attn.c_attn"."""
    from safetensors.torch import load_file, save_file

    source = tiny.tiny_gpt2(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    written = write(source, tmp_path / "out", "gptq", lambda layer: W8A16 if "mlp" in layer.name else W4)
    assert "h.0.attn.c_attn.qweight" in open_checkpoint(tmp_path / "out").tensors
    model = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    for name, weight in written.weights.items():
        assert torch.equal(model.get_submodule(name).weight, weight.dequantize(torch.float32).T)


def test_plain_folders_load_too(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    stock = load_original(open_checkpoint(source), dtype=torch.float32, device="cpu")
    assert torch.equal(outputs(load_reference(source, dtype=torch.float32, device="cpu")), outputs(stock))
