"""What differs between devices: how they compute a batch, the precision they have, the memory that is left on them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from segprox.errors import SegproxError

UNKNOWN_ROOM = 1 << 30  # bytes that are taken to be free on devices that do not tell
CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # without which NVIDIA's matrix products are not deterministic


def best_device() -> torch.device:
    """The device that `auto` means: NVIDIA's or AMD's GPU, then Apple's, then the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def together(batch: Tensor) -> bool:
    """Whether images of a batch are computed together, all classes at once: on accelerators, for which launches cost.

    On CPUs they are computed one after the other, and classes plane by plane: that is faster there, because it stays
    within the caches, and makes results independent of the batch, bit for bit.
    """
    return batch.device.type != "cpu"


def send(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device for which the host does not wait, where the device can be sent things so."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)  # what is pinned already stays where it is


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


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


def uses_tf32() -> bool:
    """Whether torch may use TF32 where it stands, for convolutions or for matrix products."""
    return any(getattr(part, name) != exact for part, name, exact in _tf32_settings())


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


def use_deterministic(asked: bool) -> None:
    """Let torch use deterministic algorithms only, or any."""
    if asked:
        os.environ.setdefault(*CUBLAS)
    if asked != torch.are_deterministic_algorithms_enabled():  # setting it imports much of torch
        torch.use_deterministic_algorithms(asked)


def check_deterministic(error: Exception) -> None:
    """Explain torch's refusal of an operation that has no deterministic form on a device; it concerns every image."""
    text = str(error)
    if isinstance(error, RuntimeError) and "use_deterministic_algorithms" in text:
        raise SegproxError(
            f"deterministic algorithms were asked for, but torch has none for an operation of this model or its "
            f"gradient on this device: {text.split(' does not have')[0].splitlines()[0]}. Adaptive pooling, padding by "
            "reflection and cumulative sums are such operations. Leave out --deterministic, or use --device cpu, which "
            "has them all"
        ) from None
