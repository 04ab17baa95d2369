"""Which layers go, against trying everything with models that have fewer layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from tiny import tiny_bert, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_mistral
from tiny_more import tiny_modernbert, tiny_mpnet
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from compress.divergence import token_kl
from compress.errors import UsageError
from compress.model.anatomy import Anatomy, anatomy
from compress.model.checkpoint import Checkpoint, open_checkpoint
from compress.model.prunable import shape_of
from compress.model.pruned import layer_kinds, pruned_config, pruned_name
from compress.progress import Silent
from compress.prune import depth as module
from compress.prune.depth import DepthOrder, compared_positions, depth_order, shortened

SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
FOUR = {"num_hidden_layers": 4}
FAMILIES = {
    "llama": (tiny_llama, FOUR),
    "gpt2": (tiny_gpt2, {"n_layer": 4}),
    "gemma3": (tiny_gemma3, FOUR | {"layer_types": SLIDING, "sliding_window": 8}),
    "bert": (tiny_bert, FOUR),
    "mpnet": (tiny_mpnet, FOUR),
}


def opened(folder: Path) -> tuple[Checkpoint, Anatomy]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, anatomy(checkpoint)


def windows(count: int = 2, length: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 256, (length,), generator=generator) for _ in range(count)]


class Stock:
    """Stock models with some of the layers, built anew each time."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.parts = opened(folder)

    def distance(self, kept: Sequence[int], texts: Sequence[torch.Tensor]) -> float:
        whole, less = self.built(range(self.parts.depth)), self.built(kept)
        found = []
        with torch.no_grad():
            for ids in texts:
                one, other = whole(input_ids=ids[None]), less(input_ids=ids[None])
                if self.parts.kind == "decoder":
                    found.append(token_kl(one.logits[0], other.logits[0]))
                else:
                    states = (one.last_hidden_state[0].double(), other.last_hidden_state[0].double())
                    found.append(1 - torch.cosine_similarity(*states, dim=-1))
        return float(torch.cat(found).mean())

    def built(self, kept: Sequence[int]) -> transformers.PreTrainedModel:
        checkpoint, parts = self.checkpoint, self.parts
        shape = shape_of(checkpoint, parts)
        config = dict(pruned_config(checkpoint, parts, shape, tuple(kept)))
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        factory = AutoModelForCausalLM if parts.kind == "decoder" else AutoModel
        model = factory.from_config(made)
        named = {name: pruned_name(parts, name, tuple(kept)) for name in checkpoint.tensors}
        state = {new: checkpoint.read(name) for name, new in named.items() if new is not None}
        left = model.load_state_dict(state, strict=False)
        assert not left.unexpected_keys
        assert {key for key in left.missing_keys if "lm_head" not in key and "pooler" not in key} == set()
        return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_each_step_removes_the_layer_without_which_the_answers_are_nearest(tmp_path, name):
    make, overrides = FAMILIES[name]
    stock, texts = Stock(make(tmp_path / "m", **overrides)), windows()
    found = depth_order(stock.checkpoint, stock.parts, texts, Silent(), layers=2, importance="obs")
    kinds = layer_kinds(stock.checkpoint, stock.parts)
    gone: list[int] = []
    for step in range(2):
        here = [layer for layer in range(4) if layer not in gone]
        legal = [layer for layer in here if any(kinds[other] == kinds[layer] for other in here if other != layer)]
        scores = {layer: stock.distance([each for each in here if each != layer], texts) for layer in legal}
        if not step:
            assert list(found.alone) == pytest.approx([scores[layer] for layer in range(4)], rel=1e-3)
        gone.append(min(scores, key=lambda layer: (scores[layer], layer)))
        assert found.together[step] == pytest.approx(scores[gone[-1]], rel=1e-3)
    assert found.removed == tuple(gone)
    assert found.metric == ("kl" if stock.parts.kind == "decoder" else "1 - cosine")
    assert found.kept(2) == tuple(layer for layer in range(4) if layer not in gone)
    assert found.kept(3) == tuple(layer for layer in range(4) if layer != gone[0])


def test_one_layer_of_each_kind_stays(tmp_path):
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    checkpoint, parts = opened(tiny_gemma3(tmp_path / "m", num_hidden_layers=4, layer_types=kinds))
    for importance in ("obs", "taylor", "magnitude", "activation", "random"):
        found = depth_order(checkpoint, parts, windows(), Silent(), layers=2, importance=importance)
        assert 3 in found.kept(2)
        with pytest.raises(UsageError, match="2 kinds"):
            depth_order(checkpoint, parts, windows(), Silent(), layers=1, importance=importance)


