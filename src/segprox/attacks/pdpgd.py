"""PDPGD: a Lagrangian with a weight per pixel, minimised by Adam and a proximity operator of the norm."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import sigmoid

from segprox.attacks.base import FIELDS, Attack, Cost, Watch
from segprox.attacks.lagrangian import ConstraintMask, Masking
from segprox.attacks.primal_dual import Adam, DualWeights
from segprox.attacks.schedules import exponential, linear
from segprox.losses import margin
from segprox.norms import distance, scale
from segprox.prox import prox_norm
from segprox.tracker import Tracker

ENOUGH = 1e-2  # relative change at which the inner iterations end


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Pdpgd(Attack):
    """Primal-dual proximal gradient descent (Matyasko, Chau, 2021), as the paper adapts it to segmentation.

    The loss of a pixel is the softplus of its margin. The proximity operator is taken in Adam's metric, by a few inner
    iterations (AdaProx, Melchior et al., 2019).
    """

    family: ClassVar[Literal["minimal", "budget"]] = "minimal"
    paper: ClassVar[str] = "Matyasko, Chau, PDPGD: Primal-Dual Proximal Gradient Descent Adversarial Attack, 2021"

    norm: Annotated[Literal["l1", "l2", "linf"], Field(description="how perturbations are measured")] = "linf"
    steps: Annotated[int, Field(ge=1, description="N: iterations")] = 500
    step_size: Annotated[float, Field(gt=0, description="of the perturbation, at the start")] = 0.01
    step_decay: Annotated[float, Field(gt=0, le=1, description="of it, by the end (exponential)")] = 0.01
    dual_step_size: Annotated[float, Field(gt=0, description="of lambda, at the start")] = 0.1
    dual_step_decay: Annotated[float, Field(gt=0, le=1, description="of it, by the end (linear)")] = 0.1
    ratio: Annotated[float, Field(gt=0, description="r: weight of the norm to that of the constraints, at first")] = 1.0
    smoothing: Annotated[float, Field(ge=0, lt=1, description="of the constraints' weights")] = 0.9
    smallest_weight: Annotated[float, Field(gt=0, lt=1, description="bounds |lambda| by its -log")] = 1e-12
    inner_steps: Annotated[int, Field(ge=1, description="iterations for the proximity operator")] = 5
    masking: Annotated[Masking, Field(description="which of the largest constraints to discard, as in alma-prox")] = (
        "none"
    )

    def cost(self) -> Cost:
        """N queries."""
        return Cost(self.steps, self.steps - 1)

    def search(self, tracker: Tracker, watch: Watch) -> None:
        """Descend on the perturbation, ascend on the weights."""
        problem, x = tracker.problem, tracker.problem.images
        masking = ConstraintMask(problem, self.masking, self.steps)
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
            direction, metric = adam(g)
            rate = exponential(self.step_size, self.step_size * self.step_decay, t, self.steps)
            moved = (x + delta - rate * direction).clamp_(0, 1).sub_(x)
            total = weights.total.clamp(max=1)
            delta = self._prox(moved, rate * ((1 - total) / total.clamp(min=1e-12)).to(d.dtype), metric, x)
            dual_rate = linear(self.dual_step_size, self.dual_step_size * self.dual_step_decay, t, self.steps)
            weights.ascend(d, masking(d, t), dual_rate)

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
            if not running.any():
                break
        return z
