"""Models whose layers are found by name (ViT, Whisper, T5, types of no table), and classes beside the usual ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_more
import torch
import transformers
from commandline import compress
from safetensors.torch import load_file

from compress.pipeline.job import Options
from compress.pipeline.run import Result, run
from compress.progress import Silent
from compress.recipe.schema import Recipe


def quantized(model: Path, output: Path, *, evaluate: Any = None, **step: Any) -> Result:
    recipe = {"version": 1, "model": str(model), "output": str(output), "steps": [{"quantize": step}]}
    return run(Recipe.model_validate(recipe | {"evaluate": evaluate}), Options(), Silent())


def proved(result: Result) -> bool:
    proof = result.report.proof
    return proof is not None and all(check["passed"] for check in proof["checks"])


def schemes(result: Result) -> dict[str, str | None]:
    return {layer.name: layer.scheme for layer in result.report.steps[0].layers if layer.skipped is None}


def test_h11_three_names_of_one_embedding_are_saved_once(tmp_path: Path) -> None:
    source = tiny_more.tiny_t5(tmp_path / "m", dtype=torch.bfloat16)
    result = quantized(source, tmp_path / "out", target="int8", evaluate={"fidelity": {"tokens": 512, "length": 64}})
    assert proved(result)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in stored if "shared" in name or "embed_tokens" in name or "lm_head" in name] == [
        "shared.weight"
    ]
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    names = (loaded.shared, loaded.encoder.embed_tokens, loaded.decoder.embed_tokens, loaded.lm_head)
    assert len({module.weight.data_ptr() for module in names}) == 1
    assert any(part["name"] == "tie" and "one tensor" in part["detail"] for part in result.report.proof["checks"])
    counted = {m.metric: m.value for m in result.report.measurements if m.subject == "original"}
    original = transformers.T5ForConditionalGeneration.from_pretrained(source)
    assert counted["parameters"] == sum(parameter.numel() for parameter in original.parameters())
    assert {m.metric for m in result.report.measurements if m.value is not None} <= {
        *("size", "size.ratio", "parameters", "bits_per_weight")
    }
    assert any("answers and times of t5 are not measured" in note for note in result.report.steps[0].notes)


def test_two_lists_of_blocks_keep_their_schemes_apart(tmp_path: Path) -> None:
    source = tiny_more.tiny_whisper(tmp_path / "m")
    overrides = [{"layers": "encoder.layers.*", "target": "int8-weight"}]
    skip = ["decoder.layers.0.fc1"]
    result = quantized(source, tmp_path / "out", target="int4", algorithm="rtn", overrides=overrides, skip=skip)
    assert proved(result)
    found = schemes(result)
    assert {scheme for name, scheme in found.items() if ".encoder." in name} == {"W8A16 channel"}
    assert {scheme for name, scheme in found.items() if ".decoder." in name} == {"W4A16 g64"}
    assert "model.decoder.layers.0.fc1" not in found
    assert "model.encoder.layers.0.fc1" in found
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32 and tensor.dim() >= 2}
    assert {name for name in kept if "conv" in name or "embed" in name} == {
        *("model.encoder.conv1.weight", "model.encoder.conv2.weight", "model.encoder.embed_positions.weight"),
        *("model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"),
    }


def test_layers_that_the_class_calls_otherwise(tmp_path: Path) -> None:
    source = tiny_more.tiny_vit(tmp_path / "m")
    overrides = [{"layers": "output.dense", "target": "int8-weight"}]
    result = quantized(
        source, tmp_path / "out", target="int4", algorithm="rtn", overrides=overrides, skip=["intermediate.dense"]
    )
    assert proved(result)
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "vit.layers.0.mlp.fc1" in block["ignore"]
    assert "classifier" in block["ignore"]


def test_a_decoder_of_no_table_is_measured_as_others_are(tmp_path: Path) -> None:
    source = tiny_more.tiny_gptj(tmp_path / "m")
    evaluate = {"fidelity": {"tokens": 512, "length": 64}}
    result = quantized(source, tmp_path / "out", target="int4", algorithm="rtn", evaluate=evaluate)
    assert proved(result)
    kl = next(m.value for m in result.report.measurements if m.metric == "kl.mean" and "/" in m.subject)
    assert kl is not None
    assert 0 < kl < 0.1
    assert any("gptj is not in the table" in note for note in result.report.steps[0].notes)
    assert len(schemes(result)) == 12


def bert_without_pooler(folder: Path) -> Path:
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**fields, vocab_size=256, max_position_embeddings=128)
    return tiny.save(transformers.BertModel(config, add_pooling_layer=False), folder)


def bare_llama(folder: Path) -> Path:
    return _other_class(tiny.tiny_llama(folder), transformers.LlamaModel)


def llama_classifier(folder: Path) -> Path:
    return _other_class(tiny.tiny_llama(folder), transformers.LlamaForSequenceClassification)


def _other_class(folder: Path, cls: Any) -> Path:
    torch.manual_seed(0)
    cls.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("build", [bert_without_pooler, bare_llama, llama_classifier])
def test_classes_that_read_a_text(build: Any, tmp_path: Path) -> None:
    evaluate = {"fidelity": {"tokens": 256, "length": 64}}
    result = quantized(build(tmp_path / "m"), tmp_path / "out", target="int8", smooth=False, evaluate=evaluate)
    assert proved(result)
    cosine = next(m.value for m in result.report.measurements if m.metric == "cosine.mean" and "/" in m.subject)
    assert cosine is not None
    assert cosine > 0.99


def refused(tmp_path: Path, source: Path, *arguments: str) -> str:
    done = compress("quantize", source, *arguments, "-o", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    return " ".join(done.stderr.split())


def test_calibration_and_gates_on_answers_are_refused(tmp_path: Path) -> None:
    source = tiny_more.tiny_t5(tmp_path / "m")
    said = refused(tmp_path, source, "--target", "int4")
    assert "GPTQ needs calibration input, and for t5 there is none yet: use --algorithm rtn" in said
    said = refused(tmp_path, source, "--target", "int8", "--gate", "kl.mean <= 0.1")
    assert "kl.mean is not measured for models that neither go on with a text nor read one" in said


def test_formats_that_stock_transformers_cannot_load_are_refused(tmp_path: Path) -> None:
    source = tiny_more.tiny_modernbert(tmp_path / "m")
    said = refused(tmp_path, source, "--target", "int4")
    assert "modernbert cannot be written as compressed-tensors for target int4" in said
    assert "--format gptq or" in said
    assert "--target int8" in said


def test_what_is_no_nn_linear_is_named_with_the_way_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
    source = tiny.save(transformers.FalconForCausalLM(config), tmp_path / "m")
    said = refused(tmp_path, source, "--target", "int8")
    assert "transformer.h.0.self_attention.dense: FalconLinear" in said
    assert "skip" in said


def test_models_with_several_kinds_of_input_are_refused(tmp_path: Path) -> None:
    parts = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = parts | {"vocab_size": 16, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=parts | {"image_size": 8, "patch_size": 4}, projection_dim=8
    )
    source = tiny.save(transformers.CLIPModel(config), tmp_path / "m")
    assert "clip reads several kinds of input (text_config, vision_config)" in refused(
        tmp_path, source, "--target", "int8"
    )


def test_answers_of_such_models_cannot_be_compared(tmp_path: Path) -> None:
    source = tiny_more.tiny_vit(tmp_path / "m")
    done = compress("eval", source, source)
    assert done.returncode == 2
    assert "answers and times of vit cannot be measured" in " ".join(done.stderr.split())
