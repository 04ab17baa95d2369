"""The switches of gptq: in a recipe, on the command line, and as the engine knows them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from recipes_written import faults, step

from compress.errors import UsageError
from compress.recipe.options import recipe_from_options
from compress.recipe.quantize import DEFAULT_DAMPING, Gptq, Quantize

GIVEN = {"MODEL": "m", "--target": "int4"}


def refused(*switches: str, **options: str) -> list[str]:
    given = GIVEN | {f"--{name}": value for name, value in options.items()} | {"--gptq": list(switches)}
    with pytest.raises(UsageError) as caught:
        recipe_from_options(given)
    return caught.value.message.splitlines()


def test_the_defaults_are_those_of_the_engine() -> None:
    from compress.quantize.gptq import GptqSettings

    assert asdict(GptqSettings()) == {"damping": DEFAULT_DAMPING} | Gptq().model_dump()


def test_every_switch_in_a_recipe_and_on_the_command_line(tmp_path: Path) -> None:
    off = {"activation_order": "false", "search_scales": "false", "asymmetric": "false", "asymmetric_damping": "0"}
    off |= {"refit_scales": "false", "local_search": "0"}
    assert off.keys() == Gptq.model_fields.keys()
    lines = "".join(f"\n  {name}: {value}" for name, value in off.items())
    found = step(tmp_path, f"target: int4\ngptq:{lines}")
    assert not any(found.gptq.model_dump().values())
    assert Quantize.model_validate(found.model_dump(mode="json")) == found
    switches = [f"{name}={value}" for name, value in off.items()]
    assert recipe_from_options(GIVEN | {"--gptq": switches}).steps[0].quantize == found


def test_what_is_not_named_keeps_its_default(tmp_path: Path) -> None:
    assert step(tmp_path, "target: int4\ngptq: {asymmetric: false}").gptq == Gptq(asymmetric=False)
    assert step(tmp_path, "target: int4").gptq == Gptq()
    (quantize,) = recipe_from_options(GIVEN | {"--gptq": ["local_search = 5"]}).steps
    assert quantize.quantize.gptq == Gptq(local_search=5)


def test_faults_in_a_recipe_have_their_line(tmp_path: Path) -> None:
    assert faults(tmp_path, "target: int4\ngptq:\n  asymetric: true\n  refit_scales: 1\n  local_search: -1") == [
        "7:9: steps[0].quantize.gptq.asymetric: unknown key `asymetric` (did you mean `asymmetric`?). Keys here: "
        "activation_order, search_scales, asymmetric, asymmetric_damping, refit_scales, local_search",
        "8:23: steps[0].quantize.gptq.refit_scales: must be true or false, not `1`",
        "9:23: steps[0].quantize.gptq.local_search: must be a whole number of at least 0 and of at most 2147483647, "
        "not `-1`",
    ]
    (fault,) = faults(tmp_path, "target: int4\ngptq: false")
    assert fault.startswith("6:13: steps[0].quantize.gptq: must be a map with the keys activation_order, ")


@pytest.mark.parametrize("target", ["int8-weight", "bf16", "int4\nalgorithm: rtn"])
def test_only_gptq_has_switches(target: str, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, f"target: {target}\ngptq: {{asymmetric: false}}")
    assert "steps[0].quantize.gptq: only algorithm gptq has these switches, and target " in fault
    assert step(tmp_path, "target: int8-weight\nalgorithm: gptq\ngptq: {asymmetric: false}")


def test_faults_on_the_command_line_name_the_switch() -> None:
    assert sorted(refused("asymetric=false", "local_search=many", "refit_scales=no")) == [
        '--gptq local_search: must be a whole number, not the text "many"',
        '--gptq refit_scales: must be true or false, not the text "no"',
        "--gptq: unknown key `asymetric` (did you mean `asymmetric`?). Keys here: activation_order, search_scales, "
        "asymmetric, asymmetric_damping, refit_scales, local_search",
    ]
    assert refused("asymmetric", "=false", "asymmetric=") == [
        f'--gptq: must be NAME=VALUE, such as asymmetric=false, not the text "{text}"'
        for text in ("asymmetric", "=false", "asymmetric=")
    ]
    assert refused("asymmetric=false", "asymmetric=true") == ["--gptq: gives asymmetric twice"]
    (line,) = refused("asymmetric=false", algorithm="rtn")
    assert line.startswith("--gptq: only algorithm gptq has these switches")
