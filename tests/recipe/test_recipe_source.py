"""Recipe files: what the user thinks they say is what they say, or an error points at the place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipes_written import GOOD, load, problems, quantize, write

from compress.errors import RecipeError, UsageError
from compress.recipe.schema import Bench, Calibration, Evaluate, Quantize, Recipe
from compress.recipe.source import load_recipe


def test_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    assert recipe.steps[0].quantize == Quantize(target="int4")
    assert (recipe.calibration, recipe.evaluate, recipe.bench) == (Calibration(), Evaluate(), None)
    assert (recipe.output, recipe.seed, recipe.gates, recipe.report) == (None, 0, (), ("json", "md", "html", "junit"))


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    text = """\
version: 1
model: org/name@main
output: out/small
seed: 7
calibration: {source: text.jsonl, samples: 16, length: 256, batch_size: 4}
steps:
  - quantize:
      target: int4
      algorithm: rtn
      format: gptq
      group_size: 32
      skip: ["*.down_proj"]
      max_shard_size: 200MB
evaluate:
  fidelity: {source: held_out.txt, tokens: 16k, length: 128}
bench: {prompt: 64, new_tokens: 8, batch: 2, budget: 30s, engine: auto}
gates:
  - kl.mean <= 0.6
  - latency.tpot.ratio <= 1.5x @95%
