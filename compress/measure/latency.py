"""Latency and peak memory of several variants of a model, measured against each other. See `schedule` for when.

Each variant lives in its own process and only one works at a time, so none is slowed by another's threads or
measured in a heap that another filled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compress.errors import UsageError
from compress.measure.children import Child, ask, children
from compress.measure.latency_figures import (
    METRICS,
    Kind,
    LatencyRaw,
    Timing,
    Variant,
    latency_measurements,
    raw_samples,
)
from compress.measure.schedule import Sample, run_protocol
from compress.progress import Progress
from compress.records import Measurement

__all__ = ["LatencyRaw", "Variant", "measure_latency"]

LOADERS = ("stock", "reference")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Workload:
    """What one sample is. Lengths in tokens; an encoder has no new_tokens."""

    kind: Kind
    prompt: int
    new_tokens: int | None
    batch: int

    @property
    def positions(self) -> int:
        """Positions a model must hold; the last token is generated but never fed back."""
        return self.prompt + (self.new_tokens - 1 if self.new_tokens is not None else 0)


def measure_latency(
    variants: Sequence[Variant],
    *,
    original_labels: Sequence[str],
    kind: Kind,
    prompt: int,
    new_tokens: int,
    batch: int,
    seconds: float,
    threads: int,
    seed: int,
    device: str,
    trust_remote_code: bool,
    progress: Progress,
    levels: Sequence[float] = (),
) -> tuple[list[Measurement], LatencyRaw]:
    """Times all variants, interleaved, and compares each result with the original.

    Args:
        original_labels: the variants that are the original (in several dtypes, say); the others are results.
        prompt, new_tokens, batch: every variant gets the same random prompt and generates exactly new_tokens,
            which an encoder ignores.
        seconds: measuring time in all; loading and warm-up come on top.
        threads: CPU threads of each process.
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.

    Returns:
        The figures (see `latency_measurements`) and every sample.

    Raises:
        UsageError: the settings contradict each other or the model; also what the loaders raise.
        BrokenResultError: a variant's output is not finite.
        MissingResourceError: a process was killed, usually because memory ran out.
    """
    _check(variants, original_labels, kind, prompt, new_tokens, batch, seconds, threads)
    workload = Workload(kind, prompt, new_tokens if kind == "decoder" else None, batch)
    labels = [variant.label for variant in variants]
    with children(labels, threads) as workers:
        facts = _load(workers, variants, device, trust_remote_code, progress)
        _prepare(workers, facts, workload, seed)
        sampler = _Sampler(workers)
        run = run_protocol(
            len(variants),
            sampler.sample,
            floor_of=labels.index(original_labels[0]),
            seconds=seconds,
            seed=seed,
            clock=time.perf_counter,
            progress=progress,
        )
    shared = {"device": facts[0]["device"], "threads": threads, **asdict(workload), "rounds": len(run.rounds)}
    engines, peaks = [str(fact["engine"]) for fact in facts], sampler.in_order()
    asked = tuple(sorted({0.95, *levels}))
    timing = Timing(run, variants, original_labels, kind, engines, peaks, shared, seed, asked)
    return latency_measurements(timing), LatencyRaw(raw_samples(run, variants), shared | {"seed": seed})


def prompt_ids(facts: Sequence[Mapping[str, Any]], *, batch: int, prompt: int, seed: int) -> list[list[int]]:
    """Random ids [batch, prompt] that every variant knows, without padding, start and end ids."""
    special = {id_ for fact in facts for id_ in fact["special"]}
    vocabulary = min(int(fact["vocabulary"]) for fact in facts)
    usable = np.array([id_ for id_ in range(vocabulary) if id_ not in special])
    chosen: list[list[int]] = np.random.default_rng(seed).choice(usable, size=(batch, prompt)).tolist()
    return chosen


class _Sampler:
    """Asks the workers for samples and remembers each one's peak memory after its first."""

    def __init__(self, workers: Sequence[Child]) -> None:
        self.workers = workers
        self.peaks: dict[int, int | None] = {}

    def sample(self, variant: int) -> Sample:
        reply = ask(self.workers[variant], {"op": "sample"})
        self.peaks.setdefault(variant, reply["peak_bytes"])
        seconds: Sample = reply["seconds"]
        return seconds

    def in_order(self) -> list[int | None]:
        """Peak bytes of every worker that was sampled, in the order of the workers."""
        return [self.peaks[variant] for variant in sorted(self.peaks)]


def _load(
    workers: Sequence[Child],
    variants: Sequence[Variant],
    device: str,
    trust_remote_code: bool,
    progress: Progress,
) -> list[dict[str, Any]]:
    facts = []
    with progress.phase("latency: load", len(workers)) as advance:
        for worker, variant in zip(workers, variants, strict=True):
            request = {
                "op": "load",
                "folder": str(variant.folder.resolve()),
                "loader": variant.loader,
                "dtype": variant.dtype,
                "device": device,
                "trust_remote_code": trust_remote_code,
            }
            facts.append(ask(worker, request))
            advance(1)
    return facts


def _check(
    variants: Sequence[Variant],
    original_labels: Sequence[str],
    kind: Kind,
    prompt: int,
    new_tokens: int,
    batch: int,
    seconds: float,
    threads: int,
) -> None:
    """All faults of the settings at once."""
    labels = [variant.label for variant in variants]
    faults = [f"no variant is called {label!r}" for label in original_labels if label not in labels]
    if len(set(labels)) != len(labels):
        faults.append(f"two variants share a label: {', '.join(labels)}")
    if not original_labels:
        faults.append("no variant is named as the original")
    if kind not in METRICS:
        faults.append(f"kind is {kind!r}, not one of {', '.join(METRICS)}")
    counts = {"prompt": prompt, "new_tokens": new_tokens, "batch": batch, "seconds": seconds, "threads": threads}
    faults += [f"{name} is {value}, must be above 0" for name, value in counts.items() if value <= 0]
    for variant in variants:
        if variant.loader not in LOADERS:
            faults.append(f"{variant.label}: loader {variant.loader!r} is not one of {', '.join(LOADERS)}")
        if variant.dtype not in DTYPES:
            faults.append(f"{variant.label}: dtype {variant.dtype!r} is not one of {', '.join(DTYPES)}")
    if faults:
        raise UsageError("latency cannot be measured:\n" + "\n".join(faults))


def _prepare(workers: Sequence[Child], facts: Sequence[Mapping[str, Any]], workload: Workload, seed: int) -> None:
    """Gives every worker the same prompt, if every model has the positions for it."""
    short = [
        f"{worker.label} holds {fact['positions']}"
        for worker, fact in zip(workers, facts, strict=True)
        if fact["positions"] is not None and fact["positions"] < workload.positions
    ]
    if short:
        raise UsageError(
            f"prompt and new tokens need {workload.positions} positions: {', '.join(short)}",
            hint="lower the prompt or the new tokens of the benchmark",
        )
    ids = prompt_ids(facts, batch=workload.batch, prompt=workload.prompt, seed=seed)
    for worker in workers:
        ask(worker, {"op": "prepare", "kind": workload.kind, "ids": ids, "new_tokens": workload.new_tokens})
