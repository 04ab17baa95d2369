"""How far two next-token distributions are apart, per token. Pure torch; every sum is taken in float64.

    KL(p || q) = sum_v p_v (log p_v - log q_v)          nats
    TV(p, q)   = 1/2 sum_v |p_v - q_v|                  0..1
    NLL(t)     = -log p_t                               nats

The KL is summed as sum_v [p_v (log p_v - log q_v) - p_v + q_v], which is the same number because both p and q
sum to one. Every bracket is >= 0 (log x <= x - 1), so rounding cannot make the total negative, and two equal
rows give exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Per-token comparison of two models; all tensors have shape [T].

    Attributes:
        kl: KL(p || q) in nats, float64, >= 0; inf where q gives no probability to something p allows.
        tv: total variation distance, float64, 0..1; 1 - tv is the chance that speculative sampling accepts a token that
            q drafts for p (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", 3.2).
        same_top1: bool; both rows have their first maximum at the same index.
    """

    kl: Tensor
    tv: Tensor
    same_top1: Tensor


def compare(p_logits: Tensor, q_logits: Tensor, *, dtype: torch.dtype = torch.float64) -> Divergence:
    """KL, total variation and top-1 agreement of softmax(p_logits) and softmax(q_logits).

    Args:
        p_logits, q_logits: [T, V], any floating dtype. -inf means probability 0.
        dtype: what the sums are taken in; float32 only where a device lacks float64 (KL then resolves 1e-6).

    A row with NaN, +inf or nothing but -inf gives NaN: it is not a distribution.

    Raises:
        ValueError: when the two shapes differ or are not [T, V] with V >= 1.
    """
    _check_shapes(p_logits, q_logits)
    log_p = torch.log_softmax(p_logits.to(dtype), dim=-1)  # [T, V]
    log_q = torch.log_softmax(q_logits.to(dtype), dim=-1)  # [T, V]
    p, q = log_p.exp(), log_q.exp()  # [T, V]
    # Where p is 0 the term is q alone; 0 * (-inf - x) would be NaN. A NaN in p still shows through "- p".
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0).sub_(p).add_(q).clamp_min_(0)  # [T, V]
    return Divergence(
        kl=terms.sum(dim=-1),
        tv=p.sub_(q).abs_().sum(dim=-1).mul_(0.5).clamp_max_(1.0),
        same_top1=p_logits.argmax(dim=-1) == q_logits.argmax(dim=-1),
    )


def token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats per token, [T] float64; see `compare`."""
    return compare(p_logits, q_logits).kl


def token_nll(logits: Tensor, targets: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """-log softmax(logits)[t, targets[t]] in nats, [T].

    Args:
        logits: [T, V].
        targets: int64 [T], each in [0, V).
    """
    wide = logits.to(dtype)  # [T, V]
    return wide.logsumexp(dim=-1) - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _check_shapes(p_logits: Tensor, q_logits: Tensor) -> None:
    if p_logits.shape != q_logits.shape or p_logits.ndim != 2 or p_logits.shape[1] == 0:
        raise ValueError(
            "logits must both be [tokens, vocabulary] of one size, "
            f"got {tuple(p_logits.shape)} and {tuple(q_logits.shape)}"
        )
