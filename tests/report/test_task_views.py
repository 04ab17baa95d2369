from __future__ import annotations

from sample_report import sample_report, task_figures, task_record, task_report

from compress.records import Measurement
from compress.report.summary import accuracy_change, signed, summary
from compress.report.task_views import POOLED, ordered_flips, p_value, smallest_drop, smallest_drops, task_rows


def test_a_row_for_each_task_and_one_for_all() -> None:
    rows = task_rows(task_report())
    assert [row.name for row in rows] == ["next_sentence", "arithmetic", POOLED]
    first, _, pooled = rows
    assert (first.original, first.result) == ("54.2 % [51.1, 57.3]", "53.0 % [49.9, 56.1]")
    assert (first.drop, first.losses, first.gains, first.p) == ("1.2 pt [0.1, 2.3]", "21", "9", "0.021")
    assert (first.recovery, first.corrected) == ("97.8 % [95.8, 99.8]", "95.9 % [92.2, 99.6]")
    assert (pooled.items, pooled.losses, pooled.gains, pooled.detectable) == ("2,000", "42", "18", "-")


def test_a_single_task_is_not_pooled() -> None:
    assert [row.name for row in task_rows(task_report(("one",)))] == ["one"]
    assert task_rows(sample_report()) == ()


def test_the_noise_floor_of_a_task_is_not_its_drop() -> None:
    floor = Measurement("accuracy.drop", "original/original", 0.1, task="one")
    report = sample_report([floor, *task_figures("one")], (), tasks=[task_record("one")])
    assert task_rows(report)[0].drop == "1.2 pt [0.1, 2.3]"


def test_what_the_items_can_show_is_said() -> None:
    rows = task_rows(task_report())
    assert smallest_drop(rows[0]).startswith("next_sentence: 1,000 items find a drop of 1.4 pt in 80 of 100 runs")
    assert smallest_drop(rows[-1]) == ""
    assert "next_sentence 1.4 pt, arithmetic 1.4 pt" in smallest_drops(rows)


def test_small_p_values_are_not_zero() -> None:
    parts = task_report().measurements
    part = next(part for part in parts if part.metric == "accuracy.mcnemar_p")
    assert p_value(part.model_copy(update={"value": 3e-9})) == "< 0.0001"
    assert p_value(part.model_copy(update={"value": 1.0})) == "1"
    assert p_value(None) == "-"


def test_losses_come_before_gains() -> None:
    flips = ordered_flips(task_report().tasks[0])
    assert [flip.lost for flip in flips] == [True, True, False]


def test_the_summary_turns_the_drop_into_a_change() -> None:
    assert accuracy_change(task_report()) == "-1.2 pt [-2.3, -0.1]"
    assert "accuracy -1.2 pt [-2.3, -0.1], KL 0.0781 nats" in summary(task_report())
    assert accuracy_change(task_report(("one",))) == "-1.2 pt [-2.3, -0.1]"
    assert accuracy_change(sample_report()) == ""


def test_signs() -> None:
    assert (signed(0.04, 1), signed(-0.04, 1), signed(0.06, 1), signed(-1.0, 0)) == ("0.0", "0.0", "+0.1", "-1")
