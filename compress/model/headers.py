"""The linear layers of a model whose table entry names none, or that has no entry: found by name in the headers.

A linear layer's weight has two dimensions and lies inside a numbered list ("encoder.block.3.layer.0.SelfAttention.q").
What embeddings, norms, routers, heads and convolutions are called is left alone. Headers cannot tell an `nn.Linear`
from another module with such a weight: `fit.py` asks the stock class before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compress.model.architectures import Kind
from compress.model.safetensors_header import TensorInfo

GENERATES = ("ForCausalLM", "LMHeadModel")
"""Endings of classes that go on with a text."""
WEIGHT_DTYPES = ("F32", "F16", "BF16")
"""Dtypes that linear layers are read in."""

_PLACE = re.compile(r"(?:(.*?)\.)?(\d+)\.(.+)")
_OTHERS = re.compile(
    r"(^|[._])(norm\w*|ln|layer_?norm\w*|embed\w*|embeddings|wte|wpe|router|gate|conv\w*|relative_attention_bias|"
    r"rel_\w*|position\w*|head|heads|lm_head|classifier|score|pooler|codebook\w*)(\.|$)",
    re.IGNORECASE,
)
_FUSED = (
    ({"q_proj", "k_proj", "v_proj"}, "qkv"),
    ({"query", "key", "value"}, "qkv"),
    ({"query_proj", "key_proj", "value_proj"}, "qkv"),
    ({"q_lin", "k_lin", "v_lin"}, "qkv"),
    ({"q", "k", "v"}, "qkv"),
    ({"gate_proj", "up_proj"}, "gate_up"),
    ({"wi_0", "wi_1"}, "gate_up"),
    ({"w1", "w3"}, "gate_up"),
)
_PARTS = ("text_config", "vision_config", "audio_config")


@dataclass(frozen=True)
class Place:
    """Where a module lies: in block `index` of the list `stack` ("model.layers"), under the name `inside`."""

    stack: str
    index: int
    inside: str

    @property
    def block(self) -> str:
        """Name of the block ("model.layers.0")."""
        return f"{self.stack}.{self.index}" if self.stack else str(self.index)


@dataclass(frozen=True)
class Found:
    """One linear layer.

    Attributes:
        group: name of the layers that engines fuse with it, after its parent module
            ("model.layers.0.self_attn:qkv").
    """

    info: TensorInfo
    name: str
    place: Place
    group: str


def place_of(name: str) -> Place | None:
    """The outermost numbered list that a module is part of; None for one outside of all lists."""
    match = _PLACE.fullmatch(name)
    return None if match is None else Place(match[1] or "", int(match[2]), match[3])


def found_layers(tensors: Mapping[str, TensorInfo]) -> tuple[Found, ...]:
    """Every linear layer, block by block: encoders before decoders, blocks by number, layers by name."""
    candidates = list(_candidates(tensors))
    siblings: dict[str, set[str]] = {}
    for name, _, _ in candidates:
        parent, _, last = name.rpartition(".")
        siblings.setdefault(parent, set()).add(last)
    found = [Found(info, name, place, _group(name, siblings)) for name, place, info in candidates]
    return tuple(sorted(found, key=lambda one: ("decoder" in one.place.stack, one.place.stack, one.place.index)))


def kind_of_class(classes: list[str]) -> Kind:
    """What a model without a table entry answers with, told by the name of its class."""
    return "decoder" if classes and classes[0].endswith(GENERATES) else "other"


def several_inputs(config: Mapping[str, Any]) -> list[str]:
    """The parts of a model that reads several kinds of input (text and images), by their keys in config.json."""
    parts = [key for key in _PARTS if isinstance(config.get(key), Mapping)]
    return parts if len(parts) > 1 else []


def _candidates(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Place, TensorInfo]]:
    for tensor, info in tensors.items():
        name, _, last = tensor.rpartition(".")
        place = place_of(name)
        if last == "weight" and place is not None and len(info.shape) == 2 and info.dtype in WEIGHT_DTYPES:
            outside = _OTHERS.search(place.stack) is not None
            if not outside and _OTHERS.search(place.inside) is None:
                yield name, place, info


def _group(name: str, siblings: Mapping[str, set[str]]) -> str:
    parent, _, last = name.rpartition(".")
    fused = next((group for members, group in _FUSED if last in members and members <= siblings[parent]), last)
    return f"{parent}:{fused}"
