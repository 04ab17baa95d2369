"""bitsandbytes folders: what is in them, how they are read, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from written import LLM_INT8, NF4, W8A8, write

from compress.errors import BrokenResultError, MissingResourceError, UsageError
from compress.formats import bitsandbytes
from compress.formats.bitsandbytes_layout import cpu_note
from compress.formats.layout import refusals
from compress.formats.read import Reader
from compress.model.anatomy import anatomy
from compress.model.checkpoint import open_checkpoint
from compress.model.load import load_original

SCHEMES = pytest.mark.parametrize("scheme", [NF4, LLM_INT8], ids=lambda scheme: scheme.label)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
QUERY = "model.layers.0.self_attn.q_proj"


def without(*ends):
    """A choice of layers: all but those whose names end so."""
    return lambda scheme: lambda layer: None if layer.name.endswith(ends) else scheme


def saved_by_transformers(source, folder, scheme, dtype, **settings):
    """The folder that transformers itself writes when it quantizes the same modules."""
    asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if scheme == NF4 else {"load_in_8bit": True}
    config = transformers.BitsAndBytesConfig(**asked, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=dtype)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@SCHEMES
@DTYPES
@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_gpt2], ids=lambda make: make.__name__)
def test_a_folder_holds_what_transformers_itself_would_write(tmp_path, make, scheme, dtype):
    """Names, dtypes, shapes, values and config; GPT-2's Conv1D weights stand there as those of linear layers."""
    source = make(tmp_path / "source", dtype=dtype)
    write(source, tmp_path / "ours", "bitsandbytes", scheme)
    computing = {"bnb_4bit_compute_dtype": dtype} if scheme == NF4 else {}
    theirs, config = saved_by_transformers(source, tmp_path / "theirs", scheme, dtype, **computing)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    written = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    skipped = written.pop("llm_int8_skip_modules")
    expected = config["quantization_config"]
    assert skipped == ["lm_head"]
    assert expected.pop("llm_int8_skip_modules") is None
    assert written == expected


@SCHEMES
@DTYPES
def test_the_reader_gives_back_what_was_written(tmp_path, scheme, dtype):
    """H04: zero rows and zero blocks have positive scales and stay exactly zero."""
    source = tiny.tiny_llama(tmp_path / "source", dtype=dtype)
    tensors = load_file(source / "model.safetensors")
    tensors[f"{QUERY}.weight"][5] = 0
    tensors["model.layers.0.mlp.down_proj.weight"][7, :64] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    written = write(source, tmp_path / "out", "bitsandbytes", scheme, max_shard_size=30_000)
    assert len(written.shards) > 3
    for shard in written.shards:
        assert (tmp_path / "out" / shard.file).stat().st_size == shard.nbytes
    reader = Reader(tmp_path / "out")
    assert sorted(reader.quantized_names) == sorted(written.weights)
    for name, weight in written.weights.items():
        found = reader.quantized(name)
        assert found.scheme == scheme
        assert torch.equal(found.codes, weight.codes)
        assert torch.equal(found.scale, weight.scale)
        assert bool((found.scale > 0).all())
    assert not reader.quantized(QUERY).dequantize(torch.float32)[5].any()
    assert not reader.quantized("model.layers.0.mlp.down_proj").dequantize(torch.float32)[7, :64].any()
    assert reader.state_dict(torch.float32).keys() == tensors.keys()


@SCHEMES
@pytest.mark.parametrize("make", [tiny.tiny_opt, tiny.tiny_bert, tiny.tiny_gpt2], ids=lambda make: make.__name__)
def test_stock_loading_quantizes_what_is_planned_and_nothing_else(tmp_path, make, scheme):
    """H07 and H08: skipped layers, tied heads, poolers and biases are as they were."""
    source = make(tmp_path / "source")
    ends = ("k_proj", "attention.self.key", "1.mlp.c_fc")
    written = write(source, tmp_path / "out", "bitsandbytes", without(*ends)(scheme))
    model = load_original(open_checkpoint(tmp_path / "out"), dtype=torch.float32, device="cpu")
    found = {name for name, module in model.named_modules() if bitsandbytes.dequantized(module) is not None}
    assert found == set(written.weights)
    assert len(found) < len(written.anatomy.layers)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    quantized = {written.layer(name).tensor for name in written.weights}
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - quantized)
    assert {name for name in before if name.endswith("bias")} == {name for name in after if name.endswith("bias")}
    head = model.get_output_embeddings()
    assert head is None or head.weight is model.get_input_embeddings().weight


def test_the_skipped_modules_hold_for_the_bare_model_too(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "bitsandbytes", without("k_proj")(NF4))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["llm_int8_skip_modules"] == ["layers.0.self_attn.k_proj", "layers.1.self_attn.k_proj", "lm_head"]
    model = transformers.AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found = {name for name, module in model.named_modules() if bitsandbytes.dequantized(module) is not None}
    assert found == {name.removeprefix("model.") for name in written.weights}


