"""Which targets fold factors by default, and which never do."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from compress.recipe.quantize import Quantize
from compress.scheme import TARGETS


@pytest.mark.parametrize("target", [name for name, row in TARGETS.items() if row.bits])
def test_only_integers_with_rounded_inputs_are_smoothed_by_themselves(target: str) -> None:
    assert Quantize.model_validate({"target": target}).smooths_any == (target == "int8")


@pytest.mark.parametrize("target", ["fp8", "nf4", "int8-bnb"])
def test_asking_for_it_in_vain_is_an_error(target: str) -> None:
    with pytest.raises(ValidationError, match=f"target {target} .*: leave this out"):
        Quantize.model_validate({"target": target, "smooth": True})


def test_integers_beside_fp8_are_smoothed_alone() -> None:
    step = {"target": "fp8", "overrides": [{"layers": "*.down_proj", "target": "int8"}]}
    for more in ({}, {"smooth": True}):
        found = Quantize.model_validate(step | more)
        assert found.smooths_any
        assert found.smooths(8, "int")
        assert not found.smooths(8, "float")
    assert not Quantize.model_validate(step | {"smooth": False}).smooths_any
