from __future__ import annotations

from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml
from sample_report import fidelity, sample_report, task_report

from compress.report.junit import report_junit
from compress.report.schema import Report


def cases(report: Report) -> dict[tuple[str, str], ElementTree.Element]:
    root = ElementTree.fromstring(report_junit(report).encode())
    return {(case.get("classname", ""), case.get("name", "")): case for case in root.iter("testcase")}


def state(case: ElementTree.Element) -> str:
    found = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return found[0] if found else "passed"


def test_a_gate_is_a_case_with_its_numbers_and_its_line() -> None:
    found = cases(task_report())
    failed = found["compress.gates", "perplexity.ratio <= 1.05x @95%"]
    failure = failed.find("failure")
    assert failure is not None
    assert failure.get("type") == "FAIL"
    assert "lower 95% bound of perplexity.ratio is 1.063x" in (failure.get("message") or "")
    assert "measured 1.064x" in (failure.text or "")
    assert [(p.get("name"), p.get("value")) for p in failed.iter("property")] == [("recipe_line", "23")]
    assert state(found["compress.gates", "kl.mean <= 0.1"]) == "passed"


def test_tasks_and_checks_of_the_proof_are_cases() -> None:
    found = cases(task_report())
    text = found["compress.tasks", "next_sentence"].findtext("system-out") or ""
    assert "drop 1.2 pt [0.1, 2.3]" in text
    assert "find a drop of 1.4 pt" in text
    assert state(found["compress.proof", "tensors"]) == "passed"


def test_a_failed_check_of_the_proof_fails() -> None:
    report = sample_report()
    broken = {"checks": [{"name": "weights", "passed": False, "detail": "1 of 210 differ"}]}
    assert state(cases(report.model_copy(update={"proof": broken}))["compress.proof", "weights"]) == "failure"


def test_what_was_not_proved_is_skipped() -> None:
    assert state(cases(sample_report(proved=False))["compress.proof", "proof"]) == "skipped"


@pytest.mark.parametrize(
    ("gates", "noise", "expected", "code"),
    [
        ((), None, "passed", "0"),
        ((), "the machine is too noisy", "error", "8"),
        (("kl.mean <= 5",), "the machine is too noisy", "error", "8"),
        (("kl.mean <= 0.01",), None, "failure", "3"),
        (("latency.ttft <= 50ms",), None, "error", "4"),
    ],
)
def test_nothing_looks_green_that_does_not_end_with_0(
    gates: tuple[str, ...], noise: str | None, expected: str, code: str
) -> None:
    report = sample_report(fidelity(), gates, noise=noise)
    assert state(cases(report)["compress.verdict", "verdict"]) == expected
    suite = next(iter(JUnitXml.fromstring(report_junit(report).encode())))
    assert {p.name: p.value for p in suite.properties()}["exit_code"] == code
    assert (suite.failures + suite.errors > 0) == (code != "0")


def test_the_same_report_gives_the_same_bytes() -> None:
    report = sample_report().model_copy(update={"created": "2026-01-01T00:00:00+00:00"})
    assert report_junit(report) == report_junit(report)
    later = report.model_copy(update={"created": "2027-01-01T00:00:00+00:00"})
    assert report_junit(later).replace("2027", "2026") == report_junit(report)
