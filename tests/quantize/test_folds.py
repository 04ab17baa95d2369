"""Folding factors through a whole model changes none of its outputs."""

from __future__ import annotations

import pytest
import tiny
import tiny_more
import torch
import transformers
from safetensors.torch import load_file, save_file
from written import write

from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.folding import producers
from compress.model.load import load_original
from compress.quantize.folds import changes, smoothing_record, standing
from compress.quantize.grid import max_abs_scale, quantize_nearest
from compress.quantize.smooth import Folded, Smoothing
from compress.runtime.load import load_reference
from compress.scheme import PER_CHANNEL, Scheme

W8 = Scheme(8, PER_CHANNEL, activation_bits=8)


def tiny_gemma(folder, **_options):
    fields = tiny._llama_like(tie_word_embeddings=True)
    torch.manual_seed(0)
    return tiny.save(transformers.AutoModelForCausalLM.from_config(transformers.GemmaConfig(**fields)), folder)


def tiny_biased_llama(folder):
    folder = tiny.tiny_llama(folder, attention_bias=True, mlp_bias=True)
    shake(folder, ".bias")
    return folder


MODELS = [
    tiny.tiny_llama,
    tiny_biased_llama,
    tiny.tiny_mistral,
    tiny.tiny_qwen2,
    tiny.tiny_qwen3,
    tiny_gemma,
    tiny.tiny_gemma2,
    tiny.tiny_gemma3,
    tiny.tiny_opt,
    tiny.tiny_gpt2,
    tiny.tiny_bert,
    tiny_more.tiny_mpnet,
    tiny_more.tiny_modernbert,
]


def shake(folder, *endings):
    """Norms of new models are ones and zeros, which would hide a wrong fold."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith(endings) and tensor.dim() == 1:
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
            tensors[name][5] = 0
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def outputs(folder):
    model = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    answer = model(input_ids=torch.arange(40, 72)[None])
    return answer.logits if hasattr(answer, "logits") else answer.last_hidden_state


def folded_everywhere(folder):
    """New tensors of the folder's model: random factors in every producer there is, and in the layers after it."""
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    layers = {layer.name: layer for layer in parts.layers}
    generator = torch.Generator().manual_seed(4)
    found, factors, replaced = producers(checkpoint, parts), {}, {}
    for layer in parts.layers:
        if layer.fused in found and layer.fused not in factors:
            before = standing(found[layer.fused], checkpoint, layers, {}, replaced, "cpu")
            after = before.fold(torch.exp2(torch.randn(found[layer.fused].channels, generator=generator) * 2))
            assert (after.s != 1).float().mean() > 0.5
            replaced |= changes(before, after).replaced
            factors[layer.fused] = after.s[before.channels]
        stored = replaced.get(layer.tensor, checkpoint.read(layer.tensor))
        W = (stored.T if layer.transposed else stored) * factors.get(layer.fused, torch.ones(layer.width))
        replaced[layer.tensor] = (W.T if layer.transposed else W).contiguous()
    return replaced


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_a_folded_model_gives_the_same_outputs(tmp_path, make):
    folder = make(tmp_path / "model")
    shake(folder, "norm.weight", "layernorm.weight", "_norm.weight", "ln_1.weight", "ln_2.weight")
    before = outputs(folder)
    replaced = folded_everywhere(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | replaced, path, metadata={"format": "pt"})
    after = outputs(folder)
    assert float((after - before).abs().max()) < 1e-5 * max(1.0, float(before.abs().max()))


