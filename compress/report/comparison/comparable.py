"""Which figures of two reports mean the same, so that they may be compared at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compress.records import PAIRED, WORKLOAD
from compress.report.markdown import one_line
from compress.report.schema import MeasurementPart, ModelPart, Report
from compress.report.views import is_floor

TIMED = ("latency.", "throughput.", "cpu.", "memory.")
ON_TEXT = ("kl.", "tv.", "top1.", "perplexity", "cosine.", "similarity.", "ndcg", "generation.")
COUNTED = ("size", "size.ratio", "bits_per_weight", "parameters", "kv_bytes")
"""Read off files and shapes: two values are equal or they are not."""
IDENTIFYING = ("dtype", "original_dtype", "variant", "original", "comparison", "loader", "device", *WORKLOAD)
"""Conditions that tell figures of one metric apart within a report."""


def key_of(m: MeasurementPart) -> tuple[str, ...]:
    """What a figure of the other report must share to be its counterpart."""
    return (m.metric, m.subject, m.task or "", *(one_line(m.conditions.get(key)) for key in IDENTIFYING))


def judged(m: MeasurementPart) -> bool:
    """Whether a worse value is a regression: what compares the result with the original of the same run, and its size.

    Times and accuracies of the result alone are not: they move with the machine of the day, and what is comparable in
    them is in the paired figure. Nor is the ratio of two dtypes: how much faster bfloat16 is than float32 moves with
    the state of the machine too, and no interval of one run knows that.
    """
    if m.metric.startswith(TIMED) and m.conditions.get("dtype") != m.conditions.get("original_dtype"):
        return False
    bytes_of_result = m.metric in ("size", "bits_per_weight", "kv_bytes") and m.subject == "result"
    return m.better != "none" and not is_floor(m) and (m.subject == PAIRED or bytes_of_result)


def why_not(before: Report, after: Report, a: MeasurementPart, b: MeasurementPart) -> str:
    """Why the two figures must not be compared, or nothing."""
    if a.definition_id != b.definition_id:
        return f"two definitions: {a.definition_id} and {b.definition_id}"
    if a.unit != b.unit:
        return f"two units: {a.unit or 'none'} and {b.unit or 'none'}"
    if ("/" in a.subject or a.metric in COUNTED) and other_model(before, after):
        return "another original"
    if a.metric.startswith(TIMED):
        return other_machine(before, after) or other_conditions(a, b)
    if a.metric.startswith(ON_TEXT):
        return "another evaluation text" if texts(before) != texts(after) else ""
    if a.metric.startswith("accuracy"):
        return other_items(before, after, a.task)
    return ""


def other_model(before: Report, after: Report) -> bool:
    return identity(before.inputs.model) != identity(after.inputs.model)


def identity(model: ModelPart) -> str:
    return model.content_hash or f"{model.source}@{model.revision}"


def other_machine(before: Report, after: Report) -> str:
    """What about the two machines and their engines differs, or nothing; an unknown machine is another one."""
    ours, theirs = machine(before), machine(after)
    if ours["CPU"] is None or theirs["CPU"] is None:
        return "the machine of a report is not known"
    differing = [name for name in ours if ours[name] != theirs[name]]
    return f"two machines: {', '.join(differing)} differ{'s' if len(differing) == 1 else ''}" if differing else ""


def machine(report: Report) -> dict[str, Any]:
    environment = report.environment
    versions = environment.get("versions")
    known: Mapping[str, Any] = versions if isinstance(versions, Mapping) else {}
    return {
        "CPU": environment.get("cpu"),
        "cores": environment.get("cores"),
        "threads": environment.get("threads"),
        "GPUs": environment.get("gpus"),
        "torch": known.get("torch"),
        "transformers": known.get("transformers"),
    }


def other_conditions(a: MeasurementPart, b: MeasurementPart) -> str:
    names = [name for name in ("engine", "threads") if a.conditions.get(name) != b.conditions.get(name)]
    return f"two conditions: {', '.join(names)} differ{'s' if len(names) == 1 else ''}" if names else ""


def texts(report: Report) -> Any:
    """The hashes of the evaluation text, or all that is known of it."""
    found = sorted(hashes(report.inputs.evaluation))
    return found or report.inputs.evaluation


def hashes(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if str(key).endswith("sha256") and item is not None:
                yield f"{key} {item}"
            else:
                yield from hashes(item)


def other_items(before: Report, after: Report, task: str | None) -> str:
    """Nothing where the task (all of them, for a pooled figure) had the same items and the same rule for right."""
    if items(before, task) == items(after, task):
        return ""
    return "other tasks or items" if task is None else "other items"


def items(report: Report, task: str | None) -> list[tuple[Any, ...]]:
    own = (part for part in report.tasks if task in (None, part.name))
    return sorted((part.name, part.kind, part.metric, part.items, part.sha256 or part.source) for part in own)


def notes(before: Report, after: Report) -> tuple[str, ...]:
    """What a reader of the comparison should know before the numbers."""
    lines = []
    if other_model(before, after):
        lines.append(
            f"the originals differ ({before.inputs.model.source}, {after.inputs.model.source}): figures that compare "
            "with the original are not compared"
        )
    if different := other_machine(before, after):
        lines.append(f"times and memory are not compared: {different}")
    if texts(before) != texts(after):
        lines.append("the evaluation texts differ: figures measured on them are not compared")
    if before.command != after.command:
        lines.append(f"one report is of `compress {before.command}`, the other of `compress {after.command}`")
    if before.tool.version != after.tool.version:
        lines.append(f"written by compress {before.tool.version} and {after.tool.version}")
    return tuple(lines)
