"""Which entry of compressed-tensors' `config_groups` describes a layer. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def group_of(groups: Mapping[str, Any], name: str) -> Any:
    """The config group of a layer: by its name, then by a pattern, then by its class; None where there is none."""
    for applies in (_names, _matches, lambda target, _name: target == "Linear"):
        for group in groups.values():
            if any(applies(target, name) for target in group["targets"]):
                return group
    return None


def _names(target: str, name: str) -> bool:
    """The file may lack the base model's prefix, or have one that the class lacks."""
    return target == name or target.endswith(f".{name}") or name.endswith(f".{target}")


def _matches(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), name) is not None
