"""The INT4 engine idea by idea, and side by side with GPTQModel, AutoRound and a plain loop of two forwards per block.

    python scripts/bench_engine.py make ROW [ROW ...] --model FOLDER --models SCRATCH [--peer-python PYTHON]
    python scripts/bench_engine.py measure --model FOLDER --models SCRATCH --second-text brown/test.txt

`make` builds rows, one after the other, and notes the wall time of the whole process, from its start to the finished
folder, and its peak memory; a comparison of times needs rows that were made with the same threads on the same cores.
`measure` answers the same tokens of two texts with all rows that are there, or with those that are named: Wikipedia
leads, which is the calibration's own domain, and a second domain. KL is the mean over tokens of KL(original || row),
nats, in float32 on dequantized weights, with a 95 % block-bootstrap interval; differences are paired by token.
Calibration: 128 x 512 tokens of the package's text, or --samples of them. Ours and the plain loop compute forwards in
the source's bfloat16 where the CPU multiplies it fast, GPTQModel in float32, AutoRound in what it chooses for a
float32 model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_quantization import environment, figures
from safetensors.torch import save_file

from compress.data.text import read_corpus
from compress.data.windows import Windows, decoder_windows
from compress.measure.fidelity import FidelityTokens, compare_logits, joined
from compress.measure.statistics import block_mean, token_blocks
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original, load_tokenizer
from compress.progress import Silent
from compress.runtime.load import load_reference

SAMPLES, LENGTH = 128, 512
PLAIN = ("asymmetric=false", "refit_scales=false", "local_search=0")
# What each row adds to `compress quantize MODEL --target int4 --group-size G`.
OURS: dict[str, tuple[str, ...]] = {
    "default": (),
    "refine-8": ("--refine", "8"),
    "plain": PLAIN,
    "plain, natural order": (*PLAIN, "activation_order=false"),
    "plain, max-abs scales": (*PLAIN, "search_scales=false"),
    "plain + asymmetric": PLAIN[1:],
    "plain + refit": (PLAIN[0], PLAIN[2]),
    "plain + local search": PLAIN[:2],
    "plain + refit + local search": PLAIN[:1],
    "default + smooth": ("--smooth",),
    "int8": ("--target", "int8"),
    "int8, not smoothed": ("--target", "int8", "--no-smooth"),
}
PEERS = {
    "two-forwards": "bench_two_forwards.py",
    "GPTQModel": "bench_peer_gptqmodel.py",
    "AutoRound": "bench_peer_autoround.py",
}


def main() -> None:
    arguments = parse()
    arguments.models.mkdir(parents=True, exist_ok=True)
    if arguments.what == "make":
        for row in arguments.rows:
            make(row, arguments)
    else:
        measure(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join((*OURS, *PEERS))}")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True, help="folder for the models of the rows")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration windows of our rows")
    parser.add_argument("--peer-python", default=sys.executable, help="Python of the peer's environment")
    parser.add_argument("--second-text", type=Path)
    parser.add_argument("--tokens", type=int, default=32768, help="of each text, for the rows named in --long")
    parser.add_argument("--ladder-tokens", type=int, default=8192, help="of each text, for all other rows")
    parser.add_argument("--long", nargs="*", default=["default", "refine-8", "GPTQModel", "AutoRound"])
    parser.add_argument("--result", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def make(row: str, arguments: argparse.Namespace) -> None:
    output = folder(arguments, row)
    if row in PEERS:
        windows = calibration(arguments)
        script = Path(__file__).with_name(PEERS[row])
        command = [arguments.peer_python, str(script), str(arguments.model), str(windows), str(output)]
        command += [] if row == "AutoRound" else [str(arguments.group_size)]
    else:
        command = [sys.executable, "-m", "compress", "quantize", str(arguments.model), "-o", str(output)]
        command += ["--no-evaluate", "--no-bench", "--quiet", "--overwrite", "--samples", str(arguments.samples)]
        command += options(row, arguments.group_size)
    start = time.perf_counter()
    # GPTQModel's loader asks for two workers and its default pool on two cores has one.
    subprocess.run(command, check=True, env=os.environ | {"GPTQMODEL_CPU_WORKERS": "2"}, stdout=subprocess.DEVNULL)
    note = {
        "seconds": time.perf_counter() - start,
        "peak_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "cores": len(os.sched_getaffinity(0)),
    }
    (arguments.models / f"{output.name}.time.json").write_text(json.dumps(note), encoding="utf-8")
    print(row, note, flush=True)


def options(row: str, group_size: int) -> list[str]:
    found = [] if "--target" in OURS[row] else ["--target", "int4", "--group-size", str(group_size)]
    for option in OURS[row]:
        found += ["--gptq", option] if "=" in option else [option]
    return found


def folder(arguments: argparse.Namespace, row: str) -> Path:
    path: Path = arguments.models / row.replace(" ", "-").replace(",", "").replace("+", "and")
    return path


def calibration(arguments: argparse.Namespace) -> Path:
    path: Path = arguments.models / "windows.safetensors"
    if not path.exists():
        corpus = read_corpus("default", part="calibration")
        windows = decoder_windows(corpus, load_tokenizer(arguments.model), length=LENGTH, samples=SAMPLES)
        save_file({f"{i:05d}": ids for i, ids in enumerate(windows.ids)}, path)
    return path


def measure(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.model)
    texts = {
        "wiki": read_corpus("default", part="evaluation"),
        "second domain": read_corpus(str(arguments.second_text), part="evaluation"),
    }
    wanted = arguments.rows or [*OURS, *PEERS]
    rows = {row: folder(arguments, row) for row in wanted if (folder(arguments, row) / "config.json").is_file()}
    loaded = {row: load_reference(path, dtype=torch.float32, device="cpu") for row, path in rows.items()}
    original = Remembering(load_original(open_checkpoint(arguments.model), dtype=torch.float32, device="cpu"))
    tokens = {
        text: answers(
            original, loaded, decoder_windows(corpus, tokenizer, length=LENGTH, tokens=arguments.tokens), arguments
        )
        for text, corpus in texts.items()
    }
    result = {
        "environment": environment(),
        "model": arguments.model.name,
        "settings": {"group_size": arguments.group_size, "samples": arguments.samples, "length": LENGTH},
        "made": {row: made(path) for row, path in rows.items()},
        "rows": {text: {row: figures(one) for row, one in found.items()} for text, found in tokens.items()},
        "paired with default": {text: differences(found) for text, found in tokens.items()},
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def made(path: Path) -> dict[str, Any] | None:
    note = path.with_name(f"{path.name}.time.json")
    return json.loads(note.read_text(encoding="utf-8")) if note.exists() else None


class Remembering(torch.nn.Module):
    """A model that answers the window it was asked last without computing it again."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self._asked: torch.Tensor | None = None
        self._answer: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        if self._asked is None or not torch.equal(self._asked, input_ids):
            self._asked, self._answer = input_ids, self.model(input_ids=input_ids, **rest)
        return self._answer


