from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.measure.tasks.accuracy import task_measurements
from compress.measure.tasks.answers import ItemAnswer, ItemPair, TaskPairs, decided, task_records
from compress.measure.tasks.paired import mcnemar_p, score_drop
from compress.metrics import METRICS
from compress.power import detectable_drop
from compress.records import Measurement

TASK_METRICS = {name for name, metric in METRICS.items() if metric.tasks}


def answer(correct: bool, shift: float = 0.0) -> ItemAnswer:
    """One of two choices; what decides is the larger log-likelihood."""
    return decided([-1.0 - shift, -2.0], [-1.0 - shift, -2.0], 0 if correct else 1, ["first", "second"])


def pairs(
    outcomes: Sequence[tuple[bool, bool]],
    *,
    name: str = "t",
    clusters: Sequence[str | None] | None = None,
    chance: float | None = 0.5,
    generated: bool = False,
) -> TaskPairs:
    def one(correct: bool, shift: float) -> ItemAnswer:
        return ItemAnswer(correct, "text") if generated else answer(correct, shift)

    items = tuple(
        ItemPair(
            id=str(index),
            question=f"question {index}",
            expected="first",
            gold=0,
            original=one(before, 0.0),
            result=one(after, 0.001 * index),
            cluster=clusters[index] if clusters else None,
            chance=chance,
        )
        for index, (before, after) in enumerate(outcomes)
    )
    return TaskPairs(name, "exact_match" if generated else "multiple_choice", "acc", "t.jsonl", items, "0" * 64)


def outcomes(both: int, lost: int, gained: int, neither: int) -> list[tuple[bool, bool]]:
    return [(True, True)] * both + [(True, False)] * lost + [(False, True)] * gained + [(False, False)] * neither


def found(measurements: Sequence[Measurement], task: str | None = "t") -> dict[str, Measurement]:
    """By metric; `accuracy` and `accuracy.expected` of the original carry its name."""
    return {
        one.metric + (":original" if one.subject == "original" else ""): one for one in measurements if one.task == task
    }


def check_bounds(one: Measurement) -> None:
    """An interval with a width, around the value, and one-sided bounds inside it."""
    assert one.value is not None
    assert one.interval is not None, one.metric
    assert one.interval.low < one.interval.high, one.metric
    assert one.interval.low <= one.value <= one.interval.high, one.metric
    low, high = one.one_sided[0.95]
    assert one.interval.low <= low <= high <= one.interval.high
    assert low < high


def test_figures_of_one_task_by_hand() -> None:
    task = pairs(outcomes(60, 6, 2, 32))
    of = found(task_measurements([task], levels=(0.9,), conditions={"device": "cpu"}))
    values = {name: one.value for name, one in of.items()}
    assert values["accuracy:original"] == pytest.approx(66)
    assert values["accuracy"] == pytest.approx(62)
    assert values["accuracy.drop"] == pytest.approx(4)
    assert values["accuracy.flips"] == pytest.approx(8)
    assert (values["accuracy.losses"], values["accuracy.gains"]) == (6, 2)
    assert values["accuracy.mcnemar_p"] == mcnemar_p(6, 2)
    assert values["accuracy.recovery"] == pytest.approx(100 * 62 / 66)
    assert values["accuracy.recovery_corrected"] == pytest.approx(100 * 12 / 16)
    expected = score_drop(6, 2, 100, levels=(0.9, 0.95))
    assert of["accuracy.drop"].one_sided == {
        level: pytest.approx((100 * low, 100 * high)) for level, (low, high) in expected.one_sided.items()
    }
    probability = [one.result.probability for one in task.items]
    assert values["accuracy.expected"] == pytest.approx(100 * np.mean(probability))
    shift = [one.result.margin - one.original.margin for one in task.items]  # type: ignore[operator]
    assert values["accuracy.margin_shift"] == pytest.approx(np.mean(shift))
    assert {one.count for one in of.values()} == {100}
    assert of["accuracy"].conditions == {"device": "cpu", "items": 100, "clusters": 100}


def test_every_metric_of_tasks_is_measured_for_each_and_pooled() -> None:
    tasks = [pairs(outcomes(30, 3, 1, 6), name="a"), pairs(outcomes(5, 2, 0, 13), name="b")]
    measured = task_measurements(tasks)
    assert {one.task for one in measured} == {"a", "b", None}
    for task in ("a", "b", None):
        own = [one for one in measured if one.task == task]
        assert {one.metric for one in own} == TASK_METRICS
        assert {one.subject for one in own if one.metric == "accuracy"} == {"original", "result"}
        for one in own:
            if one.interval is not None:
                assert METRICS[one.metric].interval
                check_bounds(one)
    pooled = found(measured, None)
    assert pooled["accuracy.drop"].value == pytest.approx(100 * 4 / 60)
    assert pooled["accuracy.losses"].value == 5
    assert pooled["accuracy.drop"].count == 60
    assert found(measured, "a")["accuracy.drop"].conditions["mcnemar_p_holm"] == pytest.approx(0.5)


