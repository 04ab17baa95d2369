"""The bitsandbytes format: NF4 and LLM.int8 weights as stock transformers loads them.

The block `quantization_config` says which of the two all layers have, and lists the modules that are left alone;
every other linear layer becomes a quantized one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Set
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from compress.errors import MissingResourceError, UsageError
from compress.formats.bitsandbytes_layout import CPU_ROWS, quant_state
from compress.model.load import config_of, empty_model, model_class
from compress.scheme import NF4_LEVELS, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.model.anatomy import LinearLayer
    from compress.model.checkpoint import Checkpoint

THRESHOLD = 6.0
"""Inputs from this magnitude on are computed with in full precision, with all their column (LLM.int8, section 3.2)."""
_HEAD = "lm_head"
_ROW_BY_ROW = 0
_LISTED = 20


def imported() -> ModuleType:
    """bitsandbytes, without what it logs about kernels that it lacks and dtypes that it casts.

    Raises:
        MissingResourceError: it is not installed, is older than transformers needs, or does not work here.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
        from transformers.utils.import_utils import BITSANDBYTES_MIN_VERSION, is_bitsandbytes_available
    except Exception as error:  # importing it loads binary parts, which fail as they please
        raise MissingResourceError(
            f"bitsandbytes cannot be imported ({' '.join(str(error).split())[:300]}).",
            hint="pip install bitsandbytes (`compress doctor` shows what works here), or use another target.",
        ) from error
    if not is_bitsandbytes_available():
        raise MissingResourceError(
            f"transformers needs bitsandbytes {BITSANDBYTES_MIN_VERSION} or newer, installed is "
            f"{bitsandbytes.__version__}.",
            hint=f"pip install 'bitsandbytes>={BITSANDBYTES_MIN_VERSION}'",
        )
    return bitsandbytes


def quantization_config(
    layers: Sequence[LinearLayer], schemes: Mapping[str, Scheme], skipped: list[str]
) -> dict[str, Any]:
    """The block `quantization_config` of config.json. NF4 layers are to compute in the source's dtype.

    Args:
        skipped: see `skipped_modules`.
    """
    from transformers import BitsAndBytesConfig

    dtype, scheme = next((layer.dtype, schemes[layer.name]) for layer in layers if layer.name in schemes)
    if scheme.values == "nf4":
        computing = {"BF16": torch.bfloat16, "F16": torch.float16}.get(dtype, torch.float32)
        asked = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": computing}
    else:
        asked = {"load_in_8bit": True}
    make: Any = BitsAndBytesConfig  # without annotations
    config = make(llm_int8_threshold=THRESHOLD, llm_int8_skip_modules=skipped, **asked)
    block: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return block


def skipped_modules(source: Checkpoint, quantized: Set[str], *, trust_remote_code: bool) -> list[str]:
    """What `llm_int8_skip_modules` must list so that stock loading quantizes exactly the modules `quantized`.

    Names leave the base model's prefix out, so that they hold for the bare model (AutoModel) too: transformers
    compares the ends of names. With a list of ours it adds no default of its own, so the head is always on it.

    Raises:
        UsageError: transformers would quantize others, whatever the list; or see `empty_model`.
    """
    cls = model_class(source.config, folder=source.folder, trust_remote_code=trust_remote_code)
    return skipped_of(empty_model(cls, config_of(cls, source.folder), source.folder), quantized)


