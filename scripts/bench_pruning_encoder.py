"""A sentence encoder with fewer feed-forward channels: how close its embeddings stay, and how much faster it is.

    python scripts/bench_pruning_encoder.py FFN --model FOLDER --output FOLDER [--calibration train.jsonl]
        [--text test.jsonl]

Builds OUTPUT with `compress prune` unless it is there, embeds held-out texts with both models as the folder's pooling
says, and times both in stock transformers: one batch of 32 texts of 128 tokens, float32, the models by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_pruning import built, failed, load, note_of, note_path, plain, predictions, pruned_by_us
from bench_quantization import environment

from compress.data.text import read_corpus
from compress.data.windows import encoder_windows
from compress.measure.encoder import compare_embeddings, read_pooling
from compress.measure.statistics import block_mean
from compress.model.load import load_tokenizer
from compress.progress import Silent

BATCH, LENGTH = 32, 128
WARM = 3


def main() -> None:
    arguments = parse()
    if failed(arguments.output):
        options = ["--keep-ffn", str(arguments.ffn), "--importance", arguments.importance]
        options += ["--calibration", arguments.calibration, "--samples", str(arguments.samples)]
        note = built(pruned_by_us(arguments.model, arguments.output, options, LENGTH))
        note_path(arguments.output).write_text(json.dumps(note), encoding="utf-8")
        if failed(arguments.output):
            raise SystemExit(" ".join(note["failed"]))
    corpus = read_corpus(arguments.text, part="evaluation")
    windows = encoder_windows(corpus, load_tokenizer(arguments.model), length=LENGTH, samples=arguments.texts)
    both = load(arguments.model), load(arguments.output)
    cosine = compare_embeddings(*both, windows, read_pooling(arguments.model), Silent()).cosine
    full = [ids for ids in windows.ids if len(ids) == LENGTH]
    if len(full) < BATCH:
        raise SystemExit(f"{len(full)} texts of {LENGTH} tokens among {len(windows.ids)}, and {BATCH} make a batch")
    result = {
        "environment": environment(),
        "model": arguments.model.name,
        "ffn": arguments.ffn,
        "importance": arguments.importance,
        "made": note_of(arguments.output),
        "errors": predictions(arguments.output),
        "texts": len(cosine),
        "cosine": plain(block_mean(cosine, np.arange(len(cosine)), rng=np.random.default_rng(0))),
        "cosine_p5": float(np.quantile(cosine, 0.05)),
        "latency": latency(arguments.model, arguments.output, torch.stack(full[:BATCH]), arguments.rounds),
    }
    arguments.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ffn", type=int, help="channels to keep in every layer")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--importance", default="obs")
    parser.add_argument("--calibration", default="default")
    parser.add_argument("--samples", type=int, default=512, help="calibration texts")
    parser.add_argument("--text", default="default", help="held-out text")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=40, help="timed batches of each model")
    parser.add_argument("--result", type=Path, default=Path(__file__).with_suffix(".json"))
    return parser.parse_args()


def latency(original: Path, pruned: Path, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Median seconds of a batch ids [b, n], and the median and quartiles of the ratio of neighbours in time."""
    models = [transformers.AutoModel.from_pretrained(one, dtype=torch.float32).eval() for one in (original, pruned)]
    seconds: list[list[float]] = [[], []]
    with torch.inference_mode():
        for turn in range(rounds + WARM):
            for index in (0, 1) if turn % 2 else (1, 0):
                start = time.perf_counter()
                models[index](input_ids=ids, attention_mask=torch.ones_like(ids))
                if turn >= WARM:
                    seconds[index].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    return {
        "batch": list(ids.shape),
        "rounds": rounds,
        "original_seconds": statistics.median(seconds[0]),
        "pruned_seconds": statistics.median(seconds[1]),
        "times_faster": statistics.median(ratios),
        "quartiles": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)],
    }


if __name__ == "__main__":
    main()
