"""The part of bench_measurement.py that times real processes: the live runs, and the recording of blocks.

    taskset -c 1 python scripts/bench_measurement_live.py --record scripts/bench_measurement_blocks.json --seconds 240

records blocks in which original and result are the same model in two processes. The model is a random Llama whose
forward pass busy-waits for `extra` of the time it took (its own code, in the folder): 0 for the same, 0.03 for 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from compress.measure.latency.measuring import Stop, Timed, Variant, Workload, measure_latency
from compress.plan.machine import machine
from compress.progress import Silent

WORKLOAD = Workload("decoder", 32, 8, 1)
CODE = '''
import functools
import time

from transformers import LlamaForCausalLM


class SlowedLlama(LlamaForCausalLM):
    """A Llama whose forward pass takes (1 + config.extra) times as long."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args, **kwargs):
        start = time.perf_counter()
        output = LlamaForCausalLM.forward(self, *args, **kwargs)
        end = start + (1 + self.config.extra) * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return output
'''
COLUMNS = ("ttft", "tpot", "e2e", "cpu", "wall", "pressure", "steal", "waiting")
"""Of a recorded sample, in microseconds, in this order; None where the system did not tell."""


def slowed_llama(folder: Path, extra: float) -> Path:
    """A seeded random Llama of 6.6 M parameters; the same weights whatever `extra` is."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings |= {"architectures": ["SlowedLlama"], "auto_map": {"AutoModelForCausalLM": "slowed.SlowedLlama"}}
    file.write_text(json.dumps(settings | {"extra": extra}), encoding="utf-8")
    (folder / "slowed.py").write_text(CODE, encoding="utf-8")
    return folder


def timed(folders: dict[str, Path], *, runs: int, budget: float, seed: int) -> Timed:
    """Times the folders by their label, one run after the other, each with its own warm-up, floor and rounds.

    Args:
        folders: the first is the original.
        budget: seconds of each run. One thread.
    """
    return measure_latency(
        [Variant(label, folder, "stock", "float32") for label, folder in folders.items()],
        original_labels=[next(iter(folders))],
        workloads=[WORKLOAD] * runs,
        stop=Stop(runs * budget),
        threads=1,
        seed=seed,
        device="cpu",
        trust_remote_code=True,  # our own code, written above
        progress=Silent(),
    )


def live_runs(runs: int, *, sittings: int, budget: float, slowdown: float) -> dict[str, Any]:
    """Runs of the original, the same again and the slowed one; every sitting starts three new processes."""
    found, contention = [], []
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_MODULES_CACHE"] = str(Path(place) / "modules")
        same = slowed_llama(Path(place) / "same", 0.0)
        folders = {"original": same, "same": same, "slowed": slowed_llama(Path(place) / "slowed", slowdown)}
        for seed in range(sittings):
            done = timed(folders, runs=runs // sittings, budget=budget, seed=seed)
            found += _ratios(done)
            contention.append(dict(done.contention))
    facts = {"runs": len(found), "sittings": sittings, "budget_seconds": budget, "slowdown": slowdown}
    return facts | {"found": found, "contention": contention} | _machine()


def _ratios(done: Timed) -> list[dict[str, Any]]:
    """Of each run [ratio, low, high] of the time per token and of CPU time, by variant, and its number of blocks."""
    by_name: dict[str, list[Any]] = {"blocks": []}
    for one in done.measurements:
        if one.metric in ("latency.tpot.ratio", "cpu.ratio") and one.interval is not None:
            label = "floor" if one.subject == "original/original" else one.conditions["variant"]
            clock = "tpot" if one.metric.startswith("latency") else "cpu"
            by_name.setdefault(f"{label} {clock}", []).append([one.value, one.interval.low, one.interval.high])
            if (label, clock) == ("same", "tpot"):
                by_name["blocks"].append(one.conditions["rounds"])
    return [dict(zip(by_name, values, strict=True)) for values in zip(*by_name.values(), strict=True)]


def record(seconds: float) -> dict[str, Any]:
    """Blocks of the original against itself in two processes: for each its order and the samples' COLUMNS."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_MODULES_CACHE"] = str(Path(place) / "modules")
        same = slowed_llama(Path(place) / "same", 0.0)
        done = timed({"original": same, "same": same}, runs=1, budget=seconds, seed=0)
    (_, run), *_ = done.raw.runs
    blocks = [[[side, *_microseconds(sample)] for side, sample in one] for one in run.rounds]
    return {"columns": ["side", *COLUMNS], "unit": "us", "contention": done.contention, "blocks": blocks} | _machine()


def _microseconds(sample: Any) -> Sequence[int | None]:
    values = dict(sample.contention) | dict(sample.seconds) | {"cpu": sample.cpu_seconds}
    return [None if values[name] is None else round(1e6 * values[name]) for name in COLUMNS]


def _machine() -> dict[str, Any]:
    here = machine()
    return {
        "cpu": here.cpu,
        "cores": here.usable_cores,
        "niceness": os.nice(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="file to write")
    parser.add_argument("--seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    recorded = record(arguments.seconds)
    arguments.record.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
    print(len(recorded["blocks"]), "blocks", recorded["contention"])


if __name__ == "__main__":
    main()
