"""Quality of every quantized target on one model, side by side with baselines and, if given, with GPTQModel.

    python scripts/bench_quantization.py --model FOLDER --second-text brown/test.txt [--peer-python PYTHON]

All rows answer the same 16k tokens (--tokens) of each of two texts: Wikipedia leads, which is the calibration's own
domain, and a second domain.
KL is the mean over tokens of KL(original || row), nats, in float32 on dequantized weights, with a 95 % block-bootstrap
interval; differences between rows are paired by token. Calibration: 128 x 512 tokens of the package's text.
Seconds are wall time of the whole process, from start to the finished folder; a model that lies in --models already
is measured again but not made again, and has none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from compress.data.text import read_corpus
from compress.data.windows import decoder_windows
from compress.formats.rounded_inputs import round_inputs
from compress.measure.fidelity import FidelityTokens, compare_logits, fidelity_measurements
from compress.measure.statistics import block_mean, token_blocks
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original, load_tokenizer
from compress.plan.machine import machine
from compress.progress import Silent
from compress.quantize.grid import max_abs_scale, quantize_nearest
from compress.runtime.load import load_reference
from compress.scheme import PER_CHANNEL, Scheme

GROUP, SAMPLES, LENGTH = 64, 128, 512
Model = transformers.PreTrainedModel


def main() -> None:
    arguments = parse()
    folder = arguments.model
    tokenizer = load_tokenizer(folder)
    texts = {
        "wiki": read_corpus("default", part="evaluation"),
        "second domain": read_corpus(str(arguments.second_text), part="evaluation"),
    }
    windows = {
        name: decoder_windows(corpus, tokenizer, length=LENGTH, tokens=arguments.tokens)
        for name, corpus in texts.items()
    }
    arguments.models.mkdir(parents=True, exist_ok=True)
    models, seconds = build_rows(folder, arguments.models, arguments.peer_python)
    original = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    tokens: dict[str, dict[str, FidelityTokens]] = {name: {} for name in windows}
    for row, load in models.items():
        model = load()
        for name, cut in windows.items():
            tokens[name][row] = compare_logits(original, model, cut, Silent())
            print(row, name, float(tokens[name][row].kl.mean()), file=sys.stderr, flush=True)
    result = {
        "environment": environment(),
        "model": folder.name,
        "settings": {"group_size": GROUP, "samples": SAMPLES, "length": LENGTH, "tokens": arguments.tokens},
        "seconds": seconds,
        "rows": {name: {row: figures(one) for row, one in rows.items()} for name, rows in tokens.items()},
        "paired": {name: differences(rows) for name, rows in tokens.items()},
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--second-text", type=Path, required=True)
    parser.add_argument("--peer-python", type=Path, help="Python of an environment with gptqmodel 7.7.0")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--models", type=Path, default=Path("out/bench"), help="folder for the models of the rows")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def build_rows(
    folder: Path, scratch: Path, peer: Path | None
) -> tuple[dict[str, Callable[[], Model]], dict[str, float]]:
    """How to load each row, and how long making it took."""
    seconds: dict[str, float] = {}

    def ours(name: str, *options: str) -> Callable[[], Model]:
        output = scratch / name.replace(" ", "-")
        command = [sys.executable, "-m", "compress", "quantize", str(folder), "-o", str(output), *options]
        if not output.exists():
            seconds[name] = timed([*command, "--no-evaluate", "--no-bench"])
        return lambda: load_reference(output, dtype=torch.float32, device="cpu")

    group = ("--group-size", str(GROUP))
    rows = {
        "int4 gptq (ours)": ours("int4 gptq (ours)", "--target", "int4", *group),
        "int4 rtn, searched scales (ours)": ours(
            "int4 rtn, searched scales (ours)", "--target", "int4", *group, "--algorithm", "rtn"
        ),
        "int4 rtn, max-abs scales": lambda: plain(folder, Scheme(4, GROUP)),
        "int8-weight (ours)": ours("int8-weight (ours)", "--target", "int8-weight"),
        "int8 W8A8 (ours)": ours("int8 W8A8 (ours)", "--target", "int8"),
        "int8 W8A8, max-abs scales": lambda: plain(folder, Scheme(8, PER_CHANNEL, True, 8)),
    }
    if peer is not None:
        calibration = decoder_windows(
            read_corpus("default", part="calibration"), load_tokenizer(folder), length=LENGTH, samples=SAMPLES
        )
        save_file({f"{i:05d}": ids for i, ids in enumerate(calibration.ids)}, scratch / "windows.safetensors")
        output = scratch / "gptqmodel"
        script = Path(__file__).with_name("bench_peer_gptqmodel.py")
        command = [str(peer), str(script), str(folder), str(scratch / "windows.safetensors"), str(output), str(GROUP)]
        if not output.exists():
            seconds["int4 GPTQModel 7.7.0"] = timed(command)
        rows["int4 GPTQModel 7.7.0"] = lambda: load_reference(output, dtype=torch.float32, device="cpu")
    return rows, seconds


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    # GPTQModel's loader asks for two workers and its default pool on two cores has one.
    subprocess.run(command, check=True, env=os.environ | {"GPTQMODEL_CPU_WORKERS": "2"}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def plain(folder: Path, scheme: Scheme) -> Model:
    """The textbook baseline: max-abs scales, rounded to the file's dtype, and per-token activations for W8A8."""
    checkpoint = open_checkpoint(folder)
    model = load_original(checkpoint, dtype=torch.float32, device="cpu")
    for layer in anatomy(checkpoint).layers:
        module = model.get_submodule(layer.name)
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        scale = max_abs_scale(weight.detach(), scheme, torch.bfloat16)
        weight.data.copy_(quantize_nearest(weight.detach(), scale, scheme).dequantize(torch.float32))
        if scheme.activation_bits:
            module.register_forward_pre_hook(partial(round_inputs, values=scheme.values))
    return model


