"""The search over shapes against stock models of those shapes, fitted by slow and obvious means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import tiny_bert, tiny_gemma2, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_opt, tiny_qwen2
from tiny_more import tiny_mpnet
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from compress.divergence import token_kl
from compress.errors import BrokenResultError
from compress.model.anatomy import Anatomy, LinearLayer, anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.kept import kept_units
from compress.model.prunable import output_of, shape_of, unit_axes
from compress.model.pruned import pruned_config, pruned_name
from compress.model.shapes import Shape
from compress.progress import Silent
from compress.prune.gradients import collect_gradients
from compress.prune.search import Found, search_shapes
from compress.prune.settings import PruneSettings
from compress.prune.slicing import sliced

RIDGE = 1e-2


def opened(folder: Path) -> tuple[Checkpoint, Anatomy]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, anatomy(checkpoint)


def windows(count: int, length: int = 32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 256, (length,), generator=generator) for _ in range(count)]


def settings(importance: str = "obs", *, compensate: bool = True) -> PruneSettings:
    return PruneSettings(
        importance=importance,
        compensate=compensate,
        compute_dtype=torch.float32,
        device="cpu",
        selection_ridge=RIDGE,
    )


FIT, HELD_OUT = windows(6), windows(3, seed=1)


def searched(folder: Path, shapes: Sequence[Shape], used: PruneSettings) -> Found:
    checkpoint, parts = opened(folder)
    gradients = None
    if used.importance == "taylor":
        gradients = collect_gradients(checkpoint, parts, FIT, Silent(), fisher=False, taylor=True)
    return search_shapes(checkpoint, parts, shapes, FIT, HELD_OUT, used, gradients, Silent())


class Slow:
    """Prunes with matrices that are inverted anew for every step, and builds a stock model of the new shape."""

    def __init__(self, folder: Path, *, compensate: bool) -> None:
        self.checkpoint, self.parts = opened(folder)
        self.before, self.compensate = shape_of(self.checkpoint, self.parts), compensate
        self.original = self.built(self.before, range(self.parts.depth), {}, {})
        self.inputs = {layer.name: self.seen(layer) for layer in self.outputs()}

    def outputs(self) -> list[LinearLayer]:
        return [output_of(self.parts, block, unit) for block in range(self.parts.depth) for unit in ("ffn", "heads")]

    def seen(self, layer: LinearLayer) -> torch.Tensor:
        """Inputs of a projection on the calibration text, float64 [tokens, in], times the roots of their weights."""
        rows, roots = [], []

        def keep(_module, args, output):
            rows.append(args[0].reshape(-1, args[0].shape[-1]).double())
            w = 1 / output.reshape(-1, output.shape[-1]).double().pow(2).mean(1)
            roots.append(torch.minimum(w, 10 * w.median()).sqrt())

        hook = self.original.get_submodule(layer.name).register_forward_hook(keep)
        with torch.no_grad():
            for ids in FIT:
                self.original(input_ids=ids[None])
        hook.remove()
        X, w = torch.cat(rows), torch.cat(roots)
        normed = self.parts.model_type == "gemma2"  # a norm behind the projection: tokens count by its factor
        return X * (w / w.pow(2).mean().sqrt()).unsqueeze(1) if normed else X

    def channels(self, layer: LinearLayer, widths: Sequence[int]) -> list[list[int]]:
        """What stays at each width, the largest first: greedy, as many at a time as the search takes."""
        W, C = self.weight(layer), self.moment(layer)
        damped = C + RIDGE * C.diagonal().mean() * torch.eye(len(C))
        there, found = list(range(len(C))), []
        for keep in widths:
            while len(there) > keep:
                out = [column for column in range(len(C)) if column not in there]
                inverse = torch.linalg.inv(damped[there][:, there])
                now = W[:, there] + W[:, out] @ damped[out][:, there] @ inverse
                cost = now.pow(2).sum(0) / inverse.diagonal()
                gone = cost.argsort(stable=True)[: min(max(1, len(C) // 48), len(there) - keep)].tolist()
                there = [column for index, column in enumerate(there) if index not in gone]
            found.append(there)
        return found

    def moment(self, layer: LinearLayer) -> torch.Tensor:
        X = self.inputs[layer.name]
        centred = X - X.mean(0) if layer.bias is not None else X
        return centred.T @ centred / len(X)

    def weight(self, layer: LinearLayer) -> torch.Tensor:
        W = self.checkpoint.read(layer.tensor).double()
        return W.T if layer.transposed else W

    def changed(self, layer: LinearLayer, there: Sequence[int]) -> dict[str, torch.Tensor]:
        """The projection's tensors after the fit, at full size; least squares with rows that hold it to W."""
        W, X = self.weight(layer), self.inputs[layer.name]
        mean = X.mean(0) if layer.bias is not None else torch.zeros(X.shape[1], dtype=torch.float64)
        pull = (RIDGE * self.moment(layer).diagonal().mean()).sqrt()
        A = torch.cat([(X - mean)[:, there] / len(X) ** 0.5, pull * torch.eye(len(there), dtype=torch.float64)])
        y = torch.cat([(X - mean) @ W.T / len(X) ** 0.5, pull * W[:, there].T])
        fitted = torch.zeros_like(W)
        fitted[:, there] = torch.linalg.lstsq(A, y).solution.T
        found = {layer.tensor: (fitted.T if layer.transposed else fitted).float()}
        if layer.bias is not None:
            found[layer.bias] = (self.checkpoint.read(layer.bias).double() + (W - fitted) @ mean).float()
        return found

    def distance(self, shape: Shape, kept: Sequence[int], chosen: dict[int, dict[str, list[int]]]) -> float:
        changed: dict[str, torch.Tensor] = {}
        for block in kept if self.compensate else ():
            for unit, units in chosen[block].items():
                layer = output_of(self.parts, block, "ffn" if unit == "ffn" else "heads")
                size = layer.width // getattr(self.before, unit)
                changed |= self.changed(layer, [one * size + column for one in units for column in range(size)])
        less, found = self.built(shape, kept, chosen, changed), []
        with torch.no_grad():
            for ids in HELD_OUT:
                one, other = self.original(input_ids=ids[None]), less(input_ids=ids[None])
                if self.parts.kind == "decoder":
                    found.append(token_kl(one.logits[0], other.logits[0]))
                else:
                    states = (one.last_hidden_state[0].double(), other.last_hidden_state[0].double())
                    found.append(1 - torch.cosine_similarity(*states, dim=-1))
        return float(torch.cat(found).mean())

    def built(
        self,
        shape: Shape,
        kept: Sequence[int],
        chosen: dict[int, dict[str, list[int]]],
        changed: dict[str, torch.Tensor],
    ) -> transformers.PreTrainedModel:
        config = dict(pruned_config(self.checkpoint, self.parts, shape, tuple(kept)))
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        factory = AutoModelForCausalLM if self.parts.kind == "decoder" else AutoModel
        model = factory.from_config(made)
        axes = {
            name: cut
            for block, units in chosen.items()
            for name, cut in unit_axes(self.checkpoint, self.parts, kept_units(block, self.before, units)).items()
        }
        state = {}
        for name in self.checkpoint.tensors:
            if (new := pruned_name(self.parts, name, tuple(kept))) is not None:
                tensor = changed[name] if name in changed else self.checkpoint.read(name)
                state[new] = sliced(tensor, axes.get(name, ()))
        assert not model.load_state_dict(state, strict=False).unexpected_keys
        return model.eval()


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2, tiny_opt, tiny_qwen2, tiny_gemma2, tiny_bert, tiny_mpnet])
@pytest.mark.parametrize("compensate", [True, False])
def test_every_width_answers_as_a_stock_model_of_it_and_the_best_wins(tmp_path, family, compensate):
    slow = Slow(family(tmp_path / "m"), compensate=compensate)
    before = slow.before
    widths = (before.ffn // 2, before.ffn // 4)
    shapes = [replace(before, ffn=width) for width in widths]
    found = searched(tmp_path / "m", [shapes[1], shapes[0]], settings(compensate=compensate))
    stays = [slow.channels(output_of(slow.parts, block, "ffn"), widths) for block in range(before.layers)]
    for index, (shape, one) in enumerate(zip(shapes, reversed(found.tried), strict=True)):
        chosen = {block: {"ffn": at[index]} for block, at in enumerate(stays)}
        assert one.shape == shape
        assert one.divergence == pytest.approx(slow.distance(shape, range(before.layers), chosen), rel=2e-3)
    assert found.tried[1].divergence < found.tried[0].divergence
    assert found.best == found.tried[1]


def test_heads_and_layers_answer_as_a_stock_model_too(tmp_path):
    """By squared weights and without a fit, so that what stays can be told without any text."""
    folder = tiny_gemma3(tmp_path / "m", sliding_window=8)
    slow = Slow(folder, compensate=False)
    shapes = [Shape(128, 4, 2, 3), Shape(128, 4, 1, 3), Shape(64, 8, 2, 3), Shape(128, 8, 2, 2), Shape(96, 2, 1, 2)]
    found = searched(folder, shapes, settings("magnitude", compensate=False))
    for shape, one in zip(shapes, found.tried, strict=True):
        chosen = {block: largest(slow, block, shape) for block in one.layers_kept}
        assert one.divergence == pytest.approx(slow.distance(shape, one.layers_kept, chosen), rel=1e-3)
        assert len(one.layers_kept) == shape.layers
    assert found.best.divergence == min(one.divergence for one in found.tried)


def largest(slow: Slow, block: int, shape: Shape) -> dict[str, list[int]]:
    """The units with the largest squared weights in the output projection: channels, groups, heads of each group."""
    squares = slow.weight(output_of(slow.parts, block, "ffn")).pow(2).sum(0)
    channels = sorted(squares.argsort(descending=True)[: shape.ffn].tolist())
    before = slow.before
    group = before.heads // before.kv_heads
    scores = slow.weight(output_of(slow.parts, block, "heads")).pow(2).sum(0).reshape(before.kv_heads, group, -1).sum(2)
    groups = sorted(scores.sum(1).argsort(descending=True)[: shape.kv_heads].tolist())
    each = shape.heads // shape.kv_heads
    inside = {one: sorted(scores[one].argsort(descending=True)[:each].tolist()) for one in groups}
    return {"ffn": channels, "heads": [one * group + head for one in groups for head in inside[one]]}


def test_parameters_and_bytes_are_those_of_the_stock_model(tmp_path):
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=3)
    slow = Slow(folder, compensate=False)
    shape = Shape(64, 4, 2, 2)
    (one,) = searched(folder, [shape], settings("random", compensate=False)).tried
    first = {block: {"ffn": list(range(64)), "heads": [0, 1, 4, 5]} for block in one.layers_kept}
    model = slow.built(shape, one.layers_kept, first, {})
    assert one.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert one.bytes == 4 * one.parameters
    assert one.row() == {
        "ffn": 64,
        "heads": 4,
        "kv_heads": 2,
        "layers": 2,
        "parameters": one.parameters,
        "bytes": one.bytes,
        "divergence": one.divergence,
    }


