"""The usual loop, as a baseline for bench_engine.py: every block runs twice, once to collect and once to go on.

    python scripts/bench_two_forwards.py MODEL WINDOWS OUTPUT GROUP_SIZE

Same GPTQ as our row `plain` (static activation order, searched scales), with one full product X^T X in float32 for
every distinct input of a block; nothing of the walk is used. OUTPUT gets the dequantized weights as a model folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from compress.model.anatomy import LinearLayer, anatomy
from compress.model.blocks import BlockModel, run_block
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original, load_tokenizer
from compress.plan.machine import machine
from compress.quantize.gptq import GptqSettings, gptq, prepare
from compress.quantize.statistics import Statistics
from compress.scheme import Scheme


@torch.no_grad()
def main(folder: str, windows: str, output: str, group_size: str) -> None:
    checkpoint = open_checkpoint(Path(folder))
    parts = anatomy(checkpoint)
    scheme = Scheme(4, int(group_size))
    settings = GptqSettings(asymmetric=False, refit_scales=False, local_search=0)
    fast = {"amx_bf16", "avx512_bf16"} & set(machine().instruction_sets)  # as `compress` decides
    model = BlockModel(checkpoint, parts, dtype=torch.bfloat16 if fast else torch.float32, device="cpu")
    states = [model.inputs(ids) for _, ids in sorted(load_file(windows).items())]
    hidden, calls = [one for one, _ in states], [called for _, called in states]
    dense: dict[str, torch.Tensor] = {}
    for index in range(parts.depth):
        layers = [layer for layer in parts.layers if layer.block == index]
        with model.block(index) as block:
            hessians, count = collect(block, layers, parts.block_name(index), hidden, calls, index)
            for group in dict.fromkeys(layer.fused for layer in layers):
                prepared = prepare(Statistics(hessians[group] / count, None, None, count), settings)
                for layer in layers:
                    if layer.fused == group:
                        W = checkpoint.read(layer.tensor).float()
                        found = gptq(W, prepared, scheme, scale_dtype=torch.bfloat16, settings=settings)
                        dense[layer.name] = found.weight.dequantize(torch.float32)
                        path = layer.name.removeprefix(parts.block_name(index) + ".")
                        block.get_parameter(f"{path}.weight").copy_(dense[layer.name])
            hidden = [run_block(block, states, called[index]) for states, called in zip(hidden, calls, strict=True)]
    result = load_original(checkpoint, dtype=torch.float32, device="cpu")
    for name, weight in dense.items():
        result.get_parameter(f"{name}.weight").copy_(weight)
    result.save_pretrained(output)
    load_tokenizer(Path(folder)).save_pretrained(output)


def collect(
    block: torch.nn.Module, layers: list[LinearLayer], name: str, hidden: list[torch.Tensor], calls: Any, index: int
) -> tuple[dict[str, torch.Tensor], int]:
    sums: dict[str, torch.Tensor] = {}
    handles = []
    for group in dict.fromkeys(layer.fused for layer in layers):
        first = next(layer for layer in layers if layer.fused == group)
        sums[group] = torch.zeros(first.width, first.width)

        def add(_module: Any, args: Any, group: str = group) -> None:
            X = args[0].reshape(-1, args[0].shape[-1]).float()
            sums[group].addmm_(X.T, X)

        handles.append(block.get_submodule(first.name.removeprefix(name + ".")).register_forward_pre_hook(add))
    for states, called in zip(hidden, calls, strict=True):
        run_block(block, states, called[index])
    for handle in handles:
        handle.remove()
    return sums, sum(states.shape[1] for states in hidden)


if __name__ == "__main__":
    main(*sys.argv[1:])
