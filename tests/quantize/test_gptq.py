"""GPTQ against the slowest form of its definition: one weight at a time, a fresh inverse after every column."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compress.quantize.gptq import GptqResult, GptqSettings, corrected, factor, gptq, prepare, sweep
from compress.quantize.grid import max_abs_scale, output_error, quantize_nearest, search_scale
from compress.quantize.statistics import Statistics
from compress.scheme import PER_CHANNEL, Scheme

ALL = GptqSettings()
PLAIN = GptqSettings(activation_order=False, search_scales=False, asymmetric=False, refit_scales=False, local_search=0)
SCHEME = Scheme(4, 8)


def layer(out: int = 8, width: int = 32, tokens: int = 256, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """W [out, in] and inputs X [T, in] that are correlated, so that repairing pays."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator)
    X = torch.randn(tokens, width, generator=generator) @ mix
    return torch.randn(out, width, generator=generator), X


def drifting(out: int = 8, width: int = 32, tokens: int = 256) -> tuple[torch.Tensor, ...]:
    """W, x, x~ [T, in], r, r~ [T, out]: two streams that have come apart."""
    W, x = layer(out, width, tokens)
    generator = torch.Generator().manual_seed(9)
    original = x + 0.3 * x.std() * torch.randn(x.shape, generator=generator) + 0.1 * x.roll(1, dims=1)
    r = torch.randn(tokens, out, generator=generator)
    return W, x, original, r, r + 0.2 * x[:, :out]


def statistics(
    x: torch.Tensor,
    original: torch.Tensor | None = None,
    r: torch.Tensor | None = None,
    original_r: torch.Tensor | None = None,
) -> Statistics:
    count = len(x)
    input_drift = None if original is None else (original - x).T @ x / count
    residual_drift = None if r is None or original_r is None else (original_r - r).T @ x / count
    return Statistics(x.T @ x / count, input_drift, residual_drift, count)


def solved(
    W: torch.Tensor,
    seen: Statistics,
    settings: GptqSettings = ALL,
    scheme: Scheme = SCHEME,
    dtype: torch.dtype = torch.float32,
) -> GptqResult:
    return gptq(W, prepare(seen, settings), scheme, scale_dtype=dtype, settings=settings)


def error(W: torch.Tensor, result: GptqResult, H: torch.Tensor) -> float:
    return output_error(W, result.weight.dequantize(torch.float32), H)


