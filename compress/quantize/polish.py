"""After the sweep: better scales for given codes, better codes for given scales.

GPTQ chooses each code once. Both steps here lower the same error, tr(E H E^T) with E = S o Q - W (S the scale of every
column, Q the codes, less their zero points), and never raise it. Zero points stay.

- Scales: for given codes the error is quadratic in a row's group scales, so the best ones solve a linear system of
  [groups, groups] for each row: A ds = b with A_kl = q_k H_kl q_l^T and b_k = -(E H)_k q_k^T, where q_k are the
  row's codes of group k, H_kl is the block of H between two groups, and ds is what the scales have to move by. (Solved
  for the step and not for the scales, because at 8 bits float32 would lose it in the large numbers.)
- Codes: coordinate descent. With all others fixed the error is smallest where the column's own weight is
  w_i - (E H)_i / H_ii (E without column i), rounded to the grid; columns are visited in the sweep's order until a
  number of passes is over. (As in QuantEase, Behdin et al., arXiv 2309.01885, started from GPTQ's codes.)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from compress.quantize.grid import stored_scale
from compress.scheme import QuantizedWeight, Scheme

ROWS = 1024  # solved at once; each takes groups^2 numbers
COLUMNS = 64  # columns visited one by one before the rest of the gradient is updated at once
LARGEST_CHANGE = 2.0  # a scale that wants to move further than this factor belongs to a group without information
RIDGE = 1e-6


def refit_scales(W: torch.Tensor, H: torch.Tensor, weight: QuantizedWeight) -> QuantizedWeight:
    """The scales with the least error for the codes of `weight`, rounded to their dtype.

    Args:
        W: float32 [out, in], the weights to be reached.
        H: float32 [in, in], damped.

    Rows where the rounded solution is no better keep their scales.
    """
    Q = _counted(weight)
    scales = [
        _refit(W[rows], H, Q[rows], weight.scale[rows])
        for rows in (slice(start, start + ROWS) for start in range(0, W.shape[0], ROWS))
    ]
    return replace(weight, scale=torch.cat(scales))


def _counted(weight: QuantizedWeight) -> torch.Tensor:
    """Codes counted from their zero points, [out, in], in a dtype that holds them."""
    if weight.zero_point is None:
        return weight.codes
    return weight.codes.float() - weight.zero_point.repeat_interleave(_size(weight), dim=1)


def _size(weight: QuantizedWeight) -> int:
    """Columns of a group."""
    return weight.codes.shape[1] // weight.scale.shape[1]


def _refit(W: torch.Tensor, H: torch.Tensor, Q: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """New scales [rows, groups] of some rows, in the dtype of `stored`."""
    codes, old = Q.float(), stored.float()  # [rows, in], [rows, groups]
    count, groups = old.shape
    size = W.shape[1] // groups
    A = torch.empty(count, groups, groups, device=W.device)
    for k in range(groups):
        products = codes[:, k * size : (k + 1) * size] @ H[k * size : (k + 1) * size]  # [rows, in]
        A[:, k] = (products * codes).reshape(count, groups, size).sum(dim=-1)
    missing = W - codes * old.repeat_interleave(size, dim=1)
    b = ((missing @ H) * codes).reshape(count, groups, size).sum(dim=-1)  # [rows, groups]
    diagonal = A.diagonal(dim1=1, dim2=2)
    ridge = RIDGE * diagonal.mean(dim=1, keepdim=True) + (diagonal == 0)
    step = torch.linalg.solve(A + torch.diag_embed(ridge), b)
    new = old + torch.nan_to_num(step, nan=0.0, posinf=0.0, neginf=0.0)
    usable = (new > old / LARGEST_CHANGE) & (new < old * LARGEST_CHANGE)
    rounded = stored_scale(torch.where(usable, new, old), stored.dtype)
    moved = rounded.float() - old
    better = ((A @ moved.unsqueeze(-1)).squeeze(-1) * moved - 2 * b * moved).sum(dim=1) < 0
    return torch.where(better.unsqueeze(1), rounded, stored)


def local_search(
    W: torch.Tensor, H: torch.Tensor, weight: QuantizedWeight, order: torch.Tensor, passes: int
) -> QuantizedWeight:
    """Coordinate descent over the codes, the columns in `order` [in], `passes` times."""
    if passes == 0:
        return weight
    Hs = H[order][:, order]
    S = weight.scale.float().repeat_interleave(_size(weight), dim=1)[:, order]
    Q = weight.codes.float()[:, order]
    E = _counted(weight)[:, order] * S - W[:, order]
    for _ in range(passes):
        before = Q.clone()
        _one_pass(Q, E, S, Hs, weight.scheme)
        if torch.equal(before, Q):
            break
    if not bool(torch.isfinite(E).all()):
        return weight
    codes = torch.empty_like(weight.codes)
    codes[:, order] = Q.to(torch.int8)
    return replace(weight, codes=codes)


def _one_pass(Q: torch.Tensor, E: torch.Tensor, S: torch.Tensor, H: torch.Tensor, scheme: Scheme) -> None:
    """Visits every column once; Q and E [out, in] are changed in place."""
    low, high = scheme.code_range
    G = E @ H  # half the gradient
    diagonal = H.diagonal()
    for start in range(0, H.shape[0], COLUMNS):
        columns = slice(start, start + COLUMNS)
        q, s, g = (part[:, columns].T.contiguous() for part in (Q, S, G))  # a column is one contiguous row
        moved = torch.empty_like(q)
        block = H[columns, columns]
        for i in range(q.shape[0]):
            new = (q[i] - g[i] / (diagonal[start + i] * s[i])).round_().clamp_(low, high)
            moved[i] = (new - q[i]) * s[i]
            q[i] = new
            g.addr_(block[i], moved[i])
        Q[:, columns] = q.T
        E[:, columns] += moved.T
        G.addmm_(moved.T, H[columns])
