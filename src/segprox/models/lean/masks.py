"""Masks of a bit per value."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

# Eight bytes of 0 or 1, read as one number, times this: their bits end up in the top byte.
_GATHER_BITS = 0x0102040810204080
_CHUNK = 1 << 16  # packed bytes that are unpacked at a time: what that takes stays within the caches


def pack_bits(mask: Tensor) -> Tensor:
    """Eight values of a bool tensor in a byte, the first in its lowest bit: uint8, an eighth as long (rounded up)."""
    flat = mask.flatten()
    if flat.device.type == "cpu":  # numpy has vectorised instructions for it
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    return _pack_anywhere(flat)


def _unpack_bits(packed: Tensor) -> Tensor:
    """What `pack_bits` was given, as uint8, and up to seven more zeros."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little"))
    return _unpack_anywhere(packed)


def _pack_anywhere(flat: Tensor) -> Tensor:
    if flat.numel() % 8:
        flat = functional.pad(flat, (0, -flat.numel() % 8))
    return ((flat.view(torch.int64) * _GATHER_BITS) >> 56).to(torch.uint8)


def _unpack_anywhere(packed: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(1).bitwise_right_shift(places).bitwise_and_(1).view(-1)


def select(values: Tensor, packed: Tensor, otherwise: float = 0.0) -> Tensor:
    """`values` where the packed mask is true, and times `otherwise` elsewhere."""
    values = values.contiguous()
    result, flat = torch.empty_like(values), values.view(-1)
    out = result.view(-1)
    for start in range(0, packed.numel(), _CHUNK):
        part = slice(8 * start, min(8 * (start + _CHUNK), flat.numel()))
        factors = _unpack_bits(packed[start : start + _CHUNK])[: part.stop - part.start]
        if otherwise:
            factors = factors.to(values.dtype).mul_(1 - otherwise).add_(otherwise)
        _multiply(flat[part], factors, out[part])
    return result


def _multiply(values: Tensor, factors: Tensor, out: Tensor) -> None:
    """Values times factors of their type or of bytes, `[N]`, into `out`."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        np.multiply(values.numpy(), factors.numpy(), out=out.numpy())  # torch is slower where types differ
    else:
        torch.mul(values, factors, out=out)
