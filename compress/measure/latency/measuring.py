"""Latency, load time and peak memory of several variants of a model, measured against each other.

See `schedule` for when what is timed, `stopping` for when it ends, `contention` for what is left out. Each variant
lives in its own process, all pinned to the same CPUs, and only one works at a time, so none is slowed by another's
threads or measured in a heap that another filled.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compress.errors import UsageError
from compress.measure.latency.children import Child, ask, children
from compress.measure.latency.contention import machine_state
from compress.measure.latency.figures import Timing, latency_measurements, load_measurements, reported_pairs
from compress.measure.latency.raw import LatencyRaw, Loaded
from compress.measure.latency.schedule import Run, Sample, left_out, never, run_protocol
from compress.measure.latency.settings import Stop, Variant, Workload, check_settings
from compress.measure.latency.stopping import enough_at, noise_of
from compress.progress import Progress
from compress.records import Measurement

__all__ = ["LatencyRaw", "Stop", "Timed", "Variant", "Workload", "measure_latency"]


@dataclass(frozen=True)
class Timed:
    """What came of timing.

    Attributes:
        raw: every sample; `raw.rows()` are the lines of latency.jsonl.
        noise: why the asked precision was not reached, in one sentence; None if it was, or if none was asked.
        contention: what else wanted the CPUs: load_average, governor, frequency_mhz and cpu_quota at the start, cpus
            (those pinned to), pressure_share, steal_share and waiting_share of the time that was sampled, rounds and
            rounds_left_out. None where the system does not tell.
    """

    measurements: list[Measurement]
    raw: LatencyRaw
    noise: str | None
    contention: Mapping[str, Any]


def measure_latency(
    variants: Sequence[Variant],
    *,
    original_labels: Sequence[str],
    workloads: Sequence[Workload],
    stop: Stop,
    threads: int,
    seed: int,
    device: str,
    trust_remote_code: bool,
    progress: Progress,
    levels: Sequence[float] = (),
) -> Timed:
    """Times all variants, interleaved, and compares each result with the original.

    Args:
        original_labels: the variants that are the original (in several dtypes, say); the others are results. If all
            are originals there are figures and a noise floor, and no ratios of results.
        workloads: measured one after the other in the same processes, each with its own floor and rounds; every
            variant gets the same random prompt and generates exactly new_tokens.
        threads: CPU threads of each process, and CPUs that it is pinned to.
        levels: one-sided confidence levels that gates ask for; 0.95 is always added.

    Raises:
        UsageError: the settings contradict each other or the model; also what the loaders raise.
        BrokenResultError: a variant's output is not finite.
        MissingResourceError: a process was killed, usually because memory ran out.
    """
    check_settings(variants, original_labels, workloads, stop, threads)
    asked = tuple(sorted({0.95, *levels}))
    with children([variant.label for variant in variants], threads) as workers:
        facts = _load(workers, variants, device, trust_remote_code, progress)
        _check_positions(variants, facts, workloads)
        cpus = facts[0]["cpus"]
        state = {"cpus": cpus} | machine_state(cpus)
        loads = [Loaded(fact["engine"], fact["seconds"], fact["peak_bytes"]) for fact in facts]
        shared = {"device": facts[0]["device"], "threads": threads, "cpus": cpus}
        timings, noises, spent = [], [], 0.0
        for index, workload in enumerate(workloads):
            share = max(stop.budget - spent, 0.0) / (len(workloads) - index)
            _prepare(workers, facts, workload, seed)
            start = time.perf_counter()
            run, peaks = _run(workers, variants, original_labels, workload, Stop(share, stop.precision), seed, progress)
            spent += time.perf_counter() - start
            timing = Timing(run, variants, original_labels, workload, loads, peaks, shared, asked, index)
            timings.append(timing)
            noises.append(_noise(timing, stop.precision))
    raw = _raw(timings, shared | state | {"budget": stop.budget, "precision": stop.precision, "seed": seed})
    found = [one for timing in timings for one in latency_measurements(timing)]
    found += load_measurements(variants, loads, original_labels, shared)
    return Timed(found, raw, _joined(workloads, noises), state | _shares([timing.run for timing in timings]))


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
        return Sample(reply["seconds"], reply["cpu_seconds"], reply["contention"])

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


def _check_positions(
    variants: Sequence[Variant], facts: Sequence[Mapping[str, Any]], workloads: Sequence[Workload]
) -> None:
    """Before anything is timed, for all workloads: whether every model has the positions."""
    needed = max(workload.positions for workload in workloads)
    short = [
        f"{variant.label} holds {fact['positions']}"
        for variant, fact in zip(variants, facts, strict=True)
        if fact["positions"] is not None and fact["positions"] < needed
    ]
    if short:
        raise UsageError(
            f"prompt and new tokens need {needed} positions: {', '.join(short)}",
            hint="lower the prompt or the new tokens of the benchmark",
        )


def _prepare(workers: Sequence[Child], facts: Sequence[Mapping[str, Any]], workload: Workload, seed: int) -> None:
    """Gives every worker the same prompt."""
    ids = prompt_ids(facts, batch=workload.batch, prompt=workload.prompt, seed=seed)
    for worker in workers:
        ask(worker, {"op": "prepare", "kind": workload.kind, "ids": ids, "new_tokens": workload.new_tokens})


def _run(
    workers: Sequence[Child],
    variants: Sequence[Variant],
    original_labels: Sequence[str],
    workload: Workload,
    stop: Stop,
    seed: int,
    progress: Progress,
) -> tuple[Run, list[int | None]]:
    """One workload: the run and every process's peak memory after its first sample."""
    sampler, names, precision = _Sampler(workers), workload.compared, stop.precision
    comparisons = _comparisons(variants, original_labels)
    run = run_protocol(
        len(variants),
        sampler.sample,
        floor_of=[variant.label for variant in variants].index(original_labels[0]),
        budget=stop.budget,
        seed=seed,
        clock=time.perf_counter,
        progress=progress,
        floor_enough=never if precision is None else enough_at(precision, [(1, 0)], names),
        enough=never if precision is None else enough_at(precision, comparisons, names),
    )
    return run, sampler.in_order()


