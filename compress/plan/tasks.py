"""The tasks of a plan: their items, and how small a drop so many items can show, told before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.data.tasks import TaskSet, read_task
from compress.errors import MissingResourceError
from compress.model.architectures import Kind
from compress.power import USUAL_FLIPS, detectable_drop, items_to_pass
from compress.recipe.comparison import Comparison
from compress.recipe.evaluate import Task
from compress.recipe.origin import Fault
from compress.recipe.schema import Recipe
from compress.recipe.words import did_you_mean

Asked = Recipe | Comparison


@dataclass(frozen=True)
class PlannedTask:
    """Attributes:
    most: at most so many items are asked; None for all.
    items: what is asked; None for a task of lm-eval, whose data are not read before the run.
    """

    task: Task
    most: int | None
    items: TaskSet | None


@dataclass(frozen=True)
class Power:
    """What the items of a task (or of all, pooled) can show.

    Attributes:
        name: of the task, or "all tasks".
        drop: smallest true drop, in points, that is found in 80 of 100 runs, if USUAL_FLIPS of the items flip; None
            where so few items find none.
        asked: the tightest drop in points that a gate with a level allows; None without such a gate.
        needed: items that would pass this gate in 80 of 100 runs if nothing got worse.
    """

    name: str
    items: int
    drop: float | None
    asked: float | None = None
    needed: int | None = None


def plan_tasks(asked: Asked, kind: Kind) -> tuple[PlannedTask, ...]:
    """Reads the items of every task that is not lm-eval's.

    Raises:
        UsageError: a task that models of this kind cannot answer, a gate on a task that is not there.
        UsageError, MissingResourceError: what is wrong with a file of items.
    """
    if asked.evaluate is None:
        return ()
    default = asked.evaluate.items
    planned = []
    for task in asked.evaluate.tasks:
        most = task.items if task.items is not None else default
        items = read_task(task.source, name=task.name, kind=task.kind, items=most) if task.ours else None
        if not task.ours and task.source is not None and not _is_file(task.source):
            raise MissingResourceError(f"there is no task file {task.source}", hint="check the path")
        planned.append(PlannedTask(task, most, items))
    faults = _foreign(planned, kind) + _unknown(asked, planned)
    if faults:
        raise asked.error(faults)
    return tuple(planned)


def _is_file(source: str) -> bool:
    try:
        return Path(source).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # a name too long, `~somebody` who is not here, a NUL
        return False


def powers(asked: Asked, planned: Sequence[PlannedTask]) -> tuple[Power, ...]:
    """What each task can show, and all of them together; nothing for those whose items are not known yet."""
    known = [(one.task.name, len(one.items.items)) for one in planned if one.items is not None]
    if len(planned) == 1 and known:
        name, count = known[0]
        return (_power(asked, {name, None}, name, count),)  # a gate on all tasks is one on this task
    found = [_power(asked, {name}, name, count) for name, count in known]
    if len(planned) > 1 and len(known) == len(planned):
        found.append(_power(asked, {None}, "all tasks", sum(count for _, count in known)))
    return tuple(found)


def _power(asked: Asked, judged: set[str | None], name: str, count: int) -> Power:
    margins = [
        gate.value
        for gate in asked.gates
        if gate.metric == "accuracy.drop" and gate.level is not None and gate.value > 0 and gate.task in judged
    ]
    found = detectable_drop(count, USUAL_FLIPS)
    drop = None if found is None else 100 * found
    if not margins:
        return Power(name, count, drop)
    margin = min(margins)
    return Power(name, count, drop, margin, items_to_pass(margin / 100, USUAL_FLIPS))


def _foreign(planned: Sequence[PlannedTask], kind: Kind) -> list[Fault]:
    faults: list[Fault] = []
    for index, one in enumerate(planned):
        path = ("evaluate", "tasks", index)
        classifies = one.items is not None and one.items.kind == "classification"
        if kind == "encoder" and not classifies:
            what = "lm-eval" if one.items is None else one.items.kind
            faults.append((path, f"{one.task.name} ({what}) needs a model that generates text; this is an encoder"))
        elif kind == "decoder" and classifies:
            faults.append((path, f"{one.task.name} (classification) is for encoders; this model generates text"))
    return faults


def _unknown(asked: Asked, planned: Sequence[PlannedTask]) -> list[Fault]:
    """Gates on tasks that are not there. A group of lm-eval has tasks whose names only lm-eval knows."""
    names = [one.task.name for one in planned]
    if any(one.items is None for one in planned):
        return []
    return [
        (("gates", index), f"no task is called `{gate.task}`{did_you_mean(gate.task, names)}")
        for index, gate in enumerate(asked.gates)
        if gate.task is not None and gate.task not in names
    ]
