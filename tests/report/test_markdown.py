from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt
from sample_report import GATES, sample_report, task_report

from compress.records import Measurement
from compress.report.markdown import report_markdown
from compress.report.markdown_text import Code, block, cell, code, prose
from compress.report.schema import Report, Reproduce


def tables(text: str) -> list[list[str]]:
    return [block.strip().splitlines() for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)]


def test_says_the_verdict_first_and_everything_after() -> None:
    text = report_markdown(task_report())
    title = "<!-- compress-report -->\n# \u274c FAIL: `out/smollm2-135m-instruct-int4`\n\nFAIL: 2 of 5 gates failed"
    assert text.startswith(title)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Gates",
        "Original and result",
        "Tasks",
        "Generated answers",
        "Speed and memory",
        "Remarks",
        "Layers",
        "Proof",
        "Where it comes from",
    ]
    for gate in GATES:
        assert f"`{gate}`" in text


def test_tables_are_well_formed() -> None:
    found = tables(report_markdown(task_report()))
    assert len(found) == 14
    for rows in found:
        assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
        assert re.fullmatch(r"\|( ---:? \|)+", rows[1])


def test_a_reader_of_markdown_sees_the_tables() -> None:
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(report_markdown(task_report()))
    assert html.count("<table>") == 14
    assert "<td>all" not in html.replace("<td>all tasks", "")
    assert html.count("<details>") == html.count("</details>") == 4
    assert "[0.0751, 0.0812]" in html


def test_tasks_have_the_columns_people_know() -> None:
    text = report_markdown(task_report())
    assert "| Tasks | Metric | Items | original | result | drop | lost | won | p | recovery | above chance |" in text
    assert "| `arithmetic` | acc | 1,000 | 54.2 % [51.1, 57.3] | 53.0 % [49.9, 56.1] | 1.2 pt [0.1, 2.3] |" in text
    assert "| 21 | 9 | 0.021 | 97.8 % [95.8, 99.8] | 95.9 % [92.2, 99.6] | 1.4 pt |" in text
    assert "the smallest drop that the items find in 80 of 100 runs: next_sentence 1.4 pt, arithmetic 1.4 pt" in text


def test_flips_are_folded_with_losses_first() -> None:
    text = report_markdown(task_report(("next_sentence",)))
    folded = text[text.index("<details>") : text.index("</details>")]
    assert "3 worst flips of <code>next&#95;sentence</code>, of 21 lost and 9 won" in folded
    assert re.findall(r"^\| (lost|won) ", folded, re.MULTILINE) == ["lost", "lost", "won"]
    assert (
        "| `Which sentence follows number 0?` | `It rained.` | `It rained.` | `The colour is 7.` | 0.400 ->" in folded
    )


def test_rows_of_a_sweep_are_told_apart() -> None:
    ratios = [
        Measurement("latency.tpot.ratio", "result/original", 0.7 + batch / 100, conditions={"dtype": "float32"} | sweep)
        for batch in (1, 4)
        for sweep in ({"batch": batch, "prompt": 128}, {"batch": batch, "prompt": 512})
    ]
    text = report_markdown(sample_report(ratios, ()))
    for name in ("batch 1, prompt 128", "batch 1, prompt 512", "batch 4, prompt 128", "batch 4, prompt 512"):
        assert f"| float32 / float32, {name} |" in text
    assert "1.408x decode speed (both in float32, batch 1, prompt 128)" in text


def test_percentiles_throughput_and_loading_have_tables() -> None:
    where = {"dtype": "float32", "batch": 1}
    figures = [
        Measurement("latency.tpot.p90", "result", 31.5, conditions=where),
        Measurement("latency.tpot.p99", "result", None, conditions=where, note="needs 299 values"),
        Measurement("throughput.decode", "result", 40.0, conditions=where),
        Measurement("latency.load", "result", 1500.0, conditions=where),
        Measurement("cpu.ratio", "result/original", 1.2, conditions=where),
    ]
    text = report_markdown(sample_report(figures, ()))
    for words in ("per token p90", "31.50 ms", "decoding", "40.00 tok/s", "loading", "1,500 ms", "CPU time", "1.200x"):
        assert words in text
    assert "per token p99" not in text
    assert "1 of 2 percentiles of times have no value, as the samples are too small" in text


def test_all_changed_layers_are_folded_in() -> None:
    text = report_markdown(sample_report())
    folded = text[text.index("<details>") : text.index("</details>")]
    assert folded.count("`model.layers.") == 210
    assert "3 input columns never saw a value other than 0" in folded


