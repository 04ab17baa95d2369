from __future__ import annotations

import io

import pytest
from rich.console import Console
from sample_report import GATES, OUTPUT, fidelity, sample_measurements, sample_report, task_report

from compress.records import Measurement
from compress.report.layer_views import left_alone, pattern, worst_layers
from compress.report.schema import Report
from compress.report.summary import summary
from compress.report.text import report_text


def rendered(report: Report, width: int = 80, encoding: str = "utf-8", colour: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(report_text(report))
    stream.flush()
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("width", [80, 120])
def test_fits_the_terminal(width: int) -> None:
    assert max(map(len, rendered(sample_report(), width).splitlines())) <= width


def test_sections_come_in_the_order_of_a_reader_s_questions() -> None:
    text = rendered(sample_report())
    titles = ["FAIL", "Gates", "Original and result", "Speed and memory", "Layers", "Remarks", "Result"]
    places = [text.index(f"\n{title}\n") if title != "FAIL" else text.index(title) for title in titles]
    assert places == sorted(places)


def test_plain_text_without_colour_and_in_ascii() -> None:
    text = rendered(sample_report(), encoding="ascii")
    assert "\x1b" not in text
    assert text.isascii()
    assert "kl.mean <= 0.1" in text


def test_colour_on_a_terminal() -> None:
    assert "\x1b[1;31mFAIL\x1b[0m" in rendered(sample_report(), colour=True)


def test_every_gate_is_shown_with_what_was_measured() -> None:
    text = rendered(sample_report(), 120)
    for gate in GATES:
        assert gate in text
    assert "117.2 MB" in text
    assert "[0.0751, 0.0812]" in text
    assert "line 23" in text


def test_a_gate_that_could_not_be_decided_says_why() -> None:
    report = sample_report(fidelity(), ("kl.mean <= 0.01", "latency.ttft <= 50ms"))
    assert "latency.ttft <= 50ms: latency.ttft was not measured" in rendered(report)


def test_original_and_result_in_every_dtype() -> None:
    lines = rendered(sample_report(), 120).splitlines()
    for name in ("original float32", "original bfloat16", "result float32", "result bfloat16"):
        assert any(line.strip().startswith(name) for line in lines)
    assert any(line.split()[:3] == ["float32", "/", "bfloat16"] for line in lines)
    assert any("noise floor, float32" in line for line in lines)


def test_noise_floor_column_only_where_there_is_one() -> None:
    def title(report: Report) -> str:
        lines = rendered(report, 120).splitlines()
        return lines[lines.index("Original and result") + 1]

    assert "noise floor" in title(sample_report())
    floorless = [m for m in sample_measurements() if "/original float32" not in m.subject]
    assert "noise floor" not in title(sample_report(floorless))


def test_tasks_fit_and_say_what_was_lost() -> None:
    text = rendered(task_report())
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert ["next_sentence", "1,000", "54.2", "%", "53.0", "%", "1.2", "pt", "21", "9", "0.021"] in lines
    words = " ".join(text.split())
    assert "all tasks: recovery 97.8 % [95.8, 99.8], above chance 95.9 % [92.2, 99.6]" in words
    assert "the smallest drop that the items find in 80 of 100 runs: next_sentence 1.4 pt" in words
    assert "Which sentence follows number 0? -> The colour is 7. instead of It rained." in words
    assert "length of answers" in text


def test_with_many_tasks_only_all_of_them_have_finer_figures() -> None:
    text = rendered(task_report(tuple(f"task{i}" for i in range(8))))
    assert "all tasks: recovery" in text
    assert "task0: recovery" not in text


def test_what_has_no_value_has_no_row() -> None:
    lost = Measurement("kl.p999", "result/original", None, note="too few tokens")
    text = rendered(sample_report([*sample_measurements(), lost], ()))
    assert "KL, p99.9" not in text
    assert "kl.p999 of result/original has no value: too few tokens" in text


def test_a_report_without_gates_and_measurements() -> None:
    text = rendered(sample_report([], ()))
    assert "no gate was asked" in text
    assert "Gates" not in text.splitlines()
    assert "accuracy was not measured" in text
    assert OUTPUT in text


def test_text_from_outside_is_not_markup() -> None:
    report = sample_report().model_copy(update={"output": "out/[bold]x[/bold]", "remarks": ("[red]a[/red]",)})
    text = rendered(report)
    assert "out/[bold]x[/bold]" in text
    assert "[red]a[/red]" in text


def test_summary_names_size_speed_and_distance() -> None:
    assert summary(sample_report()) == (
        "0.436x size, 0.954x decode speed [0.936, 0.973] (both in bfloat16), KL 0.0781 nats [0.0751, 0.0812]"
    )


def test_what_was_left_alone_is_grouped_by_reason() -> None:
    router, embedding = left_alone(sample_report())
    assert (router.reason, router.count, router.names) == ("router", 30, ("model.layers.*.mlp.gate",))
    assert embedding.names == ("model.embed_tokens",)


def test_pattern_stars_block_numbers_only() -> None:
    assert pattern("model.layers.12.mlp.experts.3.w1") == "model.layers.*.mlp.experts.*.w1"
    assert pattern("h1.layer2") == "h1.layer2"


def test_worst_layers_first() -> None:
    worst = worst_layers(sample_report())
    assert worst[0].name == "model.layers.29.mlp.down_proj"
    errors = [layer.error_after or 0.0 for layer in worst]
    assert len(errors) == 5
    assert errors == sorted(errors, reverse=True)
