"""The gate grammar: `METRIC OP VALUE[UNIT] [@LEVEL%]`, such as `perplexity.ratio <= 1.05x @95%`.

A metric of tasks may name one in brackets, `accuracy[next_sentence].drop <= 2pt`; without, all tasks are pooled.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, cast

from compress.errors import UsageError
from compress.metrics import METRICS, Metric
from compress.recipe.units import UNITS_OF, parse_quantity
from compress.recipe.words import did_you_mean, one_of

Op = Literal["<=", "<", ">=", ">"]
OPS: Mapping[Op, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}
_MISSPELT = {"=<": "<=", "=>": ">=", "≤": "<=", "≥": ">="}
_TASK = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]((?:\.[^\[\]]+)?)")
_GATE = re.compile(r"([^\s<>=!≤≥@]+)\s*([<>=!≤≥]+)\s*([^@]*?)\s*(?:@\s*(.*))?")


@dataclass(frozen=True)
class Gate:
    """A condition that the result must meet.

    Attributes:
        expression: as the user wrote it, runs of white space made one space.
        metric: id in `compress.metrics.METRICS`.
        value: in the metric's own unit: `size <= 0.2GB` has the value 200.0, because `size` is stored in MB.
        level: confidence of the one-sided bound as a share (0.95), or None to compare the point estimate.
        task: the task whose figure is judged; None for all tasks pooled, and where there is no matter of tasks.
        line: line of the recipe; None when the gate comes from elsewhere. Not part of what makes gates equal.
    """

    expression: str
    metric: str
    op: Op
    value: float
    level: float | None = None
    task: str | None = None
    line: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """`accuracy[next_sentence].drop`, or the metric where no task is named."""
        family, dot, rest = self.metric.partition(".")
        return self.metric if self.task is None else f"{family}[{self.task}]{dot}{rest}"

    def holds(self, value: float) -> bool:
        """Whether `value`, in the metric's unit, is on the good side."""
        return OPS[self.op](value, self.value)


def parse_gate(text: str) -> Gate:
    """Reads one gate expression.

    Raises:
        UsageError: the expression is malformed, names an unknown metric, has a wrong or missing unit, a value
            that the metric can never have, or a level that cannot be judged.
    """
    expression = " ".join(text.split())
    match = _GATE.fullmatch(expression)
    if match is None:
        raise UsageError(
            f"`{expression}` is not a gate: write METRIC OP VALUE, such as `kl.mean <= 0.1`, "
            "`size <= 120MB` or `perplexity.ratio <= 1.05x @95%`"
        )
    try:
        metric, task = _metric(match[1])
        op = _op(match[2])
        value = _value(match[3], metric)
        level = None if match[4] is None else _level(match[4], metric)
    except UsageError as error:
        raise UsageError(f"gate `{expression}`: {error.message}") from error
    return Gate(expression, metric.id, op, value, level, task)


def _metric(name: str) -> tuple[Metric, str | None]:
    """The metric and the task in brackets: `accuracy[a].drop` is `accuracy.drop` of the task `a`."""
    match = _TASK.fullmatch(name)
    if match is None:
        return _known(name), None
    metric, task = _known(match[1] + match[3]), match[2]
    if not metric.tasks:
        raise UsageError(f"`{metric.id}` is not measured by task: remove `[{task}]`")
    if not task:
        raise UsageError(f"the name of a task is missing between `[` and `]` of `{name}`")
    return metric, task


def _known(name: str) -> Metric:
    allowed = [metric.id for metric in METRICS.values() if metric.gate]
    if name in allowed:
        return METRICS[name]
    problem = f"metric `{name}` cannot be gated" if name in METRICS else f"unknown metric `{name}`"
    raise UsageError(f"{problem}{did_you_mean(name, allowed)}. Metrics: {', '.join(allowed)}")


def _op(text: str) -> Op:
    if text in OPS:
        return cast(Op, text)
    meant = f" (did you mean `{_MISSPELT[text]}`?)" if text in _MISSPELT else ""
    raise UsageError(f"`{text}` is no comparison{meant}: write {one_of(list(OPS))}")


def _value(text: str, metric: Metric) -> float:
    if not text:
        raise UsageError(f"the value is missing: `{metric.id}` is compared with a number")
    try:
        value = float(parse_quantity(text, UNITS_OF[metric.unit]))
    except UsageError as error:
        raise UsageError(f"the value {error.message}") from error
    if not math.isfinite(value):
        raise UsageError(f"the value `{text}` is not a finite number")
    low, high = _possible(metric)
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise UsageError(f"the value `{text}` is impossible: `{metric.id}` is always {limits}{metric.unit}")
    return value


def _possible(metric: Metric) -> tuple[float, float]:
    """The range a metric can have, in its unit; a gate beyond it would always pass or always fail."""
    if metric.unit == "pt":
        return -100.0, 100.0
    if metric.unit == "%":
        return 0.0, 100.0
    if metric.id.startswith(("cosine.", "similarity.")):
        return -1.0, 1.0
    if metric.id == "accuracy.margin_shift":
        return -math.inf, math.inf
    return 0.0, math.inf


def _level(text: str, metric: Metric) -> float:
    if not metric.interval:
        raise UsageError(f"`{metric.id}` is counted, not estimated, and has no confidence level: remove `@{text}`")
    try:
        percent = parse_quantity(text, {"%": Decimal(1)})
    except UsageError as error:
        raise UsageError(f"the level after `@` {error.message}") from error
    if not 50 < percent < 100:
        raise UsageError(f"the level `{text}` must be above 50% and below 100%, such as 95%")
    return float(percent / 100)