def test_with_one_task_the_pooled_figures_are_the_task_s() -> None:
    clusters = [f"p{index // 3}" for index in range(60)]
    for task in (pairs(outcomes(40, 5, 2, 13)), pairs(outcomes(40, 5, 2, 13), clusters=clusters)):
        measured = task_measurements([task], seed=3)
        own, pooled = found(measured), found(measured, None)
        assert {name: replace(one, task=None) for name, one in own.items()} == pooled


DEGENERATE = {
    "no flips": outcomes(30, 0, 0, 20),
    "all right": outcomes(50, 0, 0, 0),
    "all wrong": outcomes(0, 0, 0, 50),
    "all lost": outcomes(0, 50, 0, 0),
    "all gained": outcomes(0, 0, 50, 0),
    "one flip": outcomes(30, 1, 0, 19),
}


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_tasks_are_never_certain(name: str, clustered: bool) -> None:
    clusters = [f"p{index // 2}" for index in range(50)] if clustered else None
    for tasks in (["t"], ["t", "u"]):
        given_tasks = [pairs(DEGENERATE[name], name=one, clusters=clusters) for one in tasks]
        for one in task_measurements(given_tasks):
            if METRICS[one.metric].interval and one.value is not None and one.note is None:
                check_bounds(one)


@pytest.mark.parametrize(("name", "missing"), [("all wrong", True), ("all right", False), ("no flips", False)])
def test_recovery_needs_something_to_recover(name: str, missing: bool) -> None:
    plain = found(task_measurements([pairs(DEGENERATE[name])]))["accuracy.recovery"]
    assert (plain.value is None) == missing
    assert (plain.note is not None) == missing


def test_corrected_recovery_is_not_given_near_chance() -> None:
    near = found(task_measurements([pairs(outcomes(25, 2, 2, 21))]))["accuracy.recovery_corrected"]
    assert near.value is None
    assert near.note is not None
    assert "54.0% right, not clearly more than guessing (50.0%)" in near.note
    far = found(task_measurements([pairs(outcomes(25, 2, 2, 21), chance=0.25)]))["accuracy.recovery_corrected"]
    assert far.value == pytest.approx(100)
    check_bounds(far)
    hopeless = found(task_measurements([pairs(outcomes(5, 1, 0, 44), chance=None)]))["accuracy.recovery_corrected"]
    assert hopeless.value == pytest.approx(100 * 5 / 6), "where guessing is hopeless its share is nothing"


def test_identical_models_have_the_shift_that_was_seen_and_no_bound_for_it() -> None:
    task = pairs(outcomes(30, 0, 0, 20))
    same = replace(task, items=tuple(replace(one, result=one.original) for one in task.items))
    of = found(task_measurements([same]))
    assert of["accuracy.margin_shift"].value == 0.0
    assert of["accuracy.margin_shift"].interval is None
    assert of["accuracy.margin_shift"].note is not None
    check_bounds(of["accuracy.expected_drop"])


def test_generated_answers_have_no_expected_accuracy_and_say_so() -> None:
    tasks = [pairs(outcomes(5, 2, 1, 2), name="g", generated=True, chance=None), pairs(outcomes(12, 1, 0, 7))]
    measured = task_measurements(tasks)
    for metric in ("accuracy.expected", "accuracy.expected_drop", "accuracy.margin_shift"):
        assert found(measured, "g")[metric].value is None
        assert "no choices" in str(found(measured, "g")[metric].note)
        mixed = found(measured, None)[metric]
        assert mixed.count == 20
        assert mixed.note == "over the 20 of 30 items that have choices"
        assert mixed.value == pytest.approx(found(measured, "t")[metric].value)


def test_clusters_that_agree_widen_the_interval() -> None:
    """Ten items of a passage that flip together are one observation, not ten."""
    listed = [row for index in range(40) for row in [(True, index % 4 > 0)] * 10]
    alone = found(task_measurements([pairs(listed)]))["accuracy.drop"]
    together = found(task_measurements([pairs(listed, clusters=[f"p{i // 10}" for i in range(400)])]))["accuracy.drop"]
    assert alone.interval is not None
    assert together.interval is not None
    assert together.value == alone.value == 25
    widths = [one.interval.high - one.interval.low for one in (alone, together)]  # type: ignore[union-attr]
    assert widths[1] > 2.5 * widths[0], "the square root of 10, about"
    assert together.conditions["clusters"] == 40


