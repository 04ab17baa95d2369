"""Names in files against names in stock classes."""

from __future__ import annotations

from pathlib import Path

import tiny_more
import torch
import transformers

from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.load import config_of, empty_model, model_class
from compress.model.naming import module_finder


def test_renamed_layers_of_vit_are_found(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_more.tiny_vit(tmp_path / "m"))
    cls = model_class(checkpoint.config)
    model = empty_model(cls, config_of(cls, checkpoint.folder), checkpoint.folder)
    find = module_finder(model)
    names = [layer.name for layer in anatomy(checkpoint).layers]
    found = [find(name) for name in names]
    assert None not in found
    assert len(set(found)) == len(names) == 12
    assert all(isinstance(model.get_submodule(str(name)), torch.nn.Linear) for name in found)
    assert find("vit.encoder.layer.7.output.dense") is None


def test_a_prefix_of_the_base_model_may_be_there_or_not() -> None:
    config = transformers.GPTJConfig(n_embd=8, n_layer=1, n_head=1, n_positions=4, vocab_size=4, rotary_dim=8)
    full, bare = transformers.GPTJForCausalLM(config), transformers.GPTJModel(config)
    assert module_finder(full)("h.0.attn.q_proj") == "transformer.h.0.attn.q_proj"
    assert module_finder(bare)("transformer.h.0.attn.q_proj") == "h.0.attn.q_proj"
    assert module_finder(full)("h.1.attn.q_proj") is None
