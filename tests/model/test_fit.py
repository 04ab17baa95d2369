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


def test_values_decide_where_the_config_ties_nothing(tmp_path: Path) -> None:
    """T5 1.1 and Flan-T5: the class ties a head that the file has for itself."""

    def add_head(weights: State) -> None:
        weights["lm_head.weight"] = weights["shared.weight"] + 1

    folder = _edit(tiny_more.tiny_t5(tmp_path / "m", feed_forward_proj="gated-gelu"), add_head)
    assert "tie_word_embeddings" in _refusal(_config(folder, tie_word_embeddings=True))
    check_fit(open_checkpoint(_config(folder, tie_word_embeddings=False)))


@pytest.mark.parametrize("make", [tiny.tiny_bert, tiny_more.tiny_mpnet, tiny_more.tiny_modernbert])
def test_a_bare_encoder_whose_config_names_a_class_with_a_head(make: Any, tmp_path: Path) -> None:
    """What sentence-transformers writes."""
    folder = make(tmp_path / "m")
    bare = json.loads((folder / "config.json").read_text())["architectures"]
    checkpoint = open_checkpoint(_config(folder, architectures=[bare[0].replace("Model", "ForMaskedLM")]))
    assert checkpoint.config["architectures"] == bare
    check_fit(checkpoint)


def test_what_the_training_of_bert_left_in_the_file(tmp_path: Path) -> None:
    """bert-base names BertForMaskedLM and holds the pooler and the head for the order of sentences too."""
    config = transformers.BertConfig(**tiny_more._TEXT)
    folder = tiny.save(transformers.BertForMaskedLM(config), tmp_path / "m")
    more = {"bert.pooler.dense.weight": (64, 64), "bert.pooler.dense.bias": (64,), "cls.seq_relationship.bias": (2,)}
    _edit(folder, lambda weights: weights | {name: torch.zeros(shape) for name, shape in more.items()})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["architectures"] == ["BertForMaskedLM"]
    check_fit(checkpoint)
    _edit(folder, lambda weights: weights | {"bert.encoder.layer.2.output.dense.bias": torch.zeros(64)})
    assert "bert.encoder.layer.2.output.dense.bias: not expected" in _refusal(folder)


def test_a_missing_head_that_was_tied(tmp_path: Path) -> None:
    folder = _config(tiny.tiny_llama(tmp_path / "m", tie_word_embeddings=True), "tie_word_embeddings")
    with pytest.raises(UsageError) as caught:
        check_fit(open_checkpoint(folder))
    assert "tie_word_embeddings: true" in str(caught.value.hint)


def test_a_class_that_splits_weights_is_refused_for_compressed_tensors(tmp_path: Path) -> None:
    config = transformers.Dinov2Config(**tiny_more._SMALL | {"image_size": 32, "patch_size": 8})
    checkpoint = open_checkpoint(tiny.save(transformers.Dinov2Model(config), tmp_path / "m"))
    check_fit(checkpoint)
    with pytest.raises(UsageError, match="Dinov2Model from compressed-tensors"):
        check_fit(checkpoint, compressed=True)
    check_fit(open_checkpoint(tiny_more.tiny_vit(tmp_path / "vit")), compressed=True)


def test_globs_that_name_the_layers_and_no_others(tmp_path: Path) -> None:
    folder = _config(tiny_more.tiny_t5(tmp_path / "m"), architectures=["T5EncoderModel"])
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UsageError) as caught:
        check_fit(checkpoint, found=anatomy(checkpoint).layers)
    assert caught.value.hint == "leave them alone: skip decoder.block.*"


def test_the_classifier_of_gemma_3(tmp_path: Path) -> None:
    folder = tiny.tiny_gemma3(tmp_path / "m")
    checkpoint = open_checkpoint(_config(folder, architectures=["Gemma3TextForSequenceClassification"]))
    assert anatomy(checkpoint).kind == "encoder"
