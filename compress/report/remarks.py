"""What an honest reader would want said in words. Each remark follows from numbers in the report, never from hopes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from compress.records import StepRecord
from compress.report.digits import quantity
from compress.report.layer_views import PRUNE
from compress.report.schema import Command, MeasurementPart
from compress.report.speed_views import TAIL_LABELS, circumstances, fairest_of, workloads
from compress.report.views import is_floor, measured

TIMES = {
    "latency.ttft.ratio": "the first token",
    "latency.tpot.ratio": "each further token",
    "latency.forward.ratio": "a forward pass",
}
LISTED = 8
"""Layers that a remark names."""
MUCH = 1.02
"""Peaks of two processes that differ by less are alike."""
FIDELITY = ("kl.mean", "perplexity", "perplexity.ratio", "cosine.mean", "accuracy", "accuracy.drop")
WHY_NOT_FASTER = {
    "compressed-tensors": "stock transformers expands these weights to dense matrices before it multiplies; "
    "a gain in speed needs an engine with packed kernels (vLLM)",
    "gptq": "it was timed on dense matrices expanded from these weights; a gain in speed needs packed kernels "
    "(gptqmodel, vLLM)",
    "bitsandbytes": "bitsandbytes turns NF4 weights back into floating-point numbers before every product, and "
    "LLM.int8 rounds inputs and sets outliers apart: they save memory, not time",
    "gptq_v2": "it was timed on dense matrices expanded from these weights; a gain in speed needs packed kernels "
    "(gptqmodel, vLLM)",
    "safetensors": "the same dense arithmetic runs in another dtype",
}
LITTLE_REMOVED = (
    "fewer channels, heads or layers are less arithmetic, which shows where layers take most of the time; embeddings, "
    "the output head and the cost of each call stay as they were"
)


def remarks(
    measurements: Sequence[MeasurementPart],
    steps: Sequence[StepRecord],
    *,
    format_name: str | None,
    proved: bool,
    command: Command = "run",
) -> tuple[str, ...]:
    """All remarks, the weightiest first. `command`: what is not its job is not missed."""
    return (
        *proof_remark(proved or command != "run"),
        *missing_remarks(applicable(measurements, steps), command),
        *speed_remarks(measurements, why_not_faster(steps, format_name)),
        *floor_remarks(measurements),
        *memory_remarks(measurements),
        *fallback_remarks(steps),
        *uncalibrated_remarks(steps),
        *smoothing_remarks(steps),
        *refinement_remarks(steps),
        *step_remarks(steps),
    )


def proof_remark(proved: bool) -> list[str]:
    return [] if proved else ["not proved: no fresh process has loaded this result and compared it"]


def applicable(measurements: Sequence[MeasurementPart], steps: Sequence[StepRecord]) -> list[MeasurementPart]:
    """Without what only quantization has, where a run did nothing but prune."""
    only_pruned = bool(steps) and all(step.kind == PRUNE for step in steps)
    return [m for m in measurements if not (only_pruned and m.metric == "bits_per_weight")]


def missing_remarks(measurements: Sequence[MeasurementPart], command: Command) -> list[str]:
    """What was not measured, and what could not be."""
    metrics = {m.metric for m in measurements if m.value is not None}
    lines = []
    if command != "bench" and not metrics.intersection(FIDELITY):
        lines.append("accuracy was not measured: nothing here says how close the result is to the original")
    if command != "eval" and not metrics.intersection(TIMES):
        lines.append("speed was not measured: nothing here says that the result is faster")
    return lines + without_value(measurements)


def without_value(measurements: Sequence[MeasurementPart]) -> list[str]:
    """One line for each reason, with everything that has no value for it."""
    reasons: dict[str, list[str]] = defaultdict(list)
    tails = [m for m in measurements if m.metric in TAIL_LABELS]
    missing = [m for m in tails if m.value is None]
    for m in measurements:
        if m.value is None and m.note and m not in missing:
            name = f"{m.metric} of {m.subject}" + (f" ({m.task})" if m.task else "")
            reasons[m.note] += [] if name in reasons[m.note] else [name]
    return percentile_remark(missing, len(tails)) + [
        f"{', '.join(names[:LISTED])}{f' and {len(names) - LISTED} more' if len(names) > LISTED else ''} "
        f"{'has' if len(names) == 1 else 'have'} no value: {reason}"
        for reason, names in reasons.items()
    ]


def percentile_remark(missing: Sequence[MeasurementPart], count: int) -> list[str]:
    """One line for the percentiles of all times together: in a sweep they are many."""
    if not missing:
        return []
    example = missing[0]
    return [
        f"{len(missing)} of {count} percentiles of times have no value, as the samples are too small: "
        f"{example.metric} of {example.subject} {example.note}"
    ]


def why_not_faster(steps: Sequence[StepRecord], format_name: str | None) -> str | None:
    """What is known of the format, or of models that were pruned and nothing else."""
    if format_name == "safetensors" and any(step.kind == PRUNE for step in steps):
        return LITTLE_REMOVED
    return WHY_NOT_FASTER.get(format_name or "")


def speed_remarks(measurements: Sequence[MeasurementPart], reason: str | None) -> list[str]:
    """For each kind of time and workload that shows no gain in the fairest comparison: that it does not, and why."""
    lines = []
    for metric in TIMES:
        groups = workloads(measurements, metric)
        ratios = [ratio for group in groups.values() if (ratio := fairest_of(group)) is not None]
        lines += [line for ratio in ratios if (line := speed_remark(ratio, several=len(groups) > 1)) is not None]
    return [*lines, f"why not faster: {reason}"] if lines and reason else lines


def speed_remark(ratio: MeasurementPart, *, several: bool) -> str | None:
    """None when the whole interval of result / original lies below 1; `several`: there are other workloads."""
    value = ratio.value or 0.0
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (value, value)
    if high < 1:
        return None
    words = circumstances(ratio, with_workload=several)
    number, _, ends = measured(ratio).partition(" ")
    figures = f"{TIMES[ratio.metric]} takes {number} the original's time {ends}".rstrip()
    figures += f" ({words})" if words else ""
    return f"slower: {figures}" if low > 1 else f"not faster: {figures}, no difference shown"


def floor_remarks(measurements: Sequence[MeasurementPart]) -> list[str]:
    """Says so where a model timed against itself seems to differ: then small differences of others are no news."""
    lines = []
    for m in measurements:
        ends = m.interval
        if m.metric in TIMES and is_floor(m) and m.value is not None and ends and not ends.low <= 1 <= ends.high:
            lines.append(
                f"the machine's own noise: the original against itself shows {measured(m)} for {TIMES[m.metric]}; "
                "differences as small as that say nothing"
            )
    return list(dict.fromkeys(lines))


def memory_remarks(measurements: Sequence[MeasurementPart]) -> list[str]:
    """Says so when running the result takes no less memory than the original at its smallest."""
    peaks: dict[str, list[float]] = {"original": [], "result": []}
    for m in measurements:
        if m.metric == "memory.peak" and m.value is not None and m.subject in peaks:
            peaks[m.subject].append(m.value)
    if not peaks["original"] or not peaks["result"]:
        return []
    original, result = min(peaks["original"]), min(peaks["result"])
    size = next((m.value for m in measurements if m.metric == "size.ratio" and m.value is not None), None)
    if size is None or size >= 1 or result < MUCH * original:
        return []
    return [
        f"smaller on disk, not in memory: the result's peak is {quantity(result, 'MB')}, "
        f"the original's {quantity(original, 'MB')}"
    ]


def fallback_remarks(steps: Sequence[StepRecord]) -> list[str]:
    return [
        f"{step.layers_fallback} layers were quantized by another algorithm than {step.settings['algorithm']}: "
        + ", ".join(layer.name for layer in step.fallback[:LISTED])
        + (f" and {step.layers_fallback - LISTED} more" if step.layers_fallback > LISTED else "")
        for step in steps
        if step.layers_fallback and step.settings.get("algorithm")
    ]


def uncalibrated_remarks(steps: Sequence[StepRecord]) -> list[str]:
    """Experts that the calibration text left out are no better than rounded ones."""
    return [
        f"no calibration token reached {step.layers_uncalibrated} layers of experts, which were rounded to nearest: "
        + ", ".join(layer.name for layer in step.uncalibrated[:LISTED])
        + (f" and {step.layers_uncalibrated - LISTED} more" if step.layers_uncalibrated > LISTED else "")
        for step in steps
        if step.layers_uncalibrated
    ]


def smoothing_remarks(steps: Sequence[StepRecord]) -> list[str]:
    """Norms and earlier layers that took factors over are no longer the original's, so a reader should know."""
    lines = []
    for step in steps:
        changed = {layer.smoothing["producer"] for layer in step.layers if layer.smoothing}
        if changed:
            lines.append(
                f"factors of the inputs of some layers were folded into {len(changed)} norms and earlier layers, where "
                "the measured error fell (SmoothQuant); outputs before rounding stay the same"
            )
    return lines


def refinement_remarks(steps: Sequence[StepRecord]) -> list[str]:
    """How much of what the blocks learnt was kept."""
    lines = []
    for step in steps:
        if not step.settings.get("refine"):
            continue
        notes = [note for layer in step.layers for note in layer.notes]
        kept, dropped = (sum(note.startswith(word) for note in notes) for word in ("refined", "refinement dropped"))
        line = f"refinement ({step.settings['refine']} steps) was kept in blocks with {kept} of {kept + dropped} layers"
        lines.append(f"{line}; in the others, windows that it had not seen were no better for it" if dropped else line)
    return lines


def step_remarks(steps: Sequence[StepRecord]) -> list[str]:
    return [note for step in steps for note in step.notes]
