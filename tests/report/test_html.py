from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from html_page import Page
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich_report import LONG_QUESTION, OPEN, PASSING, TASK_GATES, eval_report, rich_report
from sample_report import sample_report

from compress.report.html.page import report_html
from compress.report.schema import Report
from compress.report.views import gate_rows, measured

HERE = Path(__file__).parent
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> & {{7*7}} $x$ \x1b[31m\x00\u202e ]]> -->"


@pytest.fixture(scope="module")
def html() -> str:
    return report_html(rich_report())


def headings(page: Page) -> list[str]:
    return [element.content for element in page.all("h2")]


def test_says_everything_in_the_order_a_reader_asks_for_it(html: str) -> None:
    assert headings(Page(html)) == [
        "Gates",
        "Before and after",
        "Accuracy, all tasks, against time per token",
        "Tasks",
        "Fidelity and generation",
        "Speed and memory",
        "Layers",
        "Remarks",
        "Proof",
        "How to reproduce",
    ]


def test_headings_skip_no_level(html: str) -> None:
    levels = [int(element.tag[1]) for element in Page(html).all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_links_lead_to_sections(html: str) -> None:
    page = Page(html)
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert {element.attributes["href"] for element in page.all("a")} <= {f"#{name}" for name in ids}
    used = {element.attributes["href"] for element in page.all("use")} | set(re.findall(r"url\((#[^)]*)\)", html))
    assert used <= {f"#{name}" for name in ids}


@pytest.mark.parametrize(
    ("gates", "outcome", "code"), [(TASK_GATES, "FAIL", "3"), (OPEN, "INCONCLUSIVE", "4"), (PASSING, "PASS", "0")]
)
def test_the_verdict_comes_first(gates: tuple[str, ...], outcome: str, code: str) -> None:
    report = rich_report(gates)
    page = Page(report_html(report))
    band = page.one("header")
    assert band.attributes["data-verdict"] == outcome
    assert band.attributes["data-exit-code"] == code
    assert outcome in band.attributes["class"].split()
    assert page.one("title").content.startswith(f"{outcome}: ")
    assert page.one("h1").content.split()[1] == outcome
    about = [element.attributes for element in page.all("meta") if element.attributes.get("name") == "description"]
    assert [one["content"] for one in about] == [report.verdict.headline]
    assert report.inputs.model.source in band.content


def test_a_failing_job_is_understood_from_the_band_alone(html: str) -> None:
    band = Page(html).one("header").content
    assert "3 of 6 gates failed" in band
    assert (
        "perplexity.ratio <= 1.05x @95% but measured 1.064x [1.0634, 1.0655] each @95%, 0.01438x above the limit"
        in band
    )
    assert "kl.mean <= 0.1" not in band


def test_what_failed_comes_before_what_passed() -> None:
    outcomes = [e.content.split()[-1] for e in Page(report_html(rich_report())).all("span") if is_outcome(e.attributes)]
    assert outcomes == ["FAIL"] * 3 + ["PASS"] * 3


def is_outcome(attributes: dict[str, str]) -> bool:
    return attributes.get("class", "").startswith("outcome")


def test_nothing_that_was_not_judged_is_green() -> None:
    band = Page(report_html(rich_report(()))).one("header")
    assert band.attributes["class"] == "band unjudged"


def test_every_figure_of_gates_and_measurements_is_there(html: str) -> None:
    report, text = rich_report(), Page(html).one("body").content
    for row in gate_rows(report):
        for figure in (row.asked, row.measured, row.interval, row.reason, row.line):
            assert figure in text
    for m in report.measurements:
        assert measured(m) in text
        assert m.definition in text
        assert m.definition_id in text


def test_bars_show_the_interval_on_its_side_of_the_limit(html: str) -> None:
    labels = [e.attributes["aria-label"] for e in Page(html).all("div") if e.attributes.get("class") == "bar"]
    assert len(labels) == 6
    assert labels[0] == "measured 1.064x, interval [1.0634, 1.0655] each @95%, limit 1.050x: 0.01438x above the limit"
    bar = html[html.index('<div class="bar"') :]
    limit, low = (float(re.search(rf'class="{name}" style="left:([\d.]+)%', bar)[1]) for name in ("limit", "span"))
    assert 0 < limit < low < 100


def test_tasks_with_their_flips(html: str) -> None:
    page = Page(html)
    text = page.one("main").content
    for words in ("17 lost", "6 won", "142 both right", "35 both wrong", "next_sentence: 200 items find a drop of"):
        assert words in text
    flips = [element for element in page.all("li") if element.attributes.get("class") in ("was-lost", "was-won")]
    assert [element.attributes["class"] for element in flips] == ["was-lost", "was-lost", "was-won"] + ["was-lost"] * 2
    assert "right answer" not in flips[0].content  # the original says just that
    assert "margin 1.23 nats" in flips[0].content
    assert "right answer17" in flips[2].content
    assert LONG_QUESTION.strip() in flips[1].content


def test_nothing_is_fetched_and_nothing_runs(html: str) -> None:
    page = Page(html)
    assert not page.all("script", "link", "iframe", "img", "object", "embed", "base", "form", "image")
    for element in page.elements:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert element.attributes.get(name, "#").startswith("#")
        assert not any(name.startswith("on") for name in element.attributes)
    assert not re.search(r"@import|url\(", page.one("style").content)
    policy = next(e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")


def test_charts_are_drawn_for_wide_and_narrow_screens(html: str) -> None:
    page = Page(html)
    charts = [e for e in page.all("div") if e.attributes.get("role") == "img" and "Chart" in e.attributes["aria-label"]]
    assert [element.attributes["class"] for element in charts] == ["wide", "narrow"]
    assert "result float32" in charts[0].content
    assert "269 MB" in charts[0].content


def test_a_report_without_parts_shows_no_empty_sections() -> None:
    bare = sample_report([], ()).model_copy(update={"steps": (), "remarks": (), "proof": None, "recipe": None})
    assert headings(Page(report_html(bare))) == ["How to reproduce"]


def test_a_comparison_of_two_models_names_both() -> None:
    page = Page(report_html(eval_report()))
    assert page.one("title").content == "FAIL: models/already-compressed"
    assert not {"Layers", "Proof", "Remarks"} & set(headings(page))
    assert "f" * 64 in page.one("main").content


def test_210_layers_stay_small(html: str) -> None:
    assert len(html.encode()) < 400_000


def dirty(report: Report, text: str) -> Report:
    """`report` with `text` in everything that comes from outside, past the cleaning that reports do when made."""
    task = report.tasks[0]
    flip = task.flips[0].model_copy(update=dict.fromkeys(("id", "question", "expected", "original", "result"), text))
    task = task.model_copy(update={"source": text, "flips": (flip,)})
    model = report.inputs.model.model_copy(update={"source": text, "revision": text})
    inputs = report.inputs.model_copy(update={"model": model, "calibration": {text: text}})
    gates = tuple(gate.model_copy(update={"reason": text}) for gate in report.verdict.gates)
    layers = tuple(layer.model_copy(update={"name": text, "notes": (text,)}) for layer in report.steps[0].layers[:3])
    more = {"conditions": {"variant": text, "dtype": text, text: text}, "note": text}
    return report.model_copy(
        update={
            "tasks": (task,),
            "inputs": inputs,
            "verdict": report.verdict.model_copy(update={"gates": gates}),
            "steps": (report.steps[0].model_copy(update={"layers": layers, "kind": text}),),
            "measurements": tuple(m.model_copy(update=more) for m in report.measurements),
            "remarks": (text,),
            "environment": {text: text},
            "recipe": {"steps": [text]},
            "output": text,
            "reproduce": report.reproduce.model_copy(update={"command": text, "load": (text,)}),
        }
    )


def tags(report: Report) -> list[str]:
    return [element.tag for element in Page(report_html(report)).elements if element.tag not in ("g", "path", "use")]


@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.text(st.characters(exclude_categories=()), min_size=1, max_size=40))
def test_text_from_outside_is_only_ever_text(text: str) -> None:
    report = rich_report()
    html = report_html(dirty(report, f"{HOSTILE}{text}"))
    html.encode()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    page = Page(html)
    assert not page.all("script", "img")
    assert HOSTILE[:50] in page.one("title").content
    assert "7*7" in page.one("title").content


def test_hostile_names_change_no_element() -> None:
    report = rich_report()
    harmless = "x" * len(HOSTILE)
    assert tags(dirty(report, HOSTILE)) == tags(dirty(report, harmless))


def test_long_words_and_no_words() -> None:
    for text in ("", " ", "w" * 5000):
        Page(report_html(dirty(rich_report(), text)))


FRESH = """
import hashlib, sys
sys.path.insert(0, {here!r})
import compress.report.html.page
assert "matplotlib" not in sys.modules, "matplotlib is imported before it is needed"
from rich_report import rich_report
text = compress.report.html.page.report_html(rich_report())
assert "matplotlib.pyplot" not in sys.modules, "pyplot keeps global state"
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_same_report_same_bytes_whatever_the_process_and_its_settings(html: str, tmp_path: Path) -> None:
    import hashlib
    import os

    settings_file = tmp_path / "matplotlibrc"
    settings_file.write_text("font.size: 31\nsvg.fonttype: path\naxes.facecolor: red\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(here=str(HERE))],
        env=os.environ | {"PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(settings_file)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == hashlib.sha256(html.encode()).hexdigest()


def test_drawing_leaves_the_settings_of_matplotlib_alone(html: str) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    assert report_html(rich_report()) == html
    assert dict(mpl.rcParams) == before


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    shares = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def palettes() -> list[dict[str, str]]:
    css = files("compress.report").joinpath("templates/report.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]


@pytest.mark.parametrize("palette", palettes(), ids=("light", "dark", "print"))
def test_contrast_is_enough_to_read(palette: dict[str, str]) -> None:
    for ink in ("ink", "muted", "accent", "pass-ink", "fail-ink", "open-ink"):
        for ground in ("paper", "raised"):
            assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)
    for band in ("pass", "fail", "open", "none"):
        assert contrast("#ffffff", palette[band]) >= 4.5, band
