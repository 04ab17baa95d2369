"""A plan as a table for the terminal and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compress.model.anatomy import LinearLayer
from compress.model.moe import is_expert_group
from compress.plan.estimate import Estimate
from compress.plan.found import found_note, unmeasured_note
from compress.plan.layers import PlannedLayer
from compress.plan.planning import Plan
from compress.plan.pruning import PrunePlan
from compress.plan.serving import Serving
from compress.plan.tasks import powers
from compress.power import USUAL_FLIPS
from compress.report.clean import single_line
from compress.report.plan_pruning import pruning_data, pruning_tables
from compress.report.schema import ServingPart
from compress.report.views import serving_line


def plan_data(plan: Plan, guess: Estimate, engines: Sequence[Serving]) -> dict[str, Any]:
    """Everything a plan says, for `--json`."""
    return {
        "model": plan.original.source,
        "revision": plan.original.revision,
        "model_type": plan.anatomy.model_type,
        "found_by_name": plan.anatomy.by_name,
        "output": str(plan.output),
        "target": plan.target.name,
        "algorithm": plan.algorithm,
        "format": plan.format_name,
        "pruning": None if plan.pruned is None else pruning_data(plan, plan.pruned),
        "layers": [_layer_data(planned) for planned in plan.layers],
        "left_alone": dict(plan.anatomy.untouched),
        "files": {shard.file: shard.nbytes for shard in plan.shards},
        "weight_bytes_before": _before(plan),
        "weight_bytes_after": plan.weight_bytes,
        "parameters": plan.parameters,
        "tasks": [asdict(power) for power in powers(plan.recipe, plan.tasks)],
        "serving": [asdict(engine) for engine in engines],
        "estimate": asdict(guess),
    }


def _layer_data(planned: PlannedLayer) -> dict[str, Any]:
    return {
        "name": planned.layer.name,
        "shape": [planned.layer.out, planned.layer.width],
        "scheme": planned.scheme.label if planned.scheme else None,
        "skipped": planned.skipped,
    }


def _before(plan: Plan) -> int:
    original = plan.original
    return original.weight_bytes if original.has_weights else sum(info.nbytes for info in original.tensors.values())


def plan_text(plan: Plan, guess: Estimate, engines: Sequence[Serving]) -> RenderableType:
    """Headline, what is pruned, one row per layer (neighbouring blocks that are alike share one), what is left alone,
    bytes, time.
    """
    tasks = [_section("Tasks", _task_table(plan))] if plan.tasks else []
    layers = [_section("Layers", _layer_table(plan)), _section("Left alone", _left_table(plan))]
    layers = layers if plan.quantizes else []
    notes = [note for note in (found_note(plan.anatomy), unmeasured_note(plan.anatomy)) if note is not None]
    return Group(
        Text(single_line(f"{plan.original.source} -> {plan.output}"), style="bold"),
        *(Text(line) for line in _headlines(plan)),
        *(Text(single_line(note)) for note in notes),
        *([] if plan.pruned is None else [_section("Pruning", pruning_tables(plan, plan.pruned))]),
        *layers,
        _section("Weight files", _bytes_table(plan)),
        *tasks,
        _section("Serving", _serving_table(engines)),
        _section("Estimate", _estimate_table(guess)),
    )


def _headlines(plan: Plan) -> list[str]:
    """What is done, a line for each step."""
    lines = [] if plan.pruned is None else [f"pruned by {plan.pruned.step.importance}{_fitted(plan.pruned)}"]
    if plan.quantizes:
        targets = dict.fromkeys(layer.target for layer in plan.quantized if layer.target) or {plan.target.name: None}
        what = f"{' + '.join(targets)} as {plan.format_name}" + (f", {plan.algorithm}" if plan.algorithm else "")
        of = f"{len(plan.quantized)} of {len(plan.layers)} linear layers of {plan.anatomy.depth} blocks"
        lines.append(f"{what}: {of}")
    return lines


def _fitted(pruned: PrunePlan) -> str:
    return ", the remaining weights fitted" if pruned.step.compensate else ", no weight fitted"


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), Padding(body, (0, 0, 0, 2)))


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in ("MB", "bytes", "params") else "left")
    return table


def _layer_table(plan: Plan) -> Table:
    """Blocks that are planned alike fold into one row per layer: `model.layers.{0..29}.mlp.up_proj`."""
    table = _table("layer", "shape", "params", "becomes")
    for name, members in folded(plan).items():
        planned = members[0]
        becomes = planned.scheme.label if planned.scheme else f"left alone ({planned.skipped})"
        parameters = sum(member.layer.parameters for member in members)
        table.add_row(name, f"{planned.layer.out} x {planned.layer.width}", f"{parameters:,}", becomes)
    return table


def folded(plan: Plan) -> dict[str, list[PlannedLayer]]:
    """The layers by row of the table: those of several blocks and experts that are planned alike share one."""
    alike: dict[tuple[str, str, int, int, str], list[PlannedLayer]] = {}
    for planned in plan.layers:
        place = planned.layer.place
        fate = planned.scheme.label if planned.scheme else str(planned.skipped)
        inside = _inside(planned.layer)[0]
        alike.setdefault((place.stack, inside, planned.layer.out, planned.layer.width, fate), []).append(planned)
    named: dict[str, list[PlannedLayer]] = {}
    for (stack, inside, *_), members in alike.items():
        blocks = dict.fromkeys(member.layer.place.index for member in members)
        experts = dict.fromkeys(_inside(member.layer)[1] or 0 for member in members)
        named[f"{stack}.{_ranges(list(blocks))}.{inside.replace('*', _ranges(list(experts)))}"] = members
    return named


def _inside(layer: LinearLayer) -> tuple[str, int | None]:
    """The layer's name inside its block, with `*` for the number of its expert, and that number."""
    if not is_expert_group(layer.fused):
        return layer.place.inside, None
    path, index, last = layer.place.inside.rsplit(".", 2)
    return f"{path}.*.{last}", int(index)


