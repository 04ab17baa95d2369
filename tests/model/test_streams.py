"""Hidden states that wait on the disk: the same ones, and nothing left behind."""

from __future__ import annotations

import resource

import pytest
import torch

from compress.durable import FileTensors, write_tensors
from compress.errors import MissingResourceError
from compress.model.blocks import Call
from compress.model.streams import Streams, first_streams, spilled


def some() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 5, 8), (1, 3, 8), (1, 0, 8))
    floats = [torch.randn(shape, generator=generator) for shape in shapes]
    return [floats[0], floats[1].bfloat16(), floats[0].transpose(1, 2), floats[2]]


def test_tensors_come_back_as_they_were(tmp_path):
    kept = spilled(tmp_path, some())
    assert len(kept) == 4
    for found, expected in zip(kept, some(), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert [found.shape for found in kept[1:3]] == [expected.shape for expected in some()[1:3]]
    with pytest.raises(IndexError):
        kept[4]


def test_nothing_is_left_in_the_folder(tmp_path):
    kept = spilled(tmp_path, some())
    assert torch.equal(kept[0], some()[0])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(MissingResourceError, match="activations: the disk is full: the file needs 80,000 bytes"):
            spilled(tmp_path, [torch.zeros(20_000), torch.zeros(20_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spill", [False, True])
def test_the_state_is_written_and_restored(tmp_path, spill):
    def inputs(ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        return ids.float().reshape(1, -1, 1), [Call((), {})]

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(256, (6,), generator=generator) for _ in range(3)]
    streams = first_streams(inputs, ids, two=True, spill=tmp_path / "spill" if spill else None)
    write_tensors(tmp_path / "state.safetensors", streams.state())
    other = Streams([], [], [], streams.keep)
    other.restore(FileTensors(tmp_path / "state.safetensors"))
    assert other.original is not None
    for stream in (other.changed, other.original):
        assert all(torch.equal(one, two.float().reshape(1, -1, 1)) for one, two in zip(stream, ids, strict=True))
