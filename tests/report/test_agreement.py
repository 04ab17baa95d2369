"""One verdict: everything that is shown of a run says the same, and the exit code with it."""

from __future__ import annotations

import io
import json
import math
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hostile import Page
from rich.console import Console
from sample_report import generation, sample_report, task_figures, task_record

from compress.metrics import METRICS
from compress.recipe.gates import parse_gate
from compress.records import Interval, Measurement
from compress.report.comparison.compare import compare
from compress.report.html.page import report_html
from compress.report.read import read_report
from compress.report.render import FORMATS
from compress.report.schema import Report, report_json
from compress.report.text import report_text
from compress.verdict import Outcome, judge

REPORTS = 200
PAGES = 20
"""Of the reports, those whose HTML is made too: its chart takes the time of all else together."""
ASKED = ("kl.mean", "size", "perplexity.ratio", "latency.tpot.ratio", "accuracy.drop", "top1.agreement", "memory.peak")
EXIT_CODES = {Outcome.PASS: 0, Outcome.FAIL: 3, Outcome.INCONCLUSIVE: 4}


def random_report(seed: int) -> Report:
    """Values on, just beside and far from their thresholds, missing and not finite; with and without noise."""
    rng = random.Random(seed)
    measurements = [random_measurement(rng, metric) for metric in ASKED if rng.random() < 0.9]
    tasks = [task_record(f"task{i}") for i in range(rng.randrange(3))]
    measurements += [figure for task in tasks for figure in task_figures(task.name, rng.uniform(-2, 5))]
    measurements += generation() if rng.random() < 0.5 else []
    gates = tuple(random_gate(rng, metric) for metric in ASKED if rng.random() < 0.5)
    noise = "the machine was too noisy" if rng.random() < 0.2 else None
    return sample_report(measurements, gates, proved=rng.random() < 0.8, tasks=tasks, noise=noise, blocks=1)


def random_measurement(rng: random.Random, metric: str) -> Measurement:
    value = rng.choice((0.1, math.nextafter(0.1, 1), 0.1 - 1e-15, rng.uniform(0, 0.2), rng.uniform(0, 200)))
    half = rng.choice((1e-17, 0.01, 0.2))
    bounds = {0.95: (value - half, value + half)} if rng.random() < 0.9 else {}
    ends = Interval(value - half, value + half, 0.95, "made up") if rng.random() < 0.8 else None
    shown = rng.choice((value, value, value, value, value, None, math.nan))
    note = None if shown is not None else "no reason"
    subject = "result" if metric in ("size", "memory.peak") else "result/original"
    return Measurement(metric, subject, shown, 10, ends, bounds, note=note)


def random_gate(rng: random.Random, metric: str) -> str:
    unit = METRICS[metric].unit.replace("nats", "")
    level = " @95%" if METRICS[metric].interval and rng.random() < 0.5 else ""
    return f"{metric} {rng.choice(('<=', '<', '>=', '>'))} 0.1{unit}{level}"


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return [random_report(seed) for seed in range(REPORTS)]


def test_the_reports_cover_every_end(reports: list[Report]) -> None:
    ends = {(report.verdict.outcome, report.verdict.exit_code) for report in reports}
    assert ends == {("PASS", 0), ("FAIL", 3), ("INCONCLUSIVE", 4), ("INCONCLUSIVE", 8)}


