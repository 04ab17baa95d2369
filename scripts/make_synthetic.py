"""Writes a Llama folder with random weights, shard by shard: a model of any size without a download.

    python scripts/make_synthetic.py FOLDER --blocks 54 --hidden 2304 --intermediate 4608 --shard 1GB

Weights are normal numbers, as wide as training starts with; norms are ones. The same arguments give the same bytes. No
tokenizer is written: without --evaluate and calibration text none is needed, and --tokenizer copies one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from compress.formats.stored import Shard, StoredTensor, shard_layout
from compress.formats.write import write_shard
from compress.recipe.units import parse_size

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def config(args: argparse.Namespace) -> dict[str, object]:
    """config.json of a Llama with full attention heads of 128, or of a half of a small width."""
    head = min(128, args.hidden // 2)
    return {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": args.hidden,
        "initializer_range": 0.02,
        "intermediate_size": args.intermediate,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": args.hidden // head,
        "num_hidden_layers": args.blocks,
        "num_key_value_heads": args.hidden // head,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": args.vocabulary,
    }


def tensors(args: argparse.Namespace) -> Iterator[StoredTensor]:
    """Every tensor of the model; bf16."""
    d, wide = args.hidden, args.intermediate
    yield StoredTensor("model.embed_tokens.weight", "BF16", (args.vocabulary, d))
    yield StoredTensor("lm_head.weight", "BF16", (args.vocabulary, d))
    yield StoredTensor("model.norm.weight", "BF16", (d,))
    for block in range(args.blocks):
        stem = f"model.layers.{block}."
        for name in ("q", "k", "v", "o"):
            yield StoredTensor(f"{stem}self_attn.{name}_proj.weight", "BF16", (d, d))
        for name, shape in (("gate", (wide, d)), ("up", (wide, d)), ("down", (d, wide))):
            yield StoredTensor(f"{stem}mlp.{name}_proj.weight", "BF16", shape)
        for name in ("input", "post_attention"):
            yield StoredTensor(f"{stem}{name}_layernorm.weight", "BF16", (d,))


def values(shard: Shard, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    for stored in shard.tensors:
        if len(stored.shape) == 1:
            yield stored.name, torch.ones(stored.shape, dtype=torch.bfloat16)
        else:
            yield stored.name, torch.empty(stored.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def make(folder: Path, args: argparse.Namespace) -> int:
    """Writes the folder and returns the bytes of its weight files."""
    folder.mkdir(parents=True)
    shards = shard_layout(tensors(args), args.shard)
    generator = torch.Generator().manual_seed(args.seed)
    for shard in shards:
        write_shard(folder, shard, values(shard, generator))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
            "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(config(args), indent=2) + "\n")
    for name in TOKENIZER_FILES if args.tokenizer else ():
        if (args.tokenizer / name).is_file():
            shutil.copyfile(args.tokenizer / name, folder / name)
    return sum(shard.nbytes for shard in shards)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--blocks", type=int, default=54)
    made.add_argument("--hidden", type=int, default=2304)
    made.add_argument("--intermediate", type=int, default=4608)
    made.add_argument("--vocabulary", type=int, default=49152)
    made.add_argument("--shard", type=parse_size, default=10**9)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--tokenizer", type=Path, help="folder whose tokenizer files are copied")
    return made


if __name__ == "__main__":
    arguments = parser().parse_args()
    print(make(arguments.folder, arguments))