def slow_gptq(W: torch.Tensor, H: torch.Tensor, s: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Eq. (2) and (3) as they stand, float64: after each column the inverse of the remaining Hessian is taken anew."""
    W, H, s = W.double().clone(), H.double(), s.double()
    low, high = scheme.code_range
    codes = torch.zeros(W.shape, dtype=torch.int8)
    for i in range(W.shape[1]):
        Hinv = torch.linalg.inv(H[i:, i:])
        q = (W[:, i] / s[:, i]).round().clamp(low, high)
        codes[:, i] = q.to(torch.int8)
        err = (W[:, i] - q * s[:, i]) / Hinv[0, 0]
        W[:, i:] -= err.unsqueeze(1) * Hinv[0].unsqueeze(0)
    return codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [32, 160])  # 160 crosses the border of one lazily updated block of columns
def test_sweep_equals_the_definition(bits: int, width: int) -> None:
    W, X = layer(width=width, tokens=4 * width)
    H = statistics(X).H
    scheme = Scheme(bits, 16)
    H = H + 0.01 * H.diagonal().mean() * torch.eye(width)
    s = search_scale(W, scheme, torch.float32).repeat_interleave(16, dim=1)
    factored = factor(H, torch.zeros(width, dtype=torch.bool), 0.0)
    assert factored is not None
    fast, latent = sweep(W.clone(), factored[0], s, scheme)
    slow = slow_gptq(W, H, s, scheme)
    # float32 against float64: a value within rounding noise of a tie may fall to the other side and move its
    # successors, so the error is compared as well as the codes.
    assert (fast == slow).float().mean() > 0.97
    assert output_error(W, fast * s, H) == pytest.approx(output_error(W, slow * s, H), rel=0.02)
    assert torch.equal(latent.round().clamp(*scheme.code_range).to(torch.int8), fast)


def test_with_everything_off_it_is_algorithm_1() -> None:
    W, X = layer()
    seen = statistics(X)
    result = solved(W, seen, PLAIN)
    scale = max_abs_scale(W, SCHEME, torch.float32)
    damped = seen.H + PLAIN.damping * seen.H.diagonal().mean() * torch.eye(32)
    expected = slow_gptq(W, damped, scale.repeat_interleave(8, dim=1), SCHEME)
    assert torch.equal(result.weight.scale, scale)
    assert (result.weight.codes == expected).float().mean() > 0.97
    assert torch.equal(result.target, W)


def test_activation_order_is_the_definition_on_sorted_columns() -> None:
    W, X = layer()
    seen = statistics(X * torch.linspace(0.1, 3, 32))
    result = solved(W, seen, replace(PLAIN, activation_order=True))
    order = seen.H.diagonal().argsort(descending=True)
    damped = seen.H + PLAIN.damping * seen.H.diagonal().mean() * torch.eye(32)
    s = max_abs_scale(W, SCHEME, torch.float32).repeat_interleave(8, dim=1)
    expected = slow_gptq(W[:, order], damped[order][:, order], s[:, order], SCHEME)
    assert (result.weight.codes[:, order] == expected).float().mean() > 0.97


@pytest.mark.parametrize("scheme", [Scheme(4, 8), Scheme(4, PER_CHANNEL), Scheme(8, 16)], ids=lambda s: s.label)
@pytest.mark.parametrize("settings", [ALL, PLAIN], ids=["all", "plain"])
def test_beats_rounding_on_the_same_scales(scheme: Scheme, settings: GptqSettings) -> None:
    W, X = layer()
    seen = statistics(X)
    result = solved(W, seen, settings, scheme)
    nearest = quantize_nearest(W, result.weight.scale, scheme)
    assert error(W, result, seen.H) < 0.8 * output_error(W, nearest.dequantize(torch.float32), seen.H)
    assert result.damping == settings.damping


SWITCHED_OFF = {
    "activation_order": False,
    "search_scales": False,
    "asymmetric": False,
    "asymmetric_damping": 0.01,
    "refit_scales": False,
    "local_search": 0,
}


@pytest.mark.parametrize("switch", SWITCHED_OFF)
def test_every_switch_changes_the_result(switch: str) -> None:
    W, *streams = drifting()
    seen = statistics(*streams)
    result = solved(W, seen)
    without = solved(W, seen, replace(ALL, **{switch: SWITCHED_OFF[switch]}))
    changed = not torch.equal(result.weight.codes, without.weight.codes)
    assert changed or not torch.equal(result.weight.scale, without.weight.scale)
    again = solved(W, seen)
    assert torch.equal(result.weight.codes, again.weight.codes)
    assert torch.equal(result.weight.scale, again.weight.scale)


def test_the_switches_are_all() -> None:
    assert SWITCHED_OFF.keys() | {"damping"} == set(GptqSettings.__dataclass_fields__)


@pytest.mark.parametrize("switch", ["search_scales", "refit_scales", "local_search"])
def test_what_lowers_the_error_does(switch: str) -> None:
    """Over several layers: one alone may be unlucky."""
    off, on = 0.0, 0.0
    for seed in range(6):
        W, X = layer(out=16, width=64, seed=seed)
        seen = statistics(X)
        off += error(W, solved(W, seen, PLAIN), seen.H)
        value = 2 if switch == "local_search" else True
        on += error(W, solved(W, seen, replace(PLAIN, **{switch: value})), seen.H)
    assert on < 0.97 * off


def test_corrected_is_the_least_squares_solution() -> None:
    """min over real Q of mean |Q x + r - W x~ - r~|^2 + lambda |Q - W|^2, as one dense system in float64."""
    W, x, original, r, original_r = (one.double() for one in drifting())
    seen = statistics(*(one.float() for one in (x, original, r, original_r)))
    prepared = prepare(seen, ALL)
    assert prepared.L is not None
    found = corrected(W.float(), prepared.statistics, prepared.L).double()
    ridge = (ALL.asymmetric_damping * seen.H.diagonal().mean().double() * len(x)).sqrt()
    rows = torch.cat([x, ridge * torch.eye(32, dtype=torch.float64)])
    wanted = torch.cat([original @ W.T + original_r - r, ridge * W.T])
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert (expected - W).abs().max() > 0.05, "there is something to correct"


def test_each_drift_alone() -> None:
    W, x, original, r, original_r = drifting()
    prepared = prepare(statistics(x, original, r, original_r), ALL)
    both, factor_of_both = prepared.statistics, prepared.L
    assert factor_of_both is not None

    def step(seen: Statistics) -> torch.Tensor:
        return corrected(W, seen, factor_of_both) - W

    inputs, residual = step(replace(both, residual_drift=None)), step(replace(both, input_drift=None))
    torch.testing.assert_close(inputs + residual, step(both), rtol=1e-3, atol=1e-4)
    assert not step(statistics(x)).any()
    assert prepare(statistics(x), ALL).L is None
    assert prepare(both, PLAIN).L is None
    assert not step(statistics(x, x, r, r)).any()


def test_asymmetric_comes_closer_to_the_original_outputs() -> None:
    W, x, original, r, original_r = drifting()
    seen = statistics(x, original, r, original_r)

    def distance(settings: GptqSettings) -> float:
        dense = solved(W, seen, settings).weight.dequantize(torch.float32)
        return float((x @ dense.T + r - original @ W.T - original_r).square().mean())

    assert distance(ALL) < 0.9 * distance(replace(ALL, asymmetric=False))
    result = solved(W, seen)
    assert not torch.equal(result.target, W)
    assert error(result.target, result, seen.H) < 0.05


def test_codes_and_scales_are_in_natural_order() -> None:
    """Activation order must not leak: with a diagonal H nothing is repaired, so GPTQ is round-to-nearest."""
    W, _ = layer()
    H = torch.diag(torch.rand(32) + 0.1)
    settings = GptqSettings(damping=0.0, refit_scales=False)
    result = solved(W, Statistics(H, None, None, 99), settings, dtype=torch.float16)
    nearest = quantize_nearest(W, search_scale(W, SCHEME, torch.float16, H.diagonal()), SCHEME)
    assert torch.equal(result.weight.codes, nearest.codes)
    assert torch.equal(result.weight.scale, nearest.scale)
    torch.testing.assert_close(result.latent, W / nearest.scale.float().repeat_interleave(8, dim=1))


@pytest.mark.parametrize("settings", [ALL, PLAIN], ids=["all", "plain"])
def test_dead_columns_are_rounded_and_disturb_nothing(settings: GptqSettings) -> None:
    W, X = layer()
    X[:, 5] = 0
    seen = statistics(X)
    prepared = prepare(seen, settings)
    assert prepared.dead == 1
    result = gptq(W, prepared, SCHEME, scale_dtype=torch.float32, settings=settings)
    nearest = quantize_nearest(W, result.weight.scale, SCHEME)
    assert torch.equal(result.weight.codes[:, 5], nearest.codes[:, 5])


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_singular_hessian_raises_the_damping(tokens: int, damping: float) -> None:
    """H03 (a): rank at most `tokens`, far under the width."""
    W, X = layer(width=64, tokens=tokens)
    seen = statistics(X)
    result = solved(W, seen, GptqSettings(damping=damping), Scheme(4, 32))
    assert result.damping is not None
    assert result.damping > 0
    dense = result.weight.dequantize(torch.float32)
    assert bool(torch.isfinite(dense).all())
    assert error(W, result, seen.H) < 0.01
    assert output_error(W, dense, None) < 0.2, "what the tokens do not see is not thrown away"


def test_a_hessian_that_no_damping_helps_is_round_to_nearest() -> None:
    W, _ = layer()
    H = torch.eye(32)
    H[0, 1] = H[1, 0] = 1e6
    result = solved(W, Statistics(H, None, None, 4), replace(ALL, search_scales=False))
    nearest = quantize_nearest(W, max_abs_scale(W, SCHEME, torch.float32), SCHEME)
    assert result.damping is None
    assert torch.equal(result.weight.codes, nearest.codes)


@pytest.mark.parametrize("settings", [ALL, PLAIN], ids=["all", "plain"])
def test_inputs_that_were_always_zero_give_round_to_nearest(settings: GptqSettings) -> None:
    W, _ = layer()
    zeros = torch.zeros(9, 32)
    result = solved(W, statistics(zeros, zeros), settings)
    assert torch.equal(result.weight.codes, quantize_nearest(W, result.weight.scale, SCHEME).codes)
    assert output_error(W, result.weight.dequantize(torch.float32), None) < 0.02


@pytest.mark.parametrize("scheme", [Scheme(4, 8), Scheme(4, PER_CHANNEL), Scheme(8, 8)], ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_rows_and_groups_stay_exactly_zero(scheme: Scheme, dtype: torch.dtype) -> None:
    """H04, with drifts that would move them, and weights large enough to move codes of scale 1."""
    W, *streams = drifting()
    W *= 100
    W[5] = 0
    W[7, 8:16] = 0
    result = solved(W, statistics(*streams), scheme=scheme, dtype=dtype)
    scale = result.weight.scale.float()
    dense = result.weight.dequantize(torch.float32)
    assert bool((scale > 0).all())
    assert bool(torch.isfinite(scale).all())
    assert not dense[5].any()
    assert bool((scale[5] == 1).all())
    assert not result.target[5].any()
    if scheme.group_size != PER_CHANNEL:
        assert not result.target[7, 8:16].any()
        assert not dense[7, 8:16].any()
    assert dense[6].any()
    assert output_error(result.target, dense, statistics(*streams).H) < 0.05


def test_inputs_are_not_changed() -> None:
    W, *streams = drifting()
    seen = statistics(*streams)
    kept = [one.clone() for one in (W, seen.H, seen.input_drift, seen.residual_drift) if one is not None]
    solved(W, seen)
    for before, after in zip(kept, (W, seen.H, seen.input_drift, seen.residual_drift), strict=True):
        assert after is not None
        assert torch.equal(before, after)


def test_a_row_whose_correction_is_larger_than_itself_keeps_its_weights() -> None:
    W, x, original, r, original_r = drifting()
    original_r = original_r.clone()
    original_r[:, 2] += 1e3 * x[:, 4]
    original_r[:, 3] = torch.nan
    seen = prepare(statistics(x, original, r, original_r), ALL)
    assert seen.L is not None
    found = corrected(W, seen.statistics, seen.L)
    kept = [bool(torch.equal(*rows)) for rows in zip(found, W, strict=True)]
    assert kept == [row in (2, 3) for row in range(8)]


def test_a_sweep_that_is_not_finite_is_round_to_nearest() -> None:
    W, X = layer()
    W[0, 0] = 3e38
    prepared = prepare(statistics(X), replace(ALL, search_scales=False))
    assert prepared.U is not None
    prepared = replace(prepared, U=prepared.U * torch.inf)
    result = gptq(W, prepared, SCHEME, scale_dtype=torch.float32, settings=replace(ALL, search_scales=False))
    nearest = quantize_nearest(W, max_abs_scale(W, SCHEME, torch.float32), SCHEME)
    assert result.damping is None
    assert torch.equal(result.weight.codes, nearest.codes)


@pytest.mark.parametrize("power", [-120, -60, 60])
def test_the_unit_of_the_inputs_does_not_matter(power: int) -> None:
    """A power of two changes no digit, so the codes are the same; unnormalised, H and its inverse would overflow."""
    W, *streams = drifting()
    seen = statistics(*streams)
    unit = 2.0**power
    moved = Statistics(*(one * unit for one in (seen.H, seen.input_drift, seen.residual_drift)), seen.tokens)
    result, expected = solved(W, moved), solved(W, seen)
    assert result.damping == expected.damping
    assert torch.equal(result.weight.codes, expected.weight.codes)
    torch.testing.assert_close(result.target, expected.target)
