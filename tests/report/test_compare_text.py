from __future__ import annotations

import io
import json

from rich.console import Console
from sample_report import moved, sample_report, task_report

from compress.report.comparison.compare import Comparison, compare
from compress.report.comparison.text import MARKER, compare_json, compare_markdown, compare_text


def worse() -> Comparison:
    other = task_report().model_copy(update={"environment": {"cpu": "another"}})
    return compare(sample_report(), moved(other, "kl.mean", 0.02), paths=("a/report", "b/report"))


def rendered(found: Comparison, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(compare_text(found))
    return stream.getvalue()


def test_says_first_what_became_worse() -> None:
    text = rendered(worse())
    assert text.startswith("REGRESSION: kl.mean went from 0.07812 nats to 0.09812 nats")
    assert "+0.0200 nats [0.0157, 0.0243]  worse" in text
    assert "after: FAIL, b/report" in text
    assert "2 machines" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_says_what_was_not_compared_and_why() -> None:
    text = " ".join(rendered(worse()).split())
    assert "times and memory are not compared: two machines" in text
    assert "only after: accuracy of original" in text
    assert "the same or within noise:" in text


def test_gates_that_did_not_change_take_one_line() -> None:
    text = rendered(compare(sample_report(), sample_report()))
    assert "4 as before: 2 PASS, 2 FAIL" in text
    assert text.startswith("NO REGRESSION")


def test_markdown_has_a_marker_and_folds_what_did_not_move() -> None:
    text = compare_markdown(worse())
    assert text.startswith(f"{MARKER}\n# \u274c REGRESSION: kl.mean went")
    shown, _, folded = text.partition("<details>")
    assert "| `kl.mean` | 0.07812 nats | 0.09812 nats | +0.0200 nats [0.0157, 0.0243] | worse |" in shown
    assert "`size.ratio`" in folded
    assert "`size.ratio`" not in shown


def test_json_is_the_comparison() -> None:
    data = json.loads(compare_json(worse()))
    assert (data["exit_code"], data["before"]["path"]) == (3, "a/report")
    (kl,) = [one for one in data["metrics"] if one["name"] == "kl.mean"]
    assert kl["status"] == "worse"
    assert kl["difference"]["value"] == 0.09812 - 0.07812
