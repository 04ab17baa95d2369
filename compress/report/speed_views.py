"""Times, memory and throughput of a report as tables of text, and which comparison of times is the fair one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.records import PAIRED, WORKLOAD
from compress.report.digits import NOT_MEASURED, estimate, quantity
from compress.report.schema import MeasurementPart, Report
from compress.report.views import (
    CONDITION_ORDER,
    QualityRow,
    change,
    common_conditions,
    condition,
    condition_names,
    is_floor,
    measured,
    widest,
)

TIMES = {"ttft": "first token", "tpot": "per token", "e2e": "end to end", "forward": "forward pass"}
TIME_LABELS = {f"latency.{time}": label for time, label in TIMES.items()}
TAIL_LABELS = {f"latency.{time}.{tail}": f"{label} {tail}" for time, label in TIMES.items() for tail in ("p90", "p99")}
THROUGHPUT_LABELS = {"throughput.prefill": "prompt", "throughput.decode": "decoding"}
RESOURCE_LABELS = {"memory.peak": "peak memory", "latency.load": "loading"}
RATIO_LABELS = {f"latency.{time}.ratio": label for time, label in TIMES.items()} | {"cpu.ratio": "CPU time"}
FIRST_TIMES = ("ttft", "tpot", "forward")
"""Times that a summary of before and after names."""
FASTEST = "fastest original"
"""What a comparison says of itself when the original ran in the dtype it is fastest in."""


@dataclass(frozen=True)
class SpeedTable:
    """One row for each way a model was run, its name first; `conditions` hold for all rows."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    conditions: str


def speed_tables(report: Report) -> tuple[SpeedTable, ...]:
    """All tables that have something to show: times, their ratios, percentiles, throughput, memory and loading."""
    tables = (
        speed_table(report),
        speed_ratio_table(report),
        *(table_of(report, labels) for labels in (TAIL_LABELS, THROUGHPUT_LABELS, RESOURCE_LABELS)),
    )
    return tuple(table for table in tables if table.rows)


def speed_table(report: Report) -> SpeedTable:
    """Median times of every model in every dtype, engine and workload it was run in."""
    return table_of(report, TIME_LABELS)


def table_of(report: Report, labels: Mapping[str, str]) -> SpeedTable:
    own = [m for m in report.measurements if m.metric in labels]
    return pivot(own, labels, lambda m, name: f"{m.subject} {name}".strip())


def speed_ratio_table(report: Report) -> SpeedTable:
    """Paired ratios of times, with their intervals; a row for the noise floor where it was measured."""
    own = sorted((m for m in report.measurements if m.metric in RATIO_LABELS), key=is_floor)
    names = condition_names(own, WORKLOAD)

    def row_name(m: MeasurementPart, _name: str) -> str:
        pair = dtypes(m)
        if is_floor(m):
            name = f"noise floor, {pair[0]}" if pair else "noise floor"
        else:
            name = " / ".join(pair) if pair else m.subject.replace("/", " / ")
        return f"{name}, {names[id(m)]}" if names[id(m)] else name

    return pivot(own, RATIO_LABELS, row_name, corner="result / original")


def pivot(
    own: Sequence[MeasurementPart],
    labels: Mapping[str, str],
    row_name: Callable[[MeasurementPart, str], str],
    corner: str = "",
) -> SpeedTable:
    """A table with one column for each metric that has a value and one row for each subject and condition."""
    own = [m for m in own if m.value is not None]
    names = condition_names(own)
    present = [metric for metric in labels if any(m.metric == metric for m in own)]
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for m in own:
        cells[row_name(m, names[id(m)])][m.metric] = measured(m)
    rows = tuple((name, *(row.get(metric, NOT_MEASURED) for metric in present)) for name, row in cells.items())
    shared = common_conditions(own)
    return SpeedTable(
        headers=(corner, *(labels[metric] for metric in present)),
        rows=rows,
        conditions=", ".join(condition(key, shared[key]) for key in CONDITION_ORDER if key in shared),
    )


def workload(measurement: MeasurementPart) -> tuple[Any, ...]:
    """Batch, prompt and output length: times of two workloads are never compared."""
    return tuple(str(measurement.conditions.get(key)) for key in WORKLOAD)


def workloads(measurements: Sequence[MeasurementPart], metric: str) -> dict[tuple[Any, ...], list[MeasurementPart]]:
    """The paired ratios of `metric` that have a value, by workload, in the order they were measured."""
    found: dict[tuple[Any, ...], list[MeasurementPart]] = defaultdict(list)
    for m in measurements:
        if m.metric == metric and m.subject == PAIRED and m.value:
            found[workload(m)].append(m)
    return found


