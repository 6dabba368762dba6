"""PDPGD: a Lagrangian with a weight per pixel, minimised by Adam and a proximity operator of the norm."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS
from segprox.attacks.primal_dual import Adam, PrimalDual
from segprox.devices import together
from segprox.norms import distance, scale
from segprox.prox import prox_norm

ENOUGH = 1e-2  # relative change at which the inner iterations end


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Pdpgd(PrimalDual):
    """Primal-dual proximal gradient descent (Matyasko, Chau, 2021), as the paper adapts it to segmentation.

    The proximity operator is taken in Adam's metric, by a few inner iterations (AdaProx, Melchior et al., 2019).
    """

    norm: Annotated[Literal["l1", "l2", "linf"], Field(description="how perturbations are measured")] = "linf"
    inner_steps: Annotated[int, Field(ge=1, description="iterations for the proximity operator")] = 5

    def move(self, delta: Tensor, g: Tensor, rate: float, total: Tensor, adam: Adam, x: Tensor) -> Tensor:
        """A step of Adam on the constraints, then the proximity operator of the norm."""
        direction, metric = adam(g)
        moved = (x + delta - rate * direction).clamp_(0, 1).sub_(x)
        return self._prox(moved, rate * (1 - total).clamp(min=0) / total.clamp(min=1e-12), metric, x)

    def _prox(self, point: Tensor, step: Tensor, metric: Tensor, x: Tensor) -> Tensor:
        """The proximity operator of `step * norm` in the metric, in the box, by iterations in a uniform metric."""
        if not len(point):
            return point
        largest = metric.flatten(1).amax(1)
        pull = scale(metric, 1 / largest)
        z, running = point, torch.ones_like(step, dtype=torch.bool)
        for _ in range(self.inner_steps):
            ahead = prox_norm(z - pull * (z - point), step / largest, self.norm)
            ahead = (x + ahead).clamp_(0, 1).sub_(x)
            change = distance(ahead - z, "l2") / distance(z, "l2").clamp(min=1e-12)
            z = torch.where(running.view(-1, 1, 1, 1), ahead, z)
            running &= change > ENOUGH
            if not together(z) and not running.any():  # elsewhere to ask would be to wait
                break
        return z
