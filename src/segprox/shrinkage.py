"""By how much to shrink: the threshold above which elements exceed it by a given sum, for a batch, without a wait.

The proximity operator of the linf norm, with a box and a metric, and the projection on l1 balls ask the same: the
smallest beta >= 0 with F(beta) <= s, where

    F(beta) = sum over {a_i > beta} of w_i (r_i - beta)

falls with beta: linearly between two a_i, and with a jump where r_i > a_i. On CPUs `prox.exact` and sorting answer it
faster. On an accelerator these would make the host wait; here every pass compares all elements with several values of
beta at once, and the number of passes is fixed.
"""

import torch
from torch import Tensor

from segprox.devices import finest, free_bytes
from segprox.fusion import fusible

CANDIDATES = 16  # values of beta in one pass
PASSES = {torch.float32: 6, torch.float64: 13}  # 17^-6 is below the precision of float32, 17^-13 that of float64
BYTES = CANDIDATES * 5  # that a pass holds per element: a flag and a float for each candidate
SMALL = 1 << 28  # bytes for which it is not worth asking how much memory is left


def threshold(size: Tensor, reach: Tensor, weight: Tensor | None, total: Tensor) -> Tensor:
    """The smallest beta with F(beta) <= total, for each row, `[B]`; exact to rounding.

    Args:
        size: a >= 0, `[B, n]`.
        reach: r >= a, `[B, n]`.
        weight: w > 0, `[B, n]`; ones if left out.
        total: s >= 0, `[B]`.
    """
    rows = _rows_at_once(size)
    if rows >= len(size):
        return _solve(size, reach, weight, total)
    parts = [slice(start, start + rows) for start in range(0, len(size), rows)]
    return torch.cat([_solve(size[i], reach[i], None if weight is None else weight[i], total[i]) for i in parts])


def _rows_at_once(size: Tensor) -> int:
    """For how many rows there is memory; at least one."""
    needed = size.numel() * BYTES
    if needed <= SMALL:
        return len(size)
    return max(1, int(len(size) * (free_bytes(size.device) / 2) / needed))


def _solve(size: Tensor, reach: Tensor, weight: Tensor | None, total: Tensor) -> Tensor:
    if not size.numel():
        return torch.zeros_like(total)
    precise, tiny = finest(size.device), torch.finfo(size.dtype).tiny
    moment, total = reach if weight is None else reach * weight, total.unsqueeze(1)
    shares = torch.linspace(0, 1, CANDIDATES + 2, dtype=precise, device=size.device)
    ends = torch.arange(2, device=size.device)
    high = size.amax(1, keepdim=True).to(precise)
    low = torch.zeros_like(high)
    for _ in range(PASSES[size.dtype]):  # F(low) > total, unless low is 0, and F(high) <= total
        grid = torch.lerp(low, high, shares)
        inner = grid[:, 1:-1]
        weights, moments = _sums_above(inner, size, moment, weight)
        exceeding = (torch.addcmul(moments, inner, weights, value=-1) > total).sum(1, keepdim=True)
        low, high = grid.gather(1, exceeding + ends).unsqueeze(2).unbind(1)
    weights, moments = _sums_above(low, size, moment, weight)
    root = (moments - total) / weights.clamp(min=tiny)  # were nothing between low and high
    return torch.clamp(root, low, high).to(size.dtype).squeeze(1)


@fusible
def _sums_above(beta: Tensor, size: Tensor, moment: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums of w and of w r over the elements above each beta `[B, J]`, `[B, J]` each."""
    above = size.unsqueeze(1) > beta.unsqueeze(2)
    weights = above if weight is None else above * weight.unsqueeze(1)
    return weights.sum(2, dtype=beta.dtype), (above * moment.unsqueeze(1)).sum(2, dtype=beta.dtype)
