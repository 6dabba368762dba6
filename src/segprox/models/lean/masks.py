"""Masks of a bit per value."""

import torch
from torch import Tensor
from torch.nn import functional

# Eight bytes of 0 or 1, read as one number, times this: their bits end up in the top byte.
_GATHER_BITS = 0x0102040810204080
_CHUNK = 1 << 16  # packed bytes that are unpacked at a time: what that takes stays within the caches
_UNPACKED: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # for each byte its eight bits, [256, 8]


def pack_bits(mask: Tensor) -> Tensor:
    """Eight values of a bool tensor in a byte: uint8, an eighth as long (rounded up)."""
    flat = mask.flatten()
    if flat.numel() % 8:
        flat = functional.pad(flat, (0, -flat.numel() % 8))
    return ((flat.view(torch.int64) * _GATHER_BITS) >> 56).to(torch.uint8)


def select(values: Tensor, packed: Tensor, otherwise: float = 0.0) -> Tensor:
    """`values` where the packed mask is true, and times `otherwise` elsewhere."""
    key = (values.device, values.dtype)
    if key not in _UNPACKED:
        bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and_(1)
        _UNPACKED[key] = bits.to(*key)
    table = _UNPACKED[key] if otherwise == 0 else _UNPACKED[key] * (1 - otherwise) + otherwise
    values = values.contiguous()
    result, flat = torch.empty_like(values), values.view(-1)
    out = result.view(-1)
    for start in range(0, packed.numel(), _CHUNK):
        bits = table.index_select(0, packed[start : start + _CHUNK].int()).view(-1)
        part = slice(8 * start, min(8 * (start + _CHUNK), flat.numel()))
        torch.mul(flat[part], bits[: part.stop - part.start], out=out[part])
    return result
