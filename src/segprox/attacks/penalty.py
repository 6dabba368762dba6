"""The penalty-Lagrangian function of the paper (section 4.1), a modified P2 of Birgin and Martinez."""

from typing import Literal

import torch
from torch import Tensor

from segprox.fusion import fusible

Derivative = Literal["exact", "authors"]


def penalty(y: Tensor, rho: Tensor, mu: Tensor, rho_min: float = 1.0) -> Tensor:
    """P(y, rho, mu), elementwise: cubic where the constraint is violated, bounded where it is satisfied.

    There rho is at least `rho_min`: 1 in ALMA prox, 0 for the original P2 of ALMA.
    """
    violated = mu * y + mu * rho * y**2 + rho**2 * y**3 / 6
    satisfied = mu * y / (1 - rho.clamp(min=rho_min) * y.clamp(max=0))
    return torch.where(y >= 0, violated, satisfied)


@fusible
def penalty_derivative(y: Tensor, rho: Tensor, mu: Tensor, kind: Derivative = "exact", rho_min: float = 1.0) -> Tensor:
    """dP/dy, elementwise, never negative.

    `exact` is the derivative of `penalty`. `authors` is what the authors' code uses instead where y >= 0: its first
    term is `mu * y` instead of `mu`, so a constraint that is only just violated is hardly pushed at all.
    """
    positive, negative = y.clamp(min=0), y.clamp_max(0)
    linear = negative.mul_(rho.clamp(min=rho_min)).neg_().add_(1).square_().reciprocal_().mul_(mu)  # mu where y >= 0
    if kind == "authors":
        linear = torch.where(y >= 0, mu * positive, linear)
    rest = (rho * positive).mul_(0.5).add_(mu, alpha=2).mul_(positive).mul_(rho)  # 0 where y <= 0
    return linear.add_(rest)