def test_the_first_block_of_modernbert_stays(tmp_path):
    checkpoint, parts = opened(tiny_modernbert(tmp_path / "m", num_hidden_layers=4))
    for seed in range(4):
        found = depth_order(checkpoint, parts, (), Silent(), layers=2, importance="random", seed=seed)
        assert 0 in found.kept(3)
        assert found.kept(2) in ((0, 1), (0, 2))  # the two kinds of attention


def test_the_influence_of_a_block_is_the_cosine_between_its_ends(tmp_path):
    folder = tiny_llama(tmp_path / "m", num_hidden_layers=4)
    checkpoint, parts = opened(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    texts, ends = windows(), [[] for _ in range(4)]
    for index, layer in enumerate(model.model.layers):

        def keep(_module, args, output, index=index):
            ends[index].append(torch.cosine_similarity(args[0], output, dim=-1).flatten())

        layer.register_forward_hook(keep)
    with torch.no_grad():
        for ids in texts:
            model(ids[None])
    expected = [float(1 - torch.cat(each).mean()) for each in ends]
    found = depth_order(checkpoint, parts, texts, Silent(), layers=2, importance="activation")
    assert list(found.alone) == pytest.approx(expected, rel=1e-4)
    assert found.removed == tuple(sorted(range(4), key=lambda layer: expected[layer])[:2])


def test_magnitude_goes_by_squared_weights_and_ties_by_number(tmp_path):
    checkpoint, parts = opened(tiny_mistral(tmp_path / "m", num_hidden_layers=3))
    found = depth_order(checkpoint, parts, (), Silent(), layers=1, importance="magnitude")
    sizes = [
        sum(float(checkpoint.read(one.tensor).double().pow(2).sum()) for one in parts.layers if one.block == block)
        for block in range(3)
    ]
    assert list(found.alone) == pytest.approx(sizes)
    assert found.removed == tuple(sorted(range(3), key=lambda layer: sizes[layer])[:2])
    assert module._static(module._Layers(["a"] * 4), [1.0, 0.5, 0.5, 1.0], 3, "").removed == (1, 2, 0)


def test_random_follows_its_seed(tmp_path):
    checkpoint, parts = opened(tiny_llama(tmp_path / "m", num_hidden_layers=6))
    orders = [
        depth_order(checkpoint, parts, (), Silent(), layers=1, importance="random", seed=seed).removed
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_the_same_text_gives_the_same_numbers_to_the_bit(tmp_path):
    checkpoint, parts = opened(tiny_llama(tmp_path / "m", num_hidden_layers=4))
    first, again = (depth_order(checkpoint, parts, windows(), Silent(), layers=2, importance="obs") for _ in range(2))
    assert first == again


def test_a_short_list_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRIED", 2)
    checkpoint, parts = opened(tiny_llama(tmp_path / "m", num_hidden_layers=5))
    found = depth_order(checkpoint, parts, windows(), Silent(), layers=3, importance="obs")
    cheapest = sorted((layer for layer in range(5)), key=lambda layer: found.alone[layer])
    assert found.removed[0] == cheapest[0]
    assert found.removed[1] in cheapest[1:3]


def test_a_layer_that_does_nothing_goes_first(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "m", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint, parts = opened(folder)
    for importance in ("obs", "activation"):
        found = depth_order(checkpoint, parts, windows(), Silent(), layers=3, importance=importance)
        assert found.removed == (2,)
        assert found.together[0] == pytest.approx(0, abs=1e-6)


def test_nothing_goes_where_all_stay(tmp_path):
    checkpoint, parts = opened(tiny_llama(tmp_path / "m"))
    for importance in ("obs", "magnitude", "random"):
        found = depth_order(checkpoint, parts, (), Silent(), layers=2, importance=importance)
        assert found.kept(2) == (0, 1)


def test_an_order_knows_only_so_many():
    order = DepthOrder(4, (2, 0), (1.0, 2.0, 0.5, 3.0), (0.5, 1.5), "kl")
    assert order.kept(4) == (0, 1, 2, 3)
    assert order.kept(2) == (1, 3)
    for layers in (1, 5):
        with pytest.raises(ValueError, match="of 4 layers"):
            order.kept(layers)


def test_windows_are_cut_to_the_tokens_wanted():
    texts = windows(3, 24)
    assert [len(ids) for ids in shortened(texts, 40)] == [24, 16]
    assert [len(ids) for ids in shortened(texts, 25)] == [24]
    assert [len(ids) for ids in shortened(texts, 1000)] == [24, 24, 24]
    assert compared_positions(5).tolist() == [0, 1, 2, 3, 4]
    spread = compared_positions(512)
    assert len(spread) == 128
    assert spread[0] == 3
    assert spread[-1] == 511
