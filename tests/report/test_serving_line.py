"""What serving engines make of the result stands in every rendering."""

from __future__ import annotations

import json

import pytest
from sample_report import sample_report
from test_report_text import rendered

from compress.report.html.page import report_html
from compress.report.markdown import report_markdown
from compress.report.schema import Report, ServingPart, report_json
from compress.report.views import serving_line

CASES = {
    "loads it, as far as its sources tell (read, not run)": ServingPart(engine="vLLM", loads=True),
    "loads it, as far as its sources tell (read, not run): only on Hopper": ServingPart(
        engine="vLLM", loads=True, reasons=("only on Hopper",)
    ),
    "does not load it, as far as its sources tell (read, not run): no class; no kernel": ServingPart(
        engine="vLLM", loads=False, reasons=("no class", "no kernel")
    ),
}


@pytest.mark.parametrize("said", CASES)
def test_it_is_said_everywhere(said: str) -> None:
    report = sample_report().model_copy(update={"serving": (CASES[said],)})
    assert serving_line(CASES[said]) == said
    for text in (" ".join(rendered(report, width=200).split()), report_markdown(report), report_html(report)):
        assert said.replace("(", "\\(").replace(")", "\\)") in text or said in text
    assert Report.model_validate(json.loads(report_json(report))).serving == (CASES[said],)


def test_reports_from_before_say_nothing() -> None:
    data = json.loads(report_json(sample_report()))
    del data["serving"]
    assert Report.model_validate(data).serving == ()
