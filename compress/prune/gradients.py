"""What the model's answers depend on: gradients at the output projections of every block of the original model.

Two things are taken from backward passes. A Fisher matrix G of each projection's output says which directions of an
error there change the answers, and the score of a group of units, eps_g = trace(G W_g ([C^-1]_gg)^-1 W_g^T), weighs
errors with it. Taylor sums say how much the loss changes if a column of the projection's input becomes zero.

G of a decoder. With z the logits at one position and J = dz/dh, h a projection's output at one token, the
divergence from the model's own distribution p is, for a small change d of h,

    KL(p || p_d) = 1/2 d^T J^T F J d + O(d^3),    F = diag(p) - p p^T = E_{y~p}[s s^T],  s = d(-log p(y))/dz

(Martens 2020, "New Insights and Perspectives on the Natural Gradient Method", sections 5 and 8). So
J^T F J = E_{y~p}[g g^T] with g = d(-log p(y))/dh, y drawn from the model itself, not from the text. With one draw y_s
at every position s and the sum of all -log p(y_s) as the loss, g = sum_s J_s^T s_s; the draws are independent and
E[s_s] = 0, so products of different positions vanish in expectation and E[g g^T] = sum_s J_s^T F_s J_s: the curvature
of the whole window's divergence.

G of an encoder. Its answer is a direction u_s = h_s / |h_s|, the last hidden state h_s of each token. With
v_s ~ N(0, I) independent and the loss L = sum_s v_s . u_s, the gradient at a projection's output is
g = sum_s J_s^T v_s with J_s = du_s/dh, and

    E[g g^T] = sum_{s,r} J_s^T E[v_s v_r^T] J_r = sum_s J_s^T J_s,

the Gauss-Newton matrix of sum_s |du_s|^2. As |u_s| = 1, 1 - cos(u_s, u_s + du_s) = 1/2 |du_s|^2: the same form.

Both are means over tokens, with changes at different tokens taken as independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from compress.divergence import token_nll
from compress.errors import BrokenResultError
from compress.model.anatomy import Anatomy
from compress.model.checkpoint import Checkpoint
from compress.progress import Advance, Progress
from compress.prune.settings import FISHER_TOKENS, TAYLOR_TOKENS
from compress.prune.whole import WholeModel, output_projections


@dataclass(frozen=True)
class Gradients:
    """By the module name of the output projection ("model.layers.0.mlp.down_proj").

    Attributes:
        fisher: G float32 [out, out], symmetric; empty where it was not asked for.
        taylor: float64 [windows, in], for each window the mean over its tokens of x_j dL/dx_j, with x the projection's
            input and L the sum of the text's -log p (decoders), or v . u as above (encoders). Empty where it was
            not asked for.
    """

    fisher: Mapping[str, torch.Tensor] = field(default_factory=dict)
    taylor: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors that hold the same: of each G the lower triangle, row by row."""
        triangles = {f"fisher.{name}": G[_triangle(len(G))] for name, G in self.fisher.items()}
        return triangles | {f"taylor.{name}": sums for name, sums in self.taylor.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Gradients:
        """What `to_tensors` gave."""
        parts: dict[str, dict[str, torch.Tensor]] = {"fisher": {}, "taylor": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            parts[kind][name] = _full(tensor) if kind == "fisher" else tensor
        return cls(**parts)


def _triangle(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril_()


def _full(triangle: torch.Tensor) -> torch.Tensor:
    """[n (n + 1) / 2] -> [n, n]."""
    size = int((2 * len(triangle)) ** 0.5)
    G = torch.zeros(size, size, dtype=triangle.dtype)
    G[_triangle(size)] = triangle
    return G + G.tril(-1).T


def collect_gradients(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    windows: Sequence[torch.Tensor],
    progress: Progress,
    *,
    fisher: bool = True,
    taylor: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Gradients:
    """Backward passes through the original in float32, one window in memory at a time.

    Args:
        windows: ids, int64 [T] each, in front the ones that are used: FISHER_TOKENS and TAYLOR_TOKENS of them.
        seed: of the draws y and v.

    Raises:
        BrokenResultError: gradients are not finite.
        see `load_original`.
    """
    wanted = [(FISHER_TOKENS, fisher), (TAYLOR_TOKENS, taylor)]
    drawn, read = (leading(windows, tokens) if asked else [] for tokens, asked in wanted)
    if not drawn and not read:
        return Gradients()
    whole = WholeModel(checkpoint, anatomy, device=device)
    with progress.phase("Gradients", len(drawn) + len(read)) as advance:
        return Gradients(
            fisher=_fisher(whole, anatomy, drawn, seed, advance), taylor=_taylor(whole, anatomy, read, seed, advance)
        )


def leading(windows: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """The first windows, until they have so many tokens together; at least one if there is any."""
    found: list[torch.Tensor] = []
    for ids in windows:
        if found and sum(map(len, found)) + len(ids) > tokens:
            break
        found.append(ids)
    return found


def taylor_scores(sums: torch.Tensor, units: int) -> torch.Tensor:
    """How much the loss changes, to first order, if a unit's inputs of the projection become zero. float64 [units].

        I_u = mean over windows of | sum over the unit's columns of sums_j |

    With a gate in front of a head this is the score of Michel et al. 2019, "Are Sixteen Heads Really Better than One?",
    section 4.1, and of one channel that of Molchanov et al. 2017, equation 5.

    Args:
        sums: [windows, in], see `Gradients.taylor`.
        units: how many units the columns divide into, each an equal run of neighbouring columns: the FFN's
            channels, the query heads, or the groups of query heads that share a key and value head.
    """
    return sums.view(len(sums), units, -1).sum(dim=2).abs().mean(dim=0)


def first_counted(anatomy: Anatomy) -> int:
    """Position of the first token of a window whose gradients count.

    In decoders all others look at the first one when they look for nothing; its activations are orders of magnitude
    larger than theirs (Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks").
    """
    return 1 if anatomy.kind == "decoder" else 0


def _fisher(
    whole: WholeModel, anatomy: Anatomy, windows: Sequence[torch.Tensor], seed: int, advance: Advance
) -> dict[str, torch.Tensor]:
    first, generator = first_counted(anatomy), torch.Generator().manual_seed(seed)
    G: dict[str, torch.Tensor] = {}

    def add(name: str, _output: torch.Tensor, gradient: torch.Tensor) -> None:
        g = gradient.reshape(-1, gradient.shape[-1])[first:]  # [T, out]
        G[name] = G[name].addmm_(g.T, g) if name in G else g.T @ g

    with _watched(whole, anatomy, add, outputs=True):
        for ids in windows:
            _backward(whole, ids, partial(_drawn_loss, anatomy, generator))
            advance(1)
    tokens = max(sum(len(ids) - first for ids in windows), 1)
    return {
        name: _finite(f"gradients at {name}", (total + total.T).div_(2 * tokens).cpu()) for name, total in G.items()
    }


def _taylor(
    whole: WholeModel, anatomy: Anatomy, windows: Sequence[torch.Tensor], seed: int, advance: Advance
) -> dict[str, torch.Tensor]:
    first, generator = first_counted(anatomy), torch.Generator().manual_seed(seed)
    rows: dict[str, list[torch.Tensor]] = {}

    def add(name: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
        products = (x * gradient).reshape(-1, x.shape[-1])[first:]  # [T, in]
        rows.setdefault(name, []).append(products.double().mean(dim=0).cpu())

    loss = _text_loss if anatomy.kind == "decoder" else partial(_drawn_loss, anatomy, generator)
    with _watched(whole, anatomy, add, outputs=False):
        for ids in windows:
            _backward(whole, ids, loss)
            advance(1)
    return {name: _finite(f"gradients at {name}", torch.stack(found)) for name, found in rows.items()}


@contextmanager
def _watched(
    whole: WholeModel,
    anatomy: Anatomy,
    add: Callable[[str, torch.Tensor, torch.Tensor], None],
    *,
    outputs: bool,
) -> Iterator[None]:
    """Calls `add` with the name, the output or input and its gradient at every output projection.

    No weight has a gradient. The first tensor that is watched starts the graph, so nothing in front of it is gone
    through.
    """

    def seen(name: str, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            tensor.requires_grad_()
        tensor.register_hook(partial(add, name, tensor.detach()))  # type: ignore[no-untyped-call]

    def hooked(module: nn.Module, name: str) -> RemovableHandle:
        if outputs:
            return module.register_forward_hook(lambda _module, _args, output: seen(name, output))
        return module.register_forward_pre_hook(lambda _module, args: seen(name, args[0]))

    handles = [hooked(whole.projection(layer), layer.name) for layer in output_projections(anatomy)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the model's answers, [T, V] or [T, d], and the ids, [T]: one number."""


def _backward(whole: WholeModel, ids: torch.Tensor, loss: _Loss) -> None:
    with torch.enable_grad():
        answers = _finite("its answers", whole.answer(ids))
        torch.autograd.backward(loss(answers, ids.to(answers.device)))


def _drawn_loss(
    anatomy: Anatomy, generator: torch.Generator, answers: torch.Tensor, _ids: torch.Tensor
) -> torch.Tensor:
    """The sum over positions of -log p(y) with y drawn from p; of v . u with v drawn from N(0, I) for encoders."""
    if anatomy.kind == "decoder":
        drawn = torch.multinomial(answers.detach().softmax(dim=-1).cpu(), 1, generator=generator)  # [T, 1]
        return token_nll(answers, drawn[:, 0].to(answers.device), dtype=torch.float32).sum()
    v = torch.randn(answers.shape, generator=generator).to(answers.device)
    return (v * nn.functional.normalize(answers, dim=-1)).sum()


def _text_loss(answers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The sum over the text's tokens of -log p, each given those before it."""
    return token_nll(answers[:-1], ids[1:], dtype=torch.float32).sum()


def _finite(what: str, values: torch.Tensor) -> torch.Tensor:
    if not bool(values.isfinite().all()):
        raise BrokenResultError(
            f"the original model in float32: {what} on calibration text are not finite.",
            hint="Check the model's weights, and that the tokenizer belongs to them.",
        )
    return values
