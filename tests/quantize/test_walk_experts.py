"""The walk through experts, against whole stock models that start anew for every group of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_moe
import torch
from walking import SCHEME, WholeModel, edit, walk, windows

from compress.model.anatomy import LinearLayer, anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.experts import expert_weight
from compress.model.moe import Experts
from compress.quantize.gptq import GptqSettings, gptq, prepare
from compress.quantize.refine import RefineSettings
from compress.quantize.statistics import Statistics
from compress.scheme import QuantizedWeight

BUILDERS: dict[str, Callable[..., Path]] = {
    "mixtral": tiny_moe.tiny_mixtral,
    "qwen3_moe": tiny_moe.tiny_qwen3_moe,
}
PLAIN = GptqSettings(asymmetric=False, refit_scales=False, local_search=0)


def is_expert(layer: LinearLayer) -> bool:
    return ".experts." in layer.name


def expert_inputs(model: WholeModel, experts: Experts, layer: LinearLayer, ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """What one expert's layer gets for all windows, [tokens, width], from the stock class's own arguments."""
    block, _, rest = layer.name.rpartition(f".{experts.path}.")
    index, stock = int(rest.partition(".")[0]), model.module(f"{block}.{experts.module}")
    kept: list[torch.Tensor] = []
    handle = stock.register_forward_pre_hook(lambda _module, args: kept.append(args[0][(args[1] == index).any(dim=-1)]))
    with torch.no_grad():
        for window in ids:
            model.model(input_ids=window.unsqueeze(0))
    handle.remove()
    x = torch.cat(kept)
    if not layer.fused.endswith(".down"):
        return x
    gate, up = stock.gate_up_proj[index].chunk(2)
    return torch.nn.functional.silu(x @ gate.T) * (x @ up.T)


def reference(
    folder: Path, ids: Sequence[torch.Tensor], settings: GptqSettings, found: Mapping[str, QuantizedWeight]
) -> dict[str, QuantizedWeight]:
    """What the experts should be, given what was found for the groups before them; attention is taken as found."""
    parts, model = anatomy(open_checkpoint(folder)), WholeModel(folder)
    experts = parts.architecture.experts
    assert experts is not None
    modules = dict(model.model.named_modules())
    expected: dict[str, QuantizedWeight] = {}
    for group in dict.fromkeys(layer.fused for layer in parts.layers):
        members = [layer for layer in parts.layers if layer.fused == group]
        if is_expert(members[0]):
            x = expert_inputs(model, experts, members[0], ids)
            prepared = prepare(Statistics(x.T @ x / len(x), None, None, len(x)), settings)
        for layer in members:
            weight = expert_weight(modules, layer.name, experts)
            if weight is None:
                weight = modules[layer.name].weight
            else:
                result = gptq(weight.clone(), prepared, SCHEME, scale_dtype=torch.float32, settings=settings)
                expected[layer.name] = result.weight
            with torch.no_grad():
                weight.copy_(found[layer.name].dequantize(torch.float32))
    return expected


@pytest.mark.parametrize("settings", [PLAIN, GptqSettings()], ids=["plain", "all"])
@pytest.mark.parametrize("name", BUILDERS)
def test_one_pass_equals_whole_models(name: str, settings: GptqSettings, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    ids = windows()
    found = walk(folder, ids, settings)
    expected = reference(folder, ids, settings, found.weights)
    assert list(found.weights) == [layer.name for layer in anatomy(open_checkpoint(folder)).layers]
    assert len(expected) == 2 * 4 * 3
    for layer, weight in expected.items():
        assert (found.weights[layer].codes == weight.codes).float().mean() > 0.98, layer
        assert torch.isclose(found.weights[layer].scale, weight.scale, rtol=1e-3).float().mean() > 0.95, layer


@pytest.mark.parametrize("name", BUILDERS)
def test_few_windows_at_a_time_give_the_same_bits(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    together, apart = (walk(folder, windows(3), one_pass=one, batch_size=2) for one in (True, False))
    assert [record.sha256 for record in together.records] == [record.sha256 for record in apart.records]


def starved(folder: Path) -> Path:
    """The router of block 0 never chooses expert 3."""

    def shut(router: torch.Tensor) -> None:
        router[3] = 0.0
        router[:3] = router[:1]  # all alike: ties go to the first ones

    tiny_moe.tiny_mixtral(folder)
    edit(folder, "model.layers.0.block_sparse_moe.gate.weight", shut)
    return folder


@pytest.mark.parametrize("more", [{}, {"refine": RefineSettings(3)}], ids=["plain", "refined"])
def test_experts_without_tokens_are_rounded_and_said_to_be(more: dict[str, Any], tmp_path: Path) -> None:
    found = walk(starved(tmp_path), windows(), **more)
    without = [record for record in found.records if record.tokens == 0]
    names = {record.name.rpartition(".")[0] for record in without}
    assert names
    assert all(name.startswith("model.layers.0.block_sparse_moe.experts.") for name in names)
    for record in without:
        assert record.algorithm == "rtn"
        assert record.damping is None
        assert "no calibration token reached this expert: rounded to nearest" in record.notes
        assert record.error_after is not None
        assert 0 < record.error_after < 0.1  # of the weight itself: there are no outputs
    others = [record for record in found.records if record not in without]
    assert all(record.algorithm == "gptq" and record.tokens for record in others)


def test_smoothing_leaves_experts_alone(tmp_path: Path) -> None:
    """Their norm feeds the router too, and a window may show an expert nothing."""
    from compress.model.folding import producers

    for build, dense in ((tiny_moe.tiny_mixtral, set()), (tiny_moe.tiny_qwen3_moe, {1})):
        checkpoint = open_checkpoint(build(tmp_path / build.__name__))
        groups = producers(checkpoint, anatomy(checkpoint))
        assert {group.partition(":")[2] for group in groups if group.startswith("model.layers.0:")} == {"qkv", "o"}
        assert {int(group.split(":")[0][-1]) for group in groups if group.endswith(":gate_up")} == dense
