"""Fisher matrices and Taylor sums against a gradient per token, against curvature, and against finite differences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_bert, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_opt
from tiny_more import tiny_mpnet

from compress.divergence import token_kl, token_nll
from compress.errors import BrokenResultError
from compress.model.anatomy import Anatomy, anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.progress import Silent
from compress.prune import gradients as module
from compress.prune.gradients import Gradients, collect_gradients, first_counted, leading, taylor_scores
from compress.prune.whole import WholeModel, output_projections

FAMILIES = [tiny_llama, tiny_gpt2, tiny_opt, tiny_gemma3, tiny_bert, tiny_mpnet]


def opened(folder: Path) -> tuple[Checkpoint, Anatomy]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, anatomy(checkpoint)


def windows(count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 256, (length,), generator=generator) for _ in range(count)]


def outputs_with_gradients(whole: WholeModel, names: list[str], store: dict[str, torch.Tensor]) -> None:
    """Keeps every named module's output with its gradient."""

    def keep(name: str, output: torch.Tensor) -> torch.Tensor:
        store[name] = output.detach().clone().requires_grad_()
        return store[name] + (output - output.detach())

    for name in names:
        whole.model.get_submodule(name).register_forward_hook(lambda _m, _a, output, name=name: keep(name, output))


@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_is_the_mean_of_outer_products_of_gradients(tmp_path, family):
    checkpoint, parts = opened(family(tmp_path / "m"))
    texts = windows(2, 12)
    found = collect_gradients(checkpoint, parts, texts, Silent(), seed=3).fisher
    whole, generator = WholeModel(checkpoint, parts, device="cpu"), torch.Generator().manual_seed(3)
    whole.model.requires_grad_(True)
    layers, first = output_projections(parts), first_counted(parts)
    assert set(found) == {layer.name for layer in layers}
    assert len(layers) == 2 * parts.depth
    expected = {layer.name: torch.zeros(layer.out, layer.out, dtype=torch.float64) for layer in layers}
    store: dict[str, torch.Tensor] = {}
    outputs_with_gradients(whole, list(expected), store)
    for ids in texts:
        answers = whole.answer(ids)
        if parts.kind == "decoder":
            drawn = torch.multinomial(answers.detach().softmax(-1), 1, generator=generator)
            loss = -answers.log_softmax(-1).gather(1, drawn).sum()
        else:
            v = torch.randn(answers.shape, generator=generator)
            loss = sum((v[t] * answers[t] / answers[t].norm()).sum() for t in range(len(ids)))
        for name, g in zip(expected, torch.autograd.grad(loss, [store[name] for name in expected]), strict=True):
            for t in range(first, len(ids)):
                row = g.reshape(len(ids), -1)[t].double()
                expected[name] += torch.outer(row, row)
    for name, total in expected.items():
        mean = total / sum(len(ids) - first for ids in texts)
        assert float(mean.diagonal().sum()) > 0
        torch.testing.assert_close(found[name].double(), mean, rtol=1e-4, atol=float(mean.abs().max()) * 1e-5)
        assert torch.equal(found[name], found[name].T)


@pytest.mark.parametrize("family", [tiny_llama, tiny_bert])
def test_fisher_is_the_curvature_of_the_divergence(tmp_path, family):
    """For one token and one direction d: the divergence of the window after a small change e d is e^2/2 d^T G d."""
    checkpoint, parts = opened(family(tmp_path / "m"))
    ids, layer = windows(1, 2)[0], output_projections(parts)[1]
    repeated = [ids] * 800  # many draws of one window
    found = collect_gradients(checkpoint, parts, repeated, Silent()).fisher[layer.name].double()
    whole, first = WholeModel(checkpoint, parts, device="cpu"), first_counted(parts)
    d = torch.randn(layer.out, generator=torch.Generator().manual_seed(1))
    size, measured = 0.02, 0.0
    with torch.no_grad():
        before = whole.answer(ids)
        for t in range(first, len(ids)):  # G is the mean over the tokens that are counted

            def moved(_module, _args, output, t=t):
                shifted = output.clone()
                shifted[0, t] += size * d
                return shifted

            handle = whole.projection(layer).register_forward_hook(moved)
            after = whole.answer(ids)
            handle.remove()
            if parts.kind == "decoder":
                measured += float(token_kl(before, after).sum())
            else:
                measured += float((1 - torch.cosine_similarity(before.double(), after.double(), dim=-1)).sum())
    measured /= len(ids) - first
    predicted = 0.5 * size**2 * float(d.double() @ found @ d.double())
    assert predicted == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2, tiny_opt])