report: [json]
"""
    recipe = load(tmp_path, text)
    step = recipe.steps[0].quantize
    assert (step.algorithm, step.format, step.group_size, step.skip) == ("rtn", "gptq", 32, ("*.down_proj",))
    assert step.max_shard_size == 200_000_000
    assert recipe.evaluate is not None
    assert recipe.evaluate.fidelity is not None
    assert recipe.evaluate.fidelity.tokens == 16_000
    assert recipe.bench == Bench(prompt=(64,), new_tokens=(8,), batch=(2,), budget=30.0, engine="auto")
    assert [(gate.metric, gate.value, gate.level, gate.line) for gate in recipe.gates] == [
        ("kl.mean", 0.6, None, 18),
        ("latency.tpot.ratio", 1.5, 0.95, 19),
    ]
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_null_turns_a_section_off(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD + "evaluate: null\nbench: {}\n")
    assert (recipe.evaluate, recipe.bench) == (None, Bench())


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load(tmp_path, GOOD)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


class TestWhatTheUserThinks:
    """The reproductions of real faults in other tools' recipes."""

    def test_a_misspelt_key(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, quantize("      group_sise: 64\n"))
        assert problem == (
            "6:7: steps[0].quantize.group_sise: unknown key `group_sise` (did you mean `group_size`?). "
            "Keys here: target, algorithm, format, group_size, symmetric, skip, overrides, damping, gptq, "
            "max_fallback, refine, smooth, max_shard_size"
        )

    def test_a_misspelt_key_at_the_top_that_belongs_below(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "quantise: {target: int4}\n")
        assert problem.startswith("5:1: quantise: unknown key `quantise` (did you mean `quantize` under `steps[]`?)")

    def test_a_misspelt_required_key_is_one_problem(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD.replace("model", "modle"))
        assert problem.startswith("2:1: modle: unknown key `modle` (did you mean `model`?)")

    @pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), (".05", 0.05), ("0", 0.0)])
    def test_a_number_in_any_notation_is_a_number(self, tmp_path: Path, text: str, value: float) -> None:
        assert load(tmp_path, quantize(f"      damping: {text}\n")).steps[0].quantize.damping == value

    def test_a_quoted_number_is_text(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + 'seed: "4"\n')
        assert problem == '5:7: seed: must be a whole number, not the text "4": remove the quotes'

    def test_a_key_that_is_given_twice(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "seed: 4\nseed: 4\n")
        assert problem == "6:1: seed: the key `seed` is given twice; line 5 has it already"

    @pytest.mark.parametrize("word", ["no", "yes", "on", "off"])
    def test_no_is_a_word(self, tmp_path: Path, word: str) -> None:
        (problem,) = problems(tmp_path, quantize(f"      algorithm: {word}\n"))
        assert problem == f'6:18: steps[0].quantize.algorithm: must be gptq or rtn, not the text "{word}"'

    @pytest.mark.parametrize("text", ["\tseed: 4\n", "seed:\t4\n", "seed: 4\t\n", "bench:\n\tbatch: 1\n"])
    def test_a_tab(self, tmp_path: Path, text: str) -> None:
        (problem,) = problems(tmp_path, GOOD + text)
        line = 5 + text.split("\t")[0].count("\n")
        column = len(text.split("\t")[0].split("\n")[-1]) + 1
        assert problem == f"{line}:{column}: a tab character: YAML is indented with spaces only"

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        assert load(tmp_path, b"\xef\xbb\xbf" + GOOD.encode()) == load(tmp_path, GOOD)

    def test_anchors_aliases_and_merge_keys(self, tmp_path: Path) -> None:
        text = (
            "version: 1\nmodel: m\nsteps:\n  - quantize: {target: int4}\n"
            "calibration: &text\n  source: &file corpus.txt\n  length: 64\n"
            "evaluate:\n  fidelity:\n    source: *file\n    <<: *text\n    length: 128\n"
        )
        recipe = load(tmp_path, text)
        assert recipe.evaluate is not None
        assert (recipe.evaluate.fidelity.source, recipe.evaluate.fidelity.length) == ("corpus.txt", 128)

    def test_a_merged_value_is_reported_where_it_is_written(self, tmp_path: Path) -> None:
        text = GOOD + "calibration: &text\n  length: 64\n  samples: 8\nevaluate:\n  fidelity: {<<: *text}\n"
        (problem,) = problems(tmp_path, text)
        assert problem.startswith("7:3: evaluate.fidelity.samples: unknown key `samples`")

    def test_all_problems_at_once(self, tmp_path: Path) -> None:
        text = (
            "version: 1\nmodel: m\nseed: '4'\nseed: 5\nstepps: []\ncalibration: {sample: 3, length: 0}\n"
            "steps:\n  - quantize: {target: int44, group_sise: 64, max_shard_size: 5}\n"
            "gates: [kl.maen <= 1, size <= 120, kl.mean <= 1]\n"
        )
        found = [problem.split(": ")[:2] for problem in problems(tmp_path, text)]
        assert found == [
            ["3:7", "seed"],
            ["4:1", "seed"],
            ["5:1", "stepps"],
            ["6:15", "calibration.sample"],
            ["6:34", "calibration.length"],
            ["8:24", "steps[0].quantize.target"],
            ["8:31", "steps[0].quantize.group_sise"],
            ["8:63", "steps[0].quantize.max_shard_size"],
            ["9:9", "gates[0]"],
            ["9:23", "gates[1]"],
        ]

    def test_chinese_under_the_c_locale_without_torch(self, tmp_path: Path) -> None:
        folder = tmp_path / "配方"
        folder.mkdir()
        path = write(folder, "# 注释\n" + GOOD + "output: out/模型\n")
        code = (
            "import json, sys\n"
            "from compress.recipe.source import load_recipe\n"
            "recipe = load_recipe(sys.argv[1])\n"
            "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'datasets'} & set(sys.modules)\n"
            "print(json.dumps([recipe.output, sorted(heavy)]))\n"
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LC_")}
        environment |= {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert json.loads(done.stdout) == ["out/模型", []]


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        write(tmp_path, GOOD)
        with pytest.raises(UsageError, match=r"there is no recipe file .*nothing\.yaml") as caught:
            load_recipe(tmp_path / "nothing.yaml")
        assert caught.value.hint == f"recipe files there: {tmp_path / 'recipe.yaml'}"

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is a folder, not a recipe file"):
            load_recipe(tmp_path)

    def test_far_too_large(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="larger than 1000000 bytes: this is no recipe"):
            load(tmp_path, b" " * 1_000_001)

    @pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n", "\ufeff"])
    def test_empty(self, tmp_path: Path, text: str) -> None:
        (problem,) = problems(tmp_path, text)
        assert "the file is empty: a recipe is a map with the keys version, model, " in problem

    @pytest.mark.parametrize(
        ("text", "what"), [("- quantize: {}\n", "a list"), ("int4\n", 'the text "int4"'), ("4\n", "`4`")]
    )
    def test_no_map(self, tmp_path: Path, text: str, what: str) -> None:
        (problem,) = problems(tmp_path, text)
        assert problem.startswith("1:1: a recipe is a map with the keys version, model, ")
        assert problem.endswith(f", not {what}")

    def test_latin_1(self, tmp_path: Path) -> None:
        text = GOOD.encode() + "output: modèle\n".encode("latin-1")
        (problem,) = problems(tmp_path, text)
        assert problem == f"5:12: byte 0xe8 at position {len(GOOD) + 11} is not UTF-8: save the file as UTF-8"

    def test_utf_16(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD.encode("utf-16"))
        assert problem.startswith("1:1: byte 0xf")

    def test_windows_line_ends(self, tmp_path: Path) -> None:
        assert load(tmp_path, GOOD.replace("\n", "\r\n")) == load(tmp_path, GOOD)
        (problem,) = problems(tmp_path, (GOOD + "sed: 3\n").replace("\n", "\r\n"))
        assert problem.startswith("5:1: sed: unknown key")


class TestSyntax:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("model: 'm\n", "1:8: this `'` is never closed"),
            ("report: [json\n", "1:9: this `[` is never closed"),
            ("bench: {batch: 1\nseed: 1\n", "2:5: not valid YAML: expected ',' or '}', but got ':'"),
            (
                "steps:\n  - quantize: {}\n - x\n",
                "3:2: this does not go with the lines above it: check the indentation",
            ),
            ("model: 'm' x\n", "1:12: the value before this is already complete"),
            ("seed: 1\nmodel:m\n", "2:1: a key without its value: write a colon and a space after the key"),
            ("bench:\n   batch: 1\n  prompt: 2\n", "3:3: this does not go with the lines above it"),
            ("model: a: b\n", "1:9: a `:` where no key can stand"),
            ("model: @m\n", "1:8: an unquoted value cannot start with `@`: put quotes around it"),
            ("model: *m\n", "1:8: the alias `*m` has no anchor `&m` before it"),
            ("a: 1\n---\nb: 2\n", "2:1: a second document starts here"),
            ("model: m\x00\n", "1:9: the character '\\x00' is not allowed in YAML"),
            ("model: !secret m\n", "1:8: the tag `!secret` is not known here"),
            ("model: !!python/none\n", "1:8: the tag `tag:yaml.org,2002:python/none` is not known here"),
            ("seed: !!int x\n", "1:7: `x` does not fit its tag `!!int`"),
            ("steps: &a [*a]\n", "1:8: the anchor `&a` contains itself"),
            ("bench: &a\n  <<: *a\n", "2:3: this map is merged into itself"),
            ("bench: {<<: 3}\n", "1:13: `<<` merges a map or a list of maps"),
            ("a: " + "[" * 3000, "1:1: lists or maps are nested too deeply"),
            ("model: m\n<<<<<<< HEAD\nseed: 1\n=======\nseed: 2\n>>>>>>> b\n", "2:1: `<<<<<<< HEAD` is a marker of a"),
            ("model: m\n=======\n", "2:1: `=======` is a marker of a merge conflict"),
        ],
    )
    def test_is_one_sentence_with_the_place(self, tmp_path: Path, text: str, problem: str) -> None:
        (found,) = problems(tmp_path, text)
        assert problem in found

    def test_aliases_that_multiply(self, tmp_path: Path) -> None:
        levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
        (problem,) = problems(tmp_path, "\n".join(levels))
        assert "more than 10000 values: do aliases multiply?" in problem

    def test_merges_that_multiply(self, tmp_path: Path) -> None:
        levels = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]
        (problem,) = problems(tmp_path, "\n".join(levels))
        assert "more than 10000 values: do aliases multiply?" in problem

    def test_a_key_that_is_no_name(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "? [seed]\n: 4\n")
        assert problem == "5:3: a key must be a name, not a list or a map"

    @pytest.mark.parametrize(("number", "ok"), [("0x10", True), ("0o17", True), ("+3", True), ("1_000", False)])
    def test_whole_numbers_of_yaml_1_2(self, tmp_path: Path, number: str, ok: bool) -> None:
        if ok:
            assert load(tmp_path, GOOD + f"seed: {number}\n").seed == int(number, 0)
        else:
            (problem,) = problems(tmp_path, GOOD + f"seed: {number}\n")
            assert problem == '5:7: seed: must be a whole number, not the text "1_000"'


