"""What differs between devices: the precision they have, and the memory that is left on them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from segprox.errors import SegproxError

UNKNOWN_ROOM = 1 << 30  # bytes that are taken to be free on devices that do not tell


def finest(device: torch.device) -> torch.dtype:
    """The most precise floats that a device has: float64, but on Apple's MPS float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def free_bytes(device: torch.device) -> int:
    """The memory that is left on an accelerator, with what torch has reserved there and does not use."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return UNKNOWN_ROOM


@contextmanager
def without_tf32() -> Iterator[None]:
    """Let float32 be float32 on NVIDIA's devices, whose convolutions otherwise keep 10 bits of the mantissa."""
    parts = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = [part.allow_tf32 for part in parts]
    except RuntimeError as error:  # torch cannot answer
        raise SegproxError("set torch.backends' allow_tf32 or its fp32_precision, but not both") from error
    try:
        for part in parts:
            part.allow_tf32 = False
        yield
    finally:
        for part, allowed in zip(parts, before):
            part.allow_tf32 = allowed
