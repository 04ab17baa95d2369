"""The reference model of fp8 and bitsandbytes folders against stock transformers on the same folder."""

from __future__ import annotations

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from written import FP8, LLM_INT8, NF4, W4, W8A8, write

from compress.formats import bitsandbytes
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.runtime.load import load_reference

IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))


def outputs(model, ids=IDS):
    with torch.inference_mode():
        return model(ids)[0].float()


def mixed(layer):
    return FP8 if "mlp" in layer.name else W8A8 if layer.name.endswith("o_proj") else W4


CASES = {
    "llama fp8": (tiny.tiny_llama, "compressed-tensors", FP8, torch.float32),
    "qwen2 fp8 bfloat16": (tiny.tiny_qwen2, "compressed-tensors", FP8, torch.bfloat16),
    "bert fp8": (tiny.tiny_bert, "compressed-tensors", FP8, torch.float32),
    "llama fp8 and integers": (tiny.tiny_llama, "compressed-tensors", mixed, torch.float32),
    "llama nf4": (tiny.tiny_llama, "bitsandbytes", NF4, torch.float32),
    "gpt2 nf4": (tiny.tiny_gpt2, "bitsandbytes", NF4, torch.float32),
    "opt nf4 float16": (tiny.tiny_opt, "bitsandbytes", NF4, torch.float16),
    "llama int8-bnb": (tiny.tiny_llama, "bitsandbytes", LLM_INT8, torch.float32),
    "qwen2 int8-bnb bfloat16": (tiny.tiny_qwen2, "bitsandbytes", LLM_INT8, torch.bfloat16),
    "gpt2 int8-bnb": (tiny.tiny_gpt2, "bitsandbytes", LLM_INT8, torch.float32),
    "bert int8-bnb": (tiny.tiny_bert, "bitsandbytes", LLM_INT8, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_answers_as_stock_transformers_does(tmp_path, case):
    make, format_name, choose, dtype = CASES[case]
    source = make(tmp_path / "source", dtype=dtype)
    write(source, tmp_path / "out", format_name, choose)
    # In float32 whatever the source's dtype: the library's kernels for 16 bits differ from processor to processor.
    stock = load_original(open_checkpoint(tmp_path / "out"), dtype=torch.float32, device="cpu")
    bitsandbytes.exact(stock)
    reference = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    assert torch.equal(outputs(reference), outputs(stock))
    original = outputs(load_original(open_checkpoint(source), dtype=torch.float32, device="cpu"))
    assert not torch.equal(outputs(reference), original)


def test_columns_with_outliers_are_multiplied_in_full(tmp_path):
    """LLM.int8: a channel that a norm multiplies by 40 goes past the threshold of 6 in some tokens."""
    source = tiny.tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] = 40.0
    tensors["model.layers.1.post_attention_layernorm.weight"][9] = 40.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    write(source, tmp_path / "out", "bitsandbytes", LLM_INT8)
    seen = []
    reference = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    reference.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs()))
    stock = load_original(open_checkpoint(tmp_path / "out"), dtype=torch.float32, device="cpu")
    found = outputs(reference)
    assert torch.equal(found, outputs(stock))
    assert (seen[0] >= bitsandbytes.THRESHOLD).any(dim=(0, 1)).sum() < seen[0].shape[-1]
    assert (seen[0] >= bitsandbytes.THRESHOLD).any()
    original = outputs(load_original(open_checkpoint(source), dtype=torch.float32, device="cpu"))
    wrong = (found - original).abs().mean()
    for module in reference.modules():
        if hasattr(module, "state"):
            module.state.threshold = 0.0
    all_rounded = (outputs(reference) - original).abs().mean()
    bitsandbytes.unrounded(reference)
    none_rounded = (outputs(reference) - original).abs().mean()
    assert none_rounded < wrong < all_rounded


def test_inputs_of_nf4_layers_are_not_rounded(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "bitsandbytes", NF4)
    model = load_reference(tmp_path / "out", dtype=torch.float32, device="cpu")
    for name, weight in written.weights.items():
        module = model.get_submodule(name)
        assert type(module) is torch.nn.Linear
        assert not module._forward_pre_hooks
        assert torch.equal(module.weight, weight.dequantize(torch.float32))
