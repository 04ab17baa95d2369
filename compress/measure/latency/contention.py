"""What else wanted the CPUs while a sample was taken, and which rounds to leave out for it.

Nothing here sees how long a model took: a slow round that nobody held up stays, as slowness may be the finding.
Whatever a system does not tell is None.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Seconds = Mapping[str, float | None]
"""By name: wall, pressure, steal, waiting. See `observe`."""
T = TypeVar("T")

PROC, SYS = Path("/proc"), Path("/sys")
MOST_LEFT_OUT = 0.2
"""Share of the rounds that may be left out."""
TIMES_USUAL, SHARE_ABOVE_USUAL = 3.0, 0.05
"""A round is contended when it was held up for more than TIMES_USUAL the run's median and, above that median, for
more than SHARE_ABOVE_USUAL of a usual round."""


def observe(work: Callable[[], T], cpus: Sequence[int] | None, *, proc: Path = PROC) -> tuple[T, float, Seconds]:
    """Runs `work` and tells what it took from the machine and what was taken from it.

    Args:
        cpus: those this process is pinned to; None for all.

    Returns:
        What `work` returned; CPU seconds of all threads of this process; and in seconds
        wall: from start to end, a little more than any time that `work` measures itself;
        pressure: in which at least one task of the system waited for a CPU (/proc/pressure/cpu);
        steal: that the hypervisor gave to others, on `cpus`, in ticks of usually 10 ms (/proc/stat);
        waiting: that threads of this process were ready to run and did not (schedstat), added up.
    """
    before = _held_up(cpus, proc)
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = _held_up(cpus, proc)
    return result, cpu, {"wall": wall} | {name: _difference(before[name], after[name]) for name in before}


def contended(held_up: Sequence[float | None], usual: float) -> frozenset[int]:
    """Rounds to leave out, by their index: held up far longer than the run's others, the worst first up to a fifth.

    Args:
        held_up: seconds that each round waited for a CPU, from `held_up_seconds`.
        usual: seconds of a usual round: one number for all, so that no round's own duration decides.
    """
    known = [seconds for seconds in held_up if seconds is not None]
    if len(known) < len(held_up) or not known:
        return frozenset()
    middle = statistics.median(known)
    above = [
        index
        for index, seconds in enumerate(known)
        if seconds > TIMES_USUAL * middle and seconds - middle > SHARE_ABOVE_USUAL * usual
    ]
    above.sort(key=lambda index: (-known[index], index))
    return frozenset(above[: int(MOST_LEFT_OUT * len(known))])


def held_up_seconds(samples: Sequence[Seconds]) -> float | None:
    """Seconds that the samples of one round waited for a CPU: waiting, else pressure, and steal where it is told."""
    total = 0.0
    for sample in samples:
        waited = sample.get("waiting")
        waited = sample.get("pressure") if waited is None else waited
        stolen = sample.get("steal")
        if waited is None and stolen is None:
            return None
        total += (waited or 0.0) + (stolen or 0.0)
    return total


def machine_state(cpus: Sequence[int] | None, *, proc: Path = PROC, sys: Path = SYS) -> dict[str, Any]:
    """What holds for a whole run: load average, clock governor and frequency of the first CPU, the CPU quota."""
    frequency = sys / "devices/system/cpu" / f"cpu{cpus[0] if cpus else 0}" / "cpufreq"
    kilohertz = _text(frequency / "scaling_cur_freq")
    return {
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "governor": _text(frequency / "scaling_governor") or None,
        "frequency_mhz": int(kilohertz) / 1000 if kilohertz.isdigit() else None,
        "cpu_quota": cpu_quota(proc=proc, sys=sys),
    }


def cpu_quota(*, proc: Path = PROC, sys: Path = SYS) -> float | None:
    """CPUs that the control groups of this process allow, the smallest limit; None without one."""
    found = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = sys / "fs/cgroup" / ("" if controllers == "" else "cpu")
            folder = root / path.lstrip("/")
            within = [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
            found += [quota for one in within if (quota := _quota(one)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    """Version 2 writes "QUOTA PERIOD" or "max PERIOD" into one file, version 1 has two, -1 for no limit."""
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us"),
        _text(folder / "cpu.cfs_period_us"),
    ]
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(word.isdigit() for word in words) else None


def _held_up(cpus: Sequence[int] | None, proc: Path) -> dict[str, float | None]:
    """Seconds since whenever the system began to count."""
    return {"pressure": _pressure(proc), "steal": _steal(cpus, proc), "waiting": _waiting(proc)}


def _difference(before: float | None, after: float | None) -> float | None:
    # Threads that ended meanwhile take what they waited with them.
    return None if before is None or after is None else max(0.0, after - before)


def _pressure(proc: Path) -> float | None:
    for line in _text(proc / "pressure/cpu").splitlines():
        if line.startswith("some") and (total := line.rpartition("total=")[2]).isdigit():
            return int(total) / 1e6
    return None


def _steal(cpus: Sequence[int] | None, proc: Path) -> float | None:
    names = {"cpu"} if cpus is None else {f"cpu{cpu}" for cpu in cpus}
    rows = [words for line in _text(proc / "stat").splitlines() if (words := line.split()) and words[0] in names]
    if not rows or any(len(words) < 9 for words in rows):
        return None
    return float(sum(int(words[8]) for words in rows)) / float(os.sysconf("SC_CLK_TCK"))


def _waiting(proc: Path) -> float | None:
    texts = [_text(file).split() for file in (proc / "self/task").glob("*/schedstat")]
    found = [int(words[1]) / 1e9 for words in texts if len(words) >= 2]
    return sum(found) if found else None


def _text(path: Path) -> str:
    """The text of a system file, "" where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
