"""The contract: every model type through every pair of target and format.

A cell is refused before weights are loaded, for a reason that `refusals` names and with a way out, or it is quantized,
written, and proved by a fresh process: the same outputs, every weight bit for bit.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from contract import BUILDERS, DEFAULTS, PAIRS, ROUNDED, Outcome, Pair, outcome_of

from compress.model.architectures import ARCHITECTURES
from compress.scheme import TARGETS

GGUF = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
GPTQ_LOADERS = "the loaders of gptq folders know"
CALIBRATED = tuple(str(pair) for pair in PAIRS if pair.target == "int4" and pair.step != "rtn")
LOOSE = ("vit", "whisper", "t5", "gptj")
"""Models that nothing can be calibrated of yet."""
REFUSED = (
    ("gpt2", "* compressed-tensors*", "its linear layers are transformers' Conv1D"),
    ("modernbert", "int4 compressed-tensors*", "pack-quantized: stock transformers fails on it"),
    ("modernbert", "int8-weight compressed-tensors*", "pack-quantized: stock transformers fails on it"),
    *((name, cell, "GPTQ needs calibration input") for name in LOOSE for cell in CALIBRATED),
    *((name, "int? gptq*rtn", GPTQ_LOADERS) for name in LOOSE),
    *((name, "int8-weight gptq*", GPTQ_LOADERS) for name in LOOSE),
    ("t5", "int4 compressed-tensors rtn", "pack-quantized: stock transformers fails on it"),
    ("t5", "int8-weight compressed-tensors*", "pack-quantized: stock transformers fails on it"),
    ("t5", "* bitsandbytes", "transformers would not load these layers as bitsandbytes layers"),
    *((name, "* asymmetric", "experts cannot have zero points") for name in ("mixtral", "qwen3_moe")),
    *((name, "fp8 *", "holds all experts of a block in one tensor") for name in ("mixtral", "qwen3_moe")),
    *((name, "int8 *", "holds all experts of a block in one tensor") for name in ("mixtral", "qwen3_moe")),
    *((name, "int8-bnb *", "holds all experts of a block in one tensor") for name in ("mixtral", "qwen3_moe")),
    ("mixtral", "nf4 *", "holds all experts of a block in one tensor"),
    ("qwen3_moe", "nf4 *", "target nf4 is stored in blocks of 64 weights"),
    *((name, "* gguf*", "cannot be written as gguf") for name in BUILDERS if name not in GGUF),
)
"""(model type, cell, words of the reason): all that is refused; the first row that fits counts."""


def expected_refusal(name: str, pair: Pair) -> str | None:
    return next((words for model, cell, words in REFUSED if name == model and fnmatchcase(str(pair), cell)), None)


def faults(outcome: Outcome, cells: list[tuple[str, Pair]]) -> list[str]:
    """Every cell that is not as it must be."""
    lines = []
    for name, pair in cells:
        place, words = f"{name}, {pair}", expected_refusal(name, pair)
        error, record = outcome.refused.get((name, pair)), outcome.proved.get((name, pair))
        if error is not None:
            if words is None or words not in error.message:
                lines.append(f"{place}: refused: {error.message}")
            if not (error.hint or "use " in error.message):
                lines.append(f"{place}: no way out: {error.message}")
            continue
        assert record is not None
        if words is not None:
            lines.append(f"{place}: no longer refused: {words}")
        lines += [f"{place}: {check.name}: {check.detail}" for check in record.checks if not check.passed]
        lines += [f"{place}: {fault}" for fault in step_faults(outcome, name, pair)]
    return lines


def step_faults(outcome: Outcome, name: str, pair: Pair) -> list[str]:
    made, distance, record = (found[name, pair] for found in (outcome.made, outcome.distances, outcome.proved))
    target = TARGETS[pair.target]
    names = {check.name for check in record.checks}
    wrong = []
    if bool(made.step.layers_quantized) == (target.cast is not None):
        wrong.append(f"{made.step.layers_quantized} layers quantized")
    if target.cast is None and "weights" not in names:
        wrong.append(f"no weights were compared, only {sorted(names)}")
    if not 0 <= distance < FARTHEST[pair.target]:
        wrong.append(f"its outputs are {distance:.3g} as far away as those of empty matrices")
    return wrong


FARTHEST = {
    "fp16": 0.02,
    "bf16": 0.04,
    "fp8": 0.2,
    "int8": 0.06,
    "int8-weight": 0.06,
    "int4": 0.5,
    "nf4": 0.4,
    "int8-bnb": 0.06,
}
"""Largest distance from the original's outputs, where 1 is that of a model whose matrices are empty."""


def test_every_model_type_of_the_table_is_here(tmp_path: Path) -> None:
    assert set(ARCHITECTURES) <= set(BUILDERS)
    for name, build in BUILDERS.items():
        config = json.loads((build(tmp_path / name) / "config.json").read_text())
        assert config["model_type"] == name


def test_all_models_in_the_default_formats(tmp_path: Path) -> None:
    cells = [(name, pair) for name in BUILDERS for pair in DEFAULTS]
    cells += [(name, ROUNDED[0]) for name in LOOSE]
    assert faults(outcome_of(tmp_path, cells), cells) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_all_models_in_all_formats(tmp_path: Path, target: str) -> None:
    cells = [(name, pair) for name in BUILDERS for pair in PAIRS if pair.target == target]
    cells += [(name, pair) for name in LOOSE for pair in ROUNDED if pair.target == target]
    assert faults(outcome_of(tmp_path, cells), cells) == []
