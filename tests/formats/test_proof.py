"""The proof passes for folders that are right, and fails for each way of being wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from written import FP8, LLM_INT8, NF4, W4, W8A8, W8A16, measure, proof_job, write

from compress.errors import BrokenResultError
from compress.formats import proof_worker
from compress.formats.proof import prove, prove_all, stored_sha256
from compress.formats.read import Reader
from compress.model.load import build_model


def job(written, logits, loader):
    """What `prove` sends to the worker."""
    return proof_job(written, logits, loader).as_json()


def failures(record):
    return {check.name for check in record.checks if not check.passed}


CASES = {
    "llama w4": (tiny.tiny_llama, "compressed-tensors", W4, "stock"),
    "llama w8a8": (tiny.tiny_llama, "compressed-tensors", W8A8, "stock"),
    "gemma3 w8a8": (tiny.tiny_gemma3, "compressed-tensors", W8A8, "stock"),
    "bert w8a8": (tiny.tiny_bert, "compressed-tensors", W8A8, "stock"),
    "llama fp8": (tiny.tiny_llama, "compressed-tensors", FP8, "stock"),
    "bert fp8": (tiny.tiny_bert, "compressed-tensors", FP8, "stock"),
    "llama nf4": (tiny.tiny_llama, "bitsandbytes", NF4, "stock"),
    "gpt2 nf4": (tiny.tiny_gpt2, "bitsandbytes", NF4, "stock"),
    "bert nf4": (tiny.tiny_bert, "bitsandbytes", NF4, "stock"),
    "opt int8-bnb": (tiny.tiny_opt, "bitsandbytes", LLM_INT8, "stock"),
    "gpt2 int8-bnb": (tiny.tiny_gpt2, "bitsandbytes", LLM_INT8, "stock"),
    "bert int8-bnb": (tiny.tiny_bert, "bitsandbytes", LLM_INT8, "stock"),
    "gpt2 gptq w4": (tiny.tiny_gpt2, "gptq", W4, "reader"),
    "opt gptq w8": (tiny.tiny_opt, "gptq", W8A16, "reader"),
    "bert gptq w4": (tiny.tiny_bert, "gptq", W4, "reader"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_right_folder_passes_every_check(tmp_path, case):
    make, format_name, scheme, loader = CASES[case]
    source = make(tmp_path / "source", dtype=torch.bfloat16)
    written = write(source, tmp_path / "out", format_name, scheme, max_shard_size=40_000)
    record = proof_worker.run(job(written, measure(written, tmp_path / "logits.safetensors"), loader))
    assert record.passed, record.checks
    names = [check.name for check in record.checks]
    decoder = written.anatomy.kind == "decoder"
    first = ["files", "original", "config", "side files"]
    assert names == [*first, "loading", "outputs", "weights", *(["cache"] if decoder else []), "tie"]
    assert (record.kl_mean is not None) == decoder
    assert record.tokens == 48


@pytest.mark.parametrize("make", [tiny.tiny_gpt2, tiny.tiny_bert], ids=lambda function: function.__name__)
def test_a_plain_cast_is_proved_against_the_original(tmp_path, make):
    source = make(tmp_path / "source")
    written = write(source, tmp_path / "out", "safetensors", lambda _layer: None, cast="bfloat16")
    logits = measure(written, tmp_path / "logits.safetensors")
    record = proof_worker.run(job(written, logits, "stock"))
    assert record.passed, record.checks
    name = next(name for name in written.source.tensors if name.endswith("bias"))

    def flip(tensors):
        tensors[name].view(torch.int16)[1] ^= 1

    rewrite(tmp_path / "out", name, flip)
    assert "original" in failures(proof_worker.run(job(written, logits, "stock")))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    source = tiny.tiny_llama(folder / "source", dtype=torch.bfloat16)
    written = write(source, folder / "out", "compressed-tensors", W4, max_shard_size=40_000)
    return written, measure(written, folder / "logits.safetensors")


def test_one_fresh_process_gives_the_same_answers_for_a_list_of_folders(good, tmp_path):
    written, logits = good
    right = proof_job(written, logits, "stock")
    wrong = replace(right, weight_sha256=written.hashes | {"model.layers.1.mlp.up_proj": "0" * 64})
    lost = replace(right, logits=tmp_path / "none.safetensors")
    first, second, third, fourth = prove_all([wrong, lost, right, right])
    assert failures(first) == {"weights"}
    assert failures(second) == {"process"}
    assert "none.safetensors" in second.checks[0].detail
    assert third.passed
    assert third == fourth == proof_worker.run(right.as_json())


def test_a_proof_that_fails_says_which_weight(good):
    written, logits = good
    wrong = written.hashes | {"model.layers.1.mlp.up_proj": "0" * 64}
    with pytest.raises(BrokenResultError, match=r"weights: model\.layers\.1\.mlp\.up_proj: .* differs"):
        prove(replace(proof_job(written, logits, "stock"), weight_sha256=wrong))


def test_a_process_that_dies_is_a_failed_proof(good, tmp_path):
    written, _ = good
    with pytest.raises(BrokenResultError, match="exit code"):
        prove(proof_job(written, tmp_path / "none.safetensors", "stock"))


@pytest.fixture
def copy(good, tmp_path):
    """A copy of the good folder to spoil, and its job."""
    written, logits = good
    shutil.copytree(written.stage, tmp_path / "copy")
    return tmp_path / "copy", job(written, logits, "stock") | {"stage": str(tmp_path / "copy")}


def shard_with(folder, name):
    return next(path for path in sorted(folder.glob("*.safetensors")) if name in load_file(path))


def rewrite(folder, name, change):
    path = shard_with(folder, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_flipped_bit_of_a_code_is_found(copy):
    folder, task = copy
    name = "model.layers.0.self_attn.k_proj.weight_packed"

    def flip(tensors):
        tensors[name][3, 2] ^= 1

    rewrite(folder, name, flip)
    assert "weights" in failures(proof_worker.run(task))


def test_a_flipped_bit_of_an_embedding_that_no_window_reads_is_found(copy):
    folder, task = copy
    name = "model.embed_tokens.weight"

    def flip(tensors):
        tensors[name].view(torch.int16)[255, 1] ^= 1

    rewrite(folder, name, flip)
    assert failures(proof_worker.run(task)) == {"original"}


def test_a_changed_scale_is_found(copy):
    folder, task = copy
    name = "model.layers.1.mlp.down_proj.weight_scale"

    def double(tensors):
        tensors[name][0, 0] *= 2

    rewrite(folder, name, double)
    assert "weights" in failures(proof_worker.run(task))


def test_a_dropped_tensor_is_found(copy):
    folder, task = copy
    name = "model.norm.weight"
    rewrite(folder, name, lambda tensors: tensors.pop(name))
    record = proof_worker.run(task)
    assert failures(record) == {"files"}
    assert "model.norm.weight: planned BF16 [64], found nothing" in record.checks[0].detail


def test_a_tensor_of_another_dtype_is_found(copy):
    folder, task = copy
    name = "model.norm.weight"
    rewrite(folder, name, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert failures(proof_worker.run(task)) == {"files"}


def test_a_file_that_was_not_planned_is_found(copy):
    folder, task = copy
    save_file({"x": torch.zeros(1)}, folder / "adapter.safetensors")
    assert failures(proof_worker.run(task)) == {"files"}


def test_a_cut_off_file_is_found(copy):
    folder, task = copy
    path = shard_with(folder, "model.norm.weight")
    path.write_bytes(path.read_bytes()[:-1])
    record = proof_worker.run(task)
    assert failures(record) == {"files"}
    assert "cut off" in record.checks[0].detail


def test_a_config_of_another_scheme_is_found(copy):
    folder, task = copy
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_bits": 4', '"num_bits": 8'))
    assert failures(proof_worker.run(task)) == {"loading"}


def test_other_measured_outputs_are_found(copy, tmp_path):
    _, task = copy
    tensors = load_file(task["logits"])
    tensors["logits.1"][3] += torch.linspace(0, 1, 256)
    save_file(tensors, tmp_path / "other.safetensors")
    assert failures(proof_worker.run(task | {"logits": str(tmp_path / "other.safetensors")})) == {"outputs"}


def test_a_weight_that_is_not_finite_is_found(tmp_path):
    """Written on purpose into a tensor that is only copied, in the original too."""
    source = tiny.tiny_llama(tmp_path / "source")
    rewrite(source, "model.norm.weight", lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    written = write(source, tmp_path / "out", "compressed-tensors", W4)
    logits = measure(written, tmp_path / "logits.safetensors")
    assert "outputs" in failures(proof_worker.run(job(written, logits, "stock")))


def test_a_broken_tie_is_found(tmp_path):
    written = write(tiny.tiny_opt(tmp_path / "source"), tmp_path / "out", "gptq", W4)
    state = Reader(written.stage).state_dict(torch.float32)
    model = build_model(written.stage, state, dtype=torch.float32, device="cpu")
    assert proof_worker.check_tie(model).passed
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert not proof_worker.check_tie(model).passed


def test_a_cache_that_forgets_is_found(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "gptq", W4)
    state = Reader(written.stage).state_dict(torch.float32)
    model = build_model(written.stage, state, dtype=torch.float32, device="cpu")
    ids = torch.arange(24)
    assert proof_worker.check_cache(model, ids, span=1.0).passed

    def forget(_module, _arguments, keywords):
        return (), {name: value for name, value in keywords.items() if name not in ("cache", "past_key_values")}

    model.register_forward_pre_hook(forget, with_kwargs=True)
    assert not proof_worker.check_cache(model, ids, span=1.0).passed


def test_inputs_are_not_rounded_while_the_cache_is_checked(tmp_path):
    written = write(tiny.tiny_llama(tmp_path / "source"), tmp_path / "out", "compressed-tensors", W8A8)
    model = proof_worker.load(written.stage, stock=True, trust_remote_code=False)
    state = Reader(written.stage).state_dict(torch.float32)
    dense = build_model(written.stage, state, dtype=torch.float32, device="cpu")
    ids = torch.arange(24).unsqueeze(0)
    with torch.inference_mode():
        assert not torch.equal(model(ids).logits, dense(ids).logits)
        assert proof_worker.check_cache(model, ids[0], span=1.0).passed
        assert torch.equal(model(ids).logits, dense(ids).logits)


REPLACED = "model.layers.0.input_layernorm.weight"


def replaced_job(tmp_path, declared):
    """A folder with one norm replaced, and a job that declares `declared` of the new tensor as replaced."""
    source = tiny.tiny_llama(tmp_path / "source", dtype=torch.bfloat16)
    new = torch.linspace(1, 2, 64).bfloat16()
    written = write(source, tmp_path / "out", "compressed-tensors", W8A8, replaced={REPLACED: new})
    logits = measure(written, tmp_path / "logits.safetensors")
    return job(written, logits, "stock") | {"replaced_sha256": declared(stored_sha256(new))}


def test_a_replaced_tensor_is_compared_with_what_was_planned(tmp_path):
    record = proof_worker.run(replaced_job(tmp_path, lambda sha256: {REPLACED: sha256}))
    assert failures(record) == set()
    assert "1 what replaced them" in next(check.detail for check in record.checks if check.name == "original")


@pytest.mark.parametrize(
    "declared",
    [
        lambda _sha256: {},
        lambda sha256: {REPLACED: sha256[::-1]},
        lambda sha256: {REPLACED: sha256, "model.layers.0.mlp.up_proj.weight": sha256},
        lambda sha256: {REPLACED: sha256, "model.norm.bias": sha256},
    ],
    ids=["not declared", "other bytes", "a quantized layer", "no such tensor"],
)
def test_tensors_that_changed_otherwise_than_planned_are_found(tmp_path, declared):
    assert "original" in failures(proof_worker.run(replaced_job(tmp_path, declared)))
