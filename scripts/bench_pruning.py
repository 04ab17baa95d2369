"""Structured pruning by score and by share, with and without compensation, side by side with Torch-Pruning.

    python scripts/bench_pruning.py make ROW|GROUP ... --model FOLDER --rows SCRATCH [--calibration train.jsonl]
    python scripts/bench_pruning.py measure [ROW|GROUP ...] --model FOLDER --rows SCRATCH [--text test.jsonl]

A row is SCORE-FFN, or SCORE-FFN-HEADS-KV, of what is kept: obs-1152, taylor-1152-6-2. SCORE is one of ours, or one of
Torch-Pruning's: tp.magnitude, tp.taylor (`--peer-python`: Python of an environment with torch-pruning). What follows:
  -mask   the units that this row keeps, cut out of the original's weights by this script: the same without compensation
  -plain  `--no-compensate`: scored and walked without compensation, so that the units may be others
  -256w   calibrated on so many windows instead of --samples

`make` builds what is not there and notes wall time and peak memory of the whole process, from its start to the proved
folder. `measure` answers the same tokens with every row that is there; answers stay beside the rows, and what was
answered is not asked again. KL is the mean over tokens of KL(original || row), nats, in float32, with 95 %
block-bootstrap intervals; differences are paired by token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_engine import Remembering
from bench_quantization import environment, figures
from safetensors.torch import load_file, save_file

from compress.data.text import read_corpus
from compress.data.windows import Windows, decoder_windows
from compress.measure.fidelity import FidelityTokens, compare_logits, joined
from compress.measure.statistics import Estimate, block_mean, ratio_of_sums, token_blocks
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original, load_tokenizer
from compress.progress import Silent

LENGTH = 512
OURS = ("obs", "magnitude", "activation", "taylor", "random")
ROW = re.compile(
    rf"(?P<score>{'|'.join(OURS)}|tp\.magnitude|tp\.taylor)-(?P<ffn>\d+)(-(?P<heads>\d+)-(?P<kv>\d+))?"
    r"(?P<how>-mask|-plain)?(-(?P<windows>\d+)w)?"
)
# Widths of SmolLM2-135M's 1536 channels: 0.9 (1382, and 1408 as a multiple of 64), 0.8, 0.75, 0.7, 0.6, 0.5.
GROUPS: dict[str, tuple[str, ...]] = {
    "ours": ("obs-1382", "obs-1408", "obs-1152", "obs-1152-6-2"),
    "scores": tuple(f"{score}-{ffn}" for ffn in (1382, 1152) for score in OURS[1:]),
    "heads": tuple(f"{score}-1152-6-2" for score in OURS[1:]),
    "curve": ("obs-1228", "obs-1076", "obs-922", "obs-768"),
    "masks": tuple(f"obs-{shape}-mask" for shape in (1382, 1228, 1152, "1152-6-2", 1076, 922, 768)),
    "plain": tuple(f"{score}-{ffn}-plain" for ffn in (1382, 1152) for score in OURS),
    "more-text": ("obs-1382-256w", "obs-1152-256w", "obs-1152-6-2-256w"),
    "peer": tuple(f"tp.{s}-{shape}" for s in ("magnitude", "taylor") for shape in (1382, 1152, "1152-6-2", "1152-6-3")),
}


@dataclass(frozen=True)
class Row:
    """Attributes:
    heads, kv: counts to keep; None where the attention stays whole.
    how: "" (compensated, or the peer's), "-mask" or "-plain".
    windows: of calibration; None for --samples.
    """

    name: str
    score: str
    ffn: int
    heads: int | None
    kv: int | None
    how: str
    windows: int | None

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.ffn, self.heads, self.kv)

    @property
    def peer(self) -> bool:
        return self.score.startswith("tp.")

    @property
    def compensated(self) -> str:
        """Name of the row whose units a mask keeps."""
        return self.name.replace("-mask", "")


def main() -> None:
    arguments = parse()
    arguments.rows.mkdir(parents=True, exist_ok=True)
    if arguments.what == "make":
        for row in rows_of(arguments.wanted):
            make(row, arguments)
    else:
        measure(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("wanted", nargs="*", metavar="ROW", help=f"rows, or groups of them: {', '.join(GROUPS)}")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="folder for the models of the rows, and their answers")
    parser.add_argument("--calibration", default="default", help="text of our rows and of Torch-Pruning's gradients")
    parser.add_argument("--text", default="default", help="held-out text")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--tokens", type=int, default=32768, help="of held-out text")
    parser.add_argument("--together", type=int, default=4, help="rows in memory at one time")
    parser.add_argument("--peer-python", default=sys.executable, help="Python of the peer's environment")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def rows_of(wanted: Iterable[str]) -> list[Row]:
    names = [name for one in wanted for name in GROUPS.get(one, (one,))]
    return [row_of(name) for name in dict.fromkeys(names)]


def row_of(name: str) -> Row:
    found = ROW.fullmatch(name)
    if found is None:
        raise SystemExit(f"{name} is no row, which looks like obs-1152-6-2-mask, nor one of {', '.join(GROUPS)}")
    numbers = {key: None if found[key] is None else int(found[key]) for key in ("heads", "kv", "windows")}
    return Row(name, found["score"], int(found["ffn"]), how=found["how"] or "", **numbers)


def make(row: Row, arguments: argparse.Namespace) -> None:
    output = arguments.rows / row.name
    if not failed(output):
        return
    if row.how == "-mask":
        make(row_of(row.compensated), arguments)
        start = time.perf_counter()
        cut(arguments.model, arguments.rows / row.compensated, output)
        note: dict[str, Any] = {"seconds": time.perf_counter() - start}
    else:
        note = built(command(row, output, arguments))
    note_path(output).write_text(json.dumps(note), encoding="utf-8")
    print(row.name, note, flush=True)


def note_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.note.json")


def note_of(output: Path) -> dict[str, Any]:
    """What was noted of building this folder; empty where nothing was."""
    path = note_path(output)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def failed(output: Path) -> bool:
    """Whether the folder is still to be built."""
    note = note_of(output)
    return not note or "failed" in note


def command(row: Row, output: Path, arguments: argparse.Namespace) -> list[str]:
    samples = row.windows or arguments.samples
    if row.peer:
        windows = calibration(arguments, samples)
        script = Path(__file__).with_name("bench_peer_torch_pruning.py")
        config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
        heads, kv_heads = row.heads or config["num_attention_heads"], row.kv or config["num_key_value_heads"]
        first = [arguments.peer_python, str(script), str(arguments.model), str(windows), str(output)]
        return [*first, row.score.removeprefix("tp."), str(row.ffn), str(heads), str(kv_heads)]
    options = ["--keep-ffn", str(row.ffn), "--ffn-multiple", "2", "--importance", row.score]
    options += [] if row.heads is None else ["--keep-heads", str(row.heads), "--keep-kv-heads", str(row.kv)]
    options += ["--no-compensate"] if row.how == "-plain" else []
    options += ["--calibration", arguments.calibration, "--samples", str(samples)]
    return pruned_by_us(arguments.model, output, options, LENGTH)


def pruned_by_us(model: Path, output: Path, options: Sequence[str], length: int) -> list[str]:
    first = [sys.executable, "-m", "compress", "prune", str(model), "-o", str(output), *options]
    return [*first, "--length", str(length), "--no-evaluate", "--no-bench", "--quiet", "--overwrite"]


def built(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a command: wall time, processor time and peak memory, or what it said when it failed."""
    start = time.perf_counter()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    note = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss / 1e6,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "cores": len(os.sched_getaffinity(0)),
    }
    return note if process.returncode == 0 else note | {"failed": said.strip().splitlines()[-3:]}


