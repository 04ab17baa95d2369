"""Factors against a slow reference; what folding keeps exactly; what is chosen."""

from __future__ import annotations

import math

import pytest
import torch

from compress.formats.rounded_inputs import round_inputs
from compress.quantize.grid import max_abs_scale, quantize_nearest
from compress.quantize.smooth import (
    ALPHAS,
    LARGEST_EXPONENT,
    SPREADS,
    Folded,
    candidates,
    folded_norm,
    folded_rows,
    rounded_per_token,
    sampled,
    smooth_group,
)
from compress.scheme import PER_CHANNEL, Scheme

W8A8 = Scheme(8, PER_CHANNEL, activation_bits=8)
W4 = Scheme(4, 8)


def rounded(W, scheme=W8A8):
    return quantize_nearest(W, max_abs_scale(W, scheme, torch.bfloat16), scheme).dequantize(torch.float32)


def sample(seed=0, tokens=24, width=16, outs=(8, 4)):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(tokens, width, generator=generator)
    return X, [torch.randn(out, width, generator=generator) for out in outs]


def spread_of(columns, name):
    if name == "largest":
        return [max(abs(value) for value in column) for column in columns]
    return [math.sqrt(sum(value * value for value in column) / len(column)) for column in columns]


@pytest.mark.parametrize("bits", [8, None])
def test_candidates_are_the_two_papers_factors(bits):
    X, weights = sample()
    X[:, 3] *= 50
    found = list(candidates(X, weights, None, bits))
    assert [(spread, alpha) for spread, alpha, _ in found] == [(one, alpha) for one in SPREADS for alpha in ALPHAS]
    for spread, alpha, s in found:
        x = spread_of(X.T.tolist(), spread)
        w = spread_of(torch.cat(weights).T.tolist(), spread)
        plain = [a**alpha / b ** (1 - alpha) if bits else a ** (alpha / 2) for a, b in zip(x, w, strict=True)]
        mean = math.prod(plain) ** (1 / len(plain))
        expected = torch.tensor([value / mean for value in plain])
        torch.testing.assert_close(s, expected.clamp(2.0**-LARGEST_EXPONENT, 2.0**LARGEST_EXPONENT))


def test_channels_that_were_never_used_keep_one():
    X, weights = sample()
    X[:, 5] = 0
    weights = [W.clone() for W in weights]
    for W in weights:
        W[:, 9] = 0
    for _, _, s in candidates(X, weights, None, 8):
        assert s[5] == s[9] == 1
        assert (s != 1).sum() == 14
    assert all(bool((s == 1).all()) for _, _, s in candidates(torch.zeros_like(X), weights, None, 8))


def test_inputs_that_share_a_channel_get_the_geometric_mean():
    X, weights = sample()
    channels = torch.arange(16) // 4 % 2 * 4 + torch.arange(16) % 4  # two value heads of 4, two query heads each
    alone = [s for _, _, s in candidates(X, weights, None, 8)]
    for (_, _, shared), each in zip(candidates(X, weights, channels, 8), alone, strict=True):
        for channel in range(8):
            members = [float(each[i]) for i in range(16) if int(channels[i]) == channel]
            assert float(shared[channel]) == pytest.approx(math.prod(members) ** (1 / len(members)), rel=1e-5)


def test_inputs_are_rounded_as_the_reference_rounds_them():
    X = torch.randn(7, 33, generator=torch.Generator().manual_seed(1)) * 3
    X[2] = 0
    expected = round_inputs(torch.nn.Linear(33, 1), (X[None],), values="int")[0][0]
    torch.testing.assert_close(rounded_per_token(X, 8), expected, rtol=1e-6, atol=1e-7)