def _comparisons(variants: Sequence[Variant], original_labels: Sequence[str]) -> list[tuple[int, int]]:
    """Every result with every original, while it is not known which of them will be the fastest."""
    originals = [i for i, variant in enumerate(variants) if variant.label in original_labels]
    return [(i, other) for i in range(len(variants)) if i not in originals for other in originals]


def _noise(timing: Timing, precision: float | None) -> str | None:
    if precision is None:
        return None
    return noise_of(
        precision,
        timing.run.rounds,
        timing.run.floor,
        reported_pairs(timing),
        timing.workload.compared,
        round_seconds=timing.run.round_seconds,
    )


def _joined(workloads: Sequence[Workload], noises: Sequence[str | None]) -> str | None:
    """The sentences of all workloads as one; each says which it is about where there are several."""
    found = []
    for workload, noise in zip(workloads, noises, strict=True):
        if noise is not None:
            lengths = {"prompt": workload.prompt, "new tokens": workload.new_tokens, "batch": workload.batch}
            words = ", ".join(f"{name} {value}" for name, value in lengths.items() if value is not None)
            found.append(noise if len(workloads) == 1 else f"{noise} ({words})")
    return "; ".join(found) or None


def _raw(timings: Sequence[Timing], conditions: Mapping[str, Any]) -> LatencyRaw:
    first = timings[0]
    described = [asdict(variant) | {"folder": variant.folder.name} for variant in first.variants]
    everything = dict(conditions) | {
        "variants": described,
        "original_labels": list(first.original_labels),
        "workloads": [asdict(timing.workload) for timing in timings],
    }
    labels = [variant.label for variant in first.variants]
    runs = [(timing.workload, timing.run) for timing in timings]
    return LatencyRaw(everything, labels, first.loads, runs, [timing.peaks for timing in timings])


def _shares(runs: Sequence[Run]) -> dict[str, Any]:
    """Over all samples of the rounds and the floors: which share of their time was lost to others."""
    phases = [rounds for run in runs for rounds in (run.floor, run.rounds)]
    samples = [sample.contention for rounds in phases for one in rounds for _, sample in one]
    wall = sum(sample.get("wall") or 0.0 for sample in samples)
    shares: dict[str, Any] = {}
    for name in ("pressure", "steal", "waiting"):
        lost = [sample.get(name) for sample in samples]
        known = [seconds for seconds in lost if seconds is not None]
        shares[f"{name}_share"] = sum(known) / wall if wall and len(known) == len(lost) else None
    out = sum(len(left_out(rounds)) for rounds in phases)
    return shares | {"rounds": sum(map(len, phases)), "rounds_left_out": out}
