"""The charts of the HTML report, as SVG that takes its colours from the page's style sheet.

Drawn by matplotlib without pyplot and without a change to its settings that outlives the call: same report, same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, pi, sqrt
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from compress.report.html.tradeoff import Point, Tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import BboxBase

COLOURS = {"#000001": "ink", "#000002": "muted", "#000003": "rule", "#000004": "accent", "#000005": "paper"}
"""What stands for a colour while a chart is drawn, and the property of the style sheet that takes its place."""
INK, MUTED, RULE, ACCENT, PAPER = COLOURS
LARGEST = 1100.0
"""Area of the largest model in square points."""
POINTS_PER_INCH = 72
LABEL_LENGTH, NARROW_LABEL = 34, 10
NARROW = 500
"""Charts below this width break labels into lines."""
LETTER, LINE, CAP = 6.6, 16.0, 8.0
"""About the width of a letter, the height of a line and the width of a whisker's end, in points."""
LEADER: dict[str, Any] = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.7, "shrinkA": 0}
"""The line from a label to its point, where it does not stand right beside it."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold."""


def tradeoff_svg(chart: Tradeoff, *, width: int, height: int, salt: str) -> str:
    """Quality against time as an SVG element of `width` x `height` points, its texts in the page's own font.

    Args:
        salt: makes the names inside unlike those of other charts on the page.

    Raises:
        ImportError: matplotlib is missing or broken.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", rules(salt)]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that matplotlib's font lacks: the page's fonts draw the text
        size = (width / POINTS_PER_INCH, height / POINTS_PER_INCH)
        figure = Figure(figsize=size, dpi=POINTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        areas = draw(axes, chart, width)
        figure.draw_without_rendering()  # settles the layout, by which labels are placed
        figure.set_layout_engine("none")
        label(axes, chart.points, areas, NARROW_LABEL if width < NARROW else LABEL_LENGTH)
        stream = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    return inline(stream.getvalue())


def rules(salt: str) -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,
        "text.color": INK,
        "font.size": 12.5,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": RULE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.formatter.useoffset": False,
        "grid.color": RULE,
        "grid.linewidth": 0.7,
        "xtick.color": RULE,
        "ytick.color": RULE,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
    }


def draw(axes: Axes, chart: Tradeoff, width: int) -> list[float]:
    """Axes, points and the noise floor; returns the points' areas."""
    from matplotlib.ticker import MaxNLocator

    largest = max((point.size or 0.0 for point in chart.points), default=0.0)
    areas = [max(16.0, LARGEST * (point.size or 0.0) / largest) if largest else 160.0 for point in chart.points]
    for point, area in zip(chart.points, areas, strict=True):
        draw_point(axes, point, area)
    better = "higher" if chart.quality.higher else "lower"
    unit = f", {chart.quality.unit}" if chart.quality.unit else ""
    axes.set_xlabel(f"{chart.time_name}, ms (lower is better)")
    axes.set_ylabel(f"{shortened(chart.quality.name)}{unit}\n({better} is better)")
    if chart.quality.floor is not None:
        axes.axhline(chart.quality.floor, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.margins(0.22, 0.12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4 if width < NARROW else 6))
    if chart.quality.floor is not None:
        right = axes.get_xlim()[1]
        axes.annotate(
            "noise floor", (right, chart.quality.floor), (0, 4), textcoords="offset points", ha="right", color=MUTED
        )
    return areas


def draw_point(axes: Axes, point: Point, area: float) -> None:
    """A ring for an original, a disc for a result; whiskers are the intervals."""
    time, quality = point.time, point.quality
    axes.errorbar(
        time.value,
        quality.value,
        xerr=[[time.value - time.low], [time.high - time.value]],
        yerr=[[quality.value - quality.low], [quality.high - quality.value]],
        fmt="none",
        color=INK if point.original else ACCENT,
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )
    face, edge = (PAPER, INK) if point.original else (ACCENT, ACCENT)
    axes.scatter(time.value, quality.value, s=area, facecolor=face, edgecolor=edge, linewidth=1.6, alpha=0.75, zorder=2)


