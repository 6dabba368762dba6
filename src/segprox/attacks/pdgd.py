"""PDGD: a Lagrangian with a weight per pixel, minimised by Adam, the norm included."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.nn.functional import sigmoid

from segprox.attacks.base import FIELDS, Attack, Cost, Watch
from segprox.attacks.primal_dual import Adam, DualWeights
from segprox.attacks.schedules import exponential, linear
from segprox.losses import margin
from segprox.norms import scale, unit
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Pdgd(Attack):
    """Primal-dual gradient descent (Matyasko, Chau, 2021) for l2; see `Pdpgd` for the weights."""

    family: ClassVar[Literal["minimal", "budget"]] = "minimal"
    paper: ClassVar[str] = "Matyasko, Chau, PDPGD: Primal-Dual Proximal Gradient Descent Adversarial Attack, 2021"

    norm: Annotated[Literal["l2"], Field(description="how perturbations are measured")] = "l2"
    steps: Annotated[int, Field(ge=1, description="N: iterations")] = 500
    step_size: Annotated[float, Field(gt=0, description="of the perturbation, at the start")] = 0.01
    step_decay: Annotated[float, Field(gt=0, le=1, description="of it, by the end (exponential)")] = 0.01
    dual_step_size: Annotated[float, Field(gt=0, description="of lambda, at the start")] = 0.1
    dual_step_decay: Annotated[float, Field(gt=0, le=1, description="of it, by the end (linear)")] = 0.1
    ratio: Annotated[float, Field(gt=0, description="r: weight of the norm to that of the constraints, at first")] = 1.0
    smoothing: Annotated[float, Field(ge=0, lt=1, description="of the constraints' weights")] = 0.9
    smallest_weight: Annotated[float, Field(gt=0, lt=1, description="bounds |lambda| by its -log")] = 1e-6

    def cost(self) -> Cost:
        """N queries."""
        return Cost(self.steps, self.steps - 1)

    def search(self, tracker: Tracker, watch: Watch) -> None:
        """Descend on the perturbation, ascend on the weights."""
        problem, x = tracker.problem, tracker.problem.images
        weights = DualWeights(problem, self.ratio, self.smoothing, self.smallest_weight)
        delta, adam = torch.zeros_like(x), Adam(x)
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))
            watch(query, constraints=weights.total)
            if t == self.steps:
                return
            d, pullback = margin(query.logits, problem.labels, targeted=problem.targeted)
            d.nan_to_num_(nan=0.0)
            g = query.gradient(pullback(sigmoid(d) * weights.value.to(d.dtype)))
            g += scale(unit(delta), (1 - weights.total).to(g.dtype))
            direction, _ = adam(g)
            rate = exponential(self.step_size, self.step_size * self.step_decay, t, self.steps)
            delta = (x + delta - rate * direction).clamp_(0, 1).sub_(x)
            dual_rate = linear(self.dual_step_size, self.dual_step_size * self.dual_step_decay, t, self.steps)
            weights.ascend(d, problem.mask, dual_rate)
