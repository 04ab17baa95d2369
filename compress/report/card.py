"""The model card (README.md) of the output folder.

It lies outside `report/`, so it must be the same bytes for the same inputs: times, memory, paths and dates, which
differ from run to run, stay out of it. What the source card says about licence and language is carried over.
"""

from __future__ import annotations

import io
import re
from pathlib import PurePosixPath
from typing import Any

from compress.report.loading import VLLM_INSTALL, Kind, loading
from compress.report.markdown import cell, prose
from compress.report.schema import MeasurementPart, Report
from compress.report.views import QUALITY_LABELS, by_scheme, find, is_floor, left_alone, measured

CARRIED_KEYS = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_card(
    report: Report,
    *,
    format_name: str,
    target: str,
    kind: Kind,
    source_card: str | None = None,
    fusable: bool = True,
) -> str:
    """The card for the result.

    Args:
        report: the run; only its reproducible parts are used.
        target: what the weights were quantized to ("int4"), for title and tags.
        source_card: the text of the source's own README.md.
        fusable: engines that fuse q/k/v and gate/up can serve it.
    """
    base = base_model(report.inputs.model.source)
    name = f"{PurePosixPath(base).name}-{target}"
    parts = [
        front_matter(base, target, format_name, source_card),
        f"# {name}",
        made_how(report, base, target, format_name),
        "## Load it",
        load_section(format_name, kind, name, fusable=fusable, mixed=bool(by_scheme(report))),
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
    return PurePosixPath(source.replace("\\", "/").rstrip("/")).name or "model"


def front_matter(base: str, target: str, format_name: str, source_card: str | None) -> str:
    """The YAML block on top that the hub reads."""
    from ruamel.yaml import YAML

    carried = {key: value for key, value in source_metadata(source_card).items() if key in CARRIED_KEYS}
    tags = list(dict.fromkeys(["compress", target, format_name]))
    metadata = {"base_model": base, "base_model_relation": "quantized", "tags": tags, **carried}
    metadata.setdefault("library_name", "transformers")
    stream = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(metadata, stream)
    return f"---\n{stream.getvalue()}---"


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


def made_how(report: Report, base: str, target: str, format_name: str) -> str:
    revision = report.inputs.model.revision
    lines = [
        f"`{base}`" + (f" (revision `{revision}`)" if revision else ""),
        f"compressed to **{target}** in the `{format_name}` format",
        f"with compress {report.tool.version}.",
    ]
    schemes = sorted({layer.scheme for step in report.steps for layer in step.layers if layer.scheme})
    algorithms = sorted({layer.algorithm for step in report.steps for layer in step.layers if layer.algorithm})
    text = " ".join(lines)
    mix = by_scheme(report)
    if mix:
        schemes = [f"{group.scheme} ({', '.join(f'`{name}`' for name in group.names)})" for group in mix]
    if schemes:
        text += f" Weights: {', '.join(schemes)}" + (f", chosen by {', '.join(algorithms)}." if algorithms else ".")
    return text + " Recipe, versions and every layer's record are in `compress.json`."


def load_section(format_name: str, kind: Kind, name: str, *, fusable: bool, mixed: bool) -> str:
    how = loading(format_name, kind, name, mixed=mixed)
    parts = [f"```bash\n{how.install}\n```", "```python\n" + "\n".join(how.transformers) + "\n```"]
    if how.vllm and fusable:
        parts += ["Or serve it with vLLM:", f"```bash\n{VLLM_INSTALL}\n{how.vllm}\n```"]
    return "\n\n".join(parts)


def measured_section(report: Report) -> list[str]:
    """Size and fidelity. Times hold for one machine only and stay in `report/`."""
    rows = [
        f"| {cell(label)} | {cell(measured(find(report, metric, 'original')))} | {cell(result_of(report, metric))} |"
        for metric, label in QUALITY_LABELS.items()
        if find(report, metric) is not None
    ]
    if not rows:
        return ["## Measured", "Size, distance from the original and speed, where measured, are in `report/`."]
    definitions = {m.metric: m.definition for m in report.measurements if m.metric in QUALITY_LABELS}
    notes = [f"- {QUALITY_LABELS[metric]}: {prose(text)}" for metric, text in definitions.items()]
    return [
        "## Measured",
        "\n".join(["| | original | this model |", "| --- | ---: | ---: |", *rows]),
        "\n".join(notes),
    ]


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
    alone = left_alone(report)
    if alone:
        count = sum(group.count for group in alone)
        reasons = "; ".join(group.reason for group in alone)
        lines.append(f"- {count} weights keep the source's precision: {prose(reasons)}.")
    if source_card is not None:
        lines.append("- The card of the base model is kept as `README.original.md`.")
    return "\n".join(lines)
