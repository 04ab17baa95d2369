"""What kind of model a folder holds, told from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.model.architectures import ARCHITECTURES, Kind

_GENERATES = ("ForCausalLM", "LMHeadModel")


def model_kind(config: Mapping[str, Any]) -> Kind:
    """A decoder if the class that config.json names generates text; without such a class, what the table says."""
    stated = config.get("architectures")
    name = str(stated[0]) if isinstance(stated, list) and stated else ""
    if name.endswith(_GENERATES):
        return "decoder"
    known = ARCHITECTURES.get(str(config.get("model_type")))
    return "encoder" if name or known is None else known.kind
