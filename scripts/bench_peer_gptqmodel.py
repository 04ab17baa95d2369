"""The peer's side of bench_quantization.py: GPTQModel on the same calibration windows. Runs in its own environment.

    python scripts/bench_peer_gptqmodel.py MODEL WINDOWS OUTPUT GROUP_SIZE

WINDOWS is a safetensors file of int64 windows. Settings are GPTQModel's own but for bits, group size, symmetry and
natural order at run time, as the result must be the same format as ours.
"""

from __future__ import annotations

import sys

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file


def main(model: str, windows: str, output: str, group_size: str) -> None:
    rows = [
        {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for _, ids in sorted(load_file(windows).items())
    ]
    config = QuantizeConfig(bits=4, group_size=int(group_size), sym=True, desc_act=False)
    loaded = GPTQModel.load(model, config, device="cpu", dtype=torch.float32)
    loaded.quantize(rows, batch_size=4)
    loaded.save(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
