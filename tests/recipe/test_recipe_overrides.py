"""Overrides, max_fallback and refine of a quantize step: what they mean and where their errors point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes_written import faults, step

from compress.errors import UsageError
from compress.recipe.options import recipe_from_options
from compress.recipe.quantize import Override, Quantize
from compress.recipe.units import parse_share


def test_overrides_keep_their_order(tmp_path: Path) -> None:
    found = step(
        tmp_path,
        "target: int4\noverrides:\n"
        "  - {layers: '*.down_proj', target: int8-weight}\n"
        "  - {layers: layers.0.*, target: int4, group_size: 32}\n"
        "  - {layers: o_proj, target: int8, group_size: -1}",
    )
    assert found.overrides == (
        Override(layers="*.down_proj", target="int8-weight"),
        Override(layers="layers.0.*", target="int4", group_size=32),
        Override(layers="o_proj", target="int8", group_size=-1),
    )
    assert Quantize.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("target", "algorithm", "override", "used"),
    [
        ("int4", None, "int8-weight", "gptq"),
        ("int4", "rtn", "int8-weight", "rtn"),
        ("int8-weight", None, "int8", "rtn"),
        ("int8-weight", None, "int4", "gptq"),
        ("int8-weight", "rtn", "int4", "rtn"),
        ("int8", "gptq", "int8-weight", "gptq"),
        ("bf16", None, None, None),
    ],
)
def test_all_layers_share_one_algorithm(target: str, algorithm: Any, override: str | None, used: str | None) -> None:
    overrides = [] if override is None else [{"layers": "x", "target": override}]
    found = Quantize.model_validate({"target": target, "algorithm": algorithm, "overrides": overrides})
    assert found.used_algorithm == used


def test_every_fault_of_every_override_has_its_line(tmp_path: Path) -> None:
    assert faults(
        tmp_path,
        "target: int4\noverrides:\n"
        "  - {target: int8}\n"
        "  - {layers: a, target: bf16}\n"
        "  - {layers: '', target: int4}\n"
        "  - {layers: a, target: int8, group_size: 64}\n"
        "  - {layers: a, target: int4, group_size: 0}\n"
        "  - {layers: a, target: int4, width: 8}",
    ) == [
        "7:11: steps[0].quantize.overrides[0].layers: is missing. Glob of layer names, as in `skip`. Skipped layers "
        "stay skipped; of several overrides the last one counts",
        "8:31: steps[0].quantize.overrides[1].target: must be fp8, int8, int8-weight, int4, nf4 or int8-bnb, not "
        'the text "bf16"',
        "9:20: steps[0].quantize.overrides[2].layers: must not be empty",
        "10:49: steps[0].quantize.overrides[3].group_size: target int8 has one scale per output channel: leave this "
        "out. Targets with groups: int8-weight, int4",
        "11:49: steps[0].quantize.overrides[4].group_size: must be auto, -1 (one scale per output channel) or a "
        "positive whole number such as 32, 64 or 128, not `0`",
        "12:37: steps[0].quantize.overrides[5].width: unknown key `width`. Keys here: layers, target, group_size",
    ]


def test_a_format_that_cannot_hold_the_mix_says_the_way_out(tmp_path: Path) -> None:
    (fault,) = faults(
        tmp_path,
        "target: int4\nformat: gptq\noverrides:\n  - {layers: a, target: int8-weight}\n  - {layers: b, target: int8}",
    )
    assert fault == (
        "9:31: steps[0].quantize.overrides[1].target: target int8 cannot be written as gptq, which holds all layers: "
        "use `format: compressed-tensors` or another target here (int8-weight, int4)"
    )


def test_a_cast_has_no_overrides(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "target: bf16\noverrides: [{layers: a, target: int4}]")
    assert fault.startswith("6:18: steps[0].quantize.overrides: target bf16 is a cast of every tensor")


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("0%", 0.0), ("100%", 1.0), ("1.0", 1.0), ("2.5%", 0.025)],
)
def test_a_share_has_a_point_or_a_percent_sign(text: str, share: float, tmp_path: Path) -> None:
    assert step(tmp_path, f"target: int4\nmax_fallback: {text}").max_fallback == share
    assert step(tmp_path, f'target: int4\nmax_fallback: "{text}"').max_fallback == share
    assert recipe_from_options({"MODEL": "m", "--target": "int4", "--max-fallback": text}).steps[0].quantize == (
        step(tmp_path, f"target: int4\nmax_fallback: {text}")
    )


@pytest.mark.parametrize("text", ["5", "1", "101%", "1.5", "-0.1", "5pt", "some", ".nan"])
def test_what_is_no_share(text: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, f"target: int4\nmax_fallback: {text}")
    assert fault.startswith("6:21: steps[0].quantize.max_fallback: ")
    with pytest.raises(UsageError):
        parse_share(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [("refine: 100", "is refined"), ("max_fallback: 1%", "can fall back"), ("damping: 0.1", "uses damping")],
)
def test_what_belongs_to_gptq_alone(line: str, words: str, tmp_path: Path) -> None:
    assert step(tmp_path, f"target: int8-weight\nalgorithm: gptq\n{line}")
    assert step(tmp_path, f"target: int8-weight\noverrides: [{{layers: a, target: int4}}]\n{line}")
    for target in ("int8-weight", "bf16", "int4\nalgorithm: rtn"):
        (fault,) = faults(tmp_path, f"target: {target}\n{line}")
        assert f"only algorithm gptq {words}, and target " in fault


def test_an_option_of_another_form_is_told() -> None:
    given = {"MODEL": "m", "--target": "int4", "--override": ["down_proj", "=int4", "a=", "a=int4:"]}
    with pytest.raises(UsageError) as caught:
        recipe_from_options(given)
    lines = caught.value.message.splitlines()
    assert len(lines) == 4
    assert lines[0] == (
        "--override: must be GLOB=TARGET or GLOB=TARGET:GROUP_SIZE, such as '*.down_proj=int8-weight', "
        'not the text "down_proj"'
    )
