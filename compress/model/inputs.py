"""Inputs made at random for models that read no text: what the proof compares outputs on.

Shapes come from config.json, values from a seeded generator; a model whose inputs cannot be made so is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from compress.errors import UsageError

TOKENS = 16
"""Ids in each of the texts that an encoder-decoder gets; fewer where it has fewer positions."""
WAVE = 16_000
"""Samples of a sound wave: one second for most models."""

Inputs = dict[str, torch.Tensor]


def random_inputs(
    cls: type[PreTrainedModel], config: transformers.PreTrainedConfig, seed: int, count: int
) -> list[Inputs]:
    """`count` inputs of batch 1 by the names of the forward pass's arguments: ids int64, everything else float32.

    Raises:
        UsageError: the class reads something else than text, images, spectrograms or waves, or config.json lacks a
            size that is needed.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_inputs(cls, config, generator) for _ in range(count)]


def first_output(output: Any) -> torch.Tensor:
    """Logits where the class has a head, else the last hidden states; without the batch, as float32 [..., width]."""
    found = getattr(output, "logits", None)
    if not isinstance(found, torch.Tensor):
        found = getattr(output, "last_hidden_state", None)
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"{type(output).__name__} has neither logits nor last_hidden_state to compare")
    return found[0].float()


def _inputs(cls: type[PreTrainedModel], config: Any, generator: torch.Generator) -> Inputs:
    main = cls.main_input_name
    if main == "input_ids":
        inputs = {main: _ids(config, generator, _positions(config))}
    elif main in _SHAPES:
        shape = [_size(cls, config, field) for field in _SHAPES[main]]
        inputs = {main: torch.randn(1, *_spatial(main, shape), generator=generator)}
    else:
        raise UsageError(
            f"{cls.__name__} reads {main}, and this version of compress cannot make such inputs to prove its result on",
            hint="models that read text, images, spectrograms or waves can be quantized",
        )
    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(cls.forward).parameters:
        inputs["decoder_input_ids"] = _ids(config, generator, _positions(config))
    return inputs


_SHAPES: Mapping[str, tuple[str, ...]] = {
    "pixel_values": ("num_channels", "image_size"),
    "input_features": ("num_mel_bins", "max_source_positions"),
    "input_values": (),
}


def _spatial(main: str, shape: list[Any]) -> tuple[int, ...]:
    if main == "pixel_values":
        channels, size = shape
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return channels, height, width
    if main == "input_features":
        return shape[0], 2 * shape[1]  # the convolution in front halves the length
    return (WAVE,)


def _ids(config: Any, generator: torch.Generator, positions: int) -> torch.Tensor:
    length = max(1, min(TOKENS, positions))
    return torch.randint(int(config.vocab_size), (1, length), generator=generator)


def _positions(config: Any) -> int:
    fields = ("max_target_positions", "max_position_embeddings", "n_positions")
    found = (getattr(config, field, None) for field in fields)
    return next((value for value in found if isinstance(value, int) and value > 0), TOKENS)


def _size(cls: type[PreTrainedModel], config: Any, field: str) -> Any:
    value = getattr(config, field, None)
    parts = value if isinstance(value, list | tuple) else [value]
    if not parts or not all(isinstance(part, int) and part > 0 for part in parts):
        raise UsageError(
            f"config.json has no usable {field} ({value!r}), which inputs of {cls.__name__} are made from",
            hint="models without it cannot be proved by this version of compress",
        )
    return value