def test_layers_that_transformers_keeps_in_float32_are_told(tmp_path):
    """T5's `wo`: the class takes it out of the quantization, whatever the config says."""
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    names = {"encoder.block.0.layer.1.DenseReluDense.wi", "encoder.block.0.layer.1.DenseReluDense.wo"}
    with pytest.raises(UsageError, match=r"would not load these layers .*: encoder\.block\.0\S*\.wo\.$"):
        bitsandbytes.skipped_of(model, names)
    kept = bitsandbytes.skipped_of(model, {name for name in names if not name.endswith("wo")})
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in kept


def test_what_the_format_cannot_hold_is_refused_with_the_layers(tmp_path):
    source = open_checkpoint(tiny.tiny_llama(tmp_path, hidden_size=96, num_attention_heads=12))
    layers = anatomy(source).layers
    narrow = [layer.name for layer in layers if layer.width == 96]
    found = refusals("bitsandbytes", layers, {layer.name: NF4 for layer in layers})
    assert [reason.partition(":")[0] for reason in found] == narrow
    assert all("no multiple of 64" in reason for reason in found)
    assert refusals("bitsandbytes", layers, {layer.name: LLM_INT8 for layer in layers}) == ()
    assert len(refusals("bitsandbytes", layers, {layer.name: W8A8 for layer in layers})) == len(layers)


SPOILED = {
    "fp4": (NF4, {"bnb_4bit_quant_type": "fp4"}, {}),
    "double": (NF4, {"bnb_4bit_use_double_quant": True}, {}),
    "both": (NF4, {"load_in_8bit": True}, {}),
    "threshold": (LLM_INT8, {"llm_int8_threshold": 3.0}, {}),
    "map": (NF4, {}, {"weight.quant_map": torch.zeros(16)}),
    "blocks": (NF4, {}, {"weight.absmax": torch.ones(7)}),
    "state": (
        NF4,
        {},
        {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b'{"quant_type": "nf4"}'), dtype=torch.uint8)},
    ),
    "order": (LLM_INT8, {}, {"weight_format": torch.tensor(1, dtype=torch.uint8)}),
    "rows": (LLM_INT8, {}, {"SCB": torch.ones(3)}),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_folder_that_others_would_read_differently_is_refused(tmp_path, case):
    scheme, settings, tensors = SPOILED[case]
    write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "bitsandbytes", scheme)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"] |= settings
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    stored |= {f"{QUERY}.{part}": tensor for part, tensor in tensors.items()}
    save_file(stored, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match=r"q_proj|quantization_config"):
        Reader(tmp_path / "out").quantized(QUERY)


def test_a_broken_library_is_told_with_its_pip_line(tmp_path, monkeypatch):
    import sys

    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text("raise OSError('libcudart.so: no such file')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingResourceError, match="libcudart") as caught:
        bitsandbytes.imported()
    assert "pip install bitsandbytes" in str(caught.value.hint)


def test_the_library_does_not_chat(caplog):
    with caplog.at_level(logging.WARNING):
        layer = bitsandbytes.linear_8bit(
            write_one(torch.randn(8, 16, generator=torch.Generator().manual_seed(0))), None, "cpu"
        )
        layer(torch.ones(1, 3, 16))
    assert not caplog.records


def write_one(weight):
    from compress.quantize.bitsandbytes_rounding import quantize_llm_int8

    return quantize_llm_int8(weight, LLM_INT8)


def test_outputs_that_a_processor_kernel_cannot_take_are_named(tmp_path):
    """Heads of 8 in 2 of 8 groups: k and v have 16 outputs, the others 64 or 128."""
    layers = anatomy(open_checkpoint(tiny.tiny_llama(tmp_path / "m"))).layers
    note = cpu_note(layers, {layer.name: NF4 for layer in layers})
    assert note is not None
    assert "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj" in note
    assert "and 1 more" in note
    assert cpu_note(layers, {layer.name: LLM_INT8 for layer in layers}) is None
    assert cpu_note(layers, {layer.name: NF4 for layer in layers if layer.out % 32 == 0}) is None


def test_what_the_kernel_of_this_processor_asserts_is_foretold(tmp_path):
    for heads in (2, 8):  # k and v have 16 outputs, or 64
        source = tiny.tiny_llama(tmp_path / f"m{heads}", num_key_value_heads=heads)
        write(source, tmp_path / f"o{heads}", "bitsandbytes", NF4)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"o{heads}").eval()
        folder = open_checkpoint(tmp_path / f"o{heads}")
        assert bitsandbytes.runs_here(folder, "cuda")
        with torch.inference_mode():
            if bitsandbytes.runs_here(folder, "cpu"):
                assert bool(model(input_ids=torch.arange(8)[None]).logits.isfinite().all())
            else:
                with pytest.raises(AssertionError, match="divisible"):
                    model(input_ids=torch.arange(8)[None])
