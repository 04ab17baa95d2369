"""Models whose files are unusual but right: they are quantized, and a fresh process proves what stock loads of them."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from contract import Made, Outcome, Pair, outcome_of
from safetensors.torch import load_file, save_file

from compress.model.anatomy import anatomy
from compress.model.architectures import ARCHITECTURES, TIED_BY_DEFAULT
from compress.model.checkpoint import open_checkpoint
from compress.model.dtypes import dtype_note, held_dtype

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INT4, INT8 = Pair("int4", "compressed-tensors", "rtn"), Pair("int8", "compressed-tensors")
GPTQ, NF4 = Pair("int4", "gptq", "rtn"), Pair("nf4", "bitsandbytes")
FEW_FILES = 128
"""File descriptors: fewer than there are shards."""


def edit_config(folder: Path, **changes: Any) -> Path:
    """None drops a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def add_head(folder: Path, shift: float = 0.0) -> Path:
    """The output head as a tensor of its own: the embedding, `shift` added."""
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + shift
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def tied_twice(folder: Path) -> Path:
    return add_head(tiny.tiny_llama(folder, tie_word_embeddings=True))


def untied_in_silence(folder: Path) -> Path:
    """Llama's class ties nothing where config.json is silent."""
    return edit_config(add_head(tiny.tiny_llama(folder, tie_word_embeddings=True), 1.0), tie_word_embeddings=None)


def tied_in_silence(folder: Path) -> Path:
    """Gemma's class does."""
    return edit_config(add_head(tiny.tiny_gemma(folder)), tie_word_embeddings=None)


def gpt2_in_silence(folder: Path) -> Path:
    """A view saved next to its base, as old files have it (H11)."""
    tensors = load_file(tiny.tiny_gpt2(folder) / SINGLE)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, folder / SINGLE)
    return edit_config(folder, tie_word_embeddings=None)


def float32_said_bfloat16(folder: Path) -> Path:
    return edit_config(tiny.tiny_llama(folder), dtype="bfloat16")


def bfloat16_said_float32(folder: Path) -> Path:
    return edit_config(tiny.tiny_llama(folder, dtype=torch.bfloat16), dtype="float32")


