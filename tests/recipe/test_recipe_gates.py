from __future__ import annotations

from dataclasses import replace

import pytest

from compress.errors import UsageError
from compress.metrics import METRICS
from compress.recipe.gates import OPS, Gate, parse_gate
from compress.recipe.units import UNITS_OF


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("kl.mean <= 0.1", Gate("kl.mean <= 0.1", "kl.mean", "<=", 0.1)),
        ("kl.mean<1e-4", Gate("kl.mean<1e-4", "kl.mean", "<", 0.0001)),
        ("  kl.mean   <=  .5 ", Gate("kl.mean <= .5", "kl.mean", "<=", 0.5)),
        ("size <= 120MB", Gate("size <= 120MB", "size", "<=", 120.0)),
        ("size <= 0.3 GB", Gate("size <= 0.3 GB", "size", "<=", 300.0)),
        ("size > 500kB", Gate("size > 500kB", "size", ">", 0.5)),
        ("size <= 120000000B", Gate("size <= 120000000B", "size", "<=", 120.0)),
        ("latency.tpot < 0.03s", Gate("latency.tpot < 0.03s", "latency.tpot", "<", 30.0)),
        ("top1.agreement >= 75% @95%", Gate("top1.agreement >= 75% @95%", "top1.agreement", ">=", 75.0, 0.95)),
        (
            "perplexity.ratio <= 1.2x @ 99.9%",
            Gate("perplexity.ratio <= 1.2x @ 99.9%", "perplexity.ratio", "<=", 1.2, 0.999),
        ),
        ("cosine.mean >= -0.5", Gate("cosine.mean >= -0.5", "cosine.mean", ">=", -0.5)),
        ("bits_per_weight <= 4.5", Gate("bits_per_weight <= 4.5", "bits_per_weight", "<=", 4.5)),
    ],
)
def test_reads(text: str, gate: Gate) -> None:
    assert parse_gate(text) == gate


def test_the_line_is_no_part_of_equality() -> None:
    gate = parse_gate("kl.mean <= 0.1")
    assert replace(gate, line=7) == gate


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kl.maen <= 0.1", "unknown metric `kl.maen` (did you mean `kl.mean`?). Metrics: kl.mean, "),
        ("zzz <= 0.1", "unknown metric `zzz`. Metrics: kl.mean, "),
        ("size <= 120", "the value `120` has no unit: write 120B, 120kB, 120MB or 120GB"),
        ("latency.tpot <= 30", "has no unit: write 30ms or 30s"),
        ("top1.agreement >= 0.75", "has no unit: write 0.75%"),
        ("perplexity.ratio <= 1.2", "has no unit: write 1.2x"),
        ("perplexity.ratio <= 120%", "has the unknown unit `%`: write 120x"),
        ("kl.mean <= 0.1nats", "has the unit `nats`, but this number has none: write 0.1"),
        ("kl.mean <= nan", "the value `nan` is not a finite number"),
        ("kl.mean <= .inf", "the value `.inf` is not a finite number"),
        ("kl.mean <= 1e999", "the value `1e999` is not a finite number"),
        ("kl.mean <= -0.1", "the value `-0.1` is impossible: `kl.mean` is always at least 0"),
        ("top1.agreement >= 101%", "is impossible: `top1.agreement` is always between 0 and 100%"),
        ("cosine.mean >= 95", "is impossible: `cosine.mean` is always between -1 and 1"),
        ("kl.mean <=", "the value is missing"),
        ("kl.mean <= @95%", "the value is missing"),
        ("kl.mean =< 0.1", "`=<` is no comparison (did you mean `<=`?): write <=, <, >= or >"),
        ("kl.mean ≤ 0.1", "`≤` is no comparison (did you mean `<=`?): write <=, <, >= or >"),
        ("kl.mean == 0.1", "`==` is no comparison: write <=, <, >= or >"),
        ("kl.mean 0.1", "is not a gate: write METRIC OP VALUE"),
        ("", "is not a gate: write METRIC OP VALUE"),
        ("kl.mean <= 0.1 @95", "the level after `@` `95` has no unit: write 95%"),
        ("kl.mean <= 0.1 @", "the level after `@` `` is not a finite number followed by %"),
        ("kl.mean <= 0.1 @-95%", "the level `-95%` must be above 50% and below 100%"),
        ("kl.mean <= 0.1 @50%", "the level `50%` must be above 50% and below 100%"),
        ("kl.mean <= 0.1 @100%", "the level `100%` must be above 50% and below 100%"),
        ("kl.mean <= 0.1 @95% @99%", "the level after `@` `95% @99%` is not a finite number followed by %"),
    ],
)
def test_refuses(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gate(text)
    assert sentence in caught.value.message
    assert f"`{text}`" in caught.value.message


GATED = [metric.id for metric in METRICS.values() if metric.gate]


@pytest.mark.parametrize("metric", GATED)
def test_every_metric_can_be_gated_in_every_unit_it_has(metric: str) -> None:
    for unit, worth in UNITS_OF[METRICS[metric].unit].items():
        for op in OPS:
            gate = parse_gate(f"{metric} {op} 0.5{unit}")
            assert gate == Gate(f"{metric} {op} 0.5{unit}", metric, op, float(worth) / 2)


@pytest.mark.parametrize("metric", GATED)
def test_a_level_needs_a_metric_with_an_interval(metric: str) -> None:
    unit = next(iter(UNITS_OF[METRICS[metric].unit]))
    text = f"{metric} <= 0.5{unit} @95%"
    counted = "size size.ratio bits_per_weight parameters kv_bytes memory.peak latency.load kl.max"
    if metric in {*counted.split(), "accuracy.losses", "accuracy.gains"}:
        with pytest.raises(UsageError, match="no confidence level: remove `@95%`"):
            parse_gate(text)
    else:
        assert parse_gate(text).level == 0.95


def test_a_gate_may_name_a_task() -> None:
    gate = parse_gate("accuracy[mmlu_law].drop <= 2pt @95%")
    assert (gate.metric, gate.task, gate.value, gate.level) == ("accuracy.drop", "mmlu_law", 2.0, 0.95)
    assert parse_gate("accuracy[a.b-c] >= 40%").task == "a.b-c"
    assert parse_gate("accuracy >= 40%").task is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl[a].mean <= 1", "`kl.mean` is not measured by task: remove `[a]`"),
        ("accuracy[] >= 1%", "the name of a task is missing between `[` and `]`"),
        ("accuracy[a >= 1%", "unknown metric `accuracy[a`"),
        ("accuracy[a].dorp <= 1pt", "unknown metric `accuracy.dorp` (did you mean `accuracy.drop`?)"),
        ("accuracy.recovery >= 95%", "metric `accuracy.recovery` cannot be gated"),
    ],
)
def test_what_is_wrong_with_a_task_in_a_gate(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gate(text)
    assert message in caught.value.message
