"""What kind of model a folder holds, told from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.model.architectures import ARCHITECTURES, Kind
from compress.model.headers import GENERATES


def model_kind(config: Mapping[str, Any]) -> Kind:
    """A decoder if the class that config.json names generates text; without such a class, what the table says.

    A class without an entry that generates no text is taken for an encoder of text: most of them are.
    """
    stated = config.get("architectures")
    name = str(stated[0]) if isinstance(stated, list) and stated else ""
    if name.endswith(GENERATES):
        return "decoder"
    known = ARCHITECTURES.get(str(config.get("model_type")))
    if known is not None and known.kind == "other":
        return "other"
    return "encoder" if name or known is None else known.kind