def biases_of_three(folder: Path) -> Path:
    """H07."""
    tensors = load_file(tiny.tiny_qwen2(folder) / SINGLE)
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name].fill_(3.0)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def left_out_of_the_index(folder: Path) -> Path:
    """Loaders take whole files, whatever the index leaves out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.tiny_llama(folder))
    (folder / SINGLE).unlink()
    model.save_pretrained(folder, max_shard_size="40kB")
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def five_hundred_shards(folder: Path) -> Path:
    """One tensor a file."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 56}
    tensors = load_file(tiny.tiny_llama(folder, **sizes) / SINGLE)
    (folder / SINGLE).unlink()
    names = {name: f"model-{i + 1:05d}-of-{len(tensors):05d}.safetensors" for i, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert len(names) >= 500
    return folder


def with_side_files(folder: Path) -> Path:
    """H12: what goes along, and what does not."""
    tiny.tiny_llama(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("# original")
    (folder / ".env").write_text("SECRET=1")
    (folder / "training_args.bin").write_bytes(b"pickle")
    (folder / "quantize_config.json").write_text('{"bits": 2}')
    (folder / "merges.txt").symlink_to("/etc/hostname")
    return folder


BUILDERS: dict[str, Callable[[Path], Path]] = {
    function.__name__: function
    for function in (
        tied_twice,
        untied_in_silence,
        tied_in_silence,
        gpt2_in_silence,
        float32_said_bfloat16,
        bfloat16_said_float32,
        biases_of_three,
        left_out_of_the_index,
        five_hundred_shards,
        with_side_files,
    )
}
CELLS = [
    *((name, INT4) for name in BUILDERS if name not in ("gpt2_in_silence", "five_hundred_shards")),
    *(("gpt2_in_silence", pair) for pair in (GPTQ, NF4, Pair("int8-weight", "gptq_v2", "asymmetric"))),
    *((name, pair) for name in ("biases_of_three", "with_side_files") for pair in (INT8, GPTQ, NF4)),
    ("float32_said_bfloat16", NF4),
    ("five_hundred_shards", Pair("bf16", "safetensors")),
    ("five_hundred_shards", INT4),
]


@contextmanager
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Every cell; of its stage a copy is kept."""
    folder = tmp_path_factory.mktemp("odd")

    def keep(name: str, pair: Pair, made: Made) -> None:
        shutil.copytree(made.proof_job.stage, folder / f"kept-{name}-{pair}")

    with few_descriptors():
        return folder, outcome_of(folder, CELLS, BUILDERS, keep)


def kept(odd: tuple[Path, Outcome], name: str, pair: Pair = INT4) -> Path:
    return odd[0] / f"kept-{name}-{pair}"


@pytest.mark.parametrize(("name", "pair"), CELLS, ids=str)
def test_it_is_proved(odd: tuple[Path, Outcome], name: str, pair: Pair) -> None:
    outcome = odd[1]
    assert (name, pair) not in outcome.refused
    record = outcome.proved[name, pair]
    assert record.passed, record.checks


@pytest.mark.parametrize(
    ("name", "tied"),
    [("tied_twice", True), ("untied_in_silence", False), ("tied_in_silence", True), ("gpt2_in_silence", True)],
)
def test_a_tied_head_counts_once_and_is_written_once(odd: tuple[Path, Outcome], name: str, tied: bool) -> None:
    pair = GPTQ if "gpt2" in name else INT4
    plan = odd[1].made[name, pair].plan
    model = transformers.AutoModelForCausalLM.from_pretrained(plan.checkpoint.folder, dtype=torch.float32)
    assert plan.anatomy.tied == tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    assert plan.parameters == model.num_parameters()
    before, after = load_file(plan.checkpoint.folder / SINGLE), load_file(kept(odd, name, pair) / SINGLE)
    assert "lm_head.weight" in before
    assert ("lm_head.weight" in after) == (not tied)
    if not tied:
        assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize("model_type", [name for name, entry in ARCHITECTURES.items() if entry.kind == "decoder"])
def test_what_a_silent_config_means_is_what_the_class_does(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    assert config.tie_word_embeddings == (model_type in TIED_BY_DEFAULT)


@pytest.mark.parametrize(
    ("name", "scale"), [("float32_said_bfloat16", torch.bfloat16), ("bfloat16_said_float32", torch.bfloat16)]
)
def test_scales_survive_a_load_in_the_dtype_that_config_says(
    odd: tuple[Path, Outcome], name: str, scale: torch.dtype
) -> None:
    """What a user gets who names no dtype: not one scale is rounded again."""
    stored = load_file(kept(odd, name) / SINGLE)
    scales = {key: value for key, value in stored.items() if key.endswith("weight_scale")}
    assert {value.dtype for value in scales.values()} == {scale}
    model = transformers.AutoModelForCausalLM.from_pretrained(kept(odd, name))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key].float(), value.float()) for key, value in scales.items())
    (note,) = (text for text in odd[1].made[name, INT4].step.notes if text.startswith("config.json says"))
    assert note == dtype_note(odd[1].made[name, INT4].plan.checkpoint)
    said = {"float32_said_bfloat16": ("BF16", "F32"), "bfloat16_said_float32": ("F32", "BF16")}[name]
    assert note.startswith(f"config.json says {said[0]}, the weights are stored as {said[1]}: ")


def test_the_dtype_that_a_plain_load_gives() -> None:
    assert held_dtype({"dtype": "float16"}, "BF16") == "F16"
    assert held_dtype({"torch_dtype": "bfloat16"}, "F32") == "BF16"
    assert held_dtype({"dtype": "float32"}, "BF16") == "BF16"
    assert held_dtype({}, "F32") == "F32"


def test_biases_are_neither_lost_nor_made(odd: tuple[Path, Outcome]) -> None:
    """H07."""
    for name in ("biases_of_three", "with_side_files"):
        source = set(open_checkpoint(odd[0] / name).tensors)
        for pair in (INT4, INT8, GPTQ, NF4):
            after = load_file(kept(odd, name, pair) / SINGLE)
            found = {key for key in after if key.endswith(".bias")}
            assert found == {key for key in source if key.endswith(".bias")}
            assert bool(found) == (name == "biases_of_three")
            assert all(bool((after[key] == 3.0).all()) for key in found)


def test_the_index_of_the_result_is_complete(odd: tuple[Path, Outcome]) -> None:
    result = open_checkpoint(kept(odd, "left_out_of_the_index"))
    assert "model.norm.weight" in result.tensors
    assert anatomy(open_checkpoint(odd[0] / "left_out_of_the_index")).depth == 2


@pytest.mark.parametrize("pair", [INT4, INT8, GPTQ, NF4], ids=str)
def test_side_files_go_along_in_every_format(odd: tuple[Path, Outcome], pair: Pair) -> None:
    """H12."""
    folder = kept(odd, "with_side_files", pair)
    names = {path.name for path in folder.iterdir()}
    assert {"chat_template.jinja", "LICENSE", "README.original.md", "tokenizer.json", "config.json"} <= names
    assert not names & {".env", "training_args.bin", "merges.txt"}
    assert ("quantize_config.json" in names) == (pair.format == "gptq")
    if pair.format == "gptq":
        assert json.loads((folder / "quantize_config.json").read_text())["bits"] == 4
