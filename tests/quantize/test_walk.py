"""The walk over real (tiny) models against one that holds the whole model and does the obvious thing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
import torch

from compress.errors import BrokenResultError
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent
from compress.quantize.gptq import gptq
from compress.quantize.walk import LayerPlan, WalkSettings, quantize_blocks, quantize_nearest_all
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight, Scheme

MODELS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "opt", "gpt2", "bert"]
SCHEME = Scheme(4, 32)


def windows(count: int = 4, length: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator) for _ in range(count)]


def walk(
    folder: Path, ids: list[torch.Tensor], scheme: Scheme = SCHEME, damping: float = 0.01, batch_size: int = 1
) -> tuple[dict[str, QuantizedWeight], list[LayerRecord]]:
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    plans = [LayerPlan(layer, scheme, "int4", "gptq", torch.float32) for layer in parts.layers]
    found: dict[str, QuantizedWeight] = {}

    def save(_part: str, weights: Mapping[str, QuantizedWeight]) -> None:
        found.update(weights)

    settings = WalkSettings(damping, batch_size, torch.float32, "cpu")
    records = quantize_blocks(checkpoint, parts, plans, ids, settings, save, Silent())
    return found, records


def whole_model_walk(folder: Path, ids: list[torch.Tensor]) -> dict[str, QuantizedWeight]:
    """Holds the model in memory; for each block runs the whole model and hooks the block's layers."""
    checkpoint = open_checkpoint(folder)
    parts = anatomy(checkpoint)
    model = load_original(checkpoint, dtype=torch.float32, device="cpu")
    found = {}
    for block in range(parts.depth):
        layers = [layer for layer in parts.layers if layer.block == block]
        inputs: dict[str, list[torch.Tensor]] = {layer.name: [] for layer in layers}
        handles = [
            model.get_submodule(layer.name).register_forward_pre_hook(
                lambda _module, args, kept=inputs[layer.name]: kept.append(args[0].reshape(-1, args[0].shape[-1]))
            )
            for layer in layers
        ]
        with torch.no_grad():
            for window in ids:
                model(input_ids=window.unsqueeze(0))
        for handle in handles:
            handle.remove()
        for layer in layers:
            X = torch.cat(inputs[layer.name])
            weight = model.get_submodule(layer.name).weight
            W = weight.detach().T.contiguous() if layer.transposed else weight.detach().clone()
            result = gptq(W, X.T @ X / len(X), SCHEME, scale_dtype=torch.float32, damping=0.01)
            found[layer.name] = result.weight
            dense = result.weight.dequantize(torch.float32)
            with torch.no_grad():
                weight.copy_(dense.T if layer.transposed else dense)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_block_by_block_equals_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = getattr(tiny, f"tiny_{name}")(tmp_path / name)
    ids = windows()
    found, records = walk(folder, ids)
    expected = whole_model_walk(folder, ids)
    assert found.keys() == expected.keys()
    for layer, weight in expected.items():
        # The sums over tokens are taken in another order, so a rare code may sit on the other side of a tie.
        assert (found[layer].codes == weight.codes).float().mean() > 0.98, layer
        assert torch.allclose(found[layer].scale, weight.scale), layer
    assert [record.name for record in records] == list(found)
    assert all(record.tokens == 4 * 48 for record in records)
    assert all(record.error_after is not None and record.error_after < record.error_before for record in records)


def test_batch_size_and_order_of_devices_change_nothing(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    first, _ = walk(folder, windows(5), batch_size=1)
    second, _ = walk(folder, windows(5), batch_size=4)
    for layer, weight in first.items():
        assert torch.equal(weight.codes, second[layer].codes)
        assert torch.equal(weight.scale, second[layer].scale)


def test_windows_of_different_lengths(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "m")
    ids = [window[: 10 + 7 * index] for index, window in enumerate(windows(5))]
    _, records = walk(folder, ids)
    assert {record.tokens for record in records} == {sum(map(len, ids))}


def test_few_tokens_raise_the_damping_and_say_so(tmp_path: Path) -> None:
    """H03 (a)."""
    folder = tiny.tiny_llama(tmp_path / "m")
    _, records = walk(folder, [windows()[0][:8]], damping=0.0)
    for record in records:
        assert record.damping is not None
        assert record.damping > 0
        assert record.rank_bound == 8
        assert any("damping raised" in note for note in record.notes)


def test_statistics_that_overflow_stop_the_run_and_name_the_layer(tmp_path: Path) -> None:
    """H03 (b): x^2 overflows float32 in the inputs of layer 0."""
    folder = tiny.tiny_llama(tmp_path / "m")
    _edit(
        folder, "model.layers.0.input_layernorm.weight", lambda tensor: tensor.index_fill_(0, torch.tensor([3]), 1e20)
    )
    with pytest.raises(BrokenResultError, match=r"model\.layers\.0\.self_attn\.\w_proj.*not finite"):
        walk(folder, windows())


def nearest_all(folder: Path) -> dict[str, QuantizedWeight]:
    checkpoint = open_checkpoint(folder)
    plans = [LayerPlan(layer, SCHEME, "int4", "rtn", torch.float32) for layer in anatomy(checkpoint).layers]
    found: dict[str, QuantizedWeight] = {}
    quantize_nearest_all(checkpoint, plans, lambda _part, weights: found.update(weights), Silent(), "cpu")
    return found


def test_conv1d_is_quantized_along_its_true_inputs(tmp_path: Path) -> None:
    """H02: attention's c_proj is square, so only numbers can tell a transposition."""
    folder = tiny.tiny_gpt2(tmp_path / "m")
    found = nearest_all(folder)
    assert len(found) == 8
    checkpoint = open_checkpoint(folder)
    for layer, weight in found.items():
        dense = checkpoint.read(layer + ".weight").T
        # One scale per output row and group of 32 inputs: rows of the dense [out, in] matrix differ in scale.
        expected = dense.reshape(dense.shape[0], -1, 32).abs().amax(dim=-1) / 7
        assert weight.scale.shape == expected.shape
        assert torch.corrcoef(torch.stack([weight.scale.flatten(), expected.flatten()]))[0, 1] > 0.9
        assert (weight.dequantize(torch.float32) - dense).abs().max() <= expected.max()


def test_zero_rows_and_groups(tmp_path: Path) -> None:
    """H04."""
    folder = tiny.tiny_llama(tmp_path / "m")

    def clear(tensor: torch.Tensor) -> None:
        tensor[5] = 0
        tensor[7, :32] = 0

    _edit(folder, "model.layers.0.self_attn.q_proj.weight", clear)
    found, records = walk(folder, windows())
    weight = found["model.layers.0.self_attn.q_proj"]
    dense = weight.dequantize(torch.float32)
    assert bool((weight.scale > 0).all())
    assert bool((dense[5] == 0).all())
    assert bool((dense[7, :32] == 0).all())
    assert any("zero" in note for note in records[0].notes)


def _edit(folder: Path, name: str, change: object) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors[name])  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
