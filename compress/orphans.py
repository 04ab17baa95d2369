"""What keeps a child process from outliving the process that started it."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of prctl(2), from linux/prctl.h."""


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process as soon as its parent ends, however that ends. Linux only; else nothing.

    To be called first thing in a child that its parent's main thread started: the kernel watches that thread.

    Args:
        parent: the parent's process id, as the parent tells it. If it has ended before this call, another process
            has inherited this one, and this one ends at once. None trusts that the parent is still there.
    """
    if sys.platform != "linux":
        return
    import ctypes

    expected = os.getppid() if parent is None else parent
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