def _ranges(blocks: list[int]) -> str:
    """`{0..29}`, `{0,2..5}` or `3`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    parts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    return parts[0] if len(blocks) == 1 else "{" + ",".join(parts) + "}"


def _left_table(plan: Plan) -> Table:
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.anatomy.untouched.items():
        reasons.setdefault(reason, []).append(name)
    table = _table("reason", "tensors", "for example")
    for reason, names in sorted(reasons.items(), key=lambda item: len(item[1])):
        table.add_row(reason, str(len(names)), names[0])
    return table


def _bytes_table(plan: Plan) -> RenderableType:
    table = _table("file", "bytes", "MB")
    for shard in plan.shards:
        table.add_row(shard.file, f"{shard.nbytes:,}", f"{shard.nbytes / 1e6:,.1f}")
    before = _before(plan)
    share = f"{plan.weight_bytes / before:.3f} of the original's {before / 1e6:,.1f} MB"
    table.add_row("all", f"{plan.weight_bytes:,}", f"{plan.weight_bytes / 1e6:,.1f}")
    return Group(table, Text(share, style="dim"))


def _task_table(plan: Plan) -> RenderableType:
    """How small a drop the items can show, and whether that is enough for the gates."""
    table = _table("task", "items", "smallest drop they show", "gate allows", "items it needs")
    for power in powers(plan.recipe, plan.tasks):
        asked = ("-", "-") if power.asked is None else (f"{power.asked:g} pt", f"{power.needed:,}")
        table.add_row(power.name, f"{power.items:,}", "none" if power.drop is None else f"{power.drop:.1f} pt", *asked)
    unknown = [planned.task.name for planned in plan.tasks if planned.items is None]
    notes = [
        f"if {USUAL_FLIPS:.0%} of the items flip, by McNemar's exact test at 5 %, in 80 of 100 runs; a gate's items: "
        "to pass in 80 of 100 runs if nothing got worse"
    ]
    if unknown:
        notes.append(f"not known before lm-eval has read its data: {', '.join(unknown)}")
    for power in powers(plan.recipe, plan.tasks):
        if power.needed is not None and power.needed > power.items:
            notes.append(
                f"{power.name}: {power.items:,} items cannot be expected to pass a gate of {power.asked:g} pt; take "
                f"about {power.needed:,}, or allow more"
            )
    return Group(table, *(Text(note, style="dim") for note in notes))


def _serving_table(engines: Sequence[Serving]) -> RenderableType:
    table = _table("engine", "this result")
    for engine in engines:
        table.add_row(engine.engine, serving_line(ServingPart(**asdict(engine))))
    return table


def _estimate_table(guess: Estimate) -> RenderableType:
    table = _table("what", "about")
    table.add_row("memory", f"{guess.memory_bytes / 1e9:.1f} GB")
    table.add_row("disk while it runs", f"{guess.disk_bytes / 1e6:,.0f} MB")
    for phase, seconds in guess.seconds.items():
        table.add_row(phase, f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s")
    return Group(table, Text(f"assuming {guess.rate}", style="dim"))
