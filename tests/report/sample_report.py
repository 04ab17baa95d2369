"""A realistic run, made by hand, for the tests of every renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.recipe.gates import parse_gate
from compress.records import FlipRecord, Interval, LayerRecord, Measurement, StepRecord, TaskRecord
from compress.report.build import build_report
from compress.report.loading import loading
from compress.report.schema import Inputs, ModelPart, Report, Reproduce
from compress.verdict import judge

OUTPUT = "out/smollm2-135m-instruct-int4"
GATES = ("kl.mean <= 0.1", "size <= 120MB", "perplexity.ratio <= 1.05x @95%", "latency.tpot.ratio <= 1x @95%")
BENCH = {
    "engine": "transformers 5.24.0",
    "device": "cpu",
    "threads": 2,
    "batch": 1,
    "prompt": 128,
    "new_tokens": 48,
    "rounds": 24,
}
PROJECTIONS = (
    ("self_attn.q_proj", (576, 576)),
    ("self_attn.k_proj", (192, 576)),
    ("self_attn.v_proj", (192, 576)),
    ("self_attn.o_proj", (576, 576)),
    ("mlp.gate_proj", (1536, 576)),
    ("mlp.up_proj", (1536, 576)),
    ("mlp.down_proj", (576, 1536)),
)


def paired(metric: str, value: float, low: float, high: float, **more: object) -> Measurement:
    return Measurement(
        metric,
        "result/original",
        value,
        count=8176,
        interval=Interval(low, high, 0.95, "block bootstrap, 2000 draws"),
        one_sided={0.95: (low * 1.005, high * 0.995)},
        conditions=dict(more) or {"dtype": "float32", "device": "cpu"},
    )


def fidelity() -> list[Measurement]:
    here = {"dtype": "float32", "device": "cpu"}
    return [
        Measurement("size", "original", 269.060552, 1),
        Measurement("size", "result", 117.203344, 1),
        Measurement("size.ratio", "result/original", 117.203344 / 269.060552),
        Measurement("parameters", "original", 134515008),
        Measurement("parameters", "result", 134515008),
        Measurement("bits_per_weight", "result", 4.25),
        around("perplexity", "original", 18.4177, 0.031, **here),
        around("perplexity", "result", 19.6034, 0.032, **here),
        paired("perplexity.ratio", 1.06438, 1.0581, 1.0709),
        paired("kl.mean", 0.07812, 0.0751, 0.0812),
        Measurement("kl.mean", "original bfloat16/original float32", 0.00031, 8176, conditions=here),
        paired("kl.p99", 0.6123, 0.55, 0.69),
        paired("top1.agreement", 86.314, 85.5, 87.1),
        Measurement("top1.agreement", "original bfloat16/original float32", 98.93, 8176, conditions=here),
    ]


def around(metric: str, subject: str, value: float, share: float, **conditions: object) -> Measurement:
    interval = Interval(value * (1 - share), value * (1 + share), 0.95, "order statistics")
    return Measurement(metric, subject, value, 24, interval, conditions=conditions)


def latency() -> list[Measurement]:
    figures = (
        ("original", "float32", 71.4, 24.92, 912.4),
        ("original", "bfloat16", 96.1, 16.31, 640.2),
        ("result", "float32", 78.9, 25.33, 933.8),
        ("result", "bfloat16", 99.4, 17.10, 655.0),
    )
    rows = []
    for subject, dtype, ttft, tpot, memory in figures:
        where = BENCH | {"variant": f"{subject} {dtype}", "dtype": dtype, "loader": "stock"}
        rows.append(around("latency.ttft", subject, ttft, 0.02, **where))
        rows.append(around("latency.tpot", subject, tpot, 0.01, **where))
        rows.append(Measurement("memory.peak", subject, memory, 1, conditions=where))
    for dtype, original, comparison, ttft, tpot in (
        ("float32", "float32", "same dtype", 1.105, 1.0165),
        ("float32", "bfloat16", "fastest original", 0.821, 1.553),
        ("bfloat16", "bfloat16", "same dtype, which is the fastest original", 1.034, 1.048),
    ):
        where = BENCH | {"dtype": dtype, "original_dtype": original, "comparison": comparison}
        rows.append(paired("latency.ttft.ratio", ttft, ttft - 0.03, ttft + 0.03, **where))
        rows.append(paired("latency.tpot.ratio", tpot, tpot - 0.02, tpot + 0.02, **where))
    floor = BENCH | {"dtype": "float32", "comparison": "the original against itself"}
    return [*rows, around("latency.tpot.ratio", "original/original", 1.001, 0.006, **floor)]


def layer_records(blocks: int = 30) -> list[LayerRecord]:
    layers = [
        LayerRecord(
            f"model.layers.{block}.{name}",
            shape,
            target="int4",
            algorithm="gptq",
            group_size=64,
            scheme="W4A16 g64",
            damping=0.01,
            rank_bound=min(shape[1], 16384),
            tokens=16384,
            error_before=0.0091 + 0.0004 * block + 0.002 * (shape[1] > 1000),
            error_after=0.0042 + 0.0003 * block + 0.001 * (shape[1] > 1000),
            sha256="0" * 64,
        )
        for block in range(blocks)
        for name, shape in PROJECTIONS
    ]
    layers[0] = replace(layers[0], notes=("3 input columns never saw a value other than 0",))
    tied = LayerRecord("model.embed_tokens", (49152, 576), skipped="embedding, tied to the output head")
    kept = [LayerRecord(f"model.layers.{block}.mlp.gate", (8, 576), skipped="router") for block in range(blocks)]
    return [*layers, tied, *kept]


def task_record(name: str = "next_sentence", items: int = 1000, flips: int = 3) -> TaskRecord:
    flipped = tuple(
        FlipRecord(
            id=f"{name}-{i}",
            question=f"Which sentence follows number {i}?",
            expected="It rained.",
            original="It rained.",
            result="The colour is 7.",
            lost=i % 3 != 2,
            original_margin=0.4 + i,
            result_margin=-1.25,
        )
        for i in range(flips)
    )
    return TaskRecord(
        name, "multiple_choice", "acc", f"tasks/{name}.jsonl", items, 0.25, 21, 9, 1.36, sha256="0" * 64, flips=flipped
    )


def task_figures(name: str | None, drop: float = 1.2) -> list[Measurement]:
    """Of one task, or pooled for None; a drop in points."""
    accuracy = {"original": 54.2, "result": 54.2 - drop}

    def figure(metric: str, subject: str, value: float, half: float) -> Measurement:
        interval = Interval(value - half, value + half, 0.95, "bootstrap over items")
        bounds = {0.95: (value - 0.84 * half, value + 0.84 * half)}
        return Measurement(metric, subject, value, 1000, interval, bounds, task=name)

    return [
        *(figure("accuracy", subject, value, 3.1) for subject, value in accuracy.items()),
        figure("accuracy.drop", "result/original", drop, 1.1),
        Measurement("accuracy.losses", "result/original", 21, 1000, task=name),
        Measurement("accuracy.gains", "result/original", 9, 1000, task=name),
        Measurement("accuracy.mcnemar_p", "result/original", 0.0214, 1000, task=name),
        figure("accuracy.recovery", "result/original", 100 * (1 - drop / 54.2), 2.0),
        figure("accuracy.recovery_corrected", "result/original", 100 * (1 - drop / 29.2), 3.7),
        figure("accuracy.expected_drop", "result/original", 0.9, 0.4),
        figure("accuracy.margin_shift", "result/original", -0.021, 0.011),
    ]


def generation() -> list[Measurement]:
    return [
        around("generation.length_ratio", "result/original", 1.04, 0.05),
        around("generation.repetition", "original", 4.1, 0.3),
        around("generation.repetition", "result", 5.9, 0.3),
        around("generation.first_divergence", "result/original", 17.0, 0.4),
    ]


def task_report(names: tuple[str, ...] = ("next_sentence", "arithmetic"), **more: Any) -> Report:
    """A run with tasks and generated answers."""
    pooled = task_figures(None) if len(names) > 1 else []
    figures = [one for name in names for one in task_figures(name)]
    measurements = [*sample_measurements(), *figures, *pooled, *generation()]
    gates = (*GATES, "accuracy.drop <= 3pt @95%")
    return sample_report(measurements, gates, tasks=[task_record(name) for name in names], **more)


def sample_measurements() -> list[Measurement]:
    return [*fidelity(), *latency()]


def sample_report(
    measurements: list[Measurement] | None = None,
    gates: tuple[str, ...] = GATES,
    proved: bool = True,
    tasks: Sequence[TaskRecord] = (),
    noise: str | None = None,
    blocks: int = 30,
) -> Report:
    measurements = sample_measurements() if measurements is None else measurements
    step = StepRecord(
        "quantize",
        {"target": "int4", "algorithm": "gptq", "format": "compressed-tensors", "group_size": 64},
        layers=tuple(layer_records(blocks)),
        calibration={"source": "default", "samples": 32, "length": 512, "tokens_used": 16384},
    )
    proof = {
        "method": "transformers 5.24.0",
        "checks": (
            {"name": "tensors", "passed": True, "detail": "683 of 683 with their names, shapes and dtypes"},
            {"name": "weights", "passed": True, "detail": "210 of 210 bit for bit"},
        ),
        "kl_mean": 3.1e-9,
        "max_logit_difference": 2.2e-5,
        "windows": 4,
        "tokens": 512,
    }
    return build_report(
        verdict=judge([replace(parse_gate(text), line=21 + i) for i, text in enumerate(gates)], measurements, noise),
        measurements=measurements,
        tasks=tasks,
        steps=[step],
        proof=proof if proved else None,
        inputs=Inputs(
            model=ModelPart(
                source="HuggingFaceTB/SmolLM2-135M-Instruct@7e27bd9f95328f0f3b08261d1252705110c806f8",
                revision="7e27bd9f95328f0f3b08261d1252705110c806f8",
                content_hash="5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
                model_type="llama",
            ),
            calibration={"source": "default", "tokens_used": 16384},
            evaluation={"source": "default", "tokens_used": 8192},
        ),
        output=OUTPUT,
        format_name="compressed-tensors",
        recipe={"version": 1, "steps": [{"quantize": {"target": "int4", "group_size": 64}}]},
        environment={
            "python": "3.11.2",
            "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
            "cpu": "AMD EPYC",
            "instruction_sets": ["avx2", "avx512f", "avx512_vnni"],
        },
        reproduce=Reproduce(
            command="compress run recipe.yaml",
            load=loading("compressed-tensors", "decoder", OUTPUT).transformers,
        ),
    )


def moved(
    report: Report, metric: str, by: float, *, subject: str = "result/original", task: str | None = None
) -> Report:
    """The report with one figure and its interval moved."""
    parts = []
    for part in report.measurements:
        if (part.metric, part.subject, part.task) == (metric, subject, task) and part.value is not None:
            ends = part.interval
            interval = ends and ends.model_copy(update={"low": ends.low + by, "high": ends.high + by})
            part = part.model_copy(update={"value": part.value + by, "interval": interval})
        parts.append(part)
    return report.model_copy(update={"measurements": tuple(parts)})