def test_every_measurement_and_its_definition() -> None:
    report = sample_report()
    text = report_markdown(report)
    for part in report.measurements:
        assert f"- `{part.metric}`: " in text


def huge(names: int, flips: int, question: str) -> Report:
    """Tasks with flips, 210 layers, each note and question long."""
    report = task_report(tuple(f"task_{i}" for i in range(names)))
    flip = report.tasks[0].flips[0].model_copy(update={"question": question})
    tasks = tuple(task.model_copy(update={"flips": (flip,) * flips}) for task in report.tasks)
    (step,) = report.steps
    layers = tuple(layer.model_copy(update={"notes": ("a note " * 20,)}) for layer in step.layers)
    return report.model_copy(update={"tasks": tasks, "steps": (step.model_copy(update={"layers": layers}),)})


@pytest.mark.parametrize(
    "report",
    [
        huge(10, 10, "Which one is it? " * 20),
        huge(10, 100, "模型" * 5000),
        huge(200, 10, "|`&<" * 200),
        task_report().model_copy(update={"remarks": ("a remark " * 500,) * 500}),
        task_report().model_copy(update={"environment": {str(i): "x" * 500 for i in range(500)}}),
    ],
    ids=["210 layers, 10 tasks, 100 flips", "long", "many tasks", "remarks", "environment"],
)
def test_stays_within_a_comment(report: Report) -> None:
    text = report_markdown(report)
    assert len(text.encode()) <= 60 * 1024
    assert text.count("<details>") == text.count("</details>")
    assert "report.json" in text
    for gate in report.verdict.gates:
        assert f"`{gate.expression}`" in text


def test_what_no_table_can_be_cut_enough_for_is_cut_at_a_line() -> None:
    report = sample_report().model_copy(update={"reproduce": Reproduce(command="\n".join(["a command"] * 9000))})
    text = report_markdown(report)
    assert len(text.encode()) <= 60 * 1024
    assert text.rstrip().endswith("*Cut here: the whole report is in report.json and report.html.*")


def test_the_smallest_report_renders() -> None:
    report = sample_report([], ()).model_copy(update={"steps": (), "remarks": (), "proof": None})
    text = report_markdown(report)
    assert "## Gates" not in text
    assert "## Layers" not in text
    assert "## Where it comes from" in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("kl.mean is 0.1, <= 0.2", "kl.mean is 0.1, <= 0.2"),
        ("<script>", "\\<script>"),
        ("[a](http://b)", "[a\\](http&#58;//b)"),
        ("www.evil.example", "www&#46;evil.example"),
        ("by @team, me@home", "by <code>@</code>team, me@home"),
        ("see #12 and org/a#3", "see <code>#</code>12 and org/a<code>#</code>3"),
        ("GH-7", "GH<code>-</code>7"),
        ("# not a heading", "\\# not a heading"),
        ("- no item", "\\- no item"),
        ("1. no item", "1\\. no item"),
        ("-0.3 pt, - and 1.5", "-0.3 pt, - and 1.5"),
        ("[ ] no box", "\\[ ] no box"),
        ("&lt; and AT&T", "&amp;lt; and AT&T"),
        ("~~kept~~", "\\~~kept\\~~"),
        ("::error::x", "&#58;:error::x"),
        ("*bold* and `code`", "\\*bold\\* and \\`code\\`"),
        ("snake_case and _emphasis_", "snake_case and \\_emphasis\\_"),
        ("two\nlines", "two lines"),
    ],
)
def test_prose_escapes_only_markup(text: str, escaped: str) -> None:
    assert prose(text) == escaped


def test_cells_keep_their_pipes() -> None:
    assert cell("KL(a || b)") == "KL(a \\|\\| b)"
    assert cell(Code("a|b")) == "`a\\|b`"
    assert cell(Code("a\\|b")) == "<code>a&#92;&#124;b</code>"


def test_code_spans_hold_backticks_and_commands() -> None:
    assert code("##[error]") == "<code>&#35;&#35;&#91;error&#93;</code>"
    assert code("a`b") == "``a`b``"
    assert code("`a") == "`` `a ``"


def test_a_block_cannot_be_left() -> None:
    assert block("compress run a.yaml", "bash") == "```bash\ncompress run a.yaml\n```"
    assert block("a\n```\n# b", "bash").startswith("<pre>a\n&#96;&#96;&#96;\n&#35; b</pre>")
    assert "\n::" not in block("a\n::error::b", "bash")
