"""Keeps a process on a fixed set of CPUs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def pin(threads: int) -> list[int] | None:
    """Pins every thread of this process to the first `threads` CPUs it may use, and those it starts later.

    All workers get the same CPUs: only one of them works at a time, and so none has the better ones.

    Returns:
        The CPUs; None where the system cannot pin.
    """
    if sys.platform != "linux":
        return None
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    # Libraries may have started threads while they were imported, and each has a set of its own.
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
    return cpus
