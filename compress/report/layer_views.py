"""The layers of a report, grouped and sorted for reading."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from compress.report.schema import LayerPart, Report, StepPart

WORST_LAYERS = 5
PRUNE = "prune"
"""The kind of the steps that remove units."""


@dataclass(frozen=True)
class LeftAlone:
    """Layers that share a reason for having been left as they were; `names` has `*` for block numbers."""

    reason: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class SchemeGroup:
    """Layers that became the same; `names` has `*` for block numbers."""

    scheme: str
    count: int
    names: tuple[str, ...]


def layer_steps(report: Report) -> tuple[StepPart, ...]:
    """The steps whose layers became something else; what pruning did is in `prune_views`."""
    return tuple(step for step in report.steps if step.kind != PRUNE)


def layers(report: Report) -> tuple[LayerPart, ...]:
    """Of all steps that do not prune."""
    return tuple(layer for step in layer_steps(report) for layer in step.layers)


def left_alone(report: Report) -> tuple[LeftAlone, ...]:
    """What was not quantized, grouped by reason, the largest group first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for layer in layers(report):
        if layer.skipped is not None:
            groups[layer.skipped].append(layer.name)
    found = [LeftAlone(reason, len(names), tuple(Counter(map(pattern, names)))) for reason, names in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.count, group.reason)))


def by_scheme(report: Report) -> tuple[SchemeGroup, ...]:
    """The quantized layers by what they became, the largest group first; nothing where all became the same."""
    groups: dict[str, list[str]] = defaultdict(list)
    for layer in layers(report):
        if layer.scheme is not None:
            groups[layer.scheme].append(layer.name)
    found = [SchemeGroup(scheme, len(names), tuple(Counter(map(pattern, names)))) for scheme, names in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.count, group.scheme))) if len(found) > 1 else ()


def pattern(name: str) -> str:
    """`model.layers.7.mlp.gate` as `model.layers.*.mlp.gate`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def worst_layers(report: Report, count: int = WORST_LAYERS) -> tuple[LayerPart, ...]:
    """The quantized layers with the largest relative output error."""
    known = [layer for layer in layers(report) if layer.error_after is not None and layer.skipped is None]
    return tuple(sorted(known, key=lambda layer: (-(layer.error_after or 0.0), layer.name))[:count])
