"""Where the experts of a mixture-of-experts block are: in the file, and in the stock class. Without torch.

A file holds three matrices for each expert, and serving engines expect them so. The stock classes of transformers 5
hold those of all experts of a block in two tensors of three dimensions, which loading stacks together:

    gate_up_proj [experts, 2 * inner, hidden]     the rows of gate, then those of up
    down_proj    [experts, hidden, inner]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import UsageError

EXPERTS = "experts"
"""What the names of the groups of expert layers begin with: "experts.3.gate_up"."""
_STACKED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Experts:
    """The experts of the blocks of an architecture.

    Attributes:
        path: of the experts inside a block, in the file ("block_sparse_moe.experts").
        module: the same in the stock class ("mlp.experts").
        gate, up, down: names of an expert's matrices in the file.
        counts: config fields that may hold the number of experts.
        default: that number where none of them is there.
        some_blocks: mlp_only_layers and decoder_sparse_step decide which blocks have experts; without it all have.
        dense: what the paths of layers begin with that only blocks without experts have.
    """

    path: str
    module: str
    gate: str
    up: str
    down: str
    counts: tuple[str, ...]
    default: int
    some_blocks: bool = False
    dense: str | None = None

    def count(self, config: Mapping[str, Any], block: int) -> int:
        """How many experts block number `block` has; 0 where it is dense."""
        if self.some_blocks:
            dense = config.get("mlp_only_layers")
            if isinstance(dense, list) and block in dense:
                return 0
            step = config.get("decoder_sparse_step")
            if isinstance(step, int) and step > 0 and (block + 1) % step:
                return 0
        return next((config[name] for name in self.counts if isinstance(config.get(name), int)), self.default)

    def stored(self, inside: str) -> str:
        """Path in the file of a tensor or module that has the path `inside` in a block of the stock class."""
        return _exchanged(inside, self.module, self.path)

    def in_class(self, inside: str) -> str:
        """The inverse of `stored`."""
        return _exchanged(inside, self.path, self.module)


MIXTRAL = Experts(
    "block_sparse_moe.experts", "mlp.experts", "w1", "w3", "w2", ("num_local_experts", "num_experts"), default=8
)
QWEN3_MOE = Experts(
    "mlp.experts",
    "mlp.experts",
    "gate_proj",
    "up_proj",
    "down_proj",
    ("num_experts", "num_local_experts"),
    default=128,
    some_blocks=True,
    dense="mlp.",
)


def block_linears(
    linears: tuple[tuple[str, str], ...], experts: Experts | None, config: Mapping[str, Any], block: int
) -> tuple[tuple[str, str], ...]:
    """(path inside the block, in the file; fused group) of the linear layers of one block, expert by expert.

    Args:
        linears: those of a block without experts, or of every block beside its experts.
    """
    count = 0 if experts is None else experts.count(config, block)
    if experts is None or count == 0:
        return linears
    shared = [(path, group) for path, group in linears if experts.dense is None or not path.startswith(experts.dense)]
    for index in range(count):
        for name, group in ((experts.gate, "gate_up"), (experts.up, "gate_up"), (experts.down, "down")):
            shared.append((f"{experts.path}.{index}.{name}", f"{EXPERTS}.{index}.{group}"))
    return tuple(shared)


def check_chosen(source: str, experts: Experts | None, config: Mapping[str, Any], blocks: int) -> None:
    """Raises UsageError if the router is to choose more experts for a token than a block has."""
    chosen = config.get("num_experts_per_tok")
    counts = [0 if experts is None else experts.count(config, block) for block in range(blocks)]
    least = min((count for count in counts if count), default=None)
    if isinstance(chosen, int) and least is not None and not 1 <= chosen <= least:
        raise UsageError(
            f"{source}: config.json says num_experts_per_tok is {chosen}; it must be from 1 to {least}.",
            hint="Correct config.json, or fetch the model again.",
        )


def is_expert_group(fused: str) -> bool:
    """Whether a fused group ("model.layers.0:experts.3.gate_up") is one of an expert's."""
    return fused.rpartition(":")[2].startswith(f"{EXPERTS}.")


def served_group(fused: str) -> str:
    """The group that serving engines hold in one tensor and that so needs one scheme: all experts of a block."""
    return f"{fused.rpartition(':')[0]}:{EXPERTS}" if is_expert_group(fused) else fused


def check_not_stacked(source: str, experts: Experts | None, tensors: Iterable[str]) -> None:
    """Refuses files that hold the experts as the stock class does.

    Raises:
        UsageError: the formats for quantized weights have one matrix for each expert.
    """
    if experts is None:
        return
    paths = {experts.path, experts.module}
    stacked = [
        name for name in tensors if name.endswith(tuple(f"{path}.{last}" for path in paths for last in _STACKED))
    ]
    if stacked:
        raise UsageError(
            f"{source}: {len(stacked)} tensors hold the experts of a block in one, {stacked[0]} among them; formats "
            "for quantized weights, and the engines that serve them, have one matrix for each expert.",
            hint="Load it with transformers' from_pretrained and write it again with save_pretrained, which stores "
            "experts one by one (save_original_format=True, the default).",
        )


def _exchanged(inside: str, one: str, other: str) -> str:
    """`inside` with the module that holds router and experts called as in `other`."""
    parent, wanted = one.rpartition(".")[0], other.rpartition(".")[0]
    return wanted + inside.removeprefix(parent) if inside.startswith(f"{parent}.") else inside
