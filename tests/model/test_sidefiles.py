from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
import transformers
from tiny import tiny_llama

from compress.errors import MissingResourceError, UsageError
from compress.model.sidefiles import copy_side_files, side_files, tokenizer_files, wanted


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of H12."""
    folder = tiny_llama(tmp_path / "source", dtype=torch.bfloat16)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "README.md").write_bytes(b"---\nlicense: mit\n---\r\n# Caf\xc3\xa9\n")
    for name in (
        "modeling_x.py",
        "pytorch_model.bin",
        "quantize_config.json",
        ".env",
        "LICENSE",
        "NOTICE.txt",
    ):
        (folder / name).write_text(name)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "secret").write_text("outside")
    (folder / "LICENSE-link").symlink_to(tmp_path / "secret")
    return folder


def test_h12_side_files_are_copied_and_nothing_else(source: Path, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    names = copy_side_files(source, stage)
    written = sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
    assert (
        names
        == written
        == [
            "1_Pooling/config.json",
            "LICENSE",
            "NOTICE.txt",
            "README.original.md",
            "additional_chat_templates/tools.jinja",
            "chat_template.jinja",
            "generation_config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    )
    for name in names:
        original = "README.md" if name == "README.original.md" else name
        assert (stage / name).read_bytes() == (source / original).read_bytes()


def test_h12_code_only_with_trust(source: Path, tmp_path: Path) -> None:
    names = copy_side_files(source, tmp_path / "stage", trust_remote_code=True)
    assert "modeling_x.py" in names
    assert Path("modeling_x.py") not in side_files(source, trust_remote_code=False)


def test_links_inside_the_folder_are_copied_by_content(source: Path, tmp_path: Path) -> None:
    (source / "NOTICE.txt").unlink()
    (source / "NOTICE.txt").symlink_to("LICENSE")
    (source / "2_Dense").symlink_to(tmp_path)
    (tmp_path / "config.json").write_text("outside")
    names = copy_side_files(source, tmp_path / "stage")
    assert not (tmp_path / "stage" / "NOTICE.txt").is_symlink()
    assert (tmp_path / "stage" / "NOTICE.txt").read_text() == "LICENSE"
    assert "2_Dense/config.json" not in names


def test_snapshots_of_the_hub_cache_link_to_their_own_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("{}")
    (tmp_path / "secret").write_text("outside")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    (snapshot / "LICENSE").symlink_to("../../../secret")
    assert side_files(snapshot) == [Path("tokenizer.json")]


def test_permissions_are_the_umasks(source: Path, tmp_path: Path) -> None:
    (source / "LICENSE").chmod(0o400)
    before = os.umask(0o027)
    try:
        copy_side_files(source, tmp_path / "stage")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "stage" / "LICENSE").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(source: Path, tmp_path: Path) -> None:
    (source / "LICENSE").chmod(0)
    with pytest.raises(UsageError, match="LICENSE cannot be read"):
        copy_side_files(source, tmp_path / "stage")


def test_a_place_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "stage").write_text("a file")
    with pytest.raises(MissingResourceError, match="cannot be written"):
        copy_side_files(source, tmp_path / "stage")


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model",
        "qwen.tiktoken",
        "sentencepiece.bpe.model",
        "spiece.model",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "preprocessor_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "2_Normalize/config.json",
        "3_Dense/model.safetensors",
        "license.txt",
        "USE_POLICY.md",
        "LICENSE-2.0",
    ],
)
def test_wanted(name: str) -> None:
    assert wanted(name)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "LICENSE.bin",
        "LICENSE.py",
        "quantize_config.json",
        "quant_config.json",
        "gptq_model.safetensors",
        "onnx/tokenizer.json",
        ".tiktoken",
        ".git/LICENSE",
        "data_config.json",
        "training_args.bin",
        "README.original.md",
        "custom_generate/generate.py",
        "setup.py",
    ],
)
def test_not_wanted(name: str) -> None:
    assert not wanted(name)


def test_h10_tokenizer_files_stay_byte_equal_and_load(source: Path, tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    copy_side_files(source, stage)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (stage / name).read_bytes() == (source / name).read_bytes()
    assert tokenizer_files(stage) == ["tokenizer.json"]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(stage)
    assert tokenizer.pad_token is None
