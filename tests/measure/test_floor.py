from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_opt

from compress.data.windows import Windows
from compress.errors import BrokenResultError, UsageError
from compress.measure import floor
from compress.measure.floor import DTYPES, LAYOUTS, METRICS, floor_measurements, floor_tokens
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original
from compress.progress import Silent


def windows(*lengths: int, special: int = 0) -> Windows:
    generator = torch.Generator().manual_seed(7)
    ids = tuple(torch.randint(0, 256, (length,), generator=generator) for length in lengths)
    total = sum(lengths)
    return Windows("random", ids, special, max(lengths), total, len(ids), len(ids), None, None, "0" * 64)


def load(folder: Path) -> torch.nn.Module:
    return load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3, tiny_gpt2, tiny_opt], ids=lambda make: make.__name__)
def test_bfloat16_is_what_a_model_cast_to_it_computes(make: object, tmp_path: Path) -> None:
    """For gemma3, gpt2 and opt too: tied heads and scaled embeddings follow the weights."""
    model, given = load(make(tmp_path)), windows(40, 40)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    dtypes, layouts = floor_tokens(model, given, Silent())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())

    cast = deepcopy(model)
    for parameter in cast.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with torch.inference_mode():
        wide, narrow = (one(given.ids[1][None]).logits[0, :-1].double().log_softmax(-1) for one in (model, cast))
    expected = (wide.exp() * (wide - narrow)).sum(-1)
    assert dtypes.comparison == DTYPES
    assert dtypes.tokens is not None
    np.testing.assert_allclose(dtypes.tokens.kl[dtypes.tokens.window == 1], expected, rtol=1e-4, atol=1e-9)
    assert 0 < dtypes.tokens.kl.mean() < 0.01
    assert layouts.comparison == LAYOUTS
    assert layouts.tokens is not None
    assert layouts.tokens.kl.max() < 1e-9
    assert layouts.tokens.nll_original.tolist() == dtypes.tokens.nll_original.tolist()


def test_figures_and_rows_say_what_is_compared_with_what(tmp_path: Path) -> None:
    floors = floor_tokens(load(tiny_llama(tmp_path)), windows(120, 120, 120), Silent())
    found = floor_measurements(floors, levels=(0.9,), seed=3, conditions={"device": "cpu"})
    assert {one.subject for one in found} == {"original/original"}
    for comparison, count in ((DTYPES, 357), (LAYOUTS, 238)):
        of_it = {one.metric: one for one in found if one.conditions["comparison"] == comparison}
        assert set(of_it) == set(METRICS)
        assert of_it["kl.mean"].count == count
        assert set(of_it["kl.mean"].one_sided) == {0.9, 0.95}
        assert (of_it["kl.p99"].value is not None) == (count >= 299)
        assert of_it["tv.mean"].conditions["device"] == "cpu"
    rows = [row for one in floors for row in one.rows()]
    assert [(row["kind"], row["comparison"], row["window"]) for row in rows] == [
        *(("floor", DTYPES, window) for window in range(3)),
        *(("floor", LAYOUTS, window) for window in range(2)),
    ]


def test_only_a_few_windows_are_run_and_long_ones_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "LENGTH", 20)
    monkeypatch.setattr(floor, "TOKENS", 50)
    dtypes, layouts = floor_tokens(load(tiny_llama(tmp_path)), windows(60, 60, 60, 60, special=2), Silent())
    assert dtypes.tokens is not None
    assert np.bincount(dtypes.tokens.window).tolist() == [18, 18]
    assert layouts.tokens is not None


@pytest.mark.parametrize("lengths", [(30,), (30, 20)])
def test_without_two_windows_of_one_length_there_is_no_layout_to_compare(
    lengths: tuple[int, ...], tmp_path: Path
) -> None:
    (only,) = floor_tokens(load(tiny_llama(tmp_path)), windows(*lengths), Silent())
    assert only.comparison == DTYPES


def test_a_model_that_overflows_in_bfloat16_has_no_floor_but_a_note(tmp_path: Path) -> None:
    """float32's largest number rounds to infinity in bfloat16; gelu makes 0 of the one and NaN of the other."""
    model = load(tiny_gpt2(tmp_path))
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] = torch.finfo(torch.float32).min
    dtypes, layouts = floor_tokens(model, windows(30, 30), Silent())
    assert dtypes.tokens is None
    assert dtypes.rows() == []
    missing, *others = floor_measurements([dtypes, layouts])
    assert (missing.metric, missing.value) == ("kl.mean", None)
    assert missing.note == "the original's logits are not finite in bfloat16"
    assert {one.conditions["comparison"] for one in others} == {LAYOUTS}


def test_what_a_device_cannot_do_in_bfloat16_is_a_note(tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path))

    def refuse(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].dtype == torch.bfloat16:
            raise RuntimeError("no kernel for BFloat16\nmore words")

    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(refuse)
    dtypes, _ = floor_tokens(model, windows(30, 30), Silent())
    assert dtypes.note == "the original does not run in bfloat16 here: no kernel for BFloat16"


def test_a_broken_original_and_empty_text_are_refused(tmp_path: Path) -> None:
    model = load(tiny_llama(tmp_path))
    with pytest.raises(UsageError, match="nothing to predict"):
        floor_tokens(model, windows(1, 1), Silent())
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(BrokenResultError, match="original model are not finite"):
        floor_tokens(model, windows(30, 30), Silent())
