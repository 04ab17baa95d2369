"""Freed memory that the C library keeps."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Gives freed memory back to the system.

    glibc takes pieces of up to 32 MB from its heap and returns a part of that only when nothing behind it is in use:
    after a block of a wide model hundreds of megabytes would stay. Other C libraries have no such call, nor the need.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
