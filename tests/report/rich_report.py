"""A report with all that the HTML can show: tasks with flips, sweeps, percentiles, generation, two schemes."""

from __future__ import annotations

from dataclasses import replace

from sample_report import BENCH, GATES, around, fidelity, latency, layer_records, paired, sample_report

from compress.records import FlipRecord, Interval, LayerRecord, Measurement, StepRecord, TaskRecord
from compress.report.build import step_part, task_part
from compress.report.schema import ModelPart, Report

TASK_GATES = (*GATES, "accuracy[next_sentence].drop <= 2pt @95%", "accuracy.drop <= 4pt @95%")
PASSING = ("kl.mean <= 0.1", "size <= 120MB", "accuracy.drop <= 4pt @95%")
OPEN = ("kl.mean <= 0.1", "accuracy.drop <= 2pt @95%", "cosine.mean >= 0.9")
LONG_QUESTION = "The author of the passage argues that rags were scarce. " * 20


def rich_report(gates: tuple[str, ...] = TASK_GATES) -> Report:
    measurements = [
        *fidelity(),
        *generation(),
        *task_figures("next_sentence", 200, 79.5, 74.0, 25.0),
        *task_figures("capitals", 500, 44.2, 44.0, 0.0),
        *task_figures(None, 700, 54.3, 52.6, 10.0),
        *latency(),
        *sweep(),
    ]
    tasks = (
        TaskRecord("next_sentence", "multiple_choice", "acc", "tasks/next.jsonl", 200, 0.25, 17, 6, 5.9, "ab", flips()),
        TaskRecord("capitals", "cloze", "acc", "tasks/capitals.jsonl", 500, None, 9, 8, 2.05, "cd", flips()[:2]),
    )
    report = sample_report(measurements, gates)
    return report.model_copy(
        update={
            "tasks": tuple(map(task_part, tasks)),
            "steps": (step_part(StepRecord("quantize", {}, layers=tuple(mixed_layers()))),),
            "created": "2026-11-30T20:00:00Z",
        }
    )


def eval_report() -> Report:
    """What `compress eval` leaves: no step, no proof, two models that were there before."""
    report = rich_report()
    result = ModelPart(source="models/already-compressed", content_hash="f" * 64)
    inputs = report.inputs.model_copy(update={"result": result})
    return report.model_copy(
        update={"command": "eval", "steps": (), "proof": None, "recipe": None, "inputs": inputs, "remarks": ()}
    )


def task_figures(task: str | None, items: int, original: float, result: float, chance: float) -> list[Measurement]:
    def figure(metric: str, subject: str, value: float, half: float | None = None) -> Measurement:
        interval = None if half is None else Interval(value - half, value + half, 0.95, "cluster bootstrap")
        bounds = {} if half is None else {0.95: (value - half, value + half)}
        return Measurement(metric, subject, value, items, interval, bounds, task=task)

    pair = "result/original"
    recovery = 100 * (result - chance) / (original - chance)
    return [
        figure("accuracy", "original", original, 3.2),
        figure("accuracy", "result", result, 3.3),
        figure("accuracy.drop", pair, original - result, 2.1),
        figure("accuracy.mcnemar_p", pair, 0.0321),
        figure("accuracy.recovery", pair, 100 * result / original, 2.5),
        figure("accuracy.recovery_corrected", pair, recovery, 5.2),
        figure("accuracy.expected_drop", pair, 1.31, 0.9),
        figure("accuracy.margin_shift", pair, -0.0812, 0.04),
    ]


def flips() -> tuple[FlipRecord, ...]:
    kept, taken = "She walked around the lake.", "She stepped onto the ice."
    lost = FlipRecord("item-1", "What did Anna do?", kept, kept, taken, True, 1.234, -0.771)
    long = replace(lost, id="item-2", question=LONG_QUESTION, original_margin=0.4, result_margin=-0.3)
    won = FlipRecord("item-3", "What is 20 - 3?", "17", "16", "seventeen", False)
    return lost, long, won


def generation() -> list[Measurement]:
    return [
        Measurement("kl.p999", "result/original", 1.83, 8176),
        paired("tv.mean", 0.0912, 0.0890, 0.0935),
        paired("generation.length_ratio", 1.021, 0.93, 1.12),
        Measurement("generation.repetition", "original", 3.1, 8),
        Measurement("generation.repetition", "result", 4.4, 8),
    ]


def sweep() -> list[Measurement]:
    """Times of a second workload, with a tail and a throughput."""
    rows = []
    for subject, share in (("original", 1.0), ("result", 0.9)):
        where = BENCH | {"variant": f"{subject} float32", "dtype": "float32", "batch": 4}
        rows.append(around("latency.tpot", subject, 41.0 * share, 0.01, **where))
        rows.append(around("latency.tpot.p90", subject, 44.0 * share, 0.02, **where))
        rows.append(around("throughput.decode", subject, 97.5 / share, 0.02, **where))
    return rows


def mixed_layers() -> list[LayerRecord]:
    """210 layers: down projections in 8 bit, the rest in 4."""
    return [
        replace(layer, scheme="W8A16 channel", error_after=0.0002) if layer.name.endswith("down_proj") else layer
        for layer in layer_records()
    ]
