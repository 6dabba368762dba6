"""The penalty-Lagrangian function of the paper (section 4.1), a modified P2 of Birgin and Martinez."""

from typing import Literal

import torch
from torch import Tensor

Derivative = Literal["exact", "authors"]


def penalty(y: Tensor, rho: Tensor, mu: Tensor) -> Tensor:
    """P(y, rho, mu), elementwise: cubic where the constraint is violated, bounded where it is satisfied."""
    violated = mu * y + mu * rho * y**2 + rho**2 * y**3 / 6
    satisfied = mu * y / (1 - rho.clamp(min=1) * y.clamp(max=0))
    return torch.where(y >= 0, violated, satisfied)


def penalty_derivative(y: Tensor, rho: Tensor, mu: Tensor, kind: Derivative = "exact") -> Tensor:
    """dP/dy, elementwise, never negative.

    `exact` is the derivative of `penalty`. `authors` is what the authors' code uses instead where y >= 0: its first
    term is `mu * y` instead of `mu`, so a constraint that is only just violated is hardly pushed at all.
    """
    positive, negative = y.clamp(min=0), y.clamp(max=0)
    first = mu if kind == "exact" else mu * positive
    violated = first + positive * rho * (2 * mu + 0.5 * rho * positive)
    satisfied = mu / (1 - rho.clamp(min=1) * negative).square_()
    return torch.where(y >= 0, violated, satisfied)