def skipped_of(model: PreTrainedModel, quantized: Set[str]) -> list[str]:
    """`skipped_modules` of a model whose weights are not looked at."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    linear = [
        name for name, module in model.named_modules() if type(module) is torch.nn.Linear or isinstance(module, Conv1D)
    ]
    prefix = f"{model.base_model_prefix}."
    names = sorted({name.removeprefix(prefix) for name in linear if name not in quantized} | {_HEAD})
    kept = [*names, *(model._keep_in_fp32_modules or ())]
    converted = {name for name in linear if should_convert_module(name, kept)}
    if lost := sorted(quantized - converted):
        more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
        raise UsageError(
            f"transformers would not load these layers as bitsandbytes layers of {type(model).__name__}: "
            f"{', '.join(lost[:_LISTED])}{more}.",
            hint="Leave them alone with skip, or use another target.",
        )
    assert not converted - quantized  # every one of them is on the list
    return names


def pack(layer: LinearLayer, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of one layer, by their names in the file. Codes [out, in] are packed, never rounded."""
    name, stem = layer.tensor, layer.tensor.removesuffix(".weight")
    if weight.scheme.values == "llm_int8":
        return {
            name: weight.codes.contiguous(),
            f"{stem}.SCB": weight.scale.reshape(-1).contiguous(),
            f"{stem}.weight_format": torch.tensor(_ROW_BY_ROW, dtype=torch.uint8),
        }
    codes = weight.codes.reshape(-1).to(torch.uint8)
    return {
        name: ((codes[0::2] << 4) | codes[1::2]).unsqueeze(1),
        f"{name}.absmax": weight.scale.reshape(-1).contiguous(),
        f"{name}.quant_map": torch.tensor(NF4_LEVELS, dtype=torch.float32),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(quant_state(layer)), dtype=torch.uint8),
    }


def linear_8bit(weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device | str) -> torch.nn.Module:
    """The library's own layer, in eval mode, as stock transformers makes it of these codes and scales [out, 1].

    Its inputs are rounded per token in float16, except columns in which any token reaches THRESHOLD.
    """
    bnb = imported()
    out, width = weight.codes.shape
    module = bnb.nn.Linear8bitLt(
        width, out, bias is not None, has_fp16_weights=False, threshold=THRESHOLD, device="meta"
    )
    scale = weight.scale.reshape(-1).contiguous()
    stored = bnb.nn.Int8Params(weight.codes.contiguous(), requires_grad=False, has_fp16_weights=False, SCB=scale)
    module.weight = stored.to(device)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias.to(device), requires_grad=False)
    made: torch.nn.Module = module.train(False)
    return made


def runs_here(checkpoint: Checkpoint, device: str) -> bool:
    """Whether the library's kernel for this processor takes every NF4 layer of a folder; see `cpu_note`."""
    states = [name for name in checkpoint.tensors if name.endswith(".quant_state.bitsandbytes__nf4")]
    if device != "cpu" or not states or not imported().functional.has_avx512bf16():
        return True
    shapes = (json.loads(bytes(checkpoint.read(name).tolist()))["shape"] for name in states)
    return all(out % CPU_ROWS == 0 for out, _ in shapes)


def unrounded(model: torch.nn.Module) -> None:
    """LLM.int8 layers of a loaded model no longer round their inputs: the library's way of training on a CPU."""
    for module in model.modules():
        if _is(module, "Linear8bitLt"):
            module.train(True)


def exact(model: torch.nn.Module) -> None:
    """NF4 layers of a loaded model compute in float32, from weights that are dequantized to it.

    On processors that have instructions for bfloat16 the library would round scales and inputs to it, and the config
    may ask for 16 bits.
    """
    for module in model.modules():
        if _is(module, "Linear4bit"):
            for name, value in (("support_avx512bf16_for_cpu", False), ("compute_dtype", torch.float32)):
                setattr(module, name, value)


def dequantized(module: torch.nn.Module) -> torch.Tensor | None:
    """The weight [out, in] in float32 that the library itself makes of a quantized layer; None for other modules."""
    if not (_is(module, "Linear4bit") or _is(module, "Linear8bitLt")):
        return None
    functional: Any = imported().functional
    weight: Any = module.weight
    if _is(module, "Linear8bitLt"):
        state: Any = module.state
        scale = weight.SCB if state.SCB is None else state.SCB
        dense: torch.Tensor = functional.int8_vectorwise_dequant(weight.data, scale)
        return dense
    packed: Mapping[str, Any] = weight.quant_state.as_dict()
    state = functional.QuantState.from_dict({**packed, "dtype": "float32"}, device=weight.device)
    found: torch.Tensor = functional.dequantize_4bit(weight.data, state)
    return found


def _is(module: torch.nn.Module, name: str) -> bool:
    """Whether a module is of a class of the library, which need not be imported for that."""
    return any(base.__name__ == name and base.__module__.startswith("bitsandbytes.") for base in type(module).__mro__)
