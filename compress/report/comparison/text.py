"""A comparison of two reports for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from compress.report.clean import cleaned, defused_json
from compress.report.comparison.compare import Comparison, GateChange, MetricChange
from compress.report.digits import NOT_MEASURED, interval_decimals, quantity, span
from compress.report.markdown_text import Code, cell, prose, shortened
from compress.report.summary import signed
from compress.report.text_parts import FirstThatFits, bullets, interval_cells, plain_table, section, shown

MARKER = "<!-- compress-compare -->"
ORDER = ("worse", "better", "changed", "not decided", "within tolerance", "within noise", "same")
"""As a reader wants them: what moved first."""
QUIET = ("within noise", "same")
STYLES = {"worse": "bold red", "better": "bold green", "changed": "bold", "not decided": "yellow"}
BADGES = {0: "\u2705", 3: "\u274c", 4: "\u2754"}
MOST_ROWS = 60
LONGEST = 300


def compare_text(found: Comparison) -> RenderableType:
    """The answer first, then gates and figures that changed, then what was not compared."""
    parts: list[RenderableType] = [shown(found.headline, style="bold"), *map(shown, side_lines(found))]
    if found.gates:
        parts.append(section("Gates", *gate_parts(found)))
    if moved := [change for change in sorted_changes(found) if worth_a_row(change)]:
        parts.append(section("Figures", FirstThatFits((metric_table(moved, " "), metric_table(moved, "\n")))))
    if lines := [*quiet_line(found), *remark_lines(found)]:
        parts.append(section("Remarks", bullets(lines)))
    return Group(*parts)


def side_lines(found: Comparison) -> list[str]:
    return [f"{name}: {side.outcome}, {side.path}" for name, side in (("before", found.before), ("after", found.after))]


def gate_parts(found: Comparison) -> list[RenderableType]:
    """The gates that changed as a table, the others in one line."""
    moved = [gate for gate in found.gates if gate.before != gate.after]
    parts: list[RenderableType] = []
    if moved:
        table = plain_table(("gate", "left"), ("before", "left"), ("after", "left"))
        for gate in moved:
            table.add_row(*map(shown, gate_cells(gate)))
        parts.append(table)
    if line := unchanged_gates(found):
        parts.append(shown(line))
    return parts


def gate_cells(gate: GateChange) -> tuple[str, str, str]:
    return gate.expression, gate.before or NOT_MEASURED, gate.after or NOT_MEASURED


def unchanged_gates(found: Comparison) -> str:
    """`3 as before: 2 PASS, 1 FAIL`, or nothing."""
    outcomes = Counter(gate.after for gate in found.gates if gate.before == gate.after)
    figures = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return f"{outcomes.total()} as before: {figures}" if outcomes else ""


def worth_a_row(change: MetricChange) -> bool:
    """In a terminal: what moved, and what would count if it had."""
    return change.status not in QUIET or (change.counts and change.status != "same")


def metric_table(changes: Iterable[MetricChange], gap: str) -> Table:
    table = plain_table(("", "left"), ("before", "right"), ("after", "right"), ("difference", "right"), ("", "left"))
    for change in changes:
        name, *cells, status = metric_cells(change)
        table.add_row(shown(name), *interval_cells(cells, gap), shown(status, style=STYLES.get(change.status, "")))
    return table


def metric_cells(change: MetricChange) -> tuple[str, ...]:
    name = f"{change.name} ({change.variant})" if change.variant else change.name
    return (
        name,
        quantity(change.before, change.unit),
        quantity(change.after, change.unit),
        difference_text(change),
        change.status,
    )


def difference_text(change: MetricChange) -> str:
    """`+0.0021 nats [-0.0009, 0.0051]`."""
    d = change.difference
    if d is None:
        return NOT_MEASURED
    unit = f" {change.unit}".rstrip() if change.unit != "x" else "x"
    if d.low is None or d.high is None:
        number = quantity(d.value, change.unit)
        return number if d.value <= 0 else f"+{number}"
    decimals = interval_decimals(d.low, d.high)
    if decimals is None:
        return f"{d.value:+.4g}{unit}"
    return f"{signed(d.value, decimals)}{unit} {span(d.low, d.high)}"


def sorted_changes(found: Comparison) -> list[MetricChange]:
    """What moved, then what is within noise; what was not comparable is told in words."""
    shown = [change for change in found.metrics if change.status in ORDER]
    return sorted(shown, key=lambda change: (ORDER.index(change.status), not change.counts))


def remark_lines(found: Comparison) -> list[str]:
    """Why some figures were not compared, which are in one report only, and what was assumed."""
    groups: dict[str, list[str]] = defaultdict(list)
    for change in found.metrics:
        if change.status == "not comparable":
            groups[f"not compared, {change.reason}"].append(change.name)
        elif change.reason:
            groups[f"not decided, {change.reason}"].append(change.name)
    groups["only before"] += found.missing
    groups["only after"] += found.added
    lines = [f"{what}: {listed(names)}" for what, names in groups.items() if names]
    return [*found.notes, *lines]


def quiet_line(found: Comparison) -> list[str]:
    names = [change.name for change in sorted_changes(found) if not worth_a_row(change)]
    return [f"the same or within noise: {listed(names)}"] if names else []


def listed(names: Iterable[str], most: int = 8) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:most]) + (f" and {len(unique) - most} more" if len(unique) > most else "")


def compare_markdown(found: Comparison) -> str:
    """For a comment: gates and what moved; what is within noise is folded."""
    changes = sorted_changes(found)
    moved = [change for change in changes if change.status not in QUIET]
    quiet = [change for change in changes if change.status in QUIET]
    parts = [f"{MARKER}\n# {BADGES[found.exit_code]} {short(found.headline)}"]
    sides = ((name, Code(side.path), side.outcome) for name, side in (("before", found.before), ("after", found.after)))
    parts.append(markdown_table(("", "report", "verdict"), sides))
    if found.gates:
        rows = ((Code(text), *outcomes) for text, *outcomes in map(gate_cells, found.gates))
        parts += ["## Gates", markdown_table(("gate", "before", "after"), rows)]
    if moved:
        parts += ["## What changed", metrics_markdown(moved)]
    if quiet:
        title = f"{len(quiet)} figures that are the same or within noise"
        parts.append(f"<details>\n<summary>{title}</summary>\n\n{metrics_markdown(quiet)}\n\n</details>")
    if lines := remark_lines(found):
        parts += ["## Remarks", "\n".join(f"- {short(line)}" for line in lines[:MOST_ROWS])]
    return "\n\n".join(parts) + "\n"


def metrics_markdown(changes: list[MetricChange]) -> str:
    rows = ((Code(name), *rest) for name, *rest in map(metric_cells, changes))
    return markdown_table(("figure", "before", "after", "difference", ""), rows)


def markdown_table(headers: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    every = list(rows)
    lines = [f"| {' | '.join(headers)} |", f"|{' --- |' * len(headers)}"]
    lines += [f"| {' | '.join(cell(shortened(value, LONGEST)) for value in row)} |" for row in every[:MOST_ROWS]]
    more = len(every) - MOST_ROWS
    return "\n".join([*lines, f"\n{more} more are in the JSON form."] if more > 0 else lines)


def short(text: str) -> str:
    return prose(shortened(text, LONGEST))


def compare_data(found: Comparison) -> dict[str, Any]:
    """The comparison as plain data, the exit code and the headline first."""
    data = {"exit_code": found.exit_code, "headline": found.headline, **asdict(found)}
    return dict(cleaned(data))


def compare_json(found: Comparison) -> str:
    return defused_json(json.dumps(compare_data(found), indent=2, ensure_ascii=False, allow_nan=False)) + "\n"
