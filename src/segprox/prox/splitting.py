"""The splitting methods the paper compares its ternary search with, without a metric.

All minimise f(p) + g(p) + 1/2 ||p - point||^2 for one image, with f = step * ||.||_inf and g the indicator of the box,
and stop when no element of p changes by more than `precision`.
"""

import torch
from torch import Tensor

from segprox.errors import SegproxError
from segprox.prox.norms import shrink_largest


def dual_forward_backward(
    point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, precision: float, max_iterations: int
) -> Tensor:
    """DFB (Combettes, Dung, Vu, 2010): forward-backward on the dual variable u of f, with step size 1.

    p = projection of point - u on the box; u <- projection of u + p on the dual ball of f, the l1 ball of radius step.
    """
    return _dual(point, step, lower, upper, precision, max_iterations, accelerated=False)


def accelerated_dual_forward_backward(
    point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, precision: float, max_iterations: int
) -> Tensor:
    """ADFB (Chambolle, Dossal, 2015): DFB with Nesterov's extrapolation of the dual variable, (k - 1) / (k + 3)."""
    return _dual(point, step, lower, upper, precision, max_iterations, accelerated=True)


def douglas_rachford(
    point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, precision: float, max_iterations: int
) -> Tensor:
    """DR (Lions, Mercier, 1979) on f + 1/2 ||. - point||^2 and g, both with step size 1."""
    state = point.clone()
    p = torch.clamp(state, lower, upper)
    for _ in range(max_iterations):
        reflected = (2 * p - state + point) / 2
        state += shrink_largest(reflected, step / 2) - p
        p, before = torch.clamp(state, lower, upper), p
        if _change(p, before) <= precision:
            return p
    raise _unfinished("dr", max_iterations)


def _dual(
    point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, precision: float, max_iterations: int, accelerated: bool
) -> Tensor:
    u = torch.zeros_like(point)
    ahead = u
    p = torch.clamp(point, lower, upper)
    for k in range(1, max_iterations + 1):
        moved = ahead + p
        u, before_u = moved - shrink_largest(moved, step), u  # Moreau: v = prox_f(v) + projection of v on the dual ball
        ahead = u + (k - 1) / (k + 3) * (u - before_u) if accelerated else u
        p, before = torch.clamp(point - ahead, lower, upper), p
        if _change(p, before) <= precision:
            return p
    raise _unfinished("adfb" if accelerated else "dfb", max_iterations)


def _change(p: Tensor, before: Tensor) -> float:
    return (p - before).abs().max().item() if p.numel() else 0.0


def _unfinished(name: str, iterations: int) -> SegproxError:
    return SegproxError(f"{name} did not reach its precision within {iterations} iterations; allow more or use 'exact'")
