"""Tiny folders in the gguf format, and a decoder of its blocks that is written from the description of the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from written import round_to_nearest

from compress.formats.gguf_layout import GgufFile, gguf_file
from compress.formats.write import write_checkpoint
from compress.model.anatomy import LinearLayer, anatomy
from compress.model.checkpoint import open_checkpoint
from compress.progress import Silent
from compress.scheme import QuantizedWeight, Scheme

Q4, Q8 = Scheme(4, 32), Scheme(8, 32)
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True)
class Folder:
    stage: Path
    planned: GgufFile
    weights: dict[str, QuantizedWeight]
    names: tuple[str, ...]


def model(name: str, folder: Path, **overrides: Any) -> Path:
    """A tiny bfloat16 model whose norms are not all alike."""
    path: Path = getattr(tiny, f"tiny_{name}")(folder, dtype=torch.bfloat16, **overrides)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for key in sorted(tensors):
        if key.endswith("norm.weight"):
            noise = torch.randn(tensors[key].shape, generator=generator) * 0.2
            tensors[key] = (tensors[key].float() + noise).to(tensors[key].dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write(source: Path, stage: Path, choose: Callable[[LinearLayer], Scheme | None]) -> Folder:
    """`source` rounded to nearest and written as gguf."""
    checkpoint = open_checkpoint(source)
    parts = anatomy(checkpoint)
    schemes = {layer.name: scheme for layer in parts.layers if (scheme := choose(layer)) is not None}
    weights = {
        layer.name: round_to_nearest(checkpoint.read(layer.tensor), schemes[layer.name], torch.float16)
        for layer in parts.layers
        if layer.name in schemes
    }
    names = write_checkpoint(
        checkpoint,
        stage,
        format_name="gguf",
        layers=parts.layers,
        schemes=schemes,
        quantized=weights.__getitem__,
        cast=None,
        max_shard_size=10**9,
        trust_remote_code=False,
        progress=Silent(),
    )
    return Folder(stage, gguf_file(checkpoint, parts, schemes), weights, names)


def decoded(raw: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 values of a tensor's bytes: every block is a float16 scale and 32 codes."""
    if dtype in ("F16", "F32"):
        kind = np.float16 if dtype == "F16" else np.float32
        return torch.from_numpy(np.frombuffer(raw, kind).astype(np.float32)).reshape(shape)
    size = {"Q4_0": 18, "Q8_0": 34}[dtype]
    values = []
    for start in range(0, len(raw), size):
        scale = np.frombuffer(raw[start : start + 2], np.float16).astype(np.float32)[0]
        body = raw[start + 2 : start + size]
        if dtype == "Q4_0":
            codes = [(byte & 15) - 8 for byte in body] + [(byte >> 4) - 8 for byte in body]
        else:
            codes = [byte - 256 if byte > 127 else byte for byte in body]
        values += [scale * np.float32(code) for code in codes]
    return torch.tensor(np.array(values, dtype=np.float32)).reshape(shape)


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows that stand as neighbouring pairs of each head, put back as its two halves."""
    per_head = rows.shape[0] // heads
    order = []
    for head in range(heads):
        first = head * per_head
        order += [first + 2 * pair for pair in range(per_head // 2)]
        order += [first + 2 * pair + 1 for pair in range(per_head // 2)]
    return rows[order]