def calibration(arguments: argparse.Namespace, samples: int) -> Path:
    path: Path = arguments.rows / f"windows-{samples}.safetensors"
    if not path.exists():
        corpus = read_corpus(arguments.calibration, part="calibration")
        windows = decoder_windows(corpus, load_tokenizer(arguments.model), length=LENGTH, samples=samples)
        save_file({f"{index:05d}": ids for index, ids in enumerate(windows.ids)}, path)
    return path


def layers_of(folder: Path) -> list[dict[str, Any]]:
    """The records of the output projections that `compress prune` wrote."""
    steps = json.loads((folder / "compress.json").read_text(encoding="utf-8"))["steps"]
    layers: list[dict[str, Any]] = next(step for step in steps if step["kind"] == "prune")["layers"]
    return [layer for layer in layers if layer.get("pruning")]


def cut(source: Path, pruned: Path, output: Path) -> None:
    """The units that `pruned` kept, cut out of the weights of a Llama: what it would be without compensation."""
    config = json.loads((pruned / "config.json").read_text(encoding="utf-8"))
    before = json.loads((source / "config.json").read_text(encoding="utf-8"))
    shared = before["num_attention_heads"] // before["num_key_value_heads"]
    weights = load_file(source / "model.safetensors")
    for layer in layers_of(pruned):
        block, kept, unit = layer["name"].rsplit(".", 2)[0], layer["pruning"]["kept"], layer["pruning"]["unit"]
        if unit == "ffn":
            take(weights, block, rows={"mlp.gate_proj": kept, "mlp.up_proj": kept}, columns={"mlp.down_proj": kept})
            continue
        heads = kept if unit == "heads" else [head * shared + one for head in kept for one in range(shared)]
        kv_heads = list(dict.fromkeys(head // shared for head in heads))
        queries, keys = (of_heads(some, config["head_dim"]) for some in (heads, kv_heads))
        rows = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        take(weights, block, rows=rows, columns={"self_attn.o_proj": queries})
    output.mkdir(exist_ok=True)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def take(
    weights: dict[str, torch.Tensor],
    block: str,
    *,
    rows: Mapping[str, Sequence[int]],
    columns: Mapping[str, Sequence[int]],
) -> None:
    for axis, kept in ((0, rows), (1, columns)):
        for name, index in kept.items():
            path = f"{block}.{name}.weight"
            weights[path] = weights[path].index_select(axis, torch.tensor(index))


def of_heads(heads: Iterable[int], width: int) -> list[int]:
    return [head * width + one for head in heads for one in range(width)]


def measure(arguments: argparse.Namespace) -> None:
    everything = rows_of(arguments.wanted or GROUPS)
    made = [row for row in everything if not failed(arguments.rows / row.name)]
    corpus = read_corpus(arguments.text, part="evaluation")
    windows = decoder_windows(corpus, load_tokenizer(arguments.model), length=LENGTH, tokens=arguments.tokens)
    answer(made, windows, arguments)
    tokens = {row: answered(answer_path(arguments.rows / row.name, windows)) for row in made}
    notes = {row.name: note_of(arguments.rows / row.name) for row in everything}
    result = {
        "environment": environment(),
        "model": arguments.model.name,
        "settings": {"samples": arguments.samples, "length": LENGTH, "tokens": windows.tokens, "text": windows.sha256},
        "made": {name: note for name, note in notes.items() if note},
        "rows": {row.name: figures(found) for row, found in tokens.items()},
        "scores": [found for row in tokens if row.score == "obs" for found in against(row, tokens)],
        "compensation": {
            row.compensated: gain(tokens[row_of(row.compensated)], found)
            for row, found in tokens.items()
            if row.how == "-mask" and row_of(row.compensated) in tokens
        },
        "errors": {row.name: predictions(arguments.rows / row.name) for row in made if not (row.peer or row.how)},
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def answer_path(folder: Path, windows: Windows) -> Path:
    """Where a row's answers lie: named by its weights and by the tokens, so that others are never taken for them."""
    digest = hashlib.sha256(windows.sha256.encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return folder.with_name(f"{folder.name}.{digest.hexdigest()[:16]}.npz")


def answer(rows: Sequence[Row], windows: Windows, arguments: argparse.Namespace) -> None:
    """A few rows at a time, window by window, so that the original computes each window once for all of them."""
    missing = [row for row in rows if not answer_path(arguments.rows / row.name, windows).exists()]
    for start in range(0, len(missing), arguments.together):
        some = missing[start : start + arguments.together]
        models = {row: load(arguments.rows / row.name) for row in some}
        original: Any = Remembering(load(arguments.model))
        parts: dict[Row, list[FidelityTokens]] = {row: [] for row in some}
        for index, one in enumerate(replace(windows, ids=(ids,)) for ids in windows.ids):
            for row, model in models.items():
                part = compare_logits(original, model, one, Silent())
                parts[row].append(replace(part, window=np.full(len(part.kl), index)))
        for row, found in parts.items():
            tokens = joined(found)
            columns = {field.name: getattr(tokens, field.name) for field in fields(FidelityTokens)}
            np.savez(answer_path(arguments.rows / row.name, windows), **columns)
            print(row.name, f"KL {tokens.kl.mean():.4f}", file=sys.stderr, flush=True)


def load(folder: Path) -> transformers.PreTrainedModel:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


def answered(path: Path) -> FidelityTokens:
    with np.load(path) as found:
        return FidelityTokens(**{field.name: found[field.name] for field in fields(FidelityTokens)})


def against(ours: Row, tokens: Mapping[Row, FidelityTokens]) -> Iterator[dict[str, Any]]:
    """Our mean KL minus that of every other score at the same shape, compensated or not as ours, and of the peer."""
    for row, found in tokens.items():
        alike = row.shape == ours.shape and row.windows == ours.windows and (row.how == ours.how or row.peer)
        if alike and row != ours and ours.how != "-mask":
            blocks, words = token_blocks(found.window)
            difference = tokens[ours].kl - found.kl
            estimate = block_mean(difference, blocks, rng=np.random.default_rng(0), blocks_are=words)
            yield {"ours": ours.name, "other": row.name} | plain(estimate)


def gain(compensated: FidelityTokens, mask: FidelityTokens) -> dict[str, Any]:
    """Share of the mask's KL that compensation takes away, resampled by blocks of tokens."""
    blocks, words = token_blocks(mask.window)
    left = ratio_of_sums(
        np.bincount(blocks, weights=compensated.kl).astype(np.float64),
        np.bincount(blocks, weights=mask.kl).astype(np.float64),
        rng=np.random.default_rng(0),
        items_are=words,
    )
    assert left.interval is not None
    return {"value": 1 - left.value, "interval": [1 - left.interval.high, 1 - left.interval.low]}


def plain(estimate: Estimate) -> dict[str, Any]:
    assert estimate.interval is not None
    return {"value": estimate.value, "interval": [estimate.interval.low, estimate.interval.high]}


def predictions(folder: Path) -> dict[str, Any]:
    """Measured over predicted block error on held-out tokens, over the layers, by what was removed from them."""
    found: dict[str, list[float]] = {}
    for layer in layers_of(folder):
        pruning = layer["pruning"]
        if pruning["error_predicted"] and pruning["error_measured"] is not None:
            kind = pruning["unit"] if len(pruning["kept"]) < pruning["of"] else "nothing, fitted to earlier layers"
            found.setdefault(kind, []).append(pruning["error_measured"] / pruning["error_predicted"])
    return {
        kind: {
            "layers": len(ratios),
            "median": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "within_15_percent": sum(abs(ratio - 1) <= 0.15 for ratio in ratios),
        }
        for kind, ratios in found.items()
    }


def table(result: Mapping[str, Any]) -> str:
    lines = ["| row | KL | 95 % | ppl ratio | 95 % | top-1 | seconds | GB |", "|---|---|---|---|---|---|---|---|"]
    for name, found in result["rows"].items():
        note = result["made"][name]
        cells = [f"{cell(found['kl.mean'])} | {cell(found['perplexity.ratio'])}"]
        cells += [
            f"{found['top1.agreement']['value']:.1f} %",
            f"{note['seconds']:.0f}",
            f"{note.get('peak_gb', 0):.1f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, note in result["made"].items():
        lines += [f"| {name} | failed: {' '.join(note['failed'])} |"] if "failed" in note else []
    lines += [f"KL of {one['ours']} - {one['other']}: {cell(one)}" for one in result["scores"]]
    lines += [f"KL taken away by compensation, {name}: {cell(one)}" for name, one in result["compensation"].items()]
    lines += [f"measured / predicted error, {name}: {found}" for name, found in result["errors"].items()]
    return "\n".join(lines)


def cell(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["interval"]
    return f"{estimate['value']:.4f} | {low:.4f} - {high:.4f}"


if __name__ == "__main__":
    main()
