"""The heap of the process, as far as it undoes what is saved."""

import ctypes

LARGE = 1 << 22  # bytes of a tensor that are worth a call of the system
_MMAP_THRESHOLD = -3  # its number in glibc's malloc.h


def return_what_is_freed() -> None:
    """Let the C library give the memory of large tensors back when they are freed, where it can be told to.

    By default glibc soon keeps it for what comes next. The small masks that stay then come to lie between the large
    activations that go, whose places become too small for the next ones: most of what is not held is occupied anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if hasattr(ctypes, "RTLD_GLOBAL") else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
