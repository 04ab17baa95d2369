from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import BrokenResultError, MissingResourceError, UsageError
from compress.model.checkpoint import open_checkpoint
from compress.model.load import build_model, load_original, load_tokenizer, model_class, vocabulary

MODELS = [
    tiny.tiny_llama,
    tiny.tiny_mistral,
    tiny.tiny_qwen2,
    tiny.tiny_qwen3,
    tiny.tiny_gemma2,
    tiny.tiny_gemma3,
    tiny.tiny_opt,
    tiny.tiny_gpt2,
    tiny.tiny_bert,
]
IDS = torch.arange(20, 60)[None]


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def _edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def _toggle_prefix(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The same weights with the base model's prefix taken away where it is, and added where it is not."""

    def rename(name: str) -> str:
        if name.startswith("lm_head."):
            return name
        return name.removeprefix(prefix) if name.startswith(prefix) else prefix + name

    return {rename(name): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_built_from_weights_equals_a_load_from_disk(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    original = load_original(checkpoint, dtype=torch.float32, device="cpu")
    stock = type(original).from_pretrained(folder, dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    expected = _logits(stock)
    assert torch.equal(_logits(original), expected)
    # A quantization_config in the folder says nothing about weights that come from memory.
    _edit_config(folder, quantization_config={"quant_method": "compressed-tensors"})
    prefix = original.base_model_prefix + "."
    for state in (weights, _toggle_prefix(weights, prefix)):
        model = build_model(folder, state, dtype=torch.float32, device="cpu")
        assert type(model) is type(stock)
        assert torch.equal(_logits(model), expected)
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
        assert not hasattr(model.config, "quantization_config")
        for (name, built), (_, loaded) in zip(model.named_buffers(), stock.named_buffers(), strict=True):
            assert torch.equal(built, loaded), name


@pytest.mark.parametrize("make", [tiny.tiny_gpt2, tiny.tiny_opt, tiny.tiny_gemma3], ids=lambda make: make.__name__)
def test_ties_are_restored(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert not any(name.startswith("lm_head") for name in weights)
    model = build_model(folder, weights, dtype=torch.float32, device="cpu")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight is head.weight


def test_weights_in_the_right_dtype_are_not_copied(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    model = build_model(folder, weights, dtype=torch.float32, device="cpu")
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr(), name


def test_dtype_is_the_asked_one(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    model = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_generation_config_comes_along(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    weights = load_file(folder / "model.safetensors")
    assert build_model(folder, weights, dtype=torch.float32, device="cpu").generation_config.temperature == 0.6


def test_all_faults_of_the_weights_are_listed(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(folder)
    loads = (
        lambda: load_original(checkpoint, dtype=torch.float32, device="cpu"),
        lambda: build_model(folder, weights, dtype=torch.float32, device="cpu"),
    )
    for load in loads:
        with pytest.raises(BrokenResultError) as caught:
            load()
        assert "1 missing: model.layers.0.mlp.up_proj.weight" in caught.value.message
        assert "1 unexpected: model.layers.9.mlp.up_proj.weight" in caught.value.message
        assert "1 mismatched: model.norm.weight" in caught.value.message


def test_keys_that_a_class_ignores_are_no_fault(tmp_path: Path) -> None:
    folder = tiny.tiny_gpt2(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    # GPT-2 checkpoints on the hub store the causal mask; the class declares it ignorable.
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    build_model(folder, weights, dtype=torch.float32, device="cpu")


def test_class_comes_from_architectures_else_from_model_type() -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert model_class(config) is transformers.LlamaForCausalLM
    assert model_class({"model_type": "bert"}) is transformers.BertModel


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForTelepathy"]},
        {"model_type": "llama", "architectures": ["AutoTokenizer"]},
        {"model_type": "telepath"},
    ],
)
def test_unknown_architectures_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="does not know the architecture"):
        model_class(config)


REMOTE_CODE = """
from pathlib import Path
import transformers
Path({marker!r}).write_text("executed")

class SecretForCausalLM(transformers.LlamaForCausalLM):
    pass
"""


def test_remote_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder, marker = tiny.tiny_llama(tmp_path / "model"), tmp_path / "marker"
    (folder / "modeling_secret.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    _edit_config(
        folder,
        architectures=["SecretForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_secret.SecretForCausalLM"},
    )
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UsageError, match="brings its own code") as caught:
        load_original(checkpoint, dtype=torch.float32, device="cpu")
    assert "--trust-remote-code" in (caught.value.hint or "")
    load_tokenizer(folder)
    assert not marker.exists()
    model = load_original(checkpoint, dtype=torch.float32, device="cpu", trust_remote_code=True)
    assert type(model).__name__ == "SecretForCausalLM"
    assert marker.exists()


def test_a_stock_class_is_used_even_where_code_lies_beside_it(tmp_path: Path) -> None:
    folder, marker = tiny.tiny_llama(tmp_path / "model"), tmp_path / "marker"
    (folder / "modeling_secret.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    _edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_secret.SecretForCausalLM"})
    model = load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    assert type(model) is transformers.LlamaForCausalLM
    assert not marker.exists()


def test_tokenizers_load_fast_or_say_why_not(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    assert load_tokenizer(folder)("the")["input_ids"]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_tokenizer(folder)
    for name, content in (("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("tokenizer.json", "[" * 100_000)):
        broken = tiny.tiny_llama(tmp_path / f"{name}-{len(content)}")
        (broken / name).write_text(content)
        with pytest.raises(UsageError, match=f"{name}-.*cannot be loaded") as caught:
            load_tokenizer(broken)
        assert "\n" not in caught.value.message
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MissingResourceError, match="holds no tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize("stated", [5, 0, {}, {"a": 1}, [None], "LlamaForCausalLM", [["LlamaForCausalLM"]]])
def test_architectures_of_another_form(stated: object) -> None:
    with pytest.raises(UsageError, match=r"`architectures` is .*; it must be a list of class names"):
        model_class({"model_type": "llama", "architectures": stated})


@pytest.mark.parametrize("changes", [{"hidden_act": "wat"}, {"hidden_size": "64"}])
def test_a_config_that_transformers_rejects_is_named(changes: dict[str, object], tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    _edit_config(folder, **changes)
    with pytest.raises(UsageError, match=r"config\.json: LlamaForCausalLM cannot be built"):
        load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")
    with pytest.raises(UsageError, match=r"config\.json: LlamaForCausalLM cannot be built"):
        build_model(folder, weights, dtype=torch.float32, device="cpu")


def test_the_unread_mask_of_old_gpt2_files_is_no_fault(tmp_path: Path) -> None:
    folder = tiny.tiny_gpt2(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    expected = _logits(load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu"))
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(_logits(load_original(open_checkpoint(folder), dtype=torch.float32, device="cpu")), expected)


def test_a_vocabulary_that_config_json_leaves_to_the_class(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    assert vocabulary(open_checkpoint(folder)) == 256
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert vocabulary(open_checkpoint(folder)) == transformers.LlamaConfig().vocab_size
