"""What loaders of mixture-of-experts models can take: experts are many layers in the file, and few tensors to them."""

from __future__ import annotations

from collections.abc import Sequence

from compress.errors import UsageError
from compress.model.anatomy import Anatomy
from compress.model.moe import is_expert_group
from compress.plan.layers import PlannedLayer

_LISTED = 8


def check_experts(parts: Anatomy, format_name: str, layers: Sequence[PlannedLayer]) -> None:
    """Refuses plans after which nothing loads the experts.

    Raises:
        UsageError: zero points, a block whose experts are quantized in part, or blocks of experts that differ in a
            format where all have one scheme.
    """
    experts = parts.architecture.experts
    blocks: dict[int, list[PlannedLayer]] = {}
    for planned in layers:
        if is_expert_group(planned.layer.fused):
            blocks.setdefault(planned.layer.block, []).append(planned)
    if experts is None or all(planned.scheme is None for members in blocks.values() for planned in members):
        _check_none(parts, format_name, layers, has_experts=bool(blocks))
        return
    schemes = {block: {planned.scheme for planned in members} for block, members in blocks.items()}
    used = {scheme for found in schemes.values() for scheme in found}
    if any(scheme is not None and not scheme.symmetric for scheme in used):
        raise UsageError(
            f"{parts.model_type}: experts cannot have zero points: vLLM serves symmetric ones only "
            "(llm-compressor#2628), and transformers leaves the zero points out.",
            hint="Use --symmetric.",
        )
    if split := [block for block, found in schemes.items() if len(found) > 1]:
        raise UsageError(
            f"skip leaves experts of {_named(split)} half quantized: who loads them stacks all experts of a block in "
            "one tensor, so nothing could load the result.",
            hint=f"Skip all of them ({experts.path}.*), those of a block (*.{split[0]}.{experts.path}.*), or none.",
        )
    if format_name == "compressed-tensors" and len(used) > 1:
        raise UsageError(
            "the experts of some blocks are to be stored otherwise than those of others: transformers reads all "
            "experts of a compressed-tensors folder by one scheme, and would read them wrong.",
            hint=f"Cover all of them with one override ({experts.path}.*), or use --format gptq.",
        )


def _check_none(parts: Anatomy, format_name: str, layers: Sequence[PlannedLayer], *, has_experts: bool) -> None:
    quantizes = any(planned.scheme is not None for planned in layers)
    if has_experts and quantizes and format_name == "compressed-tensors":
        raise UsageError(
            f"{parts.model_type}: skip leaves all experts alone: transformers expects those of a compressed-tensors "
            "folder to be quantized, and would not load the result.",
            hint="Use --format gptq, or leave the experts out of skip: they hold most of the weights.",
        )


def _named(blocks: Sequence[int]) -> str:
    more = f" and {len(blocks) - _LISTED} more" if len(blocks) > _LISTED else ""
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks[:_LISTED]))}{more}"
