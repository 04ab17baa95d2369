"""Looks at the HTML report in a browser. Without Chromium these tests are skipped, and say so."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
from PIL import Image
from rich_report import OPEN, PASSING, TASK_GATES, eval_report, rich_report
from sample_report import sample_report

from compress.report.html.page import report_html
from compress.report.schema import Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BANDS = {"FAIL": (179, 33, 27), "PASS": (26, 107, 58), "INCONCLUSIVE": (133, 86, 10)}
LIGHT, DARK = "1", "0"
"""Values of Chromium's preferredColorScheme."""
MEASURE = """<!DOCTYPE html><iframe id="page" style="width:%dpx;height:700px;border:0"></iframe><pre id="found"></pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement, wide = [];
  for (const one of page.querySelectorAll("body *"))
    if (one.getBoundingClientRect().right > root.clientWidth + 1 && !one.closest(".scroll, svg"))
      wide.push(one.tagName + " " + one.className + " " + one.textContent.slice(0, 40));
  const charts = [...page.querySelectorAll(".chart > div")];
  const shown = charts.filter((one) => one.offsetHeight).map((one) => one.className);
  document.getElementById("found").textContent =
    JSON.stringify({client: root.clientWidth, scroll: root.scrollWidth, wide: wide.slice(0, 9), shown: shown});
};
frame.src = "report.html";
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = f"NO BROWSER: none of {', '.join(BROWSERS)} is here, so nobody has looked at the HTML report"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    return found


def run(browser: str, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options],
        env=os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def screenshot(browser: str, folder: Path, report: Report, scheme: str, size: tuple[int, int]) -> Image.Image:
    page, picture = folder / "report.html", folder / "page.png"
    page.write_text(report_html(report), encoding="utf-8")
    width, height = size
    look = (f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},{height}")
    run(browser, folder, *look, f"--screenshot={picture}", page.as_uri())
    with Image.open(picture) as image:
        assert image.size == size
        return image.convert("RGB")


def layout(browser: str, folder: Path, report: Report, width: int) -> dict[str, object]:
    """Widths as the browser lays the page out, and what sticks out to the right."""
    (folder / "report.html").write_text(report_html(report), encoding="utf-8")
    (folder / "measure.html").write_text(MEASURE % width, encoding="utf-8")
    options = ("--allow-file-access-from-files", "--virtual-time-budget=5000", "--dump-dom")
    dom = run(browser, folder, *options, (folder / "measure.html").as_uri())
    found = re.search(r'<pre id="found">(.+?)</pre>', dom)
    assert found, dom[-2000:]
    layout: dict[str, object] = json.loads(html.unescape(found[1]))
    return layout


def long_names() -> Report:
    """Words that cannot be broken between letters of any script."""
    report, word = rich_report(), "w" * 400
    flip = report.tasks[0].flips[0].model_copy(update={"question": word, "result": "\u65e5\u672c" * 200})
    task = report.tasks[0].model_copy(update={"source": word, "flips": (flip,)})
    gates = tuple(gate.model_copy(update={"expression": word, "reason": word}) for gate in report.verdict.gates)
    verdict = report.verdict.model_copy(update={"gates": gates, "headline": f"FAIL: {word}"})
    layers = tuple(layer.model_copy(update={"name": layer.name + word}) for layer in report.steps[0].layers[:9])
    return report.model_copy(
        update={
            "verdict": verdict,
            "tasks": (task,),
            "output": word,
            "steps": (report.steps[0].model_copy(update={"layers": layers}),),
            "remarks": (word,),
            "environment": {word: word},
        }
    )


def near(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(a - b) <= 6 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("gates", "outcome"), [(TASK_GATES, "FAIL"), (PASSING, "PASS"), (OPEN, "INCONCLUSIVE")])
def test_the_verdict_is_a_band_of_its_colour(
    browser: str, tmp_path: Path, gates: tuple[str, ...], outcome: str
) -> None:
    image = screenshot(browser, tmp_path, rich_report(gates), LIGHT, (1000, 900))
    pixel = image.getpixel((3, 3))
    assert isinstance(pixel, tuple)
    assert near(pixel, BANDS[outcome])
    below = image.getpixel((3, 890))
    assert below == (255, 255, 255)
    assert len(image.getcolors(maxcolors=1_000_000) or ()) > 200  # text is drawn, not only areas


def test_dark_where_the_reader_wants_dark(browser: str, tmp_path: Path) -> None:
    image = screenshot(browser, tmp_path, rich_report(), DARK, (1000, 2600))
    colours = sorted(image.getcolors(maxcolors=1_000_000) or (), key=lambda pair: -pair[0])
    assert colours[0][1] == (20, 23, 27)
    ratio = sum(n for n, colour in colours if isinstance(colour, tuple) and min(colour) > 240) / (1000 * 2600)
    assert ratio < 0.02, "large areas stayed white"


@pytest.mark.parametrize(
    "report",
    [rich_report(), eval_report(), sample_report([], ()), long_names()],
    ids=("rich", "eval", "bare", "long-names"),
)
def test_a_phone_never_scrolls_sideways(browser: str, tmp_path: Path, report: Report) -> None:
    found = layout(browser, tmp_path, report, 360)
    assert found["wide"] == []
    assert found["scroll"] == found["client"]
    assert found["client"] in range(330, 361)


@pytest.mark.parametrize(("width", "shown"), [(360, ["narrow"]), (1200, ["wide"])])
def test_the_chart_fits_the_screen(browser: str, tmp_path: Path, width: int, shown: list[str]) -> None:
    assert layout(browser, tmp_path, rich_report(), width)["shown"] == shown
