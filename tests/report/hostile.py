"""A report that has the same text in every place that is filled from outside, and what must not come of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from sample_report import generation, sample_measurements, task_figures

from compress.recipe.gates import Gate
from compress.records import FlipRecord, LayerRecord, Measurement, StepRecord, TaskRecord
from compress.report.build import build_report
from compress.report.clean import visible
from compress.report.schema import Inputs, ModelPart, Report, Reproduce
from compress.verdict import judge

TEXTS = (
    "<script>alert(1)</script>",
    "a|b",
    "a\\|b",
    "@team and me@team",
    "see #123, GH-7 and org/repo#8",
    "[/red][bold]x",
    "::error::x",
    "one\n::error file=a::two",
    "##[error]x",
    "##vso[task.complete]x",
    "\x1b[31mred\x1b[0m",
    "a\0b",
    "a\ud800b",
    "a\u202eb\u200bc\u2028d",
    "a\rb",
    "&lt;b&gt;",
    "]]>",
    "${{ secrets.X }}",
    "# heading",
    "> quoted",
    "- item\n- item",
    "1. one",
    "---",
    "```\n</details>",
    "`code` *bold* _em_ ~~del~~",
    "[link](https://evil.example) ![image](https://evil.example/x.png) https://evil.example www.evil.example",
    "'\"><img src=x onerror=alert(1)>",
    "<!-- comment -->",
    "[x]: https://evil.example",
    "[ ] box",
    "{{ 7 * 7 }}{% raw %}",
    "模型 \N{FIRE} é",
)


def report_with(text: str, gate: bool = True) -> Report:
    """Every text that a user, a model or a data set brings is `text`."""
    gates = [Gate(text, "kl.mean", "<=", 0.01, line=3), Gate("size <= 120MB", "size", "<=", 120.0)] if gate else []
    figures = [*sample_measurements(), *task_figures(text), *task_figures(None), *task_figures("other"), *generation()]
    figures.append(Measurement("ndcg", "result", None, note=text, conditions={"text": text, text: 1}))
    flip = FlipRecord(text, text, text, text, text, lost=True, original_margin=0.5)
    tasks = [
        TaskRecord(name, "cloze", text, text, 100, 0.25, 3, 1, 1.5, text, (flip, flip)) for name in (text, "other")
    ]
    layers = (
        LayerRecord(text, (4, 4), target=text, algorithm=text, scheme=text, error_after=0.1, notes=(text, text)),
        LayerRecord("b", (4, 4), target="int4", algorithm="rtn", scheme="W4A16", error_after=0.2),
        LayerRecord(text, (4, 4), skipped=text),
    )
    step = StepRecord(text, {"algorithm": "gptq", text: text}, layers, {"source": text, "tokens_used": 5}, (text,))
    model = ModelPart(source=text, revision=text, content_hash=text, model_type=text)
    return build_report(
        verdict=judge(gates, figures),
        measurements=figures,
        tasks=tasks,
        steps=[step],
        proof={"method": text, "checks": [{"name": text, "passed": True, "detail": text}], text: text},
        inputs=Inputs(model=model, result=model, calibration={"source": text}, evaluation={"source": text}),
        output=text,
        format_name="gptq",
        recipe={text: [text]},
        environment={"cpu": text, text: {text: text}, "versions": {"torch": text}},
        reproduce=Reproduce(command=text, load=(text, text)),
        created="2026-01-01T00:00:00+00:00",
    )


class Page(HTMLParser):
    """The tags of a page in order, and its texts outside of code."""

    UNREAD = ("code", "pre", "a", "style", "script")
    INLINE = ("code", "br", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.all_text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.attributes += attrs
        if tag not in self.INLINE:
            self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        self.all_text += data
        if not set(self.open) & set(self.UNREAD):
            self.texts.append(data)


def commands(text: str) -> list[str]:
    """What GitHub, Azure or TeamCity would take for a command, had a job printed the text."""
    lines = [line for line in re.split(r"[\r\n\u2028\u2029\x85]", text) if line.strip().startswith("::")]
    return lines + re.findall(r"##\w*\[", text)


def unseen(text: str) -> list[str]:
    """Characters that show nothing."""
    return [char for char in text if visible(char) != char]


def calls(page: Page) -> list[str]:
    """Mentions of people and references to issues that GitHub would make of the page."""
    pattern = r"(?:^|\W)(@\w+|#\d+|GH-\d+)"
    return [text for text in page.texts if re.search(pattern, text)]