def figures(tokens: FidelityTokens) -> dict[str, Any]:
    return {
        one.metric: {
            "value": one.value,
            "interval": None if one.interval is None else [one.interval.low, one.interval.high],
            "count": one.count,
        }
        for one in fidelity_measurements(tokens)
        if one.subject == "result/original"
    }


def differences(rows: Mapping[str, FidelityTokens]) -> dict[str, Any]:
    """Mean KL of each row minus that of our default int4, paired by token, with a 95 % block interval."""
    ours = rows["int4 gptq (ours)"]
    found = {}
    for name, row in rows.items():
        if name.startswith("int4") and row is not ours:
            blocks, words = token_blocks(row.window)
            estimate = block_mean(
                row.kl - ours.kl, blocks, rng=np.random.default_rng(0), levels=(0.95,), blocks_are=words
            )
            assert estimate.interval is not None
            found[name] = {"value": estimate.value, "interval": [estimate.interval.low, estimate.interval.high]}
    return found


def environment() -> dict[str, Any]:
    here = machine()
    return {
        "cpu": here.cpu,
        "instruction_sets": list(here.instruction_sets),
        "cores": here.usable_cores,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def table(result: Mapping[str, Any]) -> str:
    lines = ["| row | text | KL | 95 % | ppl ratio | top-1 | seconds |", "|---|---|---|---|---|---|---|"]
    for text, rows in result["rows"].items():
        for row, found in rows.items():
            low, high = found["kl.mean"]["interval"]
            seconds = result["seconds"].get(row)
            lines.append(
                f"| {row} | {text} | {found['kl.mean']['value']:.4f} | {low:.4f} - {high:.4f} | "
                f"{found['perplexity.ratio']['value']:.4f} | {found['top1.agreement']['value']:.1f} % | "
                f"{'' if seconds is None else f'{seconds:.0f}'} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
