"""The file between the process that measures a result and the one that proves it: inputs and what they gave.

window.i     ids [T] of a text
input.i.NAME the same for models that read something else: one tensor for each argument of the forward pass
logits.i     float32 [T, V]: logits, or the last hidden states of models without a head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from compress.model.inputs import Inputs, first_output


def named_tensors(cases: Sequence[tuple[Inputs, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the file holds for models that read no text."""
    tensors: dict[str, torch.Tensor] = {}
    for index, (inputs, output) in enumerate(cases):
        tensors |= {f"input.{index}.{name}": value.contiguous() for name, value in inputs.items()}
        tensors[f"logits.{index}"] = output.contiguous().clone()
    return tensors


def read_cases(path: Path) -> Iterator[tuple[Inputs, torch.Tensor]]:
    """(arguments of the forward pass, measured outputs [rows, width]) of each case in the file."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        for index in range(sum(name.startswith("logits.") for name in names)):
            stem = f"input.{index}."
            inputs = {name.removeprefix(stem): file.get_tensor(name) for name in names if name.startswith(stem)}
            if not inputs:
                inputs = {"input_ids": file.get_tensor(f"window.{index}").reshape(1, -1)}
            measured = file.get_tensor(f"logits.{index}")
            yield inputs, measured.reshape(-1, measured.shape[-1])


def outputs(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
    """Logits [T, V] of a decoder, last hidden states [T, H] of an encoder, either of another model: [rows, width]."""
    if kind == "decoder":
        return first_output(model(**inputs, use_cache=False))
    if kind == "encoder":
        hidden: torch.Tensor = model(**inputs, output_hidden_states=True).hidden_states[-1]
        return hidden[0].float()
    found = first_output(model(**inputs))
    return found.reshape(-1, found.shape[-1])