def fairest(measurements: Sequence[MeasurementPart], metric: str) -> MeasurementPart | None:
    """The result at its fastest against the original at its fastest, on the first workload: as its user would run it.

    Where no comparison says that it is with the fastest original, the worst one counts.
    """
    first = next(iter(workloads(measurements, metric).values()), [])
    return fairest_of(first)


def fairest_of(ratios: Sequence[MeasurementPart]) -> MeasurementPart | None:
    fastest = [m for m in ratios if FASTEST in str(m.conditions.get("comparison", ""))]
    if fastest:
        return min(fastest, key=lambda m: m.value or 0.0)
    return max(ratios, key=lambda m: m.value or 0.0, default=None)


def dtypes(ratio: MeasurementPart) -> tuple[str, str] | None:
    """The dtypes the result and the original ran in, or None where they are not known."""
    dtype = ratio.conditions.get("dtype")
    return None if dtype is None else (str(dtype), str(ratio.conditions.get("original_dtype", dtype)))


def circumstances(ratio: MeasurementPart, *, with_workload: bool) -> str:
    """`both in bfloat16`, `result in float32, original in bfloat16, batch 4`, or empty."""
    pair, words = dtypes(ratio), []
    if pair is not None:
        same = pair[0] == pair[1]
        words.append(f"both in {pair[0]}" if same else f"result in {pair[0]}, original in {pair[1]}")
    if with_workload:
        words += [condition(key, ratio.conditions[key]) for key in WORKLOAD if ratio.conditions.get(key) is not None]
    return ", ".join(words)


def speed(ratio: MeasurementPart, name: str, *, with_workload: bool = False) -> str:
    """A ratio of times as the speed a person asks for: `1.31x decode speed [1.27, 1.35]`."""
    value = ratio.value or 0.0
    words = circumstances(ratio, with_workload=with_workload)
    where = f" ({words})" if words else ""
    if ratio.interval is None or ratio.interval.low <= 0:
        return f"{quantity(1 / value, 'x')} {name} speed{where}"
    number, ends = estimate(1 / value, 1 / ratio.interval.high, 1 / ratio.interval.low, "x")
    return f"{number} {name} speed {ends}{where}"


def speed_rows(report: Report) -> list[QualityRow]:
    """Each model in the dtype in which it is fastest."""
    rows = []
    for time in FIRST_TIMES:
        ratio = fairest(report.measurements, f"latency.{time}.ratio")
        if ratio is None:
            continue
        pair = tuple(timed(report, f"latency.{time}", of, ratio) for of in ("original", "result"))
        floors = [m for m in report.measurements if m.metric == ratio.metric and is_floor(m)]
        where = circumstances(ratio, with_workload=False)
        where = f", {where}" if where else ""
        rows.append(
            QualityRow(
                f"{TIMES[time]}{where}", measured(pair[0]), measured(pair[1]), measured(ratio), measured(widest(floors))
            )
        )
        if time != "ttft":
            rows += memory_rows(report, ratio, where)
    return rows


def memory_rows(report: Report, ratio: MeasurementPart, where: str) -> list[QualityRow]:
    """The peaks of the two models that a ratio of times compares."""
    original, result = (timed(report, "memory.peak", of, ratio) for of in ("original", "result"))
    compared = change(original, result)
    if compared == NOT_MEASURED:
        return []
    return [QualityRow(f"peak memory{where}", measured(original), measured(result), compared, NOT_MEASURED)]


def timed(report: Report, metric: str, subject: str, ratio: MeasurementPart) -> MeasurementPart | None:
    """The figure of the model that a ratio names, by its label or else by its dtype, on the same workload."""
    keys = {"result": ("variant", "dtype"), "original": ("original", "original_dtype")}[subject]
    asked = [ratio.conditions.get(key) for key in keys]
    own = [m for m in report.measurements if (m.metric, m.subject) == (metric, subject)]
    own = [m for m in own if metric == "memory.peak" or workload(m) == workload(ratio)]
    by_label = (m for m in own if asked[0] is not None and m.conditions.get("variant") == asked[0])
    by_dtype = (m for m in own if asked[1] is not None and m.conditions.get("dtype") == asked[1])
    return next(by_label, None) or next(by_dtype, None)
