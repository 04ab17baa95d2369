"""The model card (README.md) of the output folder.

It lies outside `report/`, so it must be the same bytes for the same inputs: times, memory, paths and dates, which
differ from run to run, stay out of it. What the source card says about licence and language is carried over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from compress.model.architectures import Kind
from compress.report.clean import cleaned, defused, single_line
from compress.report.layer_views import by_scheme, layer_steps, left_alone
from compress.report.loading import VLLM_INSTALL, loading
from compress.report.markdown_text import Code, block, cell, code, prose
from compress.report.prune_views import prune_steps, removed_line, shape_rows, title
from compress.report.schema import MeasurementPart, Report, ServingPart
from compress.report.task_views import figure, smallest_drops, task_rows
from compress.report.views import GENERATION_LABELS, QUALITY_LABELS, find, is_floor, measured

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

CARRIED_KEYS = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
FILES = (".jsonl", ".json", ".txt", ".parquet", ".yaml", ".yml")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_card(
    report: Report,
    *,
    format_name: str,
    target: str,
    kind: Kind,
    source_card: str | None = None,
    experts: bool = False,
    architecture: str | None = None,
) -> str:
    """The card for the result.

    Args:
        report: the run; only its reproducible parts are used. Engines are named as its `serving` says.
        target: what the weights were quantized to ("int4"), for title and tags.
        source_card: the text of the source's own README.md.
        experts: it has experts, each with matrices of its own.
        architecture: name of the class, for models that are no decoders or encoders of text.
    """
    base = base_model(report.inputs.model.source)
    made = (*(["pruned"] if prune_steps(report) else []), *([target] if layer_steps(report) else [])) or (target,)
    schemes = {layer.scheme or "" for step in report.steps for layer in step.layers}
    zero_points = any(scheme.endswith("asymmetric") for scheme in schemes)
    name = "-".join((PurePosixPath(base).name, *made))
    parts = [
        front_matter(base, made, format_name, source_card, evaluations(report), name),
        f"# {prose(name)}",
        made_how(report, base, made, format_name),
        *removed_section(report),
        "## Load it",
        load_section(
            format_name,
            kind,
            name,
            engines=report.serving,
            mixed=bool(by_scheme(report)),
            zero_points=zero_points,
            experts=experts,
            architecture=architecture,
        ),
        *measured_section(report),
        "## Limits",
        limits(report, source_card),
    ]
    return "\n\n".join(parts) + "\n"


def base_model(source: str) -> str:
    """The hub id without its revision; for a folder its name, as a path means nothing to another reader."""
    name = source.split("@")[0]
    if HUB_ID.fullmatch(name) and not name.startswith("."):
        return name
    return PurePosixPath(in_metadata(source).replace("\\", "/").rstrip("/")).name or "model"


def in_metadata(text: str) -> str:
    """Text for the YAML block: one line, without commands to a CI system."""
    return defused(single_line(text))


def front_matter(
    base: str, made: Sequence[str], format_name: str, source_card: str | None, results: list[EvalResult], name: str
) -> str:
    """The YAML block on top that the hub reads; `results` become its `model-index`.

    Args:
        made: what was done: "pruned", a target, or both. The hub knows adapters, merges, quantized models and
            finetunes; of these a model with fewer and newly fitted weights in the same dtype is a finetune.
    """
    from huggingface_hub import ModelCardData

    carried = {key: cleaned(value) for key, value in source_metadata(source_card).items() if key in CARRIED_KEYS}
    carried.setdefault("library_name", "transformers")
    metadata = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if tuple(made) == ("pruned",) else "quantized",
        tags=list(dict.fromkeys(["compress", *made, format_name])),
        model_name=name if results else None,
        eval_results=results or None,
        ignore_metadata_errors=True,
        **carried,
    )
    return f"---\n{metadata.to_yaml()}\n---"


def evaluations(report: Report) -> list[EvalResult]:
    """The result's own figures as the hub knows them: accuracy of each task, perplexity of the held-out text."""
    from huggingface_hub import EvalResult

    found = []
    for task in report.tasks:
        accuracy = figure(report, "accuracy", task.name, "result")
        if accuracy is not None and accuracy.value is not None:
            found.append(
                EvalResult(
                    task_type="text-generation" if task.kind != "classification" else "text-classification",
                    dataset_type=data_name(task.source),
                    dataset_name=in_metadata(task.name),
                    dataset_args={"items": task.items, "sha256": in_metadata(task.sha256 or "")},
                    metric_type="accuracy",
                    metric_name=in_metadata(task.metric),
                    metric_value=accuracy.value,
                )
            )
    perplexity = find(report, "perplexity", "result")
    if perplexity is not None and perplexity.value is not None:
        text = data_name(str((report.inputs.evaluation or {}).get("source", "held-out text")))
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=text,
                dataset_name=text,
                metric_type="perplexity",
                metric_value=perplexity.value,
            )
        )
    return found


def data_name(source: str) -> str:
    """The name of a data set, or the last part of a path: folders mean nothing to another reader."""
    name = in_metadata(source).replace("\\", "/").rstrip("/")
    path = PurePosixPath(name)
    return name if HUB_ID.fullmatch(name) and path.suffix not in FILES else path.name or "data"


