"""What serving engines make of the saved folder: its own config.json and tensors decide, not the plan."""

from __future__ import annotations

from pathlib import Path

from compress.plan.planning import Plan
from compress.plan.serving import Serving, serving
from compress.scheme import Scheme


def saved_serving(plan: Plan, folder: Path) -> tuple[Serving, ...]:
    """For a folder that was written after `plan`."""
    from compress.model.checkpoint import open_checkpoint

    return serving(open_checkpoint(folder).config, plan.anatomy, _schemes(plan, folder), plan.format_name)


def planned_serving(plan: Plan) -> tuple[Serving, ...]:
    """Before anything is saved."""
    return serving(plan.checkpoint.config, plan.anatomy, plan.schemes, plan.format_name)


def _schemes(plan: Plan, folder: Path) -> dict[str, Scheme]:
    """How every quantized layer is stored, read back from the folder."""
    from compress.formats.layout import stem_of
    from compress.formats.read import Reader

    if plan.format_name in ("safetensors", "gguf"):  # one has no quantized layer, the other's types are its schemes
        return plan.schemes
    reader = Reader(folder)
    stored = set(reader.quantized_names)
    return {layer.name: reader.scheme(stem) for layer in plan.anatomy.layers if (stem := stem_of(layer)) in stored}
