"""`compress prune` and recipes with a prune step, as a user runs them: what is written, shown and refused."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import tiny
from commandline import compress

from compress.model.checkpoint import open_checkpoint

FEW = ("--samples", "8", "--length", "64", "--no-bench", "--evaluation-tokens", "2k")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned")
    tiny.tiny_llama(folder / "m")
    return folder / "m"


@pytest.fixture(scope="module")
def pruned(model: Path) -> CompletedProcess[str]:
    asked = ("--keep-ffn", "0.5", "--keep-kv-heads", "1")
    return compress("prune", "m", *asked, *FEW, "--gate", "parameters <= 75000", "--json", cwd=model.parent)


def said(done: CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())


class TestRun:
    def test_the_default_folder_is_a_smaller_model(self, model: Path, pruned: CompletedProcess[str]) -> None:
        assert pruned.returncode == 0, pruned.stderr
        found = json.loads(pruned.stdout)
        assert found["output"] == "m-pruned"
        before, after = (open_checkpoint(model.parent / name).config for name in ("m", "m-pruned"))
        assert after["intermediate_size"] * 2 == before["intermediate_size"]
        assert (after["num_key_value_heads"], after["num_attention_heads"]) == (1, before["num_attention_heads"] // 2)
        assert after["head_dim"] == before["head_dim"]

    def test_measurements_have_the_cache_of_both(self, pruned: CompletedProcess[str]) -> None:
        rows = {
            m["subject"]: m["value"] for m in json.loads(pruned.stdout)["measurements"] if m["metric"] == "kv_bytes"
        }
        assert rows["result"] * 2 == rows["original"]

    def test_the_record_has_units_and_errors(self, model: Path, pruned: CompletedProcess[str]) -> None:
        assert pruned.returncode == 0
        (step,) = json.loads((model.parent / "m-pruned" / "compress.json").read_text())["steps"]
        assert step["kind"] == "prune"
        assert step["layers_quantized"] == 0
        assert step["settings"]["keep"] == {"ffn": 0.5, "kv_heads": 1}
        found = [layer["pruning"] for layer in step["layers"] if "pruning" in layer]
        assert {one["unit"] for one in found} == {"ffn", "kv_heads"}
        for one in found:
            assert len(one["kept"]) * 2 == one["of"]
            assert one["error_measured"] <= one["error_masked"]

    def test_the_report_is_read_again(self, model: Path, pruned: CompletedProcess[str]) -> None:
        assert pruned.returncode == 0
        for form in ("text", "md", "html", "junit"):
            done = compress("report", "m-pruned", "--format", form, cwd=model.parent)
            assert done.returncode == 0, done.stderr
        text = " ".join(compress("report", "m-pruned", cwd=model.parent).stdout.split())
        assert "Pruning units chosen by obs" in text
        assert "KV heads 2 1 0.500x" in text

    def test_a_result_is_as_good_as_itself(self, model: Path, pruned: CompletedProcess[str]) -> None:
        assert pruned.returncode == 0
        done = compress("compare", "m-pruned", "m-pruned", cwd=model.parent)
        assert done.returncode == 0, done.stderr

    def test_the_card_says_what_was_removed(self, model: Path, pruned: CompletedProcess[str]) -> None:
        assert pruned.returncode == 0
        card = (model.parent / "m-pruned" / "README.md").read_text()
        assert "base_model_relation: finetune" in card
        assert "| KV heads | 2 | 1 |" in card

    def test_it_is_not_overwritten_unasked(self, model: Path, pruned: CompletedProcess[str]) -> None:
        assert pruned.returncode == 0
        done = compress("prune", "m", "--keep-ffn", "0.5", *FEW, cwd=model.parent)
        assert done.returncode == 2
        assert "--overwrite" in done.stderr

    def test_without_text_and_quiet(self, model: Path, tmp_path: Path) -> None:
        cheap = ("--importance", "magnitude", "--no-compensate", "--no-evaluate", "--no-bench", "--quiet")
        done = compress("prune", model, "--keep-layers", "1", *cheap, "-o", tmp_path / "out")
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "layers removed: 1 of 2" in done.stdout

    def test_pruned_then_quantized(self, model: Path, tmp_path: Path) -> None:
        recipe = tmp_path / "recipe.yaml"
        steps = "steps:\n  - prune: {keep: {ffn: 0.5}}\n  - quantize: {target: int8-weight}\n"
        text = f"version: 1\nmodel: {model}\ncalibration: {{samples: 8, length: 64}}\nevaluate: null\n{steps}"
        recipe.write_text(text)
        done = compress("run", recipe, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "m-pruned-int8-weight" / "compress.json").read_text())
        assert [step["kind"] for step in found["steps"]] == ["prune", "quantize"]
        assert found["steps"][0]["layers_quantized"] == 0
        assert found["steps"][1]["layers_quantized"] > 0


class TestPlan:
    def test_before_and_after_of_every_kind(self, model: Path, tmp_path: Path) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"version: 1\nmodel: {model}\nsteps:\n  - prune: {{keep: {{ffn: 50%, heads: 4}}}}\n")
        done = compress("plan", recipe)
        assert done.returncode == 0, done.stderr
        text = " ".join(done.stdout.split())
        assert "FFN width 128 64 0.500" in text
        assert "query heads 8 4 0.500" in text
        found = json.loads(compress("plan", recipe, "--json").stdout)["plan"]["pruning"]
        assert found["before"] == {"ffn": 128, "heads": 8, "kv_heads": 2, "layers": 2}
        assert found["after"] == {"ffn": 64, "heads": 4, "kv_heads": 2, "layers": 2}
        assert found["shares"] == {"ffn": 0.5, "heads": 0.5, "kv_heads": 1.0, "layers": 1.0}
        assert found["parameters"]["after"] < found["parameters"]["before"]

    def test_candidates_of_a_search(self, model: Path, tmp_path: Path) -> None:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"version: 1\nmodel: {model}\nsteps:\n  - prune: {{params: 0.8x}}\n")
        done = compress("plan", recipe)
        assert done.returncode == 0, done.stderr
        assert "shapes to try, the largest first" in done.stdout


class TestRefused:
    def refused(self, model: Path, *options: str) -> str:
        done = compress("prune", model, *options, "-o", model.parent / "refused")
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert not (model.parent / "refused").exists()
        return said(done)

    def test_nothing_to_keep(self, model: Path) -> None:
        assert "--keep-ffn, --keep-heads, --keep-kv-heads, --keep-layers, --params or --size:" in self.refused(model)

    def test_all_mistakes_at_once(self, model: Path) -> None:
        wrong = ("--keep-ffn", "1.5", "--keep-heads", "0", "--keep-kv-heads", "-1", "--keep-layers", "two")
        text = self.refused(model, *wrong, "--importance", "taylr", "--ffn-multiple", "x")
        for name in ("--keep-ffn", "--keep-heads", "--keep-kv-heads", "--keep-layers", "--ffn-multiple"):
            assert f"{name}: must be " in text
        assert "(did you mean `taylor`?)" in text

    def test_two_ways(self, model: Path) -> None:
        text = self.refused(model, "--keep-ffn", "0.5", "--size", "1MB")
        assert "--keep-ffn or --size: --params and --size search for the shape by themselves" in text

    @pytest.mark.parametrize("option", ["--keep-ffn", "--params"])
    def test_an_empty_variable_of_a_shell(self, model: Path, option: str) -> None:
        assert f"{option}: " in self.refused(model, option, "", "--keep-layers", "1")

    @pytest.mark.parametrize(
        ("option", "value"), [("--keep-heads", "99"), ("--keep-layers", "3"), ("--keep-kv-heads", "5")]
    )
    def test_more_than_there_is(self, model: Path, option: str, value: str) -> None:
        assert f"{option}: " in self.refused(model, option, value)

    def test_an_option_of_quantize(self, model: Path) -> None:
        done = compress("prune", model, "--keep-ffn", "0.5", "--target", "int4")
        assert done.returncode == 2
        assert "--target" in done.stderr
