from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_more
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import UsageError
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.fit import check_fit

State = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"


def _edit(folder: Path, change: Callable[[State], Any]) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights = change(weights) or weights
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def _config(folder: Path, *dropped: str, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in dropped}))
    return folder


def _refusal(folder: Path) -> str:
    checkpoint = open_checkpoint(folder, source="org/name")
    with pytest.raises(UsageError) as caught:
        check_fit(checkpoint)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize(
    "make",
    [
        tiny.tiny_llama,
        tiny.tiny_mistral,
        tiny.tiny_qwen2,
        tiny.tiny_qwen3,
        tiny.tiny_gemma2,
        tiny.tiny_gemma3,
        tiny.tiny_opt,
        tiny.tiny_gpt2,
        tiny.tiny_bert,
    ],
    ids=lambda make: make.__name__,
)
def test_a_model_as_saved_fits(make: Callable[..., Path], tmp_path: Path) -> None:
    check_fit(open_checkpoint(make(tmp_path / "model", dtype=torch.bfloat16)))


def _gpt2_masks(weights: State) -> State:
    plain = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 128, 128), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    return plain | masks


def _old_bert(weights: State) -> State:
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    return {f"bert.{name}": tensor for name, tensor in old.items()} | {
        "bert.embeddings.position_ids": torch.arange(128)[None]
    }


def _head_stored(weights: State) -> None:
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (tiny.tiny_gpt2, _gpt2_masks),
        (tiny.tiny_gpt2, _head_stored),
        (tiny.tiny_bert, _old_bert),
        (tiny.tiny_llama, lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ],
    ids=["gpt2 without prefix, with masks", "equal tied head", "old bert names", "old rotary buffer"],
)
def test_what_stock_loading_forgives_fits(
    make: Callable[..., Path], change: Callable[[State], Any], tmp_path: Path
) -> None:
    check_fit(open_checkpoint(_edit(make(tmp_path / "model"), change)))


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda w: w | {"foo.weight": torch.ones(3, 3)}, ["foo.weight: not expected"]),
        (lambda w: w | {"extra.zero": torch.ones(0, 3)}, ["extra.zero: not expected"]),
        (lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"}, ["lm_head.weight: missing"]),
        (
            lambda w: {k: v for k, v in w.items() if "input_layernorm" not in k},
            [f"model.layers.{block}.input_layernorm.weight: missing" for block in (0, 1)],
        ),
        (
            lambda w: w | {UP: torch.ones(128, 32), "foo": torch.ones(1)},
            [f"{UP}: the file has [128, 32], the class expects [128, 64]", "foo: not expected"],
        ),
        (lambda w: w | {UP: torch.ones(0, 64)}, [f"{UP}: the file has [0, 64], the class expects [128, 64]"]),
    ],
    ids=["extra", "empty extra", "no head", "no norms", "shape and extra", "empty weight"],
)
def test_weights_that_do_not_fit(change: Callable[[State], Any], problems: list[str], tmp_path: Path) -> None:
    message = _refusal(_edit(tiny.tiny_llama(tmp_path / "model"), change))
    first, *rest = message.splitlines()
    assert first == "org/name: the weights do not fit config.json as LlamaForCausalLM:"
    assert [line.strip() for line in rest] == problems


def test_a_config_of_another_depth_or_vocabulary(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model", num_hidden_layers=4)
    lines = _refusal(_config(folder, num_hidden_layers=1)).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[-1].strip() == "and 7 more"  # three blocks of nine tensors
    message = _refusal(_config(folder, num_hidden_layers=4, vocab_size=300))
    assert "model.embed_tokens.weight: the file has [256, 64], the class expects [300, 64]" in message


def test_a_default_that_is_not_the_model_s(tmp_path: Path) -> None:
    message = _refusal(_config(tiny.tiny_gpt2(tmp_path / "model"), "n_positions"))
    assert "transformer.wpe.weight: the file has [128, 64], the class expects [1024, 64]" in message


def test_the_class_of_another_model_type(tmp_path: Path) -> None:
    message = _refusal(_config(tiny.tiny_llama(tmp_path / "model"), architectures=["GPT2LMHeadModel"]))
    assert "GPT2LMHeadModel" in message
    assert "'gpt2'" in message
    assert "'llama'" in message


def test_a_missing_pooler_is_forgiven_to_a_bare_model_and_to_no_other(tmp_path: Path) -> None:
    def without_pooler(weights: State) -> State:
        return {name: tensor for name, tensor in weights.items() if "pooler" not in name}

    check_fit(open_checkpoint(_edit(tiny.tiny_bert(tmp_path / "bare"), without_pooler)))
    torch.manual_seed(0)
    config = transformers.BertConfig.from_pretrained(tmp_path / "bare")
    head = tiny.save(transformers.BertForSequenceClassification(config), tmp_path / "head")
    assert "bert.pooler.dense.weight: missing" in _refusal(_edit(head, without_pooler))


def test_a_tied_head_with_other_values(tmp_path: Path) -> None:
    folder = _config(tiny.tiny_llama(tmp_path / "model"), tie_word_embeddings=True)
    message = _refusal(folder)
    assert "lm_head.weight: tied to model.embed_tokens.weight" in message
    # Without the weights at hand there are no values to compare.
    check_fit(replace(open_checkpoint(folder), has_weights=False))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 7}, "not a multiple of the number of attention heads"),
        ({"hidden_size": "64"}, "'hidden_size' expected int"),
        ({"hidden_act": "wat"}, "wat"),
        ({"rope_parameters": {"rope_type": "wat"}}, "wat"),
        ({"dtype": "wat"}, "wat"),
        ({"hidden_size": 2**62}, "LlamaForCausalLM cannot be built"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_transformers_rejects(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    message = _refusal(_config(tiny.tiny_llama(tmp_path / "model"), **changes))
    assert "config.json" in message
    assert reason in message


@pytest.mark.parametrize("content", ["nope", "[]", "[" * 100_000, '{"max_new_tokens": "x"}'])
def test_a_damaged_generation_config(content: str, tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    assert "generation_config.json" in _refusal(folder)


def test_a_language_model_head_over_bert(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=256
    )
    folder = tiny.save(transformers.BertForMaskedLM(config), tmp_path / "model")
    check_fit(open_checkpoint(folder))


def test_classes_that_ask_packed_layers_for_their_weight_are_refused(tmp_path: Path) -> None:
    speech = open_checkpoint(tiny_more.tiny_whisper(tmp_path / "w"))
    text = open_checkpoint(tiny_more.tiny_t5(tmp_path / "t"))
    layers = anatomy(speech).layers
    check_fit(speech, found=layers, packed=layers, reads_text=False)
    layers = anatomy(text).layers
    check_fit(text, found=layers, reads_text=False)
    with pytest.raises(UsageError, match="cannot load T5ForConditionalGeneration with packed weights"):
        check_fit(text, found=layers, packed=layers, reads_text=False)