def answers(
    original: Any, rows: Mapping[str, Any], windows: Windows, arguments: argparse.Namespace
) -> dict[str, FidelityTokens]:
    """All rows window by window, so that the original computes each window once."""
    parts: dict[str, list[FidelityTokens]] = {row: [] for row in rows}
    short = arguments.ladder_tokens / LENGTH
    for index, ids in enumerate(windows.ids):
        one = Windows(**{**{f.name: getattr(windows, f.name) for f in fields(windows)}, "ids": (ids,)})
        for row, model in rows.items():
            if index < short or row in arguments.long:
                part = compare_logits(original, model, one, Silent())
                parts[row].append(replace(part, window=np.full(len(part.kl), index)))
        print(
            index,
            {row: round(float(np.mean(np.concatenate([p.kl for p in found]))), 4) for row, found in parts.items()},
            file=sys.stderr,
            flush=True,
        )
    return {row: joined(found) for row, found in parts.items()}


def differences(rows: Mapping[str, FidelityTokens]) -> dict[str, Any]:
    """Mean KL of each row minus that of our default, on the tokens that both answered, with a 95 % block interval."""
    found = {}
    for name, row in rows.items():
        if name != "default" and not name.startswith("int8"):
            count = len(row.kl)
            blocks, words = token_blocks(row.window)
            difference = row.kl - rows["default"].kl[:count]
            estimate = block_mean(difference, blocks, rng=np.random.default_rng(0), levels=(0.95,), blocks_are=words)
            assert estimate.interval is not None
            found[name] = {"value": estimate.value, "interval": [estimate.interval.low, estimate.interval.high]}
    return found


def table(result: Mapping[str, Any]) -> str:
    lines = ["| row | text | tokens | KL | 95 % | ppl ratio | top-1 | seconds |", "|---|---|---|---|---|---|---|---|"]
    for text, rows in result["rows"].items():
        for row, found in rows.items():
            low, high = found["kl.mean"]["interval"]
            note = result["made"].get(row)
            lines.append(
                f"| {row} | {text} | {found['kl.mean']['count']} | {found['kl.mean']['value']:.4f} | {low:.4f} - "
                f"{high:.4f} | {found['perplexity.ratio']['value']:.4f} | {found['top1.agreement']['value']:.1f} % | "
                f"{'' if note is None else round(note['seconds'])} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