def label(axes: Axes, points: Sequence[Point], areas: Sequence[float], length: int) -> None:
    """Names and sizes beside their points, each where it covers least of points and other labels.

    Args:
        length: characters of a line.
    """
    centres = axes.transData.transform([(point.time.value, point.quality.value) for point in points]).tolist()
    radii = [sqrt(area / pi) for area in areas]
    taken = [Box(x, y, 2 * radius, 2 * radius) for (x, y), radius in zip(centres, radii, strict=True)]
    taken += [whisker for point in points for whisker in whiskers(axes, point)]
    for point, (x, y), radius in zip(points, centres, radii, strict=True):
        lines = wrap(shortened(point.label), length) + ([point.size_text] if point.size is not None else [])
        wide, high = LETTER * max(map(len, lines)), LINE * len(lines)
        places = [Box(x + dx, y + dy, wide, high) for dx, dy in around(wide, high, radius + 6)]
        inside = [place for place in places if place.within(axes.bbox)]
        best = min(inside or places, key=lambda place: sum(map(place.overlap, taken)) + hypot(place.x - x, place.y - y))
        taken.append(best)
        axes.annotate(
            "\n".join(lines),
            (point.time.value, point.quality.value),
            (best.x - x, best.y - y),
            textcoords="offset points",
            ha="center",
            va="center",
            color=INK if point.original else ACCENT,
            arrowprops=LEADER | {"shrinkB": radius} if best.x != x and best.y != y else None,
        )


def whiskers(axes: Axes, point: Point) -> tuple[Box, Box]:
    """The two strokes of a point, thick enough to keep letters away."""
    time, quality = point.time, point.quality
    corners = [(time.low, quality.low), (time.high, quality.high), (time.value, quality.value)]
    (left, low), (right, high), (x, y) = axes.transData.transform(corners).tolist()
    return Box((left + right) / 2, y, right - left, CAP), Box(x, (low + high) / 2, CAP, high - low)


def around(wide: float, high: float, gap: float) -> list[tuple[float, float]]:
    """Offsets of a label's centre, the best first: aside, above and below, then farther up and down."""
    across, up = gap + wide / 2, gap + high / 2
    steps = [0.0, *(sign * step * high for step in (0.6, 1.2, 1.8, 2.4, 3.0) for sign in (1, -1))]
    return [(x, y) for y in steps for x in (across, -across)] + [(0.0, y) for y in (up, -up, up + high, -up - high)]


@dataclass(frozen=True)
class Box:
    """A rectangle around (x, y), in points."""

    x: float
    y: float
    wide: float
    high: float

    def within(self, frame: BboxBase) -> bool:
        across = frame.x0 <= self.x - self.wide / 2 and self.x + self.wide / 2 <= frame.x1
        return across and frame.y0 <= self.y - self.high / 2 and self.y + self.high / 2 <= frame.y1

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        across = (self.wide + other.wide) / 2 - abs(self.x - other.x)
        along = (self.high + other.high) / 2 - abs(self.y - other.y)
        return max(0.0, across) * max(0.0, along)


def shortened(text: str) -> str:
    """A label of at most `LABEL_LENGTH` printable characters."""
    text = " ".join(UNPRINTABLE.sub("\ufffd", text).split())
    return text if len(text) <= LABEL_LENGTH else text[: LABEL_LENGTH - 1] + "…"


def inline(svg: str) -> str:
    """The SVG element alone: no prolog, no size of its own, no names that another chart could also have."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)  # a style would hold for the whole page
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    opening = f'<svg {view[0] if view else ""} stroke-linejoin="round" aria-hidden="true">'
    svg = re.sub(r"<svg[^>]*>", opening, svg, count=1)
    svg = svg.replace("xlink:href=", "href=")
    return re.sub(r"(fill|stroke): (#00000[1-5])", lambda found: f"{found[1]}: var(--{COLOURS[found[2]]})", svg)
