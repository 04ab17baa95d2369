"""Everything that was timed, as the lines of latency.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compress.measure.latency.schedule import Round, Run, Sample, left_out
from compress.measure.latency.settings import Workload


@dataclass(frozen=True)
class Loaded:
    """A variant in its process.

    Attributes:
        engine: what runs it, in words.
        seconds: reading the folder and building the model; imports of torch and transformers are not in it.
        peak_bytes: peak resident memory of the process when that was done; None where the system does not tell.
    """

    engine: str
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class LatencyRaw:
    """Everything that was timed, in order, and what it holds for.

    Attributes:
        labels: of the variants; samples are kept under them.
        peaks: of each run, every variant's peak resident bytes; None where the system does not tell.
    """

    conditions: Mapping[str, Any]
    labels: Sequence[str]
    loads: Sequence[Loaded]
    runs: Sequence[tuple[Workload, Run]]
    peaks: Sequence[Sequence[int | None]]

    def rows(self) -> list[dict[str, Any]]:
        """Plain data, nothing rounded: one row of conditions, one for each load, one for the peak memory
        of each variant in each workload, one for each sample in order.

        A sample says `left_out` where the figures do without its round. In phase "floor" the same variant stands on
        both sides; in the warm-up `round` is the number of the sample.
        """
        rows: list[dict[str, Any]] = [{"kind": "conditions"} | dict(self.conditions)]
        rows += [
            {"kind": "load", "variant": label, "seconds": load.seconds, "peak_bytes": load.peak_bytes}
            for label, load in zip(self.labels, self.loads, strict=True)
        ]
        for (workload, run), peaks in zip(self.runs, self.peaks, strict=True):
            common = {"kind": "memory", "workload": asdict(workload)}
            rows += [common | {"variant": label, "bytes": peak} for label, peak in zip(self.labels, peaks, strict=True)]
            rows += self._samples(workload, run)
        return rows

    def _samples(self, workload: Workload, run: Run) -> Iterator[dict[str, Any]]:
        common = {"kind": "sample", "workload": asdict(workload)}
        for side, warm in enumerate(run.warm_ups):
            for number, sample in enumerate(warm.samples):
                yield common | _row("warm-up", number, self.labels[side], side, sample, False)
        same = self.labels[run.floor_of]
        phases: tuple[tuple[str, Sequence[Round], Sequence[str]], ...] = (
            ("floor", run.floor, (same, same)),
            ("measure", run.rounds, self.labels),
        )
        for phase, rounds, labels in phases:
            out = left_out(rounds)
            for number, one in enumerate(rounds):
                for side, sample in one:
                    yield common | _row(phase, number, labels[side], side, sample, number in out)


def _row(phase: str, number: int, label: str, side: int, sample: Sample, out: bool) -> dict[str, Any]:
    return {
        "phase": phase,
        "round": number,
        "variant": label,
        "side": side,
        "seconds": dict(sample.seconds),
        "cpu_seconds": sample.cpu_seconds,
        "contention": dict(sample.contention),
        "left_out": out,
    }
