"""Quantizes a tiny folder by rounding to nearest and writes it in a format, for tests of formats and of loading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from compress.formats.layout import scale_dtype, stored_tensors
from compress.formats.proof import Loader, ProofJob
from compress.formats.stored import Shard, shard_layout
from compress.formats.write import write_checkpoint
from compress.model.anatomy import Anatomy, LinearLayer, anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.progress import Silent
from compress.quantize.bitsandbytes_rounding import quantize_llm_int8, quantize_nf4
from compress.quantize.float8 import quantize_float8
from compress.runtime.load import load_reference
from compress.scheme import QuantizedWeight, Scheme

W4 = Scheme(4, 32)
W8A16 = Scheme(8, -1)
W8A8 = Scheme(8, -1, activation_bits=8)
FP8 = Scheme(8, -1, activation_bits=8, values="float")
NF4 = Scheme(4, 64, values="nf4")
LLM_INT8 = Scheme(8, -1, activation_bits=8, values="llm_int8")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ROUNDINGS: dict[str, Callable[[torch.Tensor, Scheme, torch.dtype], QuantizedWeight]] = {
    "float": quantize_float8,
    "nf4": lambda weight, scheme, _dtype: quantize_nf4(weight, scheme),
    "llm_int8": lambda weight, scheme, _dtype: quantize_llm_int8(weight, scheme),
}


def round_to_nearest(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    """`weight` [out, in], with the plainest scales: the largest magnitude of a group; 1 where it is zero."""
    if scheme.values != "int":
        return ROUNDINGS[scheme.values](weight.float().contiguous(), scheme, dtype)
    out, width = weight.shape
    low, high = scheme.code_range
    grouped = weight.float().reshape(out, scheme.groups(width), -1)
    if not scheme.symmetric:
        return _with_zero_points(grouped, scheme, dtype)
    scale = grouped.abs().amax(-1, keepdim=True) / high
    scale = scale.where(scale > 0, torch.ones_like(scale)).to(dtype)
    codes = (grouped / scale.float()).round().clamp(low, high).to(torch.int8).reshape(out, width)
    return QuantizedWeight(codes, scale.squeeze(-1), None, scheme)


def _with_zero_points(grouped: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    """`grouped` [out, groups, n]: scales that reach from the smallest weight, or zero, to the largest, or zero."""
    low, high = scheme.code_range
    least, most = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
    scale = ((most - least) / (high - low)).to(dtype)
    scale = scale.where(scale > 0, torch.ones_like(scale))
    zero = (low - least / scale.float()).round().clamp(low, high)
    codes = ((grouped / scale.float()).round() + zero).clamp(low, high).to(torch.int8)
    return QuantizedWeight(codes.flatten(1), scale.squeeze(-1), zero.squeeze(-1).to(torch.int8), scheme)


@dataclass(frozen=True)
class Written:
    """A folder on disk and everything that is known about it."""

    source: Checkpoint
    anatomy: Anatomy
    stage: Path
    format_name: str
    weights: Mapping[str, QuantizedWeight]
    shards: tuple[Shard, ...]
    names: tuple[str, ...]

    @property
    def hashes(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(weight.dequantize(torch.float32).contiguous().numpy().tobytes()).hexdigest()
            for name, weight in self.weights.items()
        }

    def layer(self, name: str) -> LinearLayer:
        return next(layer for layer in self.anatomy.layers if layer.name == name)


def write(
    folder: Path,
    stage: Path,
    format_name: str,
    choose: Callable[[LinearLayer], Scheme | None] | Scheme,
    *,
    cast: str | None = None,
    max_shard_size: int = 10**9,
    change: Callable[[str, QuantizedWeight], QuantizedWeight] = lambda _name, weight: weight,
    replaced: Mapping[str, torch.Tensor] | None = None,
) -> Written:
    """Writes `folder` into `stage`; `choose` says how (or whether: None) a layer is quantized."""
    source = open_checkpoint(folder)
    parts = anatomy(source)
    schemes, weights = {}, {}
    for layer in parts.layers:
        scheme = choose if isinstance(choose, Scheme) else choose(layer)
        if scheme is not None:
            stored = source.read(layer.tensor)
            dtype = DTYPES[scale_dtype(format_name, layer.dtype)]
            weight = round_to_nearest(stored.T if layer.transposed else stored, scheme, dtype)
            schemes[layer.name], weights[layer.name] = scheme, change(layer.name, weight)
    names = write_checkpoint(
        source,
        stage,
        format_name=format_name,
        layers=parts.layers,
        schemes=schemes,
        quantized=weights.__getitem__,
        cast=cast,
        max_shard_size=max_shard_size,
        trust_remote_code=False,
        progress=Silent(),
        replaced=replaced,
    )
    planned = stored_tensors(format_name, source.tensors, parts.layers, schemes, cast=cast)
    return Written(source, parts, stage, format_name, weights, shard_layout(planned, max_shard_size), names)


@torch.inference_mode()
def measure(written: Written, path: Path, *, windows: int = 2, length: int = 24) -> Path:
    """The file of windows and outputs of the reference model that the proof compares with."""
    model = load_reference(written.stage, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for index in range(windows):
        ids = torch.randint(0, 256, (length,), generator=generator)
        output = model(ids.unsqueeze(0))
        values = output.logits if written.anatomy.kind == "decoder" else output.last_hidden_state
        tensors[f"window.{index}"], tensors[f"logits.{index}"] = ids, values[0].contiguous()
    save_file(tensors, path)
    return path


def proof_job(written: Written, logits: Path, loader: Loader) -> ProofJob:
    """The folder against its weights, its source and the outputs that `measure` wrote."""
    return ProofJob(
        written.stage,
        planned=written.shards,
        weight_sha256=written.hashes,
        logits=logits,
        kind=written.anatomy.kind,
        loader=loader,
        source=written.source.folder,
    )
