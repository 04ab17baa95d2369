"""The peer's side of bench_engine.py: AutoRound on the same calibration windows. Runs in its own environment.

    python scripts/bench_peer_autoround.py MODEL WINDOWS OUTPUT

WINDOWS is a safetensors file of int64 windows. Weights of 4 bits, group 64, symmetric, 50 iterations for each block, in
float32, without torch.compile; everything else is AutoRound's own choice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from auto_round import AutoRound
from safetensors.torch import load_file


def main(folder: str, windows: str, output: str) -> None:
    rows = [{"input_ids": ids.unsqueeze(0)} for _, ids in sorted(load_file(windows).items())]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounder = AutoRound(
        model,
        transformers.AutoTokenizer.from_pretrained(folder),
        scheme="W4A16",
        group_size=64,
        iters=50,
        nsamples=len(rows),
        seqlen=rows[0]["input_ids"].shape[1],
        dataset=rows,
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounder.quantize_and_save(output, format="auto_gptq")
    for inner in [path for path in Path(output).iterdir() if path.is_dir()]:  # it adds a folder named after the model
        for path in inner.iterdir():
            path.rename(Path(output) / path.name)
    config = Path(output) / "config.json"  # it leaves the variant of zero points out, which is gptq's first
    content = json.loads(config.read_text(encoding="utf-8"))
    content["quantization_config"]["checkpoint_format"] = "gptq"
    config.write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