def test_the_error_that_decides_is_that_of_the_outputs():
    X, weights = sample()
    X[:, 3] *= 40
    s = torch.linspace(0.8, 1.2, 16)
    s[3] = 6
    found = smooth_group(X, weights, lambda _wanted: Folded(s, s, None), rounded, channels=None, activation_bits=8)
    for factors, error in ((torch.ones(16), found.error_before), (s, found.error_after)):
        wrong = signal = 0.0
        for W in weights:
            outputs = [[float(row @ x) for row in W] for x in X]
            energy = [sum(value * value for value in row) for row in outputs]
            middle = sorted(energy)[(len(energy) - 1) // 2]
            signal += sum(value / (value + middle) for value in energy)
            for t, row in enumerate(outputs):
                inputs = rounded_per_token(X[t : t + 1] / factors, 8)[0]
                answer = [float(q @ inputs) for q in rounded(W * factors)]
                wrong += sum((a - b) ** 2 for a, b in zip(answer, row, strict=True)) / (energy[t] + middle)
        assert error == pytest.approx(wrong / signal, rel=1e-3)


def test_outlying_channels_are_smoothed_away():
    X, weights = sample(tokens=64)
    X[:, 3] *= 100
    norm = torch.ones(16)
    found = smooth_group(
        X,
        weights,
        lambda s: folded_norm(s, norm, None, plus_one=False),
        rounded,
        channels=None,
        activation_bits=8,
    )
    assert found.error_after < found.error_before / 5
    assert found.folded is not None
    assert found.alpha in ALPHAS
    assert found.s.argmax() == 3
    torch.testing.assert_close(found.folded.weight * found.s, norm)


def test_without_a_better_one_there_are_no_factors():
    X, weights = sample()
    stuck = smooth_group(
        X,
        weights,
        lambda s: Folded(torch.ones_like(s), s, None),
        rounded,
        channels=None,
        activation_bits=8,
    )
    assert stuck.folded is None
    assert stuck.spread is None
    assert stuck.error_before == stuck.error_after > 0
    assert bool((stuck.s == 1).all())


def test_inputs_without_values_have_no_error():
    X, weights = sample()
    none = smooth_group(
        torch.zeros_like(X),
        weights,
        lambda s: folded_norm(s, torch.ones(16), None, plus_one=False),
        rounded,
        channels=None,
        activation_bits=8,
    )
    assert (none.folded, none.error_before, none.error_after) == (None, 0.0, 0.0)


def test_weights_alone_are_judged_on_inputs_that_are_not_rounded():
    X, weights = sample()
    X[:, 3] *= 100  # with rounded inputs this channel would decide; with group scales only the weights count
    one = smooth_group(
        X, weights, lambda s: Folded(torch.ones_like(s), s, None), lambda W: W, channels=None, activation_bits=None
    )
    assert one.error_before == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_takes_exactly_the_factors_it_says(dtype, plus_one):
    generator = torch.Generator().manual_seed(2)
    s = torch.exp2(torch.randn(64, generator=generator) * 2)
    weight = (torch.randn(64, generator=generator)).to(dtype)
    weight[:2] = -1 if plus_one else 0
    folded = folded_norm(s, weight, None, plus_one=plus_one)
    offset = 1 if plus_one else 0
    assert folded.weight.dtype == dtype
    before, after = weight.double() + offset, folded.weight.double() + offset
    torch.testing.assert_close(after * folded.s.double(), before, rtol=1e-6, atol=0)
    assert bool((folded.s[:2] == 1).all())
    assert bool((folded.weight[:2] == weight[:2]).all())
    if not plus_one:
        torch.testing.assert_close(folded.s[2:], s[2:], rtol=0.01, atol=0)


def test_a_layer_norms_bias_is_divided_too():
    s, weight, bias = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([1.0, 0.0, 2.0]), torch.tensor([4.0, 4.0, 10.0])
    folded = folded_norm(s, weight, bias, plus_one=False)
    assert folded.bias is not None
    torch.testing.assert_close(folded.bias, torch.tensor([2.0, 4.0, 2.0]))


def test_a_weight_that_would_vanish_stays():
    weight = torch.tensor([2.0**-20, 1.0]).half()
    folded = folded_norm(torch.tensor([256.0, 256.0]), weight, None, plus_one=False)
    assert folded.s.tolist() == [1, 256]
    assert folded.weight[0] == weight[0]


def test_quantized_rows_keep_their_codes():
    _, (W, _) = sample()
    weight = quantize_nearest(W, max_abs_scale(W, W8A8, torch.bfloat16), W8A8)
    s = torch.exp2(torch.linspace(-2, 2, 3))
    folded = folded_rows(s, weight, torch.arange(8.0), first_row=4)
    assert folded.weight.codes is weight.codes
    assert folded.weight.scale.dtype == torch.bfloat16
    whole = torch.ones(8)
    whole[4:7] = folded.s
    torch.testing.assert_close(folded.s, s, rtol=0.01, atol=0)
    before, after = weight.dequantize(torch.float32), folded.weight.dequantize(torch.float32)
    torch.testing.assert_close(after * whole[:, None], before, rtol=1e-6, atol=0)
    torch.testing.assert_close(folded.bias * whole, torch.arange(8.0))
    assert torch.equal(after[:4], before[:4])


@pytest.mark.parametrize("kind", ["grouped codes", "bfloat16 rows"])
def test_rows_of_many_numbers_are_divided_by_powers_of_two_and_stay_exact(kind):
    _, (W, _) = sample()
    weight = quantize_nearest(W, max_abs_scale(W, W4, torch.float16), W4) if kind == "grouped codes" else W.bfloat16()
    s = torch.exp2(torch.linspace(-3, 3, 8))
    folded = folded_rows(s, weight, None)
    assert torch.equal(folded.s, torch.exp2(s.log2().round()))
    dense = [
        one.float() if isinstance(one, torch.Tensor) else one.dequantize(torch.float32)
        for one in (weight, folded.weight)
    ]
    assert torch.equal(dense[1] * folded.s[:, None], dense[0])


def test_a_row_whose_scales_would_underflow_stays():
    _, (W, _) = sample()
    W[2] *= 1e-6
    weight = quantize_nearest(W, max_abs_scale(W, W4, torch.float16), W4)
    folded = folded_rows(torch.full((8,), 64.0), weight, None)
    assert folded.s[2] == 1
    assert torch.equal(folded.weight.scale[2], weight.scale[2])
    assert (folded.s == 64).sum() == 7


def test_tokens_are_taken_evenly():
    inputs = torch.arange(24.0).reshape(1, 12, 2)
    assert sampled(inputs, 4, 0)[:, 0].tolist() == [0, 6, 12, 18]
    assert sampled(inputs, 4, 1)[:, 0].tolist() == [0, 6, 12, 18]
    assert sampled(inputs, 4, 2)[:, 0].tolist() == [2, 8, 14, 20]
    assert sampled(inputs, 1, 3)[:, 0].tolist() == [0]
    assert torch.equal(sampled(inputs, 99, 5), inputs[0])
    assert sampled(inputs.half(), 4, 0).dtype == torch.float32


@pytest.mark.parametrize(("rows", "tokens"), [(8, 64), (5, 33), (8, 512), (7, 7)])
def test_few_windows_show_their_first_token(rows, tokens):
    """The largest outliers live there: in every window's sample they would decide alone."""
    inputs = torch.arange(float(tokens))[None, :, None]
    found = [sampled(inputs, rows, turn)[:, 0].tolist() for turn in range(3 * rows)]
    assert all(taken == sorted(set(taken)) and len(taken) == rows for taken in found)
    assert all(max(taken) > tokens - tokens / rows - 1 for taken in found)
    assert sum(0 in taken for taken in found) == (3 if tokens > rows else 3 * rows)
