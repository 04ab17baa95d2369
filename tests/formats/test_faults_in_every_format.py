"""Real faults of other tools (H02, H08, H11), looked for in every format that can hold the model."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import tiny
import torch
from contract import PAIRS, Made, Pair, made

from compress.formats.layout import stem_of
from compress.formats.read import open_reader
from compress.quantize.layer import LayerPlan, nearest
from compress.scheme import TARGETS

DTYPES = {"F32": torch.float32, "F16": torch.float16}
QUANTIZED = [pair for pair in PAIRS if TARGETS[pair.target].cast is None]
ROUNDED = {"algorithm": "rtn"}


def dense(one: Made) -> dict[str, torch.Tensor]:
    return dict(open_reader(one.proof_job.stage).state_dict(torch.float32))


@pytest.mark.parametrize(
    "pair", [pair for pair in QUANTIZED if pair.format not in ("compressed-tensors", "gguf")], ids=str
)
def test_h02_conv1d_equals_the_same_numbers_in_linear_layers(pair: Pair, tmp_path: Path) -> None:
    """The square c_proj too, which no shape betrays. The twin rounds the transposed matrix of the file."""
    with contextlib.ExitStack() as stack:
        source = tiny.tiny_gpt2(tmp_path / "m")
        group = {"group_size": 32} if pair.target == "int4" else {}
        one = made(source, tmp_path / "out", pair, stack, **ROUNDED, **group)
        reader = open_reader(one.proof_job.stage)
        assert len(one.plan.quantized) == 8
        for planned in one.plan.quantized:
            stem, scheme = stem_of(planned.layer), planned.scheme
            assert scheme is not None
            dtype = DTYPES[one.plan.scale_dtypes[planned.layer.name]]
            as_linear = one.plan.checkpoint.read(f"{stem}.weight").T.contiguous()
            twin = nearest(as_linear, LayerPlan(planned.layer, scheme, pair.target, "rtn", dtype))
            assert torch.equal(reader.quantized(stem).dequantize(torch.float32), twin.dequantize(torch.float32))


@pytest.mark.parametrize("pair", [pair for pair in QUANTIZED if pair.format != "gguf"], ids=str)
def test_h08_a_skip_list_adds_to_what_is_protected(pair: Pair, tmp_path: Path) -> None:
    """Embedding, tied head and q_proj stay as they were, and there is no head of its own (H11)."""
    with contextlib.ExitStack() as stack:
        source = tiny.tiny_opt(tmp_path / "m")
        one = made(source, tmp_path / "out", pair, stack, skip=["q_proj"], **ROUNDED)
        reader = open_reader(one.proof_job.stage)
        assert len(reader.quantized_names) == 10
        assert not any("q_proj" in name or "embed" in name or "head" in name for name in reader.quantized_names)
        after = dense(one)
        kept = [name for name in one.plan.checkpoint.tensors if "embed" in name or "q_proj" in name]
        assert len(kept) == 6
        for name in kept:
            assert torch.equal(after[name], one.plan.checkpoint.read(name)), name
        assert not any(name.startswith("lm_head") for name in after)
        skipped = {layer.name: layer.skipped or "" for layer in one.step.layers}
        assert skipped["lm_head"].startswith("tied")
