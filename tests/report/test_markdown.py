from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt
from sample_report import GATES, sample_report

from compress.report.markdown import Code, cell, code, prose, report_markdown


def tables(text: str) -> list[list[str]]:
    return [block.strip().splitlines() for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)]


def test_says_the_verdict_first_and_everything_after() -> None:
    text = report_markdown(sample_report())
    assert text.startswith("# \u274c FAIL: out/smollm2-135m-instruct-int4\n\nFAIL: 2 of 4 gates failed")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "Gates",
        "Original and result",
        "Speed and memory",
        "Remarks",
        "Layers",
        "Proof",
        "Where it comes from",
    ]
    for gate in GATES:
        assert f"`{gate}`" in text


def test_tables_are_well_formed() -> None:
    found = tables(report_markdown(sample_report()))
    assert len(found) == 9
    for rows in found:
        assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
        assert re.fullmatch(r"\|( ---:? \|)+", rows[1])


def test_a_reader_of_markdown_sees_the_tables() -> None:
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(report_markdown(sample_report()))
    assert html.count("<table>") == 9
    assert "<td>all" not in html
    assert html.count("<details>") == html.count("</details>") == 2
    assert "[0.0751, 0.0812]" in html


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


def test_stays_within_a_job_summary() -> None:
    assert len(report_markdown(sample_report()).encode()) < 1024 * 1024


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
        ("[a](http://b)", "[a\\](http://b)"),
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


def test_code_spans_hold_backticks() -> None:
    assert code("a`b") == "``a`b``"
    assert code("`a") == "`` `a ``"
