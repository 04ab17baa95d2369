"""The report as JUnit XML, which every CI system shows.

FAIL is a `failure`. INCONCLUSIVE is an `error`, a test that could not decide: the command ends with 4 or 8, so nothing
may look green, as `skipped` would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from compress.report.clean import defused_markup, single_line
from compress.report.digits import NOT_MEASURED
from compress.report.markdown import one_line
from compress.report.schema import GatePart, Report
from compress.report.summary import summary
from compress.report.task_views import TaskRow, smallest_drop, task_rows
from compress.report.views import gate_rows

if TYPE_CHECKING:
    from junitparser import TestCase

CHECKED = "a fresh process has not loaded this result"


def report_junit(report: Report) -> str:
    """One suite: the verdict, each gate, each task, each check of the proof. The only time in it is `created`."""
    from junitparser import JUnitXml, TestSuite

    suite = TestSuite("compress")
    if report.created is not None:
        suite.timestamp = report.created
    suite.add_testcases([verdict_case(report), *gate_cases(report), *task_cases(report), *proof_cases(report)])
    for name, value in properties(report).items():
        suite.add_property(name, value)
    xml = JUnitXml("compress")
    xml.add_testsuite(suite)
    body = re.sub(r"^<\?xml.*?\?>\s*", "", xml.tostring().decode())
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{defused_markup(body).strip()}\n'


def properties(report: Report) -> dict[str, str]:
    return {
        "verdict": report.verdict.outcome,
        "exit_code": str(report.verdict.exit_code),
        "summary": summary(report),
        "output": report.output,
        "model": report.inputs.model.source,
        "compress": report.tool.version,
    }


def verdict_case(report: Report) -> TestCase:
    """There also where no gate was asked, and where the machine was too noisy (exit code 8)."""
    verdict = report.verdict
    return case("compress.verdict", "verdict", verdict.outcome, verdict.headline, [f"exit code {verdict.exit_code}"])


def gate_cases(report: Report) -> Iterator[TestCase]:
    """Each with the line of the recipe that asks for it, so that a viewer can lead there."""
    for gate, row in zip(report.verdict.gates, gate_rows(report), strict=True):
        figures = [f"measured {row.measured}", f"interval {row.interval}", *([row.line] if row.line else ())]
        made = case("compress.gates", gate.expression, gate.outcome, gate.reason, figures)
        if gate.line is not None:
            made.append(line_property(gate))
        yield made


def line_property(gate: GatePart) -> object:
    from junitparser import Properties, Property

    found = Properties()
    found.add_property(Property("recipe_line", str(gate.line)))
    return found


def task_cases(report: Report) -> Iterator[TestCase]:
    """Figures only: whether a drop is too large is for a gate to say."""
    for row in task_rows(report):
        yield case("compress.tasks", row.name, "PASS", "", task_lines(row))


def task_lines(row: TaskRow) -> list[str]:
    figures = {
        "original": row.original,
        "result": row.result,
        "drop": row.drop,
        "lost": row.losses,
        "won": row.gains,
        "McNemar p": row.p,
        "recovery": row.recovery,
        "above chance": row.corrected,
    }
    lines = [f"{name} {value}" for name, value in figures.items() if value != NOT_MEASURED]
    return [*lines, smallest_drop(row)] if smallest_drop(row) else lines


def proof_cases(report: Report) -> Iterator[TestCase]:
    from junitparser import Skipped

    if report.proof is None:
        if report.command == "run":
            made = case("compress.proof", "proof", "PASS", "", [])
            made.result = [Skipped(CHECKED, "not proved")]
            yield made
        return
    for check in report.proof.get("checks", ()):
        outcome = "PASS" if check.get("passed") else "FAIL"
        yield case("compress.proof", str(check.get("name")), outcome, one_line(check.get("detail")), [])


def case(classname: str, name: str, outcome: str, reason: str, lines: list[str]) -> TestCase:
    from junitparser import Error, Failure, TestCase

    made = TestCase(single_line(name), classname, 0.0)
    text = "\n".join(map(single_line, [reason, *lines]))
    if outcome == "PASS":
        made.system_out = text.strip() or "passed"
        return made
    kind = Failure if outcome == "FAIL" else Error
    found = kind(single_line(reason), outcome)
    found.text = text
    made.result = [found]
    return made
