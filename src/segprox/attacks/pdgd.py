"""PDGD: a Lagrangian with a weight per pixel, minimised by Adam, the norm included."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS
from segprox.attacks.primal_dual import Adam, PrimalDual
from segprox.norms import scale, unit


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Pdgd(PrimalDual):
    """Primal-dual gradient descent (Matyasko, Chau, 2021) for l2."""

    norm: Annotated[Literal["l2"], Field(description="how perturbations are measured")] = "l2"
    smallest_weight: Annotated[
        float, Field(gt=0, lt=1, description="smallest weight of a constraint: bounds |lambda| by -log of it")
    ] = 1e-6

    def move(self, delta: Tensor, g: Tensor, rate: float, total: Tensor, adam: Adam, x: Tensor) -> Tensor:
        """A step of Adam on the norm and the constraints."""
        direction, _ = adam(g + scale(unit(delta), 1 - total))
        return (x + delta - rate * direction).clamp_(0, 1).sub_(x)
