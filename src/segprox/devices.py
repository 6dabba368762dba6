"""What differs between devices: the precision they have, and the memory that is left on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
    settings = _tf32_settings()
    before = [getattr(part, name) for part, name, _ in settings]
    try:
        for part, name, exact in settings:
            setattr(part, name, exact)
        yield
    finally:
        for (part, name, _), value in zip(settings, before):
            setattr(part, name, value)


def _tf32_settings() -> list[tuple[Any, str, Any]]:
    """Where torch keeps whether TF32 is used: objects, attributes, and the values that switch it off.

    It has an old and a new way, and refuses to read the old one where the new one was used.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        _ = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:
        return [(part, "fp32_precision", "ieee") for part in (matmul, cudnn.conv, cudnn.rnn)]
    return [(part, "allow_tf32", False) for part in (matmul, cudnn)]
