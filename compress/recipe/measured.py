"""Which section of a recipe measures what, so that a gate on what is not measured is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from compress.recipe.fields import located, read_gate, rule
from compress.recipe.gates import Gate
from compress.recipe.words import shown

MEASURED_BY: Mapping[str, tuple[str, ...]] = {
    "kl": ("evaluate", "fidelity"),
    "tv": ("evaluate", "fidelity"),
    "top1": ("evaluate", "fidelity"),
    "perplexity": ("evaluate", "fidelity"),
    "cosine": ("evaluate", "fidelity"),
    "similarity": ("evaluate", "fidelity"),
    "accuracy": ("evaluate", "tasks"),
    "generation": ("evaluate", "generation"),
    "ndcg": ("evaluate", "retrieval"),
    "latency": ("bench",),
    "throughput": ("bench",),
    "cpu": ("bench",),
    "memory": ("bench",),
    "size": (),
    "bits_per_weight": (),
    "parameters": (),
    "kv_bytes": (),
}
"""Family of a metric (its id up to the first dot) -> the section that measures it; empty: it always is."""


def read_gates(name: str, value: Any, sections: Mapping[str, Any]) -> tuple[Gate, ...]:
    """The gates of a recipe, each measured by a section that is on.

    Args:
        name: of the model that is validated.
        sections: the sections that were read before; one that is invalid is missing, and counts as on.

    Raises:
        PydanticCustomError, ValidationError: what is wrong with the list, or with each of the gates.
    """
    if not isinstance(value, list | tuple):
        raise rule(f"must be a list of gates such as `kl.mean <= 0.1`, not {shown(value)}")
    gates, faults = [], []
    for index, item in enumerate(value):
        try:
            gate = read_gate(item)
            _check_measured(gate, sections)
            gates.append(gate)
        except PydanticCustomError as error:
            faults.append(located(error, (index,), item))
    if faults:
        raise ValidationError.from_exception_data(name, faults)
    return tuple(gates)


def _check_measured(gate: Gate, sections: Mapping[str, Any]) -> None:
    path = MEASURED_BY[gate.metric.split(".")[0]]
    here: Any = sections
    for depth, part in enumerate(path, start=1):
        if isinstance(here, Mapping):
            if part not in here:
                return
            here = here[part]
        else:
            here = getattr(here, part)
        if here is None or here == ():
            section = ".".join(path[:depth])
            on = "name a task there" if here == () else f"turn it on (`{section}: {{}}` in a recipe)"
            state = "empty" if here == () else "off"
            raise rule(
                f"gate `{gate.expression}`: `{gate.metric}` is measured by `{section}`, which is {state}: "
                f"{on} or remove the gate"
            )
