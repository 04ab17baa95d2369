"""What a plan would prune, as tables for the terminal and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from compress.model.cache import kv_bytes
from compress.plan.planning import Plan
from compress.plan.pruning import PrunePlan
from compress.report.prune_views import SHAPE
from compress.report.text_parts import bullets, plain_table


def pruning_data(plan: Plan, pruned: PrunePlan) -> dict[str, Any]:
    """Shapes before and after with their shares, candidates, and what it saves, for `--json`."""
    before = asdict(pruned.before)
    return {
        "importance": pruned.step.importance,
        "compensate": pruned.step.compensate,
        "before": before,
        "after": asdict(pruned.after),
        "shares": {name: count / before[name] for name, count in asdict(pruned.after).items()},
        "searches": pruned.step.searches,
        "candidates": [asdict(shape) for shape in pruned.candidates],
        "parameters": {"before": plan.original_parameters, "after": plan.parameters},
        "weight_bytes": {"before": _source_bytes(pruned), "after": sum(shard.nbytes for shard in pruned.shards)},
        "kv_bytes": {"before": kv_bytes(pruned.anatomy), "after": kv_bytes(plan.anatomy)},
        "notes": list(pruned.notes),
    }


def pruning_tables(plan: Plan, pruned: PrunePlan) -> RenderableType:
    """What is kept of each kind, what that saves, what a search would try, and what to know."""
    parts: list[RenderableType] = [_kept_table(plan, pruned)]
    if pruned.step.searches:
        parts += [Text(" "), Text(f"shapes to try, the largest first ({len(pruned.candidates)}):")]
        parts.append(_candidates_table(pruned))
        parts.append(Text("the figures above are those of the first", style="dim"))
    if pruned.notes:
        parts += [Text(" "), bullets(pruned.notes)]
    return Group(*parts)


def _kept_table(plan: Plan, pruned: PrunePlan) -> RenderableType:
    data = pruning_data(plan, pruned)
    rows = {label: (data["before"][name], data["after"][name]) for name, label in SHAPE.items()}
    rows["parameters"] = (data["parameters"]["before"], data["parameters"]["after"])
    rows["bytes of weight files"] = (data["weight_bytes"]["before"], data["weight_bytes"]["after"])
    rows["KV cache, bytes per token"] = (data["kv_bytes"]["before"], data["kv_bytes"]["after"])
    table = plain_table(("", "left"), ("original", "right"), ("pruned", "right"), ("share", "right"))
    for label, (before, after) in rows.items():
        if before and after is not None:
            table.add_row(label, f"{before:,}", f"{after:,}", f"{after / before:.3f}")
    return table


def _candidates_table(pruned: PrunePlan) -> RenderableType:
    before = asdict(pruned.before)
    table = plain_table(*((label, "right") for label in SHAPE.values()))
    for shape in pruned.candidates:
        table.add_row(*(f"{count:,} ({count / before[name]:.2f})" for name, count in asdict(shape).items()))
    return table


def _source_bytes(pruned: PrunePlan) -> int:
    source = pruned.source
    return source.weight_bytes if source.has_weights else sum(info.nbytes for info in source.tensors.values())
