"""The heap of the process, as far as it undoes what is saved."""

import ctypes
import sys

LARGE = 1 << 20  # bytes of a tensor that are worth a call of the system
_MMAP_THRESHOLD = -3  # its number in glibc's malloc.h


def return_what_is_freed(at_least: int = LARGE) -> None:
    """Let the C library give the memory of tensors of that many bytes back when they are freed, where it can be told.

    By default glibc soon keeps it for what comes next. The small masks that stay then come to lie between the large
    activations that go, whose places become too small for the next ones: most of what is not held is occupied anyway.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries than glibc have none
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, at_least)
