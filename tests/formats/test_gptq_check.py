"""A gptq folder whose configuration other loaders would read differently is refused, whatever our reader knows."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_proof import failures, job
from written import W4, W8A16, measure, write

from compress.errors import BrokenResultError
from compress.formats import proof_worker
from compress.formats.gptq import override
from compress.formats.read import Reader


def skip(*endings):
    return lambda layer: None if layer.name.endswith(endings) else W4


def edit_block(folder, change):
    """Edits `quantization_config` in both files that hold it."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(config["quantization_config"]))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gptq")
    source = tiny.tiny_llama(folder / "source", dtype=torch.bfloat16)
    written = write(source, folder / "out", "gptq", skip("q_proj"))
    logits = measure(written, folder / "logits.safetensors")
    assert proof_worker.run(job(written, logits, "reader")).passed
    return written, logits


@pytest.fixture
def copy(good, tmp_path):
    written, logits = good
    shutil.copytree(written.stage, tmp_path / "copy")
    return tmp_path / "copy", job(written, logits, "reader") | {"stage": str(tmp_path / "copy")}


CHANGES = {
    'checkpoint_format: found "marlin", expected "gptq" or "gptq_v2"': {"checkpoint_format": "marlin"},
    "sym: found false, expected true": {"sym": False},
    "sym: found 1, expected true": {"sym": 1},
    "desc_act: found true, expected false": {"desc_act": True},
    "lm_head: found true, expected false": {"lm_head": True},
    'pack_dtype: found "int8", expected "int32"': {"pack_dtype": "int8"},
    'format: found "gptq_v2", expected "gptq"': {"format": "gptq_v2"},
    "bits: found 3, expected 4 or 8": {"bits": 3},
    "group_size: found 0, expected -1 or a positive integer": {"group_size": 0},
    "+:.*o_proj: sym: found false, expected true": {"dynamic": {"+:.*o_proj": {"sym": False}}},
    ".*o_proj: desc_act: found true, expected false": {"dynamic": {".*o_proj": {"desc_act": True}}},
    "-:(: found no regular expression": {"dynamic": {"-:(": {}}},
    'modules_in_block_to_quantize: found ["q"]': {"modules_in_block_to_quantize": ["q"]},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_value_that_means_another_folder_fails_the_proof(copy, message):
    folder, task = copy
    edit_block(folder, lambda block: block.update(CHANGES[message]))
    with pytest.raises(BrokenResultError, match=re.escape(message)):
        Reader(folder)
    assert not proof_worker.run(task).passed
    assert not proof_worker.run(task | {"source": None}).passed


@pytest.mark.parametrize("key", ["checkpoint_format", "sym", "desc_act", "lm_head", "bits", "group_size"])
def test_a_value_that_loaders_would_guess_is_refused(copy, key):
    folder, _ = copy
    edit_block(folder, lambda block: block.pop(key))
    with pytest.raises(BrokenResultError, match=f"{key}: found nothing, expected"):
        Reader(folder)


def test_a_block_without_a_method_is_refused(copy):
    folder, task = copy
    edit_block(folder, lambda block: block.pop("quant_method"))
    with pytest.raises(BrokenResultError, match="quantization method 'None'"):
        Reader(folder)
    assert not proof_worker.run(task).passed


def test_pack_dtype_may_be_absent(copy):
    folder, task = copy
    edit_block(folder, lambda block: block.pop("pack_dtype"))
    assert proof_worker.run(task).passed


def test_dropped_rules_fail_the_proof(copy):
    folder, task = copy
    edit_block(folder, lambda block: block.pop("dynamic"))
    message = "model.layers.0.self_attn.q_proj: found no qweight, expected one by quantization_config: dynamic"
    with pytest.raises(BrokenResultError, match=re.escape(message)):
        Reader(folder)
    assert not proof_worker.run(task).passed


def test_a_dropped_list_is_no_fault_and_a_wrong_one_is(copy):
    folder, task = copy
    edit_block(folder, lambda block: block.pop("modules_in_block_to_quantize"))
    assert proof_worker.run(task).passed
    edit_block(folder, lambda block: block.update(modules_in_block_to_quantize=[["self_attn.q_proj", "mlp.up_proj"]]))
    with pytest.raises(BrokenResultError) as caught:
        Reader(folder)
    assert "q_proj: found no qweight, expected one by quantization_config: modules_in_block" in caught.value.message
    assert "down_proj: found a qweight, expected none by quantization_config: modules" in caught.value.message
    assert not proof_worker.run(task).passed


def test_a_rule_that_excludes_a_quantized_layer_is_refused(copy):
    folder, task = copy
    edit_block(folder, lambda block: block["dynamic"].update({r"-:.*layers\.1\.mlp\.down_proj": {}}))
    message = "model.layers.1.mlp.down_proj: found a qweight, expected none by quantization_config: dynamic"
    with pytest.raises(BrokenResultError, match=re.escape(message)):
        Reader(folder)
    assert not proof_worker.run(task).passed


def test_the_first_rule_that_matches_counts(copy):
    folder, task = copy
    same = {"bits": 4, "group_size": 32}
    edit_block(folder, lambda block: block.update(dynamic=block["dynamic"] | {"-:.*down_proj": {}}))
    assert not proof_worker.run(task).passed
    edit_block(folder, lambda block: block.update(dynamic={"+:.*down_proj": same} | block["dynamic"]))
    assert proof_worker.run(task).passed


@pytest.mark.parametrize("fused", ["qkv_proj", "gate_up_proj"])
def test_a_rule_that_excludes_a_fused_matrix_with_quantized_members_is_refused(copy, fused):
    folder, _ = copy
    edit_block(folder, lambda block: block["dynamic"].update({f"-:.*{fused}": {}}))
    with pytest.raises(BrokenResultError, match=f"{fused}: found excluded, expected included"):
        Reader(folder)


def test_a_quantized_head_is_refused(copy):
    folder, _ = copy
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.qweight"] = torch.zeros(8, 256, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenResultError, match="lm_head: found a qweight, expected none"):
        Reader(folder)


@pytest.mark.parametrize("content", ['{"bits": 8}', "[]", "{"], ids=["bits", "list", "cut off"])
def test_quantize_config_must_equal_the_block(copy, content):
    folder, task = copy
    path = folder / "quantize_config.json"
    if "bits" in content:
        content = json.dumps(json.loads(path.read_text()) | json.loads(content))
    path.write_text(content)
    with pytest.raises(BrokenResultError, match=r"quantize_config\.json"):
        Reader(folder)
    assert not proof_worker.run(task).passed
    path.unlink()
    assert proof_worker.run(task).passed


SKIPS = {
    "nothing": (tiny.tiny_llama, lambda _layer: W4),
    "a part of a fused group": (tiny.tiny_llama, skip("q_proj", "up_proj")),
    "a whole fused group": (tiny.tiny_llama, skip("q_proj", "k_proj", "v_proj")),
    "a block": (tiny.tiny_llama, lambda layer: None if layer.block == 0 else W4),
    "two schemes": (tiny.tiny_qwen2, lambda layer: W8A16 if layer.fused.endswith("qkv") else W4),
    "opt": (tiny.tiny_opt, skip("fc1", "k_proj")),
    "gpt2": (tiny.tiny_gpt2, skip("attn.c_proj")),
    "a name that ends with another's": (tiny.tiny_bert, skip("attention.output.dense")),
    "a name in another's": (tiny.tiny_bert, lambda x: W4 if x.name.endswith("attention.output.dense") else None),
}


@pytest.mark.parametrize("case", SKIPS)
def test_what_is_written_says_who_is_quantized(tmp_path, case):
    make, choose = SKIPS[case]
    written = write(make(tmp_path / "source"), tmp_path / "out", "gptq", choose)
    assert len(Reader(tmp_path / "out").quantized_names) == len(written.weights)


def test_a_fused_name_is_excluded_only_with_all_its_members(tmp_path):
    source = tiny.tiny_llama(tmp_path / "source")
    attention = "model.layers.1.self_attn"
    for name, endings, excluded in (
        ("part", ("q_proj", "gate_proj"), {"q_proj"}),
        ("whole", ("q_proj", "k_proj", "v_proj"), {"q_proj", "k_proj", "v_proj", "qkv_proj"}),
    ):
        write(source, tmp_path / name, "gptq", skip(*endings))
        block = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
        assert {last for last in names if override(block, f"{attention}.{last}") is None} == excluded
        assert override(block, "model.layers.1.mlp.gate_up_proj") == {}


def test_the_check_names_what_failed(copy):
    folder, task = copy
    edit_block(folder, lambda block: block.update(sym=False))
    record = proof_worker.run(task)
    assert failures(record) == {"original"}
    assert "sym: found false, expected true" in record.checks[1].detail
