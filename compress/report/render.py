"""Every form a report can be written in, by the name that recipes and `--format` give it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compress.report.flat import metrics_json
from compress.report.junit import report_junit
from compress.report.markdown import report_markdown
from compress.report.schema import Report, report_json


@dataclass(frozen=True)
class Format:
    """The file's name in the report folder, and what makes its content."""

    file: str
    render: Callable[[Report], str]


def report_html(report: Report) -> str:
    """The page; its charts import matplotlib, so only who asks for it pays."""
    from compress.report.html.page import report_html as page

    return page(report)


FORMATS: dict[str, Format] = {
    "json": Format("report.json", report_json),
    "md": Format("report.md", report_markdown),
    "html": Format("report.html", report_html),
    "junit": Format("junit.xml", report_junit),
    "metrics": Format("metrics.json", metrics_json),
}
ALWAYS = ("metrics",)
"""Written by every run, asked for or not."""


def render_files(report: Report, formats: Iterable[str]) -> dict[str, bytes]:
    """{file name: content} of the formats asked for and of ALWAYS."""
    names = [*dict.fromkeys((*formats, *ALWAYS))]
    return {FORMATS[name].file: FORMATS[name].render(report).encode() for name in names}