def test_clusters_of_one_make_up_have_no_spread_and_no_fault() -> None:
    clusters = [f"p{index // 2}" for index in range(40)]
    of = found(task_measurements([pairs([(True, True), (True, False)] * 20, clusters=clusters)]))
    check_bounds(of["accuracy.drop"])
    check_bounds(of["accuracy"])


def test_a_single_cluster_has_no_interval() -> None:
    for one in task_measurements([pairs(outcomes(5, 2, 1, 2), clusters=["p"] * 10)]):
        assert one.interval is None
        assert not one.one_sided


def test_cluster_bounds_cover_what_they_promise() -> None:
    """By simulation: 60 passages of 5 items; a flip takes its whole passage with it half of the time."""
    rng = np.random.default_rng(11)
    true_drop, held = 0.04, 0
    for _ in range(40):
        listed, names = [], []
        for passage in range(60):
            together = rng.random() < 0.5
            shared = rng.random() < true_drop
            for _item in range(5):
                lost = shared if together else rng.random() < true_drop
                listed.append((True, not lost))
                names.append(f"p{passage}")
        drop = found(task_measurements([pairs(listed, clusters=names)]))["accuracy.drop"]
        held += drop.one_sided[0.95][1] >= 100 * true_drop
    assert held / 40 > 0.9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60), st.integers(0, 3))
def test_any_answers_give_sound_figures(listed: list[tuple[bool, bool]], grouping: int) -> None:
    clusters = [f"p{index % (2 + index // 7)}" for index in range(len(listed))] if grouping == 1 else None
    measured = task_measurements([pairs(listed, clusters=clusters), pairs(listed, name="u", generated=grouping == 2)])
    of = found(measured)
    drop, accuracies = of["accuracy.drop"].value, (of["accuracy:original"].value, of["accuracy"].value)
    assert drop == pytest.approx(accuracies[0] - accuracies[1])  # type: ignore[operator]
    assert drop == pytest.approx(100 * (of["accuracy.losses"].value - of["accuracy.gains"].value) / len(listed))  # type: ignore[operator]
    for one in measured:
        assert one.metric in METRICS
        for low, high in one.one_sided.values():
            assert np.isfinite([low, high]).all()
            assert low <= high
        if METRICS[one.metric].unit == "%" and not one.metric.startswith("accuracy.recovery") and one.interval:
            assert one.interval.low >= 0
            assert one.interval.high <= 100


def test_swapping_the_models_mirrors_the_drop() -> None:
    task = pairs(outcomes(30, 7, 2, 11))
    back = replace(task, items=tuple(replace(one, original=one.result, result=one.original) for one in task.items))
    there, again = found(task_measurements([task]))["accuracy.drop"], found(task_measurements([back]))["accuracy.drop"]
    assert there.value == pytest.approx(-again.value)  # type: ignore[operator]
    assert there.one_sided[0.95] == pytest.approx(tuple(-one for one in reversed(again.one_sided[0.95])))


def test_the_record_lists_the_worst_flips_losses_first() -> None:
    task = pairs(outcomes(3, 12, 4, 1))
    record = task_records([task])[0]
    assert (record.items, record.losses, record.gains, record.metric, record.chance) == (20, 12, 4, "acc", 0.5)
    assert record.detectable_drop == pytest.approx(100 * (detectable_drop(20, 0.8) or 0))
    assert len(record.flips) == 10
    assert all(flip.lost for flip in record.flips)
    risen = [(flip.result_margin or 0) - (flip.original_margin or 0) for flip in record.flips]
    assert risen == sorted(risen)
    assert (record.flips[0].original, record.flips[0].result) == ("first", "first")
    few = task_records([pairs(outcomes(3, 1, 2, 1))])[0]
    assert [flip.lost for flip in few.flips] == [True, False, False]
    assert task_records([pairs(outcomes(3, 0, 0, 2))])[0].detectable_drop == 100 * (detectable_drop(5, 0.0) or 0)


def test_rows_are_plain_and_keep_every_digit() -> None:
    row = pairs(outcomes(1, 1, 0, 0), clusters=["p", None]).rows()[1]
    assert json.loads(json.dumps(row)) == row
    assert row | {"original": None, "result": None} == {
        "kind": "task", "task": "t", "id": "1", "cluster": None, "gold": 0, "chance": 0.5, "original": None,
        "result": None,
    }  # fmt: skip
    assert set(row["original"]) == {"correct", "answer", "loglikelihoods", "probability", "margin"}


def test_no_tasks_no_measurements() -> None:
    assert task_measurements([]) == []
    assert task_records([]) == []