def test_what_was_written_is_read_again_and_judged_the_same(reports: list[Report], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for report in reports:
        path.write_text(report_json(report), encoding="utf-8")
        assert read_report(path) == report


def test_all_forms_tell_one_verdict(reports: list[Report]) -> None:
    for report in reports:
        expected = (report.verdict.outcome, report.verdict.exit_code)
        gates = [(gate.expression, gate.outcome) for gate in report.verdict.gates]
        assert told_by_json(report) == (expected, gates)
        assert told_by_metrics(report) == (expected, outcome_counts(gates))
        assert told_by_junit(report) == (expected, gates)
        assert told_by_markdown(report) == (expected[0], gates)
        assert told_by_text(report) == (expected[0], [outcome for _, outcome in gates])
        assert compare(report, report).exit_code == 0


def test_the_page_tells_it_too(reports: list[Report]) -> None:
    for report in reports[:PAGES]:
        page = Page(report_html(report))
        first = re.search(r"\b(PASS|FAIL|INCONCLUSIVE)\b", page.all_text)
        assert first is not None
        assert first[0] == report.verdict.outcome


def test_the_exit_code_is_that_of_the_worst_gate(reports: list[Report]) -> None:
    """Judged once more from the numbers as they were stored: nothing was rounded before it was compared."""
    for report in reports:
        stored = Report.model_validate(json.loads(FORMATS["json"].render(report)))
        for gate in stored.verdict.gates:
            asked = parse_gate(gate.expression)
            if gate.level is None and gate.value is not None:
                assert (gate.outcome == "PASS") == asked.holds(gate.value), gate
            if gate.level is not None and gate.bound is not None and gate.outcome != "INCONCLUSIVE":
                ends = (gate.bound.lower, gate.bound.upper)
                assert gate.value is None or {asked.holds(end) for end in ends if end is not None} == {
                    gate.outcome == "PASS"
                }
        if stored.verdict.exit_code != 8:
            assert stored.verdict.exit_code == EXIT_CODES[Outcome(stored.verdict.outcome)]


def test_judging_twice_gives_the_same() -> None:
    gates = [parse_gate("kl.mean <= 0.1")]
    for value, outcome in ((0.1, "PASS"), (math.nextafter(0.1, 1), "FAIL")):
        verdict = judge(gates, [Measurement("kl.mean", "result/original", value)])
        assert verdict.outcome == outcome


def told_by_json(report: Report) -> object:
    verdict = json.loads(FORMATS["json"].render(report))["verdict"]
    gates = [(gate["expression"], gate["outcome"]) for gate in verdict["gates"]]
    return (verdict["outcome"], verdict["exit_code"]), gates


def told_by_metrics(report: Report) -> object:
    flat = json.loads(FORMATS["metrics"].render(report))
    counts = tuple(flat[f"gates.{name}"] for name in ("passed", "failed", "inconclusive"))
    return (flat["verdict"], flat["exit_code"]), counts


def outcome_counts(gates: list[tuple[str, str]]) -> tuple[int, ...]:
    outcomes = [outcome for _, outcome in gates]
    return tuple(outcomes.count(name) for name in ("PASS", "FAIL", "INCONCLUSIVE"))


def told_by_junit(report: Report) -> object:
    states = {None: "PASS", "failure": "FAIL", "error": "INCONCLUSIVE"}
    root = ElementTree.fromstring(FORMATS["junit"].render(report).encode())
    found = [
        (case.get("classname"), case.get("name"), states[next((c.tag for c in case if c.tag in states), None)])
        for case in root.iter("testcase")
    ]
    (outcome,) = [state for kind, _, state in found if kind == "compress.verdict"]
    properties = {item.get("name"): item.get("value") for item in root.iter("property")}
    assert properties["verdict"] == outcome
    gates = [(name, state) for kind, name, state in found if kind == "compress.gates"]
    return (outcome, int(properties["exit_code"] or "")), gates


def told_by_markdown(report: Report) -> object:
    text = FORMATS["md"].render(report)
    (outcome,) = re.findall(r"^# \S+ (\w+): ", text, re.MULTILINE)
    gates = re.findall(r"^\| \S+ (PASS|FAIL|INCONCLUSIVE) \| `([^`]*)` \|", text, re.MULTILINE)
    return outcome, [(expression, state) for state, expression in gates]


def told_by_text(report: Report) -> object:
    stream = io.StringIO()
    Console(file=stream, width=200).print(report_text(report))
    text = stream.getvalue()
    return text.partition(":")[0], re.findall(r"^  (PASS|FAIL|INCONCLUSIVE) ", text, re.MULTILINE)
