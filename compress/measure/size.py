"""What a model takes on disk. Read from file sizes and headers; no weight is loaded."""

from __future__ import annotations

from compress.model.checkpoint import Checkpoint
from compress.records import Measurement

BYTES_PER_MB = 1_000_000


def size_measurements(
    original: Checkpoint,
    result: Checkpoint,
    *,
    original_parameters: int,
    result_parameters: int,
    kv_bytes: tuple[int, int] | None = None,
    quantized_bytes: int = 0,
    quantized_parameters: int = 0,
) -> list[Measurement]:
    """Size, size ratio, parameters, bytes of the cache and bits per weight.

    Args:
        original, result: counted are the weight files that a loader reads, headers included.
        original_parameters, result_parameters: weights each model computes with; a tied tensor counts once.
        kv_bytes: of original and result, for each token; None for models without a cache.
        quantized_bytes: stored bytes of everything that makes up the quantized weights of the result (codes,
            scales, zero points, indices), without what stayed in floating point.
        quantized_parameters: weights of those layers, out x in each; 0 when nothing was quantized.
    """
    conditions = {"files": len(result.shard_bytes)}
    return [
        Measurement("size", "original", original.weight_bytes / BYTES_PER_MB, len(original.shard_bytes)),
        Measurement("size", "result", result.weight_bytes / BYTES_PER_MB, len(result.shard_bytes)),
        Measurement(
            "size.ratio", "result/original", result.weight_bytes / original.weight_bytes, conditions=conditions
        ),
        Measurement("parameters", "original", float(original_parameters)),
        Measurement("parameters", "result", float(result_parameters)),
        bits_per_weight(quantized_bytes, quantized_parameters),
        *(
            Measurement("kv_bytes", subject, float(found))
            for subject, found in zip(("original", "result"), kv_bytes or (), strict=False)
        ),
    ]


def bits_per_weight(quantized_bytes: int, quantized_parameters: int) -> Measurement:
    """8 x bytes / parameters of the quantized layers; without any there is no value.

    Raises:
        ValueError: a count is negative, or there are bytes without parameters.
    """
    if quantized_bytes < 0 or quantized_parameters < 0 or (quantized_bytes > 0 and quantized_parameters == 0):
        raise ValueError(f"{quantized_bytes} bytes for {quantized_parameters} quantized parameters")
    if quantized_parameters == 0:
        return Measurement("bits_per_weight", "result", None, note="no layer is quantized")
    value = 8 * quantized_bytes / quantized_parameters
    return Measurement("bits_per_weight", "result", value, quantized_parameters)
