"""What the reports show of a step that pruned: the shape, what it bought, where it hurt, and what was tried."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pruned_report import AFTER, BEFORE, REMOVED, SEARCHED, prune_step, pruned_layers, pruned_report, quantize_step
from pydantic import ValidationError
from rich.console import Console
from sample_report import moved

from compress.report.build import step_part
from compress.report.card import model_card
from compress.report.comparison.compare import compare
from compress.report.html.page import report_html
from compress.report.html.prune_strip import prune_strips
from compress.report.junit import report_junit
from compress.report.layer_views import layers, left_alone, worst_layers
from compress.report.markdown import report_markdown
from compress.report.prune_views import PruneView, prune_views
from compress.report.schema import Report, report_json
from compress.report.text import report_text


def view(report: Report) -> PruneView:
    (found,) = prune_views(report)
    return found


def terminal(report: Report, width: int = 120) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as shown:
        console.print(report_text(report))
    return shown.get()


def words(text: str) -> str:
    return " ".join(text.split())


def changed(report: Report, **settings: Any) -> Report:
    """The report with other settings of its prune step."""
    (step, *others) = report.steps
    step = step.model_copy(update={"settings": step.settings | settings})
    return report.model_copy(update={"steps": (step, *others)})


class TestView:
    def test_the_shape_before_and_after(self) -> None:
        assert view(pruned_report()).bought[:4] == (
            ("FFN width", "1,536", "1,152", "0.750x"),
            ("query heads", "9", "6", "0.667x"),
            ("KV heads", "3", "2", "0.667x"),
            ("layers", "30", "28", "0.933x"),
        )

    def test_what_it_bought_and_cost(self) -> None:
        rows = {row[0]: row[1:] for row in view(pruned_report()).bought}
        assert rows["parameters"] == ("134,515,008", "102,221,376", "0.760x")
        assert rows["weight files"] == ("269.1 MB", "204.5 MB", "0.760x")
        assert rows["KV cache per token"] == ("23,040 B", "14,336 B", "0.622x")
        assert rows["per token, both in bfloat16"][2] == "1.048x [1.028, 1.068]"
        assert rows["perplexity"][2] == "1.607x [1.580, 1.630]"
        assert rows["accuracy, next_sentence"][2] == "1.2 pt [0.1, 2.3]"

    def test_the_layers_that_went(self) -> None:
        assert view(pruned_report()).removed == "layers removed: 2 of 30 (20, 21, counted from 0)"
        assert view(changed(pruned_report(), layers_kept=list(range(30)))).removed == ""

    def test_a_row_for_each_kind_of_projection(self) -> None:
        assert view(pruned_report()).units == (
            ("28 x self_attn.o_proj", "2 of 3 KV heads", "0.327", "0.137", "0.127", "0.168 in layer 29"),
            ("28 x mlp.down_proj", "1,152 of 1,536 FFN channels", "0.354", "0.164", "0.154", "0.226 in layer 29"),
        )

    def test_errors_that_nobody_measured(self) -> None:
        bare = [
            replace(layer, pruning={key: layer.pruning[key] for key in ("unit", "of", "kept")})
            for layer in pruned_layers()
            if layer.pruning is not None
        ]
        report = pruned_report().model_copy(update={"steps": (step_part(replace(prune_step(), layers=tuple(bare))),)})
        assert view(report).units[0] == ("28 x self_attn.o_proj", "2 of 3 KV heads", "-", "-", "-", "-")
        assert prune_strips(report)[0].errors is None

    def test_shapes_that_were_tried(self) -> None:
        assert view(pruned_report()).tried == ()
        found = view(pruned_report(searched=True))
        assert found.tried_headers[-2:] == ("KL, held out", "")
        assert found.tried[0] == ("1,152", "6", "2", "28", "102,221,376", "204.5", "0.5120", "chosen")
        assert [row[-1] for row in found.tried] == ["chosen", "", ""]
        assert len(found.tried) == len(SEARCHED)

    def test_without_compensation(self) -> None:
        report = changed(pruned_report(), importance="random", compensate=False)
        assert view(report).title == "units chosen by random, no weight fitted, 32,768 calibration tokens"

    @pytest.mark.parametrize(
        "settings",
        [
            {"before": None, "after": "x", "layers_kept": 3, "search": {"a": 1}},
            {"before": {"ffn": "many"}, "after": {}, "layers_kept": None, "search": [1, {}, {"bytes": "?"}]},
            {"before": {"ffn": 0, "layers": 2}, "after": {"ffn": 1, "layers": True}, "search": None},
        ],
    )
    def test_settings_that_somebody_edited(self, settings: dict[str, Any]) -> None:
        report = changed(pruned_report(), **settings)
        assert "Pruning" in terminal(report)
        assert "## Pruning" in report_markdown(report)
        assert 'id="pruning"' in report_html(report)


class TestNotQuantized:
    def test_pruned_projections_are_no_quantized_layers(self) -> None:
        report = pruned_report()
        assert (layers(report), worst_layers(report), left_alone(report)) == ((), (), ())
        totals = report.steps[0].totals
        assert (totals.layers_quantized, totals.layers_skipped, totals.layers_fallback) == (0, 0, 0)
        assert totals.calibration_tokens == 32768

    def test_both_steps_have_their_own(self) -> None:
        report = pruned_report(quantized=True)
        quantized = report.steps[1].totals
        assert quantized.layers_quantized == sum(layer.skipped is None for layer in quantize_step().layers)
        assert len(layers(report)) == len(quantize_step().layers)
        assert "of all steps together" in view(report).title
        assert all(group.reason != "removed" for group in left_alone(report))

    def test_what_only_quantization_has_is_not_missed(self) -> None:
        assert not any("bits_per_weight" in remark for remark in pruned_report().remarks)

    def test_why_it_is_not_faster(self) -> None:
        (why,) = [remark for remark in pruned_report().remarks if remark.startswith("why not faster")]
        assert "another dtype" not in why


class TestRenderings:
    def test_terminal(self) -> None:
        text = words(terminal(pruned_report(searched=True)))
        for shown in ("Pruning units chosen by obs", "FFN width 1,536 1,152 0.750x", "layers removed: 2 of 30 (20, 21"):
            assert shown in text
        assert "0.5120 chosen" in text
        assert "layers done" not in text

    def test_a_narrow_terminal_loses_no_figure(self) -> None:
        lines = terminal(pruned_report(searched=True), 80).splitlines()
        assert max(map(len, lines)) <= 80
        assert "0.226 in layer 29" in words(terminal(pruned_report(), 80))

    def test_markdown(self) -> None:
        text = report_markdown(pruned_report(searched=True))
        assert "| FFN width | 1,536 | 1,152 | 0.750x |" in text
        assert "\n\n|  | original | result | compared |" in text
        assert "All 56 projections that lost inputs or were fitted" in text
        assert "## Layers" not in text
        assert "## Layers" in report_markdown(pruned_report(quantized=True))

    def test_html(self) -> None:
        page = report_html(pruned_report(searched=True))
        assert '<a href="#pruning">Pruning</a>' in page
        assert 'id="layers"' not in page
        assert "model.layers.20: removed" in page
        assert 'id="layers"' in report_html(pruned_report(quantized=True))

    def test_junit_has_no_layers(self) -> None:
        assert "down_proj" not in report_junit(pruned_report(quantized=True))

    def test_the_strip_has_a_column_for_every_layer_of_the_original(self) -> None:
        (strip,) = prune_strips(pruned_report())
        (grid,) = strip.grids
        assert grid.blocks == tuple(range(30))
        assert [kind for kind, _ in grid.rows] == ["self_attn.o_proj", "mlp.down_proj"]
        for _, cells in grid.rows:
            assert [index for index, cell in enumerate(cells) if cell is not None and cell.colour == 0] == [*REMOVED]
        down = dict(grid.rows)["mlp.down_proj"]
        assert down[29] is not None
        assert down[29].strength == 1.0
        assert strip.errors == ("0.110", "0.226")
        assert [(key.label, key.count) for key in strip.legend][-1] == ("removed", 2)


class TestRoundTrip:
    @pytest.mark.parametrize("quantized", [False, True])
    def test_json(self, quantized: bool) -> None:
        report = pruned_report(quantized=quantized, searched=True)
        assert Report.model_validate(json.loads(report_json(report))) == report

    def test_units_are_checked(self) -> None:
        data = json.loads(report_json(pruned_report()))
        data["steps"][0]["layers"][0]["pruning"]["kept"] = ["two"]
        with pytest.raises(ValidationError):
            Report.model_validate(data)

    def test_two_reports_are_compared(self) -> None:
        assert compare(pruned_report(), pruned_report()).exit_code == 0
        wider = moved(pruned_report(), "kv_bytes", 1024.0, subject="result")
        assert any("kv_bytes" in line for line in compare(pruned_report(), wider).regressions)
        assert not compare(wider, pruned_report()).regressions


class TestCard:
    def card(self, report: Report, target: str, format_name: str) -> str:
        return model_card(report, format_name=format_name, target=target, kind="decoder")

    def test_pruned(self) -> None:
        card = self.card(pruned_report(), "unchanged", "safetensors")
        assert "base_model_relation: finetune" in card
        assert "- pruned" in card
        assert "unchanged" not in card
        assert "# SmolLM2-135M-Instruct-pruned" in card
        assert "**pruned** in the `safetensors` format" in card
        assert '.from_pretrained("SmolLM2-135M-Instruct-pruned")' in card
        assert f"| FFN width | {BEFORE['ffn']:,} | {AFTER['ffn']:,} |" in card
        assert "Layers removed: 2 of 30 (20, 21, counted from 0)." in card
        assert "| KV cache per token | 23,040 B | 14,336 B |" in card

    def test_pruned_and_quantized(self) -> None:
        card = self.card(pruned_report(quantized=True), "int4", "compressed-tensors")
        assert "base_model_relation: quantized" in card
        assert "# SmolLM2-135M-Instruct-pruned-int4" in card
        assert "**pruned** and compressed to **int4** in the `compressed-tensors` format" in card
        assert "## What was removed" in card