class TestRules:
    @pytest.mark.parametrize("size", ["0", "-5", '"64"', "64.0", "true", "large"])
    def test_group_size(self, tmp_path: Path, size: str) -> None:
        (problem,) = problems(tmp_path, quantize(f"      group_size: {size}\n"))
        assert problem.startswith(
            "6:19: steps[0].quantize.group_size: must be auto, -1 (one scale per output channel) or a positive whole "
            "number such as 32, 64 or 128, not "
        )
        assert problem.endswith(": remove the quotes") == (size == '"64"')

    @pytest.mark.parametrize("target", ["int8", "fp8", "nf4", "int8-bnb", "fp16", "bf16"])
    def test_groups_where_there_are_none(self, tmp_path: Path, target: str) -> None:
        own, other = (64, 128) if target == "nf4" else (-1, 64)
        for size in ("auto", own, "null"):
            load(tmp_path, quantize(f"      group_size: {size}\n").replace("int4", target))
        (problem,) = problems(tmp_path, quantize(f"      group_size: {other}\n").replace("int4", target))
        assert problem.endswith(": leave this out. Targets with groups: int8-weight, int4")
        assert problem.startswith(f"6:19: steps[0].quantize.group_size: target {target} ")

    def test_format_of_another_target(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, quantize("      format: gptq\n").replace("int4", "int8"))
        assert problem.startswith("6:15: steps[0].quantize.format: target int8 cannot be written as gptq. Formats by ")
        held = "compressed-tensors, gptq, gptq_v2, gguf"
        assert f"int8-weight: {held}; int4: {held}; nf4: bitsandbytes; int8-bnb: bitsandbytes" in problem

    @pytest.mark.parametrize("setting", ["algorithm: rtn", "skip: [a]", "damping: 0.1"])
    def test_settings_that_a_cast_would_ignore(self, tmp_path: Path, setting: str) -> None:
        (problem,) = problems(tmp_path, quantize(f"      {setting}\n").replace("int4", "fp16"))
        assert "fp16" in problem
        assert problem.endswith(": leave this out")

    def test_damping_that_rtn_would_ignore(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, quantize("      damping: 0.1\n      algorithm: rtn\n"))
        assert problem.startswith("6:16: steps[0].quantize.damping: only algorithm gptq uses damping")

    @pytest.mark.parametrize("damping", ["-0.1", "1", "1.5", ".nan", ".inf"])
    def test_damping(self, tmp_path: Path, damping: str) -> None:
        (problem,) = problems(tmp_path, quantize(f"      damping: {damping}\n"))
        assert problem.startswith("6:16: steps[0].quantize.damping: must be a ")

    def test_a_step_of_a_later_version(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD.replace("quantize: {target: int4}", "distill: {steps: 100}"))
        assert problem == "4:5: steps[0].distill: unknown step `distill`. Steps here: prune, quantize"

    def test_two_quantize_steps(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "  - quantize: {target: int8}\n")
        assert problem == ("5:5: steps[1]: is a second quantize step; a recipe of this version has at most one")

    def test_two_quantize_steps_beside_other_faults(self, tmp_path: Path) -> None:
        found = problems(tmp_path, GOOD.replace("int4", "int3") + "  - quantize: {target: int8, damping: []}\n")
        assert [problem.split(": ")[1] for problem in found] == [
            "steps[0].quantize.target",
            "steps[1]",
            "steps[1].quantize.damping",
        ]

    def test_no_step(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, "version: 1\nmodel: m\nsteps: []\n")
        assert problem == "3:8: steps: must have one step, such as `- quantize: {target: int4}`"

    @pytest.mark.parametrize("version", ["2", "true", '"1"', "1.0", "null"])
    def test_version(self, tmp_path: Path, version: str) -> None:
        (problem,) = problems(tmp_path, GOOD.replace("version: 1", f"version: {version}"))
        assert problem.startswith("1:10: version: must be 1, not ")

    def test_missing_keys_stand_at_the_map_that_lacks_them(self, tmp_path: Path) -> None:
        found = problems(tmp_path, "# nothing\nseed: 1\nsteps:\n  - quantize: {}\n")
        assert found == [
            "2:1: version: is missing. Version of the recipe language",
            "2:1: model: is missing. Folder of the model, or hub id, or hub id@revision",
            "4:15: steps[0].quantize.target: is missing. What the weights become: "
            "fp16, bf16, fp8, int8, int8-weight, int4, nf4 or int8-bnb",
        ]

    @pytest.mark.parametrize(
        ("sections", "gate", "section"),
        [
            ("evaluate: null\n", "kl.mean <= 1", "evaluate"),
            ("evaluate: null\n", "perplexity.ratio <= 1x", "evaluate"),
            ("", "latency.tpot <= 30ms", "bench"),
            ("", "memory.peak <= 1GB", "bench"),
        ],
    )
    def test_a_gate_that_nothing_measures(self, tmp_path: Path, sections: str, gate: str, section: str) -> None:
        found = problems(tmp_path, GOOD + sections + f"gates:\n  - size <= 1GB\n  - {gate}\n")
        metric = gate.split()[0]
        line = 7 + sections.count("\n")
        assert found == [
            f"{line}:5: gates[1]: gate `{gate}`: `{metric}` is measured by `{section}`, which is off: "
            f"turn it on (`{section}: {{}}` in a recipe) or remove the gate"
        ]
        on = GOOD + f"{section}: {{}}\ngates:\n  - {gate}\n"
        assert load(tmp_path, on).gates[0].line == 7

    @pytest.mark.parametrize("gates", ["kl.mean <= 1", "null", "{kl.mean: 1}"])
    def test_gates_are_a_list(self, tmp_path: Path, gates: str) -> None:
        (problem,) = problems(tmp_path, GOOD + f"gates: {gates}\n")
        assert problem.startswith("5:8: gates: must be a list of gates such as `kl.mean <= 0.1`, not ")

    def test_a_gate_is_text(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "gates:\n  - kl.mean: 0.1\n")
        assert problem == "6:5: gates[0]: must be text such as `kl.mean <= 0.1`, not a map"

    def test_a_report_that_does_not_exist(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "report: [json, pdf]\n")
        assert problem == '5:16: report[1]: must be json, md, html or junit, not the text "pdf"'

    def test_a_report_twice(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + "report: [md, md]\n")
        assert problem == "5:9: report: lists md twice"

    def test_faults_found_later_point_at_the_file(self, tmp_path: Path) -> None:
        recipe = load(tmp_path, quantize("      skip:\n        - '*.q_proj'\n        - nothing*\n"))
        error = recipe.error([(("steps", 0, "quantize", "skip", 1), "matches no layer")])
        assert isinstance(error, RecipeError)
        assert str(error) == f"{tmp_path / 'recipe.yaml'}:8:11: steps[0].quantize.skip[1]: matches no layer"
