"""What a reader is told about layers that became different things."""

from __future__ import annotations

import io

from rich.console import Console
from sample_report import layer_records, sample_report

from compress.records import StepRecord
from compress.report.build import step_part
from compress.report.card import model_card
from compress.report.layer_views import by_scheme
from compress.report.loading import loading
from compress.report.markdown import report_markdown
from compress.report.remarks import fallback_remarks
from compress.report.schema import Report
from compress.report.text import report_text

DOWN = "model.layers.*.mlp.down_proj"


def mixed() -> Report:
    report = sample_report()
    (step,) = report.steps
    change = {"scheme": "W8A16 channel", "target": "int8-weight", "group_size": -1}
    layers = tuple(layer.model_copy(update=change if "down_proj" in layer.name else {}) for layer in step.layers)
    return report.model_copy(update={"steps": (step.model_copy(update={"layers": layers}),)})


def text_of(report: Report) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(report_text(report))
    return stream.getvalue()


def test_one_line_for_each_scheme() -> None:
    four, eight = by_scheme(mixed())
    assert (four.scheme, four.count, len(four.names)) == ("W4A16 g64", 180, 6)
    assert (eight.scheme, eight.count, eight.names) == ("W8A16 channel", 30, (DOWN,))
    lines = [line.strip() for line in text_of(mixed()).splitlines()]
    assert any(line.startswith("- 180 x W4A16 g64: model.layers.*.self_attn.q_proj, ") for line in lines)
    assert f"- 30 x W8A16 channel: {DOWN}" in lines
    assert f"- 30 x W8A16 channel: `{DOWN}`\n" in report_markdown(mixed())


def test_nothing_where_all_layers_became_the_same() -> None:
    assert by_scheme(sample_report()) == ()
    assert "210 x" not in text_of(sample_report())


def test_the_card_says_which_layers_became_what() -> None:
    card = model_card(mixed(), format_name="gptq", target="int4", kind="decoder")
    assert f"W8A16 channel (`{DOWN}`), chosen by gptq." in card
    assert 'GPTQModel.load("' in card
    assert "Weights: W4A16 g64, chosen by gptq." in model_card(
        sample_report(), format_name="compressed-tensors", target="int4", kind="decoder"
    )


def test_a_mix_in_gptq_is_loaded_by_who_knows_the_rules() -> None:
    """transformers goes through optimum, which would give all layers the scheme of the first."""
    lines = loading("gptq", "decoder", "out", mixed=True).transformers
    assert "from gptqmodel import GPTQModel" in lines
    assert not any("AutoModel" in line for line in lines)


def test_a_mix_in_compressed_tensors_warns_of_dequantizing_at_load() -> None:
    """Stock `dequantize=True` applies the first scheme to all layers."""
    mix, alone = (
        loading("compressed-tensors", "decoder", "out", mixed=True),
        loading("compressed-tensors", "decoder", "out"),
    )
    assert alone.note is None
    assert mix.note is not None
    assert "dequantize=True" in mix.note
    assert mix.transformers == alone.transformers


def test_layers_that_fell_back_are_named() -> None:
    layers = layer_records(2)
    fallen = [layer.__class__(**(vars(layer) | {"algorithm": "rtn"})) for layer in layers[:10]]
    step = StepRecord("quantize", {"algorithm": "gptq"}, (*fallen, *layers[10:]))
    (remark,) = fallback_remarks([step])
    assert remark.startswith(
        "10 layers were quantized by another algorithm than gptq: model.layers.0.self_attn.q_proj, "
    )
    assert remark.endswith(" and 2 more")
    assert step_part(step).totals.layers_fallback == 10
