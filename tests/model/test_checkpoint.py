from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import tiny_llama

from compress.errors import EXIT_MISSING_RESOURCE, MissingResourceError, UsageError
from compress.model.checkpoint import open_checkpoint
from compress.model.safetensors_header import DTYPE_BITS, HeaderError, parse_header


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "llama", dtype=torch.bfloat16)


@pytest.fixture
def sharded(tmp_path: Path, folder: Path) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    target = tmp_path / "sharded"
    model.save_pretrained(target, max_shard_size="60KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def test_opens_a_folder_as_the_library_reads_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, source="./llama")
    stored = load_file(folder / "model.safetensors")
    assert list(checkpoint.tensors) == sorted(stored)
    for name, info in checkpoint.tensors.items():
        assert (info.shape, info.dtype) == (tuple(stored[name].shape), "BF16")
        assert info.nbytes == stored[name].nbytes
        assert torch.equal(checkpoint.read(name), stored[name])
    assert checkpoint.model_type == "llama"
    assert checkpoint.source == "./llama"
    assert checkpoint.revision is None
    assert checkpoint.has_weights
    assert not checkpoint.is_quantized
    assert checkpoint.weight_bytes == (folder / "model.safetensors").stat().st_size


def test_shards_hold_the_same_tensors_as_one_file(folder: Path, sharded: Path) -> None:
    whole, parts = open_checkpoint(folder), open_checkpoint(sharded)
    names = list(whole.tensors)[::-1]
    read = parts.read_many(names)
    assert list(read) == names
    assert all(torch.equal(read[name], whole.read(name)) for name in names)
    assert parts.weight_bytes == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_the_single_file_wins_over_an_index_as_in_transformers(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.norm.weight" in open_checkpoint(folder).tensors
    transformers.LlamaForCausalLM.from_pretrained(folder)


def test_content_hash_follows_config_and_weights_only(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    first = checkpoint.content_hash
    data = (folder / "model.safetensors").read_bytes()
    assert checkpoint.file_hashes()["model.safetensors"] == hashlib.sha256(data).hexdigest()
    (folder / "notes.txt").write_text("x")
    assert open_checkpoint(folder).content_hash == first
    (folder / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert open_checkpoint(folder).content_hash != first


def test_a_quantized_folder_opens_and_says_so(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert open_checkpoint(folder).is_quantized


def test_unknown_tensor_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.nothing"):
        open_checkpoint(folder).read("model.nothing")


def test_missing_folder_is_a_missing_resource(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match="nowhere") as caught:
        open_checkpoint(tmp_path / "nowhere")
    assert caught.value.exit_code == EXIT_MISSING_RESOURCE


def test_a_path_that_no_folder_can_have_is_a_missing_resource(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match="cannot be read: File name too long"):
        open_checkpoint(tmp_path / ("x" * 300))
    with pytest.raises(MissingResourceError, match="does not exist"):
        open_checkpoint(tmp_path / "x\0y")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _append(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 3)


def _only(name: str, content: bytes = b"x") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)

    return change


def _replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (_replace("config.json", b"{"), r"config\.json is not valid JSON"),
        (_replace("config.json", b"\xff\xfe"), r"config\.json is not valid JSON"),
        (_replace("config.json", b"[" * 100_000), r"config\.json is not valid JSON: nested too deeply"),
        (_replace("config.json", b"[]"), r"config\.json is not a JSON object"),
        (_replace("config.json", b"{}"), "has no model_type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (_only("pytorch_model.bin"), r"only pickled weights \(pytorch_model\.bin\).*runs the code"),
        (_only("consolidated.00.pth"), "only pickled weights"),
        (_only("model-q4.gguf"), r"no weights.*model-q4\.gguf"),
        (_only("adapter_config.json"), "adapter"),
        (_truncate, r"model\.safetensors is cut off: \d+ bytes expected, \d+ found"),
        (_append, r"bytes after its last tensor: \d+ bytes expected, \d+ found"),
        (_replace("model.safetensors", b""), "at least 8 bytes expected, 0 found"),
        (_replace("model.safetensors", b"PK\x03\x04" + b"\xff" * 20), "is not a safetensors file"),
        (_replace("model.safetensors", struct.pack("<Q", 500) + b"{}"), "inside its header"),
        (_replace("model.safetensors", struct.pack("<Q", 2) + b"{]"), "not JSON"),
        (
            _replace("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
            "git lfs pull",
        ),
    ],
)
def test_unusable_folders_are_refused_in_one_sentence(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    change(folder)
    with pytest.raises(UsageError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in caught.value.message


def test_a_file_and_an_unreadable_shard(folder: Path) -> None:
    with pytest.raises(UsageError, match="is a file"):
        open_checkpoint(folder / "config.json")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(UsageError, match=r"model\.safetensors cannot be read"):
        open_checkpoint(folder)


def test_all_faulty_shards_are_listed_at_once(sharded: Path) -> None:
    first, second, third = sorted(sharded.glob("*.safetensors"))[:3]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-8])
    third.write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        open_checkpoint(sharded)
    lines = caught.value.message.splitlines()
    assert len(lines) == 3
    assert "is missing" in lines[0]
    assert first.name in lines[0]
    assert second.name in lines[1]
    assert third.name in lines[2]


def test_the_index_must_agree_with_the_shards(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = list(index["weight_map"])
    index["weight_map"]["model.extra.weight"] = index["weight_map"][names[0]]
    path.write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"holds tensor model\.extra\.weight; it does not"):
        open_checkpoint(sharded)
    index["weight_map"] = {names[0]: "../outside.safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"no plain .* names: '\.\./outside\.safetensors'"):
        open_checkpoint(sharded)
    index["weight_map"] = {names[0]: "a\0.safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"no plain .* names: 'a\\x00\.safetensors'"):
        open_checkpoint(sharded)
    index["weight_map"] = {names[0]: "a" * 300 + ".safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        open_checkpoint(sharded)
    for text in ("[" * 100_000, '{"weight_map": {"a": "\\ud800.safetensors"}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"index\.json is not valid JSON"):
            open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    both = load_file(first) | load_file(second)
    save_file(both, second)
    with pytest.raises(UsageError, match="is stored more than once"):
        open_checkpoint(sharded)


def _header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def _entry(begin: int, end: int, dtype: object = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (_header(a=_entry(0, 8), b=_entry(16, 24)), "a hole before tensor b"),
        (_header(a=_entry(0, 8), b=_entry(4, 12)), "an overlap before tensor b"),
        (_header(a=_entry(0, 12)), r"gives tensor a 12 bytes; F32 \[2\] takes 8"),
        (_header(a=_entry(0, 8, "X9")), "unknown dtype 'X9'"),
        (_header(a=_entry(0, 8, shape=[-2])), "malformed shape"),
        (_header(a={"dtype": "F32"}), "malformed header entry"),
        (_header(a=[]), "malformed header entry"),
        (_header(a=_entry(0, 0, shape=[2**62, 4, 0])), "malformed shape"),
        (_header(a=_entry(0, 8, shape={"2": 1})), "malformed shape"),
        (_header(a=_entry(0, 8, ["F32"])), r"unknown dtype \['F32'\]"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not JSON .nested too deeply"),
        (b'{"\\ud800": {}}', "not JSON"),
    ],
)
def test_malformed_headers(raw: bytes, message: str) -> None:
    with pytest.raises(HeaderError, match=message):
        parse_header(raw, "model.safetensors")


def test_sizes_of_all_dtypes_torch_can_write(tmp_path: Path) -> None:
    dtypes = {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(3, 2).to(dtype) for name, dtype in dtypes.items()}, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors, total = parse_header(raw[8 : 8 + length], path.name)
    assert {tensor.name: tensor.dtype for tensor in tensors} == {name: name for name in dtypes}
    assert total == 6 * sum(DTYPE_BITS[name] // 8 for name in dtypes) == len(raw) - 8 - length


def test_importing_and_opening_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import compress.model.hub, compress.model.sidefiles; "
        "from compress.model.checkpoint import open_checkpoint; open_checkpoint(Path(sys.argv[1])); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.parametrize(
    ("model_type", "stated", "expected"),
    [("llama", 1, 1), ("roberta", 130, 128), ("mpnet", 130, 128), ("t5", None, None)],
)
def test_positions(model_type: str, stated: int | None, expected: int | None, folder: Path) -> None:
    config = {"model_type": model_type, "max_position_embeddings": stated, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).positions == expected


@pytest.mark.parametrize(("model_type", "stated"), [("llama", -5), ("roberta", 2), ("mpnet", 2)])
def test_no_position_for_a_token(model_type: str, stated: int, folder: Path) -> None:
    config = {"model_type": model_type, "max_position_embeddings": stated, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"gives {model_type} {stated} positions"):
        _ = open_checkpoint(folder).positions
