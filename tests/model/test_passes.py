"""Windows that stop inside a block: what comes out of them, what they see, and that nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.model.anatomy import Anatomy, anatomy
from compress.model.architectures import ARCHITECTURES
from compress.model.blocks import BlockModel, Call, run_block
from compress.model.checkpoint import open_checkpoint
from compress.model.passes import PausedPass, Reached, Stop, paused

MODELS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "olmo2",
    "phi3",
    "gpt_neox",
    "gemma",
    "gemma2",
    "gemma3",
    "opt",
    "gpt2",
    "bert",
    "roberta",
    "distilbert",
]
ADDING = [name for name in MODELS if ARCHITECTURES[{"gemma3": "gemma3_text"}.get(name, name)].residuals]
LENGTHS = (12, 7, 12)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Opened:
    """Block 1 of a tiny model, and windows in front of it."""

    def __init__(self, block: nn.Module, parts: Anatomy, hidden: list[torch.Tensor], calls: list[Call]) -> None:
        self.block, self.parts, self.hidden, self.calls = block, parts, hidden, calls
        self.stops: dict[str, Stop] = {}
        residuals = dict(parts.architecture.residuals)
        for path, group in parts.architecture.linears:
            residual = residuals.get(group)
            seen = None if residual is None else block.get_submodule(residual)
            self.stops.setdefault(group, Stop(block.get_submodule(path), seen))

    def plain(self) -> list[torch.Tensor]:
        return [run_block(self.block, states, call) for states, call in zip(self.hidden, self.calls, strict=True)]

    def hooks(self) -> int:
        return sum(len(module._forward_pre_hooks) for module in self.block.modules())

    def paused(self) -> Any:
        return paused(self.block, self.hidden, self.calls, self.stops)


@contextmanager
def opened(name: str, folder: Path, **overrides: Any) -> Iterator[Opened]:
    checkpoint = open_checkpoint(getattr(tiny, f"tiny_{name}")(folder / name, **overrides))
    parts = anatomy(checkpoint)
    model = BlockModel(checkpoint, parts, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    hidden, calls = [], []
    for length in LENGTHS:
        states, called = model.inputs(torch.randint(256, (length,), generator=generator))
        hidden.append(states)
        calls.append(called[1])
    with model.block(1) as block:
        yield Opened(block, parts, hidden, calls)


def through(running: PausedPass) -> list[list[Reached]]:
    """All stops in turn, each with what every window saw."""
    found = []
    while stop := list(running.advance()):
        found.append(stop)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_plain_passes(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path) as work:
        expected = work.plain()
        seen: dict[str, list[torch.Tensor]] = {}
        with work.paused() as running:
            for stop in through(running):
                assert len({reached.group for reached in stop}) == 1
                seen[stop[0].group] = [reached.inputs for reached in stop]
            outputs = running.outputs
            assert list(running.advance()) == [], "the passes are over"
            assert len(running.outputs) == len(LENGTHS)
        assert list(seen) == list(dict.fromkeys(group for _, group in work.parts.architecture.linears))
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
        for group, path in {group: path for path, group in reversed(work.parts.architecture.linears)}.items():
            kept: list[torch.Tensor] = []
            handle = work.block.get_submodule(path).register_forward_pre_hook(
                lambda _module, args, kept=kept: kept.append(args[0])
            )
            work.plain()
            handle.remove()
            assert all(torch.equal(*pair) for pair in zip(seen[group], kept, strict=True)), group
        assert work.hooks() == 0


def test_weights_changed_at_a_stop_are_used_by_every_window(tmp_path: Path) -> None:
    with opened("llama", tmp_path) as work:
        before = work.plain()
        projection = work.stops["o"].module
        with work.paused() as running:
            for _ in range(2):
                stop = list(running.advance())
            assert {reached.group for reached in stop} == {"o"}
            assert isinstance(projection.weight, torch.Tensor)
            projection.weight.mul_(-1)
            while list(running.advance()):
                pass
            outputs = running.outputs
        after = work.plain()
        for output, expected, old in zip(outputs, after, before, strict=True):
            assert torch.equal(output, expected)
            assert not torch.allclose(output, old)


def test_a_stop_that_is_never_reached_is_none(tmp_path: Path) -> None:
    with opened("llama", tmp_path) as work:
        stops = {"elsewhere": Stop(nn.Linear(2, 2)), "down": work.stops["down"]}
        with paused(work.block, work.hidden, work.calls, stops) as running:
            assert [stop[0].group for stop in through(running)] == ["down"]
        with paused(work.block, work.hidden, work.calls, {}) as running:
            assert through(running) == []
            assert all(torch.equal(*pair) for pair in zip(running.outputs, work.plain(), strict=True))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closing_in_the_middle_unwinds_every_window(steps: int, tmp_path: Path) -> None:
    with opened("llama", tmp_path) as work:
        expected = work.plain()
        entered, left = [], []
        forward = work.block.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            entered.append(1)
            try:
                return forward(*args, **kwargs)
            finally:
                left.append(1)

        work.block.forward = watched
        with work.paused() as running:
            for _ in range(steps):
                list(running.advance())
            assert len(entered) == (len(LENGTHS) if steps else 0)
            assert not left
        assert len(left) == len(entered)
        assert work.hooks() == 0
        assert all(torch.equal(*pair) for pair in zip(work.plain(), expected, strict=True))


def test_closing_while_some_windows_have_not_come_there_yet(tmp_path: Path) -> None:
    with opened("llama", tmp_path) as work:
        expected = work.plain()
        with work.paused() as running:
            next(running.advance())
        assert work.hooks() == 0
        assert all(torch.equal(*pair) for pair in zip(work.plain(), expected, strict=True))


def test_an_error_in_a_forward_pass_leaves_nothing_behind(tmp_path: Path) -> None:
    with opened("llama", tmp_path) as work:
        expected = work.plain()
        calls = []

        def fail(_module: nn.Module, _args: object) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise ValueError("the second window breaks")

        handle = work.stops["down"].module.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="the second window breaks"), work.paused() as running:
            through(running)
        handle.remove()
        assert work.hooks() == 0
        assert all(torch.equal(*pair) for pair in zip(work.plain(), expected, strict=True))


class Sums(TorchDispatchMode):
    """Keeps the operands of every sum of two tensors of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], torch.Tensor) and args[0].shape == args[1].shape:
            self.pairs.append((args[0].clone(), args[1].clone()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ADDING)
def test_residuals_are_what_the_output_is_added_to(name: str, tmp_path: Path) -> None:
    """Every group of the table's `residuals`: the block itself computes residual + output of the group's layer."""
    with opened(name, tmp_path) as work:
        with work.paused() as running:
            seen = {stop[0].group: [reached.residual for reached in stop] for stop in through(running)}
        table = dict(work.parts.architecture.residuals)
        assert table
        for group, found in seen.items():
            assert all((residual is not None) == (group in table) for residual in found), group
        for group in table:
            layer = work.stops[group].module
            for residual, states, call in zip(seen[group], work.hidden, work.calls, strict=True):
                outputs: list[torch.Tensor] = []
                handle = layer.register_forward_hook(
                    lambda _module, _args, output, outputs=outputs: outputs.append(output.clone())
                )
                with Sums() as sums:
                    run_block(work.block, states, call)
                handle.remove()
                assert any(_are(pair, residual, outputs[0]) for pair in sums.pairs), group


def test_a_residual_that_comes_later_is_none(tmp_path: Path) -> None:
    """OPT-350m normalizes after the sum: what fc2 is added to goes through no module of its own."""
    with opened("opt", tmp_path, do_layer_norm_before=False) as work:
        with work.paused() as running:
            found = {stop[0].group: [reached.residual for reached in stop] for stop in through(running)}
        assert all(torch.equal(*pair) for pair in zip(found["o"], work.hidden, strict=True))
        assert found["fc2"] == [None] * len(LENGTHS)


def _are(pair: tuple[torch.Tensor, torch.Tensor], first: torch.Tensor, second: torch.Tensor) -> bool:
    flat = [one.flatten() for one in (*pair, first, second)]
    left, right, residual, output = flat
    if len(left) != len(residual):
        return False
    return (torch.equal(left, residual) and torch.equal(right, output)) or (
        torch.equal(left, output) and torch.equal(right, residual)
    )


def test_a_wrong_entry_would_be_noticed(tmp_path: Path) -> None:
    """The check above is no formality: the MLP's output is not added to the block's input."""
    with opened("llama", tmp_path) as work:
        outputs: list[torch.Tensor] = []
        handle = work.stops["down"].module.register_forward_hook(lambda _m, _a, output: outputs.append(output))
        with Sums() as sums:
            run_block(work.block, work.hidden[0], work.calls[0])
        handle.remove()
        assert sums.pairs
        assert not any(_are(pair, work.hidden[0], outputs[0]) for pair in sums.pairs)
