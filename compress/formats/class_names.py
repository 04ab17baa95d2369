"""Layers by the names that their modules have in the stock class, where those found by name have others in the file.

`quantization_config` speaks of modules, and transformers compares it with the class's names; files of older models
have names that loading replaces (`model/naming.py`). Asked before anything is quantized too, as the class may not be
able to hold what is planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from compress.model.anatomy import LinearLayer, anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.load import config_of, empty_model, model_class
from compress.model.naming import module_finder
from compress.scheme import Scheme


def by_class_names(
    source: Checkpoint, layers: Sequence[LinearLayer], schemes: Mapping[str, Scheme], *, trust_remote_code: bool
) -> tuple[list[LinearLayer], dict[str, Scheme]]:
    """Layers and schemes with the class's names. Those of table entries have them already."""
    if not anatomy(source).by_name:
        return list(layers), dict(schemes)
    find = module_finder(_empty(source, trust_remote_code=trust_remote_code))
    names = {layer.name: find(layer.name) or layer.name for layer in layers}
    return (
        [replace(layer, name=names[layer.name]) for layer in layers],
        {names[name]: scheme for name, scheme in schemes.items()},
    )


def untouched_modules(source: Checkpoint, schemes: Mapping[str, Scheme], *, trust_remote_code: bool) -> list[str]:
    """Names of all modules with a weight of two dimensions that stay as they are, and of the output heads.

    Heads are named even where they are tied and have no tensor: loaders would otherwise make quantized layers
    of them and expect scales. The class says which ones it ties, and which linear layers the file lacks (a pooler).
    """
    parts = anatomy(source)
    names = {layer.name for layer in parts.layers if layer.name not in schemes}
    names |= {
        parts.module_name(name)
        for name in parts.untouched
        if name.endswith(".weight") and len(source.tensors[name].shape) == 2
    }
    cls = model_class(source.config, folder=source.folder, trust_remote_code=trust_remote_code)
    tied: Mapping[str, str] = getattr(cls, "_tied_weights_keys", None) or {}
    names |= {name.removesuffix(".weight") for name in tied if name.endswith(".weight")}
    if parts.kind == "decoder":
        names.add("lm_head")
    if parts.by_name or parts.kind == "encoder":
        names |= _other_linears(source, schemes, trust_remote_code=trust_remote_code)
    return sorted(names)


def _other_linears(source: Checkpoint, schemes: Mapping[str, Scheme], *, trust_remote_code: bool) -> set[str]:
    """Every nn.Linear of the class that is not quantized."""
    model = _empty(source, trust_remote_code=trust_remote_code)
    find = module_finder(model)
    quantized = {find(name) for name in schemes}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return linear - quantized


def _empty(source: Checkpoint, *, trust_remote_code: bool) -> PreTrainedModel:
    cls = model_class(source.config, folder=source.folder, trust_remote_code=trust_remote_code)
    return empty_model(cls, config_of(cls, source.folder), source.folder)