@pytest.mark.parametrize("importance", ["obs", "magnitude", "activation", "taylor", "random"])
def test_the_same_inputs_give_the_same_numbers(tmp_path, importance):
    folder = tiny_llama(tmp_path / "m")
    shapes = [Shape(64, 8, 2, 2), Shape(128, 4, 1, 2), Shape(64, 4, 2, 1)]
    first, again = (searched(folder, shapes, settings(importance)) for _ in range(2))
    assert first == again
    assert first.metric == "kl"


def test_the_model_itself_is_at_no_distance(tmp_path):
    folder = tiny_llama(tmp_path / "m")
    found = searched(folder, [Shape(64, 8, 2, 2), Shape(128, 8, 2, 2), Shape(64, 4, 1, 2)], settings())
    assert found.tried[1].divergence == 0
    assert found.best == found.tried[1]
    assert found.tried[0].divergence > 0


def test_channels_that_say_the_same_are_made_up_for(tmp_path):
    folder = tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name in ("gate_proj", "up_proj"):
            weight = tensors[f"model.layers.{layer}.mlp.{name}.weight"]
            weight[64:] = weight[:64]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fitted, masked = (
        searched(folder, [Shape(64, 8, 2, 2)], replace(settings(compensate=fit), steps=128)).best.divergence
        for fit in (True, False)
    )
    assert fitted < 0.02 * masked


def test_the_metric_of_the_outputs_decides_with(tmp_path):
    folder = tiny_llama(tmp_path / "m")
    checkpoint, parts = opened(folder)
    gradients = collect_gradients(checkpoint, parts, FIT, Silent())
    with_metric = search_shapes(checkpoint, parts, [Shape(64, 8, 2, 2)], FIT, HELD_OUT, settings(), gradients, Silent())
    assert with_metric.best.divergence != searched(folder, [Shape(64, 8, 2, 2)], settings()).best.divergence


def test_numbers_that_are_not_finite_are_told(tmp_path):
    folder = tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].sign_().mul_(3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match="not finite"):
        searched(folder, [Shape(64, 8, 2, 2)], settings())
    with pytest.raises(BrokenResultError, match="not finite"):
        searched(folder, [Shape(64, 8, 2, 2)], settings("random", compensate=False))
