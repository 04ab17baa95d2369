"""Layers that serving engines fuse into one matrix (q/k/v, gate/up) must share one scheme."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from compress.errors import UsageError
from compress.model.anatomy import Anatomy, LinearLayer
from compress.model.moe import is_expert_group
from compress.scheme import Scheme

_LISTED = 8


def check_fused(parts: Anatomy, schemes: Mapping[str, Scheme]) -> None:
    """Raises UsageError, listing the groups, if overrides give the members of a fused group several schemes.

    Members without a scheme are skipped ones, which a recipe may ask for: the plan only tells of those.
    """
    groups: dict[str, list[LinearLayer]] = {}
    for layer in parts.layers:
        groups.setdefault(layer.served, []).append(layer)
    faults: dict[str, list[int]] = {}
    globs: dict[str, str] = {}
    for members in groups.values():
        names: dict[Scheme, list[str]] = {}
        for layer in members:
            if layer.name in schemes:
                names.setdefault(schemes[layer.name], []).append(layer.name)
        if len(names) > 1:
            block = members[0].block
            inside = [_inside(layer) for layer in members]
            parent = _parent(parts, members[0])
            schemes_told = "; ".join(f"{_listed(parent, names[scheme])} {scheme.label}" for scheme in names)
            others = [_inside(layer) for layer in parts.layers if layer.block == block and layer not in members]
            fault = f"{parent}: {schemes_told}"
            faults.setdefault(fault, []).append(members[0].place.index)
            globs[fault] = f"{parent}.*" if is_expert_group(members[0].fused) else covering_glob(inside, others)
    if faults:
        places = [
            globs[fault] if _everywhere(parts, fault, blocks) else f"*.{blocks[0]}.{globs[fault]}"
            for fault, blocks in faults.items()
        ]
        lines = [f"  {fault} ({_blocks(blocks, parts.depth)})" for fault, blocks in faults.items()]
        raise UsageError(
            "overrides give layers that serving engines fuse into one matrix several schemes; each of these groups "
            "needs one:\n" + "\n".join(lines),
            hint=f"Cover the whole group with one glob: {', '.join(dict.fromkeys(places))}.",
        )


def covering_glob(members: Sequence[str], others: Sequence[str]) -> str:
    """One glob that matches all `members` and none of `others` ("self_attn.[kqv]_proj")."""
    start = _common_start(members)
    ends = [member.removeprefix(start) for member in members]
    end = _common_start([text[::-1] for text in ends])[::-1]
    middles = [text.removesuffix(end) for text in ends]
    letters = "".join(sorted({middle[:1] for middle in middles}))
    glob = f"{start}[{letters}]{'' if all(len(middle) == 1 for middle in middles) else '*'}{end}"
    fits = all(middles) and not any(fnmatch.fnmatchcase(other, glob) for other in others)
    return glob if fits else f"{start}*{end}"


def _everywhere(parts: Anatomy, fault: str, blocks: Sequence[int]) -> bool:
    """Whether one glob without a block's number is meant: not all blocks need to have experts."""
    experts = parts.architecture.experts
    return len(blocks) == parts.depth or (experts is not None and fault.startswith(f"{experts.path}: "))


def _parent(parts: Anatomy, layer: LinearLayer) -> str:
    """Path inside the block of the module whose layers are fused."""
    experts = parts.architecture.experts
    if experts is not None and is_expert_group(layer.fused):
        return experts.path
    return _inside(layer).rpartition(".")[0]


def _listed(parent: str, names: Sequence[str]) -> str:
    """Names after `parent`; some of them where there are many, as of experts."""
    told = [name.rpartition(f"{parent}.")[2] for name in names]
    more = f" and {len(told) - _LISTED} more" if len(told) > _LISTED else ""
    return ", ".join(told[:_LISTED]) + more


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    length = next((index for index, letter in enumerate(first) if letter != last[index]), len(first))
    return first[:length]


def _inside(layer: LinearLayer) -> str:
    """The layer's name inside its block."""
    return layer.place.inside


def _blocks(blocks: Sequence[int], depth: int) -> str:
    if len(blocks) == depth:
        return "in every block"
    return f"in block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
