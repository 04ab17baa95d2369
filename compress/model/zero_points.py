"""How stock transformers takes compressed-tensors folders whose weights have zero points. Without torch.

Packed zero points have another shape than transformers 5.24 prepares the model for, so by default such a folder does
not load. With `CompressedTensorsConfig(dequantize=True)` it does; but that gives all layers the first scheme of the
folder, so the folder must have only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def needs_dequantizing(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes packed weights with zero points."""
    return any(_has_zero_points(group) for group in _groups(config))


def loads_nowhere(config: Mapping[str, Any]) -> bool:
    """Whether there are such weights beside others, so that transformers has no way to load the folder."""
    return needs_dequantizing(config) and len(_groups(config)) > 1


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    block = config.get("quantization_config")
    if not isinstance(block, Mapping) or block.get("quant_method") != "compressed-tensors":
        return []
    groups = block.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    return [{"format": block.get("format"), **group} for group in found if isinstance(group, Mapping)]


def _has_zero_points(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights")
    return isinstance(weights, Mapping) and weights.get("symmetric") is False and group["format"] != "int-quantized"
