"""Whole models through stock transformers: the original as it is, and a result from weights in memory.

Remote code (`auto_map` in config.json) is executed only with trust_remote_code=True.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from compress.errors import BrokenResultError, MissingResourceError, UsageError
from compress.model.checkpoint import CONFIG_FILE, Checkpoint, parse_config
from compress.model.sidefiles import tokenizer_files
from compress.model.zero_points import loads_nowhere, needs_dequantizing

_REMOTE_HINT = "if you have read that code and trust it, pass --trust-remote-code"
_LISTED = 20
_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LEFT_OVER = re.compile(r"\.attn\.masked_bias$|(^|\.)pooler\.dense\.(weight|bias)$|^cls\.seq_relationship\.")
"""What well-known files hold beyond their class, which stock loading ignores aloud: a constant of older GPT-2 models,
and the pooler and the sentence order of BERT's training (bert-base names BertForMaskedLM)."""


def model_class(
    config: Mapping[str, Any], *, folder: Path | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """The class that stock transformers uses: the first of `architectures`, else by `model_type`.

    Args:
        folder: where the modelling code of a remote-code model lies; used only with trust_remote_code.

    Raises:
        UsageError: this transformers knows neither the architecture nor the model type, or the model needs
            its own code and that was not allowed.
    """
    architecture = _architecture(config, folder)
    stock = getattr(transformers, architecture, None) if architecture else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        return stock
    model_type = config["model_type"]
    if auto_map := config.get("auto_map"):
        if not trust_remote_code or folder is None:
            raise UsageError(
                f"the model ({architecture or model_type}) is not in transformers and brings its own code",
                hint=_REMOTE_HINT,
            )
        return _remote_class(auto_map, architecture, folder)
    # `architectures` may be missing, but a class that is named and unknown must not be replaced by another.
    if architecture is None and model_type in transformers.CONFIG_MAPPING:
        config_class = transformers.CONFIG_MAPPING[model_type]
        if config_class in transformers.MODEL_MAPPING:
            return cast(type[PreTrainedModel], transformers.MODEL_MAPPING[config_class])
    raise UsageError(
        f"transformers {transformers.__version__} does not know the architecture {architecture!r} "
        f"(model_type {model_type!r})",
        hint="check `architectures` in config.json, or update transformers",
    )


def _architecture(config: Mapping[str, Any], folder: Path | None) -> str | None:
    stated = config.get("architectures")
    if stated is None or stated == []:
        return None
    if isinstance(stated, list) and all(isinstance(name, str) for name in stated):
        return str(stated[0])
    file = folder / CONFIG_FILE if folder else CONFIG_FILE
    raise UsageError(
        f"{file}: `architectures` is {stated!r}; it must be a list of class names",
        hint='write the name of the class, such as ["LlamaForCausalLM"], or leave the key out',
    )


def config_of(cls: type[PreTrainedModel], folder: Path) -> transformers.PreTrainedConfig:
    """config.json as the config of `cls`.

    Raises:
        UsageError: transformers rejects it, for whatever reason.
    """
    if cls.config_class is None:
        raise UsageError(f"{cls.__name__} of {folder} declares no config class")
    with quiet_transformers(), config_errors(cls, folder):
        return cls.config_class.from_pretrained(folder, local_files_only=True)


def empty_model(cls: type[PreTrainedModel], config: transformers.PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """The class built without weights, in eval mode: parameters on the meta device, buffers real.

    Raises:
        UsageError: the class cannot be built from the config of `folder`, for whatever reason.
    """
    import accelerate

    with quiet_transformers(), config_errors(cls, folder), accelerate.init_empty_weights(include_buffers=False):
        model = cls(config)
    model.train(False)
    return model


def vocabulary(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> int:
    """How many ids a model of text knows: what its class takes from config.json, or has where that says nothing.

    Raises:
        UsageError: see `model_class` and `config_of`.
    """
    cls = model_class(checkpoint.config, folder=checkpoint.folder, trust_remote_code=trust_remote_code)
    return int(plain_config(cls, checkpoint.folder).get_text_config().vocab_size)


@contextmanager
def config_errors(cls: type[PreTrainedModel], folder: Path) -> Iterator[None]:
    """Turns anything that transformers raises over a config into a UsageError that names config.json.

    Validators, look-ups in tables and arithmetic on the fields raise what they please: there is no list to name.
    """
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"{folder / CONFIG_FILE}: {cls.__name__} cannot be built from it ({_brief(error)})",
            hint="correct config.json, or fetch the model again",
        ) from error


def _brief(error: Exception) -> str:
    """The kind and the message on one line: the messages of validators name the field first, then the fault."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a folder.

    Raises:
        MissingResourceError: the folder holds no tokenizer file.
        UsageError: the files cannot be loaded, or not as a fast tokenizer.
    """
    if not tokenizer_files(folder):
        raise MissingResourceError(
            f"{folder} holds no tokenizer",
            hint="copy the tokenizer's files (tokenizer.json, ...) into the folder",
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and tokenizers check little: a broken file fails anywhere
        hint = _REMOTE_HINT if "trust_remote_code" in str(error) else "save it again with transformers"
        raise UsageError(f"the tokenizer in {folder} cannot be loaded ({_brief(error)})", hint=hint) from error
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer in {folder} has no fast version (tokenizer.json)",
            hint="convert it once with transformers' AutoTokenizer and save_pretrained",
        )
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_original(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model as stock `from_pretrained` loads it, in eval mode and without gradients.

    Packed weights with zero points are loaded with `dequantize=True`, see `zero_points.py`.

    Raises:
        UsageError: see `model_class`; or transformers has no way to load the folder's schemes.
        MissingResourceError: its quantization needs a package that is not installed.
        BrokenResultError: weights are missing, left over or of another shape than the class expects.
    """
    if loads_nowhere(checkpoint.config):
        raise UsageError(
            f"{checkpoint.source}: transformers cannot load packed zero points beside another scheme.",
            hint="vLLM can.",
        )
    cls = model_class(checkpoint.config, folder=checkpoint.folder, trust_remote_code=trust_remote_code)
    config = config_of(cls, checkpoint.folder)
    dequantized = needs_dequantizing(checkpoint.config)
    more = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantized else {}
    empty_model(cls, config, checkpoint.folder)  # a config that is at fault is told from weights that are
    with quiet_transformers(), missing_packages(checkpoint):
        model, info = from_pretrained(
            cls,
            checkpoint.folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **more,
        )
    _check_loading(info, f"{checkpoint.folder} as {cls.__name__}")
    block = checkpoint.config.get("quantization_config")
    if isinstance(block, Mapping) and block.get("quant_method") == "bitsandbytes":
        _cast_rest(model, dtype)
    return _frozen(model, device)


def _cast_rest(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts floating parameters that transformers left in the dtype of the file.

    In bitsandbytes folders it does so with all weights that are not quantized, but casts the biases: norms that have
    both then fail.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype in _FLOATING and kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


@contextmanager
def missing_packages(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns transformers' ImportError over a quantized folder into a MissingResourceError with its pip line."""
    try:
        yield
    except ImportError as error:
        if not checkpoint.is_quantized:
            raise
        raise MissingResourceError(
            f"{checkpoint.source} is quantized, and loading it needs what is not installed: {_brief(error)}",
            hint="install it, or compare on a machine that has it",
        ) from error


def build_model(
    folder: Path,
    state_dict: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The class and config of `folder` with the given weights: what a load from disk would give with them.

    Any `quantization_config` is dropped: the weights are plain. Names may carry the base model's prefix or
    lack it; tied weights may be left out. Tensors already in `dtype` on the CPU are used, not copied.
    `from_pretrained` itself does the loading, so that prefixes, ties, buffers, renamed keys and the parts
    that a class keeps in float32 are exactly those of a load from disk.

    Raises:
        UsageError: see `model_class`.
        BrokenResultError: weights are missing, left over or of another shape than the class expects.
    """
    raw = parse_config(folder / CONFIG_FILE)
    cls = model_class(raw, folder=folder, trust_remote_code=trust_remote_code)
    config = plain_config(cls, folder)
    empty_model(cls, config, folder)
    with quiet_transformers():
        model, info = from_pretrained(
            cls,
            None,
            config=config,
            state_dict=dict(state_dict),
            dtype=dtype,
        )
    _check_loading(info, f"the weights given for {folder} as {cls.__name__}")
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return _frozen(model, device)


def from_pretrained(
    cls: type[PreTrainedModel], folder: Path | None, **options: Any
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Stock loading and its report. Mismatched shapes are reported with all other faults.

    A bare model's pooler may be missing (sentence-transformers saves none): its values are then random, and its output
    is used by nothing here.
    """
    loaded = cls.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True, **options)
    model, report = cast(tuple[PreTrainedModel, Mapping[str, Any]], loaded)
    unexpected = {name for name in report.get("unexpected_keys", ()) if not _LEFT_OVER.search(name)}
    missing = set(report.get("missing_keys", ()))
    if model.base_model is model:
        missing = {name for name in missing if not name.startswith("pooler.")}
    return model, {**report, "unexpected_keys": unexpected, "missing_keys": missing}


def _remote_class(auto_map: Mapping[str, Any], architecture: str | None, folder: Path) -> type[PreTrainedModel]:
    references = {
        name: reference
        for name, reference in auto_map.items()
        if name.startswith("AutoModel") and isinstance(reference, str)
    }
    for reference in references.values():
        if reference.split(".")[-1] == architecture:
            try:
                return cast(type[PreTrainedModel], get_class_from_dynamic_module(reference, folder))
            except Exception as error:  # importing the code runs it
                raise UsageError(f"{folder}: its own code {reference} does not load ({_brief(error)})") from error
    raise UsageError(
        f"{folder / CONFIG_FILE}: auto_map names no AutoModel class for the architecture {architecture!r}; "
        f"it names {', '.join(references.values()) or 'none'}"
    )


def plain_config(cls: type[PreTrainedModel], folder: Path) -> transformers.PreTrainedConfig:
    """As `config_of`, without a word on quantization: for weights that are plain."""
    config = config_of(cls, folder)
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)
    return config


def _check_loading(info: Mapping[str, Any], what: str) -> None:
    """Raises for all that `from_pretrained` reports; keys that the class declares ignorable it leaves out."""
    faults = []
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get(f"{kind}_keys", ()))
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            faults.append(f"{len(names)} {kind}: {', '.join(names[:_LISTED])}{more}")
    faults += [str(message) for message in info.get("error_msgs", ())]
    if faults:
        raise BrokenResultError(
            f"{what} does not load cleanly; " + "; ".join(faults),
            hint="weights and config.json do not belong together, or `architectures` names the wrong class",
        )


def _frozen(model: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise BrokenResultError(f"{type(model).__name__}: no values for {', '.join(left[:_LISTED])}")
    cast(torch.nn.Module, model).to(device)
    model.train(False)
    model.requires_grad_(False)
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and load report: faults are raised here, in our own words."""
    log = cast(Any, transformers_logging)  # its functions carry no annotations
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
