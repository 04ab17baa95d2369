from __future__ import annotations

import math

import pytest
import torch

from compress.divergence import compare, token_kl, token_nll


def slow_reference(p_row: list[float], q_row: list[float]) -> tuple[float, float]:
    """KL and total variation of one pair of rows with Python floats and exact summation."""

    def distribution(row: list[float]) -> tuple[list[float], list[float]]:
        top = max(row)
        norm = math.log(math.fsum(math.exp(x - top) for x in row)) + top
        logs = [x - norm for x in row]
        return logs, [math.exp(x) for x in logs]

    (log_p, p), (log_q, q) = distribution(p_row), distribution(q_row)
    kl = math.fsum(a * (x - y) for a, x, y in zip(p, log_p, log_q, strict=True) if a > 0)
    return kl, 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))


def logits(seed: int, tokens: int = 5, vocabulary: int = 97, scale: float = 4.0) -> torch.Tensor:
    return scale * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_slow_reference(scale: float, dtype: torch.dtype) -> None:
    p, q = logits(1, scale=scale).to(dtype), logits(2, scale=scale).to(dtype)
    found = compare(p, q)
    assert found.kl.dtype == torch.float64
    for row in range(len(p)):
        kl, tv = slow_reference(p[row].double().tolist(), q[row].double().tolist())
        assert found.kl[row].item() == pytest.approx(kl, rel=1e-11, abs=1e-15)
        assert found.tv[row].item() == pytest.approx(tv, rel=1e-11)
    assert torch.equal(found.kl, token_kl(p, q))


def test_equal_rows_give_exactly_zero_also_when_huge() -> None:
    p = torch.cat([logits(3), 1e30 * logits(4), torch.zeros(1, 97)])
    found = compare(p, p.clone())
    assert found.kl.tolist() == [0.0] * 11
    assert found.tv.tolist() == [0.0] * 11
    assert bool(found.same_top1.all())


def test_a_tiny_change_is_never_negative_and_keeps_its_size() -> None:
    """KL of a small change is half its variance under p: a value float32 sums would lose in noise."""
    p = logits(5, tokens=200, vocabulary=4096).double()
    change = 1e-6 * torch.randn(p.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    kl = token_kl(p, p + change)
    probability = p.softmax(-1)
    expected = 0.5 * ((probability * change**2).sum(-1) - (probability * change).sum(-1) ** 2)
    assert bool((kl >= 0).all())
    torch.testing.assert_close(kl, expected, rtol=1e-2, atol=0)


def test_minus_infinity_is_probability_zero() -> None:
    inf = math.inf
    p = torch.tensor([[0.0, 0.0, -inf], [0.0, -inf, -inf], [0.0, 0.0, -inf]])
    q = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf], [0.0, -inf, -inf]])
    found = compare(p, q)
    assert found.kl.tolist() == [0.0, pytest.approx(math.log(2)), inf]
    assert found.tv.tolist() == [0.0, 0.5, 0.5]


def test_underflow_of_p_leaves_the_value_finite() -> None:
    p = torch.tensor([[0.0, -2000.0]])
    q = torch.tensor([[-2000.0, 0.0]])
    found = compare(p, q)
    assert found.kl.item() == pytest.approx(2000.0)
    assert found.tv.item() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_no_distribution_show_as_nan(bad: float) -> None:
    p = torch.tensor([[0.0, 1.0], [0.0, bad]])
    q = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    for first, second in ((p, q), (q, p)):
        found = compare(first, second)
        assert (found.kl[0].item(), found.tv[0].item()) == (0.0, 0.0)
        assert math.isnan(found.kl[1].item())
        assert math.isnan(found.tv[1].item())


def test_top1_takes_the_first_maximum_and_counts_disagreement() -> None:
    p = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    q = torch.tensor([[0.0, 9.0, 2.0], [4.0, 3.0, 2.0]])
    assert compare(p, q).same_top1.tolist() == [True, False]


def test_nll_agrees_with_cross_entropy() -> None:
    rows, targets = logits(7), torch.tensor([0, 96, 3, 5, 5])
    expected = torch.nn.functional.cross_entropy(rows.double(), targets, reduction="none")
    torch.testing.assert_close(token_nll(rows, targets), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 96), (4, 97), (5, 1, 97)])
def test_different_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        compare(logits(1), torch.zeros(shape))
    with pytest.raises(ValueError, match="vocabulary"):
        token_kl(logits(1), torch.zeros(shape))
