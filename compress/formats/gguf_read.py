"""The independent reader of GGUF folders: model.gguf back into the dense model of transformers.

Blocks are dequantized by the package `gguf`, which shares no code with the packing; rows and norms are put back as
transformers has them, so that the reference path computes with exactly what the file holds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from compress.errors import BrokenResultError
from compress.formats.gguf_metadata import model_config
from compress.formats.gguf_names import FAMILIES, ROPE_FACTORS, file_names, from_file
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.gguf_header import GGUF_FILE
from compress.model.gguf_tensors import raw_tensor
from compress.model.safetensors_header import BLOCKS
from compress.scheme import QuantizedWeight, Scheme

_SCHEMES = {"Q4_0": Scheme(4, 32), "Q8_0": Scheme(8, 32)}


class GgufReader:
    """A folder with model.gguf; layers go by the names that their tensors have in transformers.

    Attributes:
        names: {name in the file: name in transformers} of every tensor that transformers has.

    Raises:
        MissingResourceError, UsageError: see `open_checkpoint`.
        BrokenResultError: the model or a tensor is none that compress writes.
    """

    def __init__(self, folder: Path) -> None:
        self._checkpoint = open_checkpoint(folder)
        if self._checkpoint.model_type not in FAMILIES:
            raise BrokenResultError(
                f"{folder}: compress writes no GGUF file of model type {self._checkpoint.model_type}."
            )
        self._config = model_config(folder)
        self.names = _dense_names(self._checkpoint, int(self._config.num_hidden_layers))
        self.quantized_names: tuple[str, ...] = tuple(
            dense.removesuffix(".weight")
            for name, dense in self.names.items()
            if self._checkpoint.tensors[name].dtype in BLOCKS
        )

    def scheme(self, name: str) -> Scheme:
        """How the layer is quantized, by the type of its tensor."""
        for found, dense in self.names.items():
            if dense == f"{name}.weight" and self._checkpoint.tensors[found].dtype in _SCHEMES:
                return _SCHEMES[self._checkpoint.tensors[found].dtype]
        raise BrokenResultError(f"{name}: the file holds no quantized weight of it.")

    def quantized(self, name: str) -> QuantizedWeight:
        """The quantized weight of one layer, rows in transformers' order, equal to the one that was written."""
        scheme = self.scheme(name)
        found = next(own for own, dense in self.names.items() if dense == f"{name}.weight")
        info = self._checkpoint.tensors[found]
        raw = raw_tensor(self._checkpoint.folder / GGUF_FILE, info).reshape(-1, BLOCKS[info.dtype][1])
        scale = torch.from_numpy(raw[:, :2].copy()).view(torch.float16).reshape(info.shape[0], -1)
        if scheme.bits == 4:
            packed = raw[:, 2:]
            codes = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int8) - np.int8(8)
        else:
            codes = raw[:, 2:].view(np.int8)
        parts = [
            from_file(self._checkpoint.model_type, self._config, f"{name}.weight", part).contiguous()
            for part in (torch.from_numpy(codes.copy()).reshape(info.shape), scale)
        ]
        return QuantizedWeight(parts[0], parts[1], None, scheme)

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All weights as the dense model names them, in `dtype`, each rounded once."""
        state = {}
        for name, dense in self.names.items():
            tensor = self._checkpoint.read(name).float()
            state[dense] = from_file(self._checkpoint.model_type, self._config, dense, tensor).to(dtype).contiguous()
        return state


def _dense_names(checkpoint: Checkpoint, depth: int) -> dict[str, str]:
    """{name in the file: name in transformers}.

    Raises:
        BrokenResultError: tensors that transformers' class does not have.
    """
    candidates = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for block in range(depth):
        candidates += [f"model.layers.{block}.{part}" for part in _parts(checkpoint.model_type)]
    table: dict[str, str] = {}
    for dense, name in file_names(checkpoint.model_type, depth, candidates).items():
        table.setdefault(name, dense)
    unknown = sorted(checkpoint.tensors.keys() - table.keys() - {ROPE_FACTORS})
    if unknown:
        raise BrokenResultError(f"{checkpoint.folder}: tensors that no model of ours has: {', '.join(unknown[:10])}.")
    return {name: table[name] for name in checkpoint.tensors if name != ROPE_FACTORS}


def _parts(model_type: str) -> list[str]:
    """Tensors that a block may have."""
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    if FAMILIES[model_type] == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return [f"{name}.{kind}" for name in linears for kind in ("weight", "bias")] + [f"{name}.weight" for name in norms]