@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_qwen2, tiny.tiny_gpt2], ids=lambda make: make.__name__)
def test_folding_into_a_quantized_layer_changes_only_its_scales(tmp_path, make):
    folder = make(tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    layers = {layer.name: layer for layer in parts.layers}
    producer = next(one for group, one in producers(checkpoint, parts).items() if group.endswith(":o"))
    layer = layers[producer.module]
    stored = checkpoint.read(layer.tensor)
    W = stored.T.contiguous() if layer.transposed else stored
    weight = quantize_nearest(W, max_abs_scale(W, W8, torch.bfloat16), W8)
    before = standing(producer, checkpoint, layers, {layer.name: weight}, {}, "cpu")
    change = changes(before, before.fold(torch.full((producer.channels,), 3.0)))
    assert change.weights.keys() == {layer.name}
    assert torch.equal(change.weights[layer.name].codes, weight.codes)
    assert change.replaced.keys() == ({producer.bias} if producer.bias else set())
    rows = slice(producer.first_row, producer.first_row + producer.channels)
    ratio = weight.scale.float() / change.weights[layer.name].scale.float()
    torch.testing.assert_close(ratio[rows], torch.full_like(ratio[rows], 3), rtol=0.01, atol=0)
    assert bool((ratio[: rows.start] == 1).all())


@pytest.mark.parametrize("scheme", [Scheme(8, PER_CHANNEL), Scheme(4, 32)], ids=lambda scheme: scheme.label)
@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_gemma3, tiny.tiny_qwen2], ids=lambda make: make.__name__)
@torch.no_grad()
def test_a_written_folder_computes_what_the_codes_over_the_factors_stand_for(tmp_path, make, scheme):
    """In bfloat16, where norms and scales are rounded: only biases may differ from Q(W s) / s before plain inputs."""
    folder = make(tmp_path / "model", dtype=torch.bfloat16)
    shake(folder, "norm.weight", "layernorm.weight")
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    layers = {layer.name: layer for layer in parts.layers}
    generator = torch.Generator().manual_seed(5)
    found, factors, weights, replaced, dense = producers(checkpoint, parts), {}, {}, {}, {}
    for layer in parts.layers:
        if layer.fused not in factors:
            before = standing(found[layer.fused], checkpoint, layers, weights, replaced, "cpu")
            after = before.fold(torch.exp2(torch.randn(found[layer.fused].channels, generator=generator) * 2))
            change = changes(before, after)
            weights |= change.weights
            replaced |= change.replaced
            factors[layer.fused] = after.s[before.channels]
        s = factors[layer.fused]
        W = checkpoint.read(layer.tensor).float() * s
        weights[layer.name] = quantize_nearest(W, max_abs_scale(W, scheme, torch.bfloat16), scheme)
        dense[layer.tensor] = weights[layer.name].dequantize(torch.float32) / s
    written = write(
        folder,
        tmp_path / "out",
        "compressed-tensors",
        scheme,
        change=lambda name, _weight: weights[name],
        replaced=replaced,
    )
    expected = load_original(checkpoint, dtype=torch.float32, device="cpu")
    for name, weight in dense.items():
        expected.get_parameter(name).copy_(weight)
    result = load_reference(written.stage, dtype=torch.float32, device="cpu")
    ids = torch.arange(40, 72)[None]
    before, after = expected(ids).logits, result(ids).logits
    limit = 2e-2 if make is tiny.tiny_qwen2 else 1e-4
    assert float((after - before).abs().max()) < limit * float(before.abs().max())


def test_the_record_names_the_producer_and_both_errors(tmp_path):
    checkpoint = open_checkpoint(tiny.tiny_llama(tmp_path / "model"))
    producer = producers(checkpoint, anatomy(checkpoint))["model.layers.0:qkv"]
    s = torch.full((64,), 2.0)
    chosen = Smoothing(s, Folded(s, s, None), "rms", 0.5, 2e-3, 3e-4)
    assert smoothing_record(producer, chosen) == {
        "producer": "model.layers.0.input_layernorm",
        "spread": "rms",
        "alpha": 0.5,
        "error_before": 2e-3,
        "error_after": 3e-4,
    }
    assert smoothing_record(producer, Smoothing(s, None, None, None, 2e-3, 2e-3)) is None
