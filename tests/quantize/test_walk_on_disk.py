"""Windows that wait on the disk: the same walk, bit for bit."""

from __future__ import annotations

import pytest
import tiny
import torch
from walking import walk, windows


@pytest.mark.parametrize("make", [tiny.tiny_llama, tiny.tiny_bert], ids=lambda function: function.__name__)
def test_a_walk_whose_windows_wait_on_the_disk_has_the_same_result(tmp_path, make):
    folder = make(tmp_path / "source")
    ids = [*windows(3), *windows(2, 20)]
    straight = walk(folder, ids)
    waiting = walk(folder, ids, one_pass=False, spill=tmp_path / "spill", batch_size=2)
    assert waiting.parts == straight.parts
    for name, weight in straight.weights.items():
        assert torch.equal(weight.codes, waiting.weights[name].codes)
        assert torch.equal(weight.scale, waiting.weights[name].scale)
    assert waiting.records == straight.records