def test_taylor_sums_are_the_slope_of_the_loss_at_a_gate(tmp_path, family):
    checkpoint, parts = opened(family(tmp_path / "m"))
    texts = windows(2, 16)
    found = collect_gradients(checkpoint, parts, texts, Silent(), fisher=False, taylor=True)
    assert not found.fisher
    whole, first = WholeModel(checkpoint, parts, device="cpu"), first_counted(parts)
    whole.model.double()
    for layer in output_projections(parts):
        sums = found.taylor[layer.name]
        assert sums.shape == (2, layer.width)
        assert sums.dtype == torch.float64
        column = int(sums[0].abs().argmax())
        for window, ids in enumerate(texts):
            slopes = []
            for gate in (1.001, 0.999):

                def scaled(_module, args, gate=gate, column=column):
                    x = args[0].clone().reshape(-1, args[0].shape[-1])
                    x[first:, column] *= gate
                    return (x.reshape(args[0].shape),)

                handle = whole.projection(layer).register_forward_pre_hook(scaled)
                with torch.no_grad():
                    slopes.append(float(token_nll(whole.answer(ids)[:-1], ids[1:]).sum()))
                handle.remove()
            measured = (slopes[0] - slopes[1]) / 0.002 / (len(ids) - first)
            assert float(sums[window, column]) == pytest.approx(measured, rel=1e-2)


def test_scores_of_units_take_the_size_after_summing_a_unit():
    sums = torch.tensor([[1.0, -1.0, 2.0, 2.0], [1.0, 1.0, -3.0, 1.0]], dtype=torch.float64)
    assert taylor_scores(sums, 4).tolist() == [1.0, 1.0, 2.5, 1.5]
    assert taylor_scores(sums, 2).tolist() == [1.0, 3.0]


def test_encoders_have_taylor_sums_too(tmp_path):
    checkpoint, parts = opened(tiny_bert(tmp_path / "m"))
    found = collect_gradients(checkpoint, parts, windows(3, 10), Silent(), fisher=False, taylor=True).taylor
    assert all(sums.shape[0] == 3 and float(sums.abs().max()) > 0 for sums in found.values())


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path):
    checkpoint, parts = opened(tiny_llama(tmp_path / "m"))
    first, again, other = (
        collect_gradients(checkpoint, parts, windows(2, 12), Silent(), taylor=True, seed=seed) for seed in (0, 0, 1)
    )
    for name, G in first.fisher.items():
        assert torch.equal(G, again.fisher[name])
        assert not torch.equal(G, other.fisher[name])
        assert torch.equal(first.taylor[name], again.taylor[name])
        assert torch.equal(first.taylor[name], other.taylor[name])  # the text is no draw


def test_named_tensors_hold_everything(tmp_path):
    checkpoint, parts = opened(tiny_llama(tmp_path / "m"))
    found = collect_gradients(checkpoint, parts, windows(2, 12), Silent(), taylor=True)
    tensors = found.to_tensors()
    back = Gradients.from_tensors(tensors)
    assert all(tensors[f"fisher.{name}"].numel() == len(G) * (len(G) + 1) // 2 for name, G in found.fisher.items())
    assert list(back.fisher) == list(found.fisher)
    assert list(back.taylor) == list(found.taylor)
    for name, G in found.fisher.items():
        assert torch.equal(back.fisher[name], G)
        assert torch.equal(back.taylor[name], found.taylor[name])


def test_only_the_leading_windows_are_used(tmp_path, monkeypatch):
    texts = windows(4, 12)
    assert len(leading(texts, 24)) == 2
    assert len(leading(texts, 35)) == 2
    assert len(leading(texts, 3)) == 1
    monkeypatch.setattr(module, "FISHER_TOKENS", 24)
    checkpoint, parts = opened(tiny_llama(tmp_path / "m"))
    short, long = (collect_gradients(checkpoint, parts, some, Silent()).fisher for some in (texts[:2], texts))
    assert all(torch.equal(short[name], long[name]) for name in short)


def test_nothing_asked_nothing_loaded(tmp_path):
    checkpoint, parts = opened(tiny_llama(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").unlink()
    assert collect_gradients(checkpoint, parts, windows(1, 12), Silent(), fisher=False) == Gradients()


def test_gradients_that_are_not_finite_are_told(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"].sign_().mul_(3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint, parts = opened(folder)
    for fisher in (True, False):
        with pytest.raises(BrokenResultError, match="not finite"):
            collect_gradients(checkpoint, parts, windows(1, 12), Silent(), fisher=fisher, taylor=not fisher)
