"""Pairs of model type and storage that no stock loader reads: refused before a weight is loaded, with the way out."""

from __future__ import annotations

from collections.abc import Iterable

from compress.errors import UsageError
from compress.model.anatomy import Anatomy
from compress.scheme import TARGETS, Scheme, Target, Values


def storage(format_name: str, activation_bits: int | None, values: Values) -> str:
    """A format, or the one of compressed-tensors' own formats that holds such weights."""
    if format_name != "compressed-tensors":
        return format_name
    if activation_bits is None:
        return "pack-quantized"
    return "float-quantized" if values == "float" else "int-quantized"


def check_storages(parts: Anatomy, target: Target, format_name: str, schemes: Iterable[Scheme]) -> None:
    """Raises UsageError if a table entry says that nothing loads what would be written."""
    refused = parts.architecture.refused
    used = dict.fromkeys(storage(format_name, scheme.activation_bits, scheme.values) for scheme in schemes)
    reasons = [f"{name}: {refused[name]}" for name in used if name in refused]
    if reasons:
        raise UsageError(
            f"{parts.model_type} cannot be written as {format_name} for target {target.name}. " + "; ".join(reasons),
            hint=_ways(parts, target, format_name),
        )


def _ways(parts: Anatomy, target: Target, format_name: str) -> str:
    refused = {*parts.architecture.refused, "gguf"}  # that format has a list of its own

    def works(row: Target, name: str) -> bool:
        return storage(name, row.activation_bits, row.values) not in refused

    formats = [f"--format {name}" for name in target.formats if name != format_name and works(target, name)]
    others = [row for row in TARGETS.values() if row.bits and row.name != target.name and works(row, row.formats[0])]
    targets = [f"--target {row.name}" for row in others]
    ways = formats + targets
    return f"Use {' or '.join(ways)}." if ways else "Cast it instead: --target bf16."
