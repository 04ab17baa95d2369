"""Text from outside comes through every renderer as text: seen, harmless, and calling nobody."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from hostile import TEXTS, Page, calls, commands, report_with, unseen
from markdown_it import MarkdownIt
from rich.console import Console, RenderableType
from ruamel.yaml import YAML

from compress.cli.terminal import Terminal, drawn
from compress.report.card import model_card
from compress.report.clean import defused, visible
from compress.report.comparison.compare import Comparison, compare
from compress.report.comparison.text import compare_json, compare_markdown, compare_text
from compress.report.html.page import report_html
from compress.report.render import FORMATS
from compress.report.schema import Report
from compress.report.text import report_text


def in_terminal(renderable: RenderableType, width: int) -> str:
    return drawn(Console(file=io.StringIO(), width=width, color_system=None, emoji=False), renderable)


def card_of(report: Report) -> str:
    return model_card(report, format_name="gptq", target="int4", kind="decoder")


RENDERERS: dict[str, Callable[[Report], str]] = {
    "terminal": lambda report: in_terminal(report_text(report), 80),
    "narrow terminal": lambda report: in_terminal(report_text(report), 24),
    "compare": lambda report: in_terminal(compare_text(compared(report)), 80),
    "compare md": lambda report: compare_markdown(compared(report)),
    "compare json": lambda report: compare_json(compared(report)),
    "card": card_of,
    **{name: form.render for name, form in FORMATS.items()},
}
MARKDOWN = ("md", "compare md", "card")


def compared(report: Report) -> Comparison:
    """With a report whose gates, tasks and machine are others."""
    return compare(report_with("former", gate=False), report, paths=(report.output, report.output))


def page_of(markdown: str) -> Page:
    body = re.sub(r"\A---\n.*?\n---\n", "", markdown, flags=re.DOTALL)
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return Page(reader.render(body))


@pytest.fixture(scope="module")
def plain_pages() -> dict[str, Page]:
    report = report_with("benign")
    return {name: page_of(RENDERERS[name](report)) for name in MARKDOWN} | {"html": Page(report_html(report))}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:20])
def test_every_renderer_shows_it_and_obeys_it_nowhere(text: str, plain_pages: dict[str, Page]) -> None:
    report = report_with(text)
    for name, render in RENDERERS.items():
        shown = render(report)
        assert shown.encode("utf-8"), name
        assert unseen(shown) == [], name
        assert commands(shown) == [], name
        if name in MARKDOWN:
            page = page_of(shown)
            assert page.tags == plain_pages[name].tags, name
            assert calls(page) == [], name
            assert words(text) <= words(page.all_text), name
        if name == "html":
            page = Page(shown)
            assert page.tags == plain_pages[name].tags
            assert not any(key.startswith("on") for key, _ in page.attributes)
            assert words(text) <= words(page.all_text)


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]{3,}", visible(text)))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:20])
def test_machines_read_back_what_it_was(text: str) -> None:
    report = report_with(text)
    seen = visible(text)
    assert Report.model_validate(json.loads(FORMATS["json"].render(report))) == report
    assert report.tasks[0].flips[0].question == seen
    assert f"accuracy[{seen}].drop" in json.loads(FORMATS["metrics"].render(report))
    assert json.loads(compare_json(compared(report)))["after"]["path"] == seen
    cases = ElementTree.fromstring(FORMATS["junit"].render(report).encode()).iter("testcase")
    assert " ".join(seen.split()) in [case.get("name") for case in cases]
    (front,) = re.findall(r"\A---\n(.*?)\n---\n", card_of(report), re.DOTALL)
    assert YAML(typ="safe").load(front)["model-index"][0]["results"][0]["dataset"]["name"] == defused(
        " ".join(seen.split())
    )


def test_long_texts_stay_within_bounds() -> None:
    report = report_with("very long " * 20_000)
    assert len(FORMATS["md"].render(report).encode()) <= 60 * 1024
    assert len(compare_markdown(compared(report)).encode()) <= 60 * 1024
    assert max(map(len, in_terminal(report_text(report), 80).splitlines())) <= 80


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:20])
def test_error_lines_and_json_of_the_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(verbose=True).fail(f"{text}: no such file", hint=text, error=ValueError(text))
    Terminal().say(f"at\n{text}")
    Terminal().result(text)
    Terminal(json=True).emit({"error": text})
    captured = capsys.readouterr()
    assert commands(captured.err) == commands(captured.out) == []
    assert unseen(captured.err) == []
    assert json.loads(captured.out[captured.out.index("{\n") :])["error"] == text
