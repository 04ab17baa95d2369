"""The step `prune`, from a file and from options: shares and counts, one way at a time, order of the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recipes_written import problems, write

from compress.errors import RecipeError, UsageError
from compress.recipe.options import PRUNE_OPTIONS, RECIPE, SHAPES, prune_from_options
from compress.recipe.prune import Keep, Prune
from compress.recipe.schema import Recipe
from compress.recipe.source import load_recipe

FORM = "must be a count of at least 1 such as 6, or a share between 0 and 1 such as 0.75 or 75%"
EXAMPLES: dict[str, tuple[Any, Any]] = {
    "--keep-ffn": ("0.75", 0.75),
    "--keep-heads": ("6", 6),
    "--keep-kv-heads": ("2", 2),
    "--keep-layers": ("93.5%", 0.935),
    "--importance": ("magnitude", "magnitude"),
    "--compensate": (False, False),
    "--ffn-multiple": ("32", 32),
    "--max-shard-size": ("1MB", 10**6),
}


def prune(folder: Path, settings: str) -> Prune:
    step = load_recipe(write(folder, f"version: 1\nmodel: m\nsteps:\n  - prune: {settings}\n")).prune
    assert step is not None
    return step


def fault(folder: Path, settings: str) -> str:
    (found,) = problems(folder, f"version: 1\nmodel: m\nsteps:\n  - prune: {settings}\n")
    return found


def reach(recipe: Recipe, path: tuple[str | int, ...]) -> Any:
    value: Any = recipe
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value


def message(options: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        prune_from_options({"MODEL": "m"} | options)
    assert not isinstance(caught.value, RecipeError)
    return caught.value.message


class TestAmounts:
    @pytest.mark.parametrize(
        ("written", "read"),
        [("0.75", 0.75), ("75%", 0.75), ('"75%"', 0.75), ("0.5%", 0.005), ("6", 6), ('"6"', 6), ("1", 1)],
    )
    def test_a_share_has_a_point_or_a_percent_sign_and_a_count_has_none(
        self, tmp_path: Path, written: str, read: float
    ) -> None:
        kept = prune(tmp_path, f"{{keep: {{heads: {written}}}}}").keep.heads
        assert (kept, type(kept)) == (read, type(read))

    @pytest.mark.parametrize("written", ["0", "0.0", "0%", "-1", "-0.5", "1.5", "6 heads", "true", "null x", ".nan"])
    def test_what_is_neither(self, tmp_path: Path, written: str) -> None:
        found = fault(tmp_path, f"{{keep: {{ffn: {written}}}}}")
        assert found.startswith(f"4:25: steps[0].prune.keep.ffn: {FORM}, not ")

    def test_what_is_no_number_is_quoted(self, tmp_path: Path) -> None:
        assert fault(tmp_path, "{keep: {ffn: all}}").endswith(', not the text "all"')

    @pytest.mark.parametrize("written", ["150%", "-5%"])
    def test_a_percentage_beyond_all(self, tmp_path: Path, written: str) -> None:
        found = fault(tmp_path, f"{{keep: {{ffn: {written}}}}}")
        assert found == f"4:25: steps[0].prune.keep.ffn: `{written}` is not a share from 0% to 100%"

    @pytest.mark.parametrize("written", ["1.0", "100%"])
    def test_all_is_said_by_saying_nothing(self, tmp_path: Path, written: str) -> None:
        assert fault(tmp_path, f"{{keep: {{layers: {written}}}}}").endswith("; leave it out to keep all")

    @pytest.mark.parametrize(("written", "read"), [("0.8x", 0.8), ("0.8", 0.8), ('"0.8"', 0.8)])
    def test_a_share_of_the_parameters(self, tmp_path: Path, written: str, read: float) -> None:
        assert prune(tmp_path, f"{{params: {written}}}").params == read

    @pytest.mark.parametrize("written", ["1x", "1.5x", "0x", "-1x", "80%", "2"])
    def test_no_share_of_the_parameters(self, tmp_path: Path, written: str) -> None:
        found = fault(tmp_path, f"{{params: {written}}}")
        assert found.startswith("4:21: steps[0].prune.params: ")
        assert found.endswith("must be a factor below 1 such as 0.8x") == (written == "80%")

    def test_a_budget_has_a_unit(self, tmp_path: Path) -> None:
        assert prune(tmp_path, "{size: 100MB}").size == 10**8
        assert "has no unit: write 100B, 100kB, 100MB or 100GB" in fault(tmp_path, '{size: "100"}')


class TestWays:
    def test_nothing_to_do(self, tmp_path: Path) -> None:
        for settings in ("{}", "{keep: {}}", "{importance: taylor}"):
            assert fault(tmp_path, settings).startswith("4:12: steps[0].prune: must say what is kept, such as ")

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ("{keep: {ffn: 0.5}, params: 0.8x}", "ffn, params"),
            ("{params: 0.8x, size: 1MB}", "params, size"),
            ("{keep: {kv_heads: 1, layers: 2}, size: 1MB}", "kv_heads, layers, size"),
        ],
    )
    def test_two_at_once(self, tmp_path: Path, settings: str, named: str) -> None:
        assert fault(tmp_path, settings).endswith(f"search for the shape by themselves: give one of {named}")

    def test_an_importance_that_there_is_not(self, tmp_path: Path) -> None:
        found = fault(tmp_path, "{keep: {ffn: 0.5}, importance: taylr}")
        assert found.startswith("4:43: steps[0].prune.importance: must be obs, magnitude, activation, taylor or random")
        assert found.endswith("(did you mean `taylor`?)")

    def test_a_kind_that_there_is_not(self, tmp_path: Path) -> None:
        assert "unknown key `kv_head` (did you mean `kv_heads`?)" in fault(tmp_path, "{keep: {kv_head: 2}}")
        assert "(did you mean `ffn` under `steps[].prune.keep`?)" in fault(tmp_path, "{ffn: 0.5}")

    def test_a_found_shape_takes_the_place_of_the_search(self) -> None:
        step = Prune(params=0.8, importance="taylor").fixed(ffn=96, heads=4)
        assert step.keep == Keep(ffn=96, heads=4)
        assert (step.params, step.size, step.searches, step.importance) == (None, None, False, "taylor")


class TestOrder:
    PRUNE, QUANTIZE = "  - prune: {keep: {ffn: 0.5}}\n", "  - quantize: {target: int4}\n"
    HEAD = "version: 1\nmodel: m\nsteps:\n"

    def test_prune_then_quantize(self, tmp_path: Path) -> None:
        recipe = load_recipe(write(tmp_path, self.HEAD + self.PRUNE + self.QUANTIZE))
        assert recipe.prune is not None
        assert recipe.quantize is not None
        assert recipe.step_path("quantize") == ("steps", 1, "quantize")
        narrower = recipe.with_step(Prune(keep=Keep(ffn=0.25)))
        assert narrower.prune == Prune(keep=Keep(ffn=0.25))
        assert narrower.quantize == recipe.quantize

    def test_quantized_weights_are_not_pruned(self, tmp_path: Path) -> None:
        (found,) = problems(tmp_path, self.HEAD + self.QUANTIZE + self.PRUNE)
        assert found == (
            "5:5: steps[1]: comes after the quantize step, and quantized weights cannot be pruned: put it before"
        )

    def test_each_at_most_once(self, tmp_path: Path) -> None:
        (found,) = problems(tmp_path, self.HEAD + self.PRUNE + self.PRUNE)
        assert found == "5:5: steps[1]: is a second prune step; a recipe of this version has at most one"

    def test_one_thing_a_step(self, tmp_path: Path) -> None:
        both = "  - prune: {keep: {ffn: 0.5}}\n    quantize: {target: int4}\n"
        (found,) = problems(tmp_path, self.HEAD + both)
        assert found.startswith("4:5: steps[0]: must be one of prune and quantize")

    def test_all_that_is_wrong_at_once(self, tmp_path: Path) -> None:
        wrong = "  - prune: {keep: {ffn: 1.5}}\n  - prune: {keep: {heads: 0}}\n"
        assert [line.split(": ")[1] for line in problems(tmp_path, self.HEAD + self.QUANTIZE + wrong)] == [
            "steps[1]",
            "steps[1].prune.keep.ffn",
            "steps[2]",
            "steps[2].prune.keep.heads",
        ]


class TestOptions:
    def test_the_examples_are_all_options(self) -> None:
        assert set(EXAMPLES) | set(RECIPE) | {"--params", "--size"} == set(PRUNE_OPTIONS)

    @pytest.mark.parametrize("name", EXAMPLES)
    def test_every_option_sets_its_value(self, name: str) -> None:
        given, value = EXAMPLES[name]
        found = reach(prune_from_options({"MODEL": "m", "--keep-ffn": "0.5", name: given}), PRUNE_OPTIONS[name])
        assert (found, type(found)) == (value, type(value))

    @pytest.mark.parametrize(("name", "given", "value"), [("--params", "0.8x", 0.8), ("--size", "3kB", 3000)])
    def test_every_budget_sets_its_value(self, name: str, given: str, value: float) -> None:
        assert reach(prune_from_options({"MODEL": "m", name: given}), PRUNE_OPTIONS[name]) == value

    @pytest.mark.parametrize("name", [*EXAMPLES, "--params", "--size"])
    def test_every_option_is_named_by_its_error(self, name: str) -> None:
        given = {} if name in SHAPES else {"--keep-ffn": "0.5"}
        assert message(given | {name: object()}).startswith(f"{name}: must be ")

    def test_options_are_named_where_nothing_is_kept(self) -> None:
        assert message({}).startswith(
            "--keep-ffn, --keep-heads, --keep-kv-heads, --keep-layers, --params or --size: must say what is kept"
        )

    def test_options_are_named_where_two_ways_are_given(self) -> None:
        said = message({"--params": "0.8x", "--keep-heads": "6"})
        assert said.startswith("--keep-heads or --params: ")
        assert "`" not in said

    def test_all_that_is_wrong_at_once(self) -> None:
        wrong = {"--keep-ffn": "1.5", "--keep-heads": "0", "--importance": "obss", "--ffn-multiple": "0"}
        assert [line.split(": ")[0] for line in message(wrong).split("\n")] == list(wrong)

    def test_faults_found_later_name_the_option(self) -> None:
        recipe = prune_from_options({"MODEL": "m", "--keep-heads": "4"})
        assert str(recipe.error([(("steps", 0, "prune", "keep", "heads"), "is no divisor")])) == (
            "--keep-heads: is no divisor"
        )
