"""What the cache of keys and values takes, from the shapes of the layers that make them. Without torch."""

from __future__ import annotations

from compress.model.anatomy import Anatomy

_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def kv_bytes(anatomy: Anatomy, dtype: str | None = None) -> int | None:
    """Bytes for each token: 2 x layers x key and value heads x size of a head x bytes of a number.

    A layer makes as many numbers as its queries, keys and values have rows, without those of the queries, which the
    attention's output projection has columns for.

    Args:
        dtype: of the cache, as safetensors names it; None for that of the layers.

    Returns:
        None where there is no cache, or where it is not known which layers fill it.
    """
    if anatomy.kind != "decoder":
        return None
    total = 0
    for block in range(anatomy.depth):
        group = f"{anatomy.block_name(block)}:"
        made = [layer for layer in anatomy.layers if layer.fused == f"{group}qkv"]
        used = [layer for layer in anatomy.layers if layer.fused == f"{group}o"]
        if not made or len(used) != 1:
            return None
        total += (sum(layer.out for layer in made) - used[0].width) * _BYTES[dtype or made[-1].dtype]
    return total
