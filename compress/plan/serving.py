"""What an engine can serve, told from config.json and the headers alone. The rules are read from vLLM's sources of
2025 and 2026 (the file is named beside each), not run: a release may refuse more, or less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.model.anatomy import Anatomy, LinearLayer, class_names
from compress.model.moe import is_expert_group
from compress.scheme import PER_CHANNEL, Scheme

GROUP_SIZES = (PER_CHANNEL, 32, 64, 128)
"""MARLIN_SUPPORTED_GROUP_SIZES in layers/quantization/utils/marlin_utils.py."""
MARLIN_WIDTH, MARLIN_OUT = 128, 64
"""GPTQ_MARLIN_MIN_THREAD_K and _N in the same file."""
MACHETE_GROUP_SIZES, MACHETE_WIDTH, MACHETE_OUT = (PER_CHANNEL, 64, 128), 64, 128
"""layers/quantization/utils/machete_utils.py; the only kernel with 8-bit zero points, on Hopper alone."""
_WORD = 32
_LISTED = 3

CLASSES = frozenset(
    {
        *("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM"),
        *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM", "OPTForCausalLM"),
        *("Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM"),
        *("GPTJForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "PhiForCausalLM", "StableLmForCausalLM"),
        *("GraniteForCausalLM", "CohereForCausalLM", "OlmoForCausalLM", "Starcoder2ForCausalLM"),
        *("BertModel", "BertForSequenceClassification", "BertForTokenClassification"),
        *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        *("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
        *("ModernBertModel", "ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
        *("LlamaModel", "MistralModel", "Qwen2Model", "Gemma2Model", "Gemma3TextModel"),
        *("GPT2ForSequenceClassification", "WhisperForConditionalGeneration"),
    }
)
"""Of model_executor/models/registry.py, the classes that this tool compresses."""


@dataclass(frozen=True)
class Serving:
    """Whether an engine loads a folder.

    Attributes:
        reasons: why not; where it loads, on which conditions.
    """

    engine: str
    loads: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Matrix:
    """What the engine holds as one matrix [out, width]: a layer, or several side by side (q/k/v, gate/up)."""

    name: str
    out: int
    width: int
    scheme: Scheme
    expert: bool


def serving(
    config: Mapping[str, Any], parts: Anatomy, schemes: Mapping[str, Scheme], format_name: str
) -> tuple[Serving, ...]:
    """What the engines make of a folder.

    Args:
        config: config.json.
        parts: the layers of the model, as in the original.
        schemes: {layer name: how it is stored}; what is not named is dense.
    """
    faults = [*_model_faults(config), *_group_faults(parts, schemes)]
    conditions: list[str] = []
    matrices = _matrices(parts, schemes)
    if format_name == "gguf":
        conditions.append("GGUF is experimental there: one file and the original's tokenizer (docs, features/gguf)")
    elif format_name == "bitsandbytes":
        faults += _bitsandbytes_faults(matrices)
    elif matrices:
        faults += _kernel_faults(matrices, format_name)
        conditions += _kernel_conditions(matrices)
    return (Serving("vLLM", not faults, tuple(faults or conditions)),)


def _model_faults(config: Mapping[str, Any]) -> Iterator[str]:
    classes = class_names(config)
    if classes and classes[0] not in CLASSES:
        yield f"it is not known to have a class {classes[0]} (models/registry.py)"
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    for width, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("d_model", "num_heads")):
        size, count = text.get(width), text.get(heads)
        if isinstance(size, int) and isinstance(count, int) and count and text.get("head_dim") is None and size % count:
            yield f"{width} {size} is no multiple of {heads} {count}, and config.json gives no head_dim"


def _group_faults(parts: Anatomy, schemes: Mapping[str, Scheme]) -> list[str]:
    """Fused matrices (compressed_tensors/utils.py, gptq_utils.py) and the experts of a block share one scheme."""
    fates: dict[str, set[Scheme | None]] = {}
    for layer in parts.layers:
        fates.setdefault(layer.served, set()).add(schemes.get(layer.name))
    split = [name for name, found in fates.items() if len(found) > 1]
    return [f"fused matrices of which the parts are stored in several ways: {_names(split)}"] if split else []


def _matrices(parts: Anatomy, schemes: Mapping[str, Scheme]) -> list[_Matrix]:
    members: dict[str, list[LinearLayer]] = {}
    for layer in parts.layers:
        if layer.name in schemes:
            members.setdefault(layer.fused, []).append(layer)
    return [
        _Matrix(
            name,
            sum(layer.out for layer in layers),
            layers[0].width,
            schemes[layers[0].name],
            is_expert_group(name),
        )
        for name, layers in members.items()
    ]


def _bitsandbytes_faults(matrices: Sequence[_Matrix]) -> list[str]:
    """layers/quantization/bitsandbytes.py: BitsAndBytesMoEMethod has only 4 bits."""
    eight = [matrix.name for matrix in matrices if matrix.expert and matrix.scheme.bits == 8]
    return [f"experts of bitsandbytes in 8 bits: {_names(eight)}"] if eight else []


def _kernel_faults(matrices: Sequence[_Matrix], format_name: str) -> Iterator[str]:
    """Matrices for which no kernel is there at all."""
    reasons: dict[str, list[str]] = {}
    for matrix in matrices:
        reason = _refusal(matrix, format_name)
        if reason:
            reasons.setdefault(reason, []).append(matrix.name)
    for reason, names in reasons.items():
        yield f"{reason}: {_names(names)}"


def _refusal(matrix: _Matrix, format_name: str) -> str | None:
    scheme = matrix.scheme
    if scheme.activation_bits is not None:  # unaligned shapes fall back to Triton: cutlass_scaled_mm in _custom_ops.py
        return None
    if not scheme.symmetric and format_name.startswith("gptq"):
        # TYPE_MAP of layers/quantization/auto_gptq.py, before that of gptq_marlin.py
        return "GPTQ is read with symmetric codes only, and these have zero points"
    if not scheme.symmetric and matrix.expert:
        # CompressedTensorsWNA16MoEMethod in compressed_tensors_moe_wna16.py
        return "experts are read with symmetric codes only, and these have zero points"
    if format_name.startswith("gptq") and scheme.group_size not in GROUP_SIZES:
        return f"no kernel for GPTQ in groups of {scheme.group_size} (verify_marlin_supported)"
    if matrix.expert or _marlin(matrix) or _machete(matrix) or _exllama(matrix):
        return None
    return f"no kernel for {scheme.label} in these shapes or groups (kernels/linear/mixed_precision)"


def _kernel_conditions(matrices: Sequence[_Matrix]) -> Iterator[str]:
    weight_only = [one for one in matrices if one.scheme.activation_bits is None and not one.expert]
    narrow = [one.name for one in weight_only if _exllama(one) and not _marlin(one)]
    if narrow:
        yield (
            f"outside Marlin's tiles (width {MARLIN_WIDTH}, output {MARLIN_OUT}, groups of 32, 64, 128 or whole rows), "
            f"so older releases need --dtype half (Exllama): {_names(narrow)}"
        )
    hopper = [one.name for one in weight_only if _machete(one) and not _exllama(one) and not _marlin(one)]
    if hopper:
        yield f"only on Hopper (Machete): {_names(hopper)}"
    if any(one.scheme.activation_bits and one.scheme.values == "int" for one in matrices):
        # dispatch_scaled_mm in csrc/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp
        yield "INT8 activations have no CUTLASS kernel on Blackwell GPUs"


def _marlin(matrix: _Matrix) -> bool:
    """query_marlin_supported_quant_types and verify_marlin_supports_shape in marlin_utils.py."""
    scheme = matrix.scheme
    typed = scheme.symmetric or scheme.bits == 4
    fits = matrix.width % MARLIN_WIDTH == 0 and matrix.out % MARLIN_OUT == 0
    return typed and scheme.group_size in GROUP_SIZES and fits


def _machete(matrix: _Matrix) -> bool:
    fits = matrix.width % MACHETE_WIDTH == 0 and matrix.out % MACHETE_OUT == 0
    return fits and matrix.scheme.group_size in MACHETE_GROUP_SIZES


def _exllama(matrix: _Matrix) -> bool:
    """kernels/linear/mixed_precision/exllama.py: symmetric, float16 activations, whole words of zero points."""
    return matrix.scheme.symmetric and matrix.out % (_WORD // matrix.scheme.bits) == 0


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