def source_metadata(card: str | None) -> dict[str, Any]:
    """The front matter of a card; empty where there is none or it cannot be read."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card or "", re.DOTALL)
    if match is None:
        return {}
    try:
        metadata = YAML(typ="safe").load(match[1])
    except YAMLError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def made_how(report: Report, base: str, made: Sequence[str], format_name: str) -> str:
    revision = report.inputs.model.revision
    how = " and ".join("**pruned**" if one == "pruned" else f"compressed to **{one}**" for one in made)
    lines = [
        code(base) + (f" (revision {code(revision)})" if revision else ""),
        f"{how} in the `{format_name}` format",
        f"with compress {report.tool.version}.",
    ]
    schemes = sorted({layer.scheme for step in report.steps for layer in step.layers if layer.scheme})
    algorithms = sorted({layer.algorithm for step in report.steps for layer in step.layers if layer.algorithm})
    text = " ".join(lines)
    mix = by_scheme(report)
    if mix:
        weights = [f"{prose(group.scheme)} ({', '.join(map(code, group.names))})" for group in mix]
    else:
        weights = list(map(prose, schemes))
    if weights:
        chosen = f", chosen by {', '.join(map(prose, algorithms))}" if algorithms else ""
        text += f" Weights: {', '.join(weights)}{chosen}."
    return text + " Recipe, versions and every layer's record are in `compress.json`."


def removed_section(report: Report) -> list[str]:
    """The shape before and after, and which layers went."""
    parts = []
    for step in prune_steps(report):
        rows = [row[:3] for row in shape_rows(step)]
        parts += ["## What was removed", table(("", "original", "this model"), rows)]
        how = ". ".join(prose(text[:1].upper() + text[1:]) for text in (title(step), removed_line(step)) if text)
        parts.append(f"{how}. Which units stayed, layer by layer, is in `compress.json`.")
    return parts


def load_section(
    format_name: str,
    kind: Kind,
    name: str,
    *,
    engines: Sequence[ServingPart],
    mixed: bool,
    zero_points: bool,
    experts: bool = False,
    architecture: str | None = None,
) -> str:
    how = loading(
        format_name,
        kind,
        name,
        mixed=mixed,
        zero_points=zero_points,
        experts=experts,
        architecture=architecture,
        served=all(engine.loads for engine in engines),
    )
    parts = [how.note] if how.note else []
    parts += [block(how.install, "bash"), block("\n".join(how.transformers), "python")] if how.transformers else []
    if how.vllm:
        parts += ["Or serve it with vLLM:", block(f"{VLLM_INSTALL}\n{how.vllm}", "bash")]
        parts += [f"- {prose(reason)}" for engine in engines for reason in engine.reasons]
    return "\n\n".join(parts)


def measured_section(report: Report) -> list[str]:
    """Size, fidelity, tasks and generation. Times hold for one machine only and stay in `report/`."""
    tables = [*compared_section(report), *task_section(report)]
    if not tables:
        return ["## Measured", "Size, distance from the original and speed, where measured, are in `report/`."]
    return ["## Measured", *tables]


def compared_section(report: Report) -> list[str]:
    labels = QUALITY_LABELS | GENERATION_LABELS
    rows = [
        (label, measured(find(report, metric, "original")), result_of(report, metric))
        for metric, label in labels.items()
        if find(report, metric) is not None
    ]
    if not rows:
        return []
    shown = {metric for metric in labels if find(report, metric) is not None}
    definitions = {m.metric: m.definition for m in report.measurements if m.metric in shown}
    notes = [f"- {labels[metric]}: {prose(text)}" for metric, text in definitions.items()]
    return [table(("", "original", "this model"), rows), "\n".join(notes)]


def task_section(report: Report) -> list[str]:
    """Both models on the same items; a drop below 0 means that this model is better."""
    rows = [
        (Code(row.name) if row.task else row.name, row.items, row.original, row.result, row.drop)
        for row in task_rows(report)
    ]
    if not rows:
        return []
    limits = smallest_drops(task_rows(report))
    found = [table(("task", "items", "original", "this model", "drop"), rows)]
    return [*found, f"{prose(limits[:1].upper() + limits[1:])}."] if limits else found


def table(headers: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    marks = f"| --- |{' ---: |' * (len(headers) - 1)}"
    head, *body = (f"| {' | '.join(map(cell, row))} |" for row in (headers, *rows))
    return "\n".join((head, marks, *body))


def result_of(report: Report, metric: str) -> str:
    """The result's own value, else the paired one."""
    found: MeasurementPart | None = find(report, metric, "result")
    if found is None:
        paired = [m for m in report.measurements if m.metric == metric and "/" in m.subject and not is_floor(m)]
        found = next(iter(paired), None)
    return measured(found)


def limits(report: Report, source_card: str | None) -> str:
    lines = ["- A compressed model keeps the limits and biases of its base model and adds its own errors."]
    kl = find(report, "kl.mean")
    if kl is not None and kl.count:
        lines.append(
            f"- The distance from the original ({measured(kl)}) was measured on {kl.count:,} tokens "
            "of one text; other languages and domains can differ more."
        )
    lines += [f"- {prose(note[:1].upper() + note[1:])}." for step in report.steps for note in step.notes]
    alone = left_alone(report)
    if alone:
        count = sum(group.count for group in alone)
        reasons = "; ".join(group.reason for group in alone)
        lines.append(f"- {count} weights keep the source's precision: {prose(reasons)}.")
    if source_card is not None:
        lines.append("- The card of the base model is kept as `README.original.md`.")
    return "\n".join(lines)
