"""Random inputs for models that read no text."""

from __future__ import annotations

import pytest
import torch
import transformers

from compress.errors import UsageError
from compress.model.inputs import random_inputs


def shapes(cls: type, config: transformers.PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    (inputs,) = random_inputs(cls, config, seed=0, count=1)
    return {name: tuple(value.shape) for name, value in inputs.items()}


def test_shapes_come_from_the_config() -> None:
    image = transformers.ViTConfig(image_size=32, num_channels=1)
    assert shapes(transformers.ViTModel, image) == {"pixel_values": (1, 1, 32, 32)}
    sides = transformers.ViTConfig(image_size=[32, 48])
    assert shapes(transformers.ViTModel, sides) == {"pixel_values": (1, 3, 32, 48)}
    speech = transformers.WhisperConfig(num_mel_bins=16, max_source_positions=20, max_target_positions=7)
    expected = {"input_features": (1, 16, 40), "decoder_input_ids": (1, 7)}
    assert shapes(transformers.WhisperForConditionalGeneration, speech) == expected
    both = {"input_ids": (1, 16), "decoder_input_ids": (1, 16)}
    assert shapes(transformers.T5ForConditionalGeneration, transformers.T5Config()) == both
    assert shapes(transformers.Wav2Vec2Model, transformers.Wav2Vec2Config()) == {"input_values": (1, 16000)}


def test_an_encoder_alone_gets_no_ids_for_a_decoder() -> None:
    config = transformers.T5Config(is_encoder_decoder=False)
    assert shapes(transformers.T5EncoderModel, config) == {"input_ids": (1, 16)}


def test_the_seed_decides_and_inputs_differ() -> None:
    config = transformers.T5Config(vocab_size=50)
    first = random_inputs(transformers.T5ForConditionalGeneration, config, seed=3, count=2)
    again = random_inputs(transformers.T5ForConditionalGeneration, config, seed=3, count=2)
    assert all(torch.equal(one[name], other[name]) for one, other in zip(first, again, strict=True) for name in one)
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])
    assert max(int(value.max()) for inputs in first for value in inputs.values()) < 50


def test_inputs_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UsageError, match="no usable image_size"):
        random_inputs(transformers.ViTModel, transformers.ViTConfig(image_size=0), seed=0, count=1)
    with pytest.raises(UsageError, match="_Odd reads bbox"):
        random_inputs(_Odd, transformers.ViTConfig(), seed=0, count=1)


class _Odd(transformers.ViTModel):
    main_input_name = "bbox"
