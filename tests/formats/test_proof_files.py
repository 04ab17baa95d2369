"""The proof compares config.json and the side files with the original's, and says briefly why a process died."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
import torch
import transformers
from safetensors.torch import save_file
from test_proof import failures, job
from written import W4, W8A8, measure, proof_job, write

from compress.errors import BrokenResultError
from compress.formats import proof_worker
from compress.formats.proof import ProofCrashError, last_words, prove
from compress.model.sidefiles import CARD, SOURCE_CARD, copy_side_files
from compress.runtime.load import load_reference


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    source = tiny.tiny_llama(folder / "source", dtype=torch.bfloat16)
    (source / CARD).write_text("# A model\n")
    (source / "LICENSE").write_text("free\n")
    (source / "extra.py").write_text("x = 1\n")
    written = write(source, folder / "out", "compressed-tensors", W4)
    return written, measure(written, folder / "logits.safetensors")


@pytest.fixture
def copy(good, tmp_path):
    written, logits = good
    shutil.copytree(written.stage, tmp_path / "copy")
    return tmp_path / "copy", job(written, logits, "stock") | {"stage": str(tmp_path / "copy")}


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_the_card_of_the_result_may_lie_beside_the_originals(copy):
    folder, task = copy
    assert (folder / SOURCE_CARD).read_text() == "# A model\n"
    (folder / CARD).write_text("# A quantized model\n")
    assert proof_worker.run(task).passed


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: found 1e-05, expected 1e-06"),
        ({"eos_token_id": 7}, "eos_token_id: found 7, expected null"),
        ({"dtype": "float16"}, 'dtype: found "float16", expected "bfloat16"'),
        ({"new": None}, "new: found null, expected nothing"),
        ({"attention_bias": 0}, "attention_bias: found 0, expected false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_config_is_found(copy, change, detail):
    folder, task = copy
    edit_config(folder, **change)
    record = proof_worker.run(task)
    assert failures(record) == {"config"}
    assert next(check.detail for check in record.checks if check.name == "config") == detail


def test_a_key_that_is_gone_is_found(copy):
    folder, task = copy
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    assert failures(proof_worker.run(task)) == {"config"}


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", SOURCE_CARD, "LICENSE"])
def test_a_side_file_that_is_gone_or_changed_is_found(copy, name):
    folder, task = copy
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + b" ")
    assert failures(proof_worker.run(task)) == {"side files"}
    (folder / name).unlink()
    record = proof_worker.run(task)
    assert failures(record) == {"side files"}
    assert f"{name}: missing" in record.checks[-1].detail
    (folder / name).write_bytes(content)
    assert proof_worker.run(task).passed


def test_a_side_file_that_the_original_lacks_is_found(copy):
    folder, task = copy
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert failures(proof_worker.run(task)) == {"side files"}


def test_code_belongs_to_the_side_files_only_where_it_is_trusted(good, copy):
    written, _ = good
    folder, task = copy
    assert not (folder / "extra.py").exists()
    trusting = task | {"trust_remote_code": True}
    assert failures(proof_worker.run(trusting)) == {"side files"}
    copy_side_files(written.source.folder, folder, trust_remote_code=True)
    assert proof_worker.run(trusting).passed
    assert failures(proof_worker.run(task)) == {"side files"}


def test_a_snapshot_of_the_hubs_cache_is_an_original_like_any_other(tmp_path):
    """Its files are links into a folder of blobs."""
    plain = tiny.tiny_llama(tmp_path / "plain", dtype=torch.bfloat16)
    (plain / CARD).write_text("# A model\n")
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in plain.iterdir():
        shutil.move(path, repository / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    written = write(snapshot, tmp_path / "out", "gptq", W4)
    task = job(written, measure(written, tmp_path / "logits.safetensors"), "reader")
    record = proof_worker.run(task)
    assert record.passed, record.checks
    (written.stage / "tokenizer_config.json").unlink()
    assert failures(proof_worker.run(task)) == {"side files"}


@pytest.mark.parametrize("stated", ["dtype", "torch_dtype", None])
def test_the_config_of_a_cast_must_name_its_dtype(tmp_path, stated):
    source = tiny.tiny_bert(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    dtype = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config if stated is None else config | {stated: dtype}))
    written = write(source, tmp_path / "out", "safetensors", lambda _layer: None, cast="bfloat16")
    task = job(written, measure(written, tmp_path / "logits.safetensors"), "stock")
    record = proof_worker.run(task)
    assert record.passed, record.checks
    edit_config(written.stage, **{stated or "dtype": "float32"})
    assert failures(proof_worker.run(task)) == {"config"}


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_a_tied_head_of_an_encoder_expects_no_scales(tmp_path, name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(tiny.tiny_bert(tmp_path / "config"))
    source = tiny.save(getattr(transformers, name)(config), tmp_path / "source")
    written = write(source, tmp_path / "out", "compressed-tensors", W8A8)
    assert "cls.predictions.decoder.weight" not in written.source.tensors
    config = json.loads((written.stage / "config.json").read_text())
    assert "cls.predictions.decoder" in config["quantization_config"]["ignore"]
    model = load_reference(written.stage, dtype=torch.float32, device="cpu")
    ids = torch.arange(24)
    with torch.inference_mode():
        hidden = model.base_model(ids.unsqueeze(0)).last_hidden_state[0]
    save_file({"window.0": ids, "logits.0": hidden.contiguous()}, tmp_path / "logits.safetensors")
    record = proof_worker.run(job(written, tmp_path / "logits.safetensors", "stock"))
    assert record.passed, record.checks


def test_a_process_that_dies_is_reported_in_one_line(good, tmp_path):
    written, _ = good
    with pytest.raises(BrokenResultError) as caught:
        prove(proof_job(written, tmp_path / "none.safetensors", "stock"))
    message = caught.value.message
    assert "exit code 1: FileNotFoundError: " in message
    assert "\n" not in message
    assert "Traceback" not in message
    cause = caught.value.__cause__
    assert isinstance(cause, ProofCrashError)
    assert "Traceback (most recent call last)" in str(cause)


WORDS = {
    "bar": ("load: 50%|#####     | 1/2\rload: 100%|#####| 2/2\nout of luck\n", "out of luck"),
    "bar before a traceback": (
        'load: 50%|#| 1/2Traceback (most recent call last):\n  File "a.py", line 1\n    f()\nKeyError: 3\n',
        "KeyError: 3",
    ),
    "chained": (
        "Traceback (most recent call last):\n  x\nKeyError: 3\n\nThe above exception was the direct cause of the "
        "following exception:\n\nTraceback (most recent call last):\n  y\nlib.Error: one\ntwo\n",
        "lib.Error: one",
    ),
    "bar after a traceback": ("Traceback (most recent call last):\n  x\nKeyError: 3\nload: 50%|#| 1/2", "KeyError: 3"),
    "silence": ("", "no further message"),
    "bars only": ("load: 50%|#####     | 1/2", "no further message"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_last_words_are_one_meaningful_line(case):
    stderr, expected = WORDS[case]
    assert last_words(stderr) == expected
