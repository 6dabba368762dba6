"""What PDGD and PDPGD share: a weight for every constraint that rises while it is violated, and Adam's steps."""

import math
from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import sigmoid

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter, Steps
from segprox.attacks.lagrangian import ConstraintMask, Masking
from segprox.attacks.schedules import exponential, linear
from segprox.devices import finest
from segprox.losses import margin
from segprox.problem import Problem
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class PrimalDual(MinimalAttack):
    """Descent of the perturbation on `(1 - sum of weights) * norm + sum of weights * softplus(margin)`.

    And ascent of lambda, one per pixel, from which the weights come: paper, appendix on PDPGD.
    """

    paper: ClassVar[str] = "Matyasko, Chau, PDPGD: Primal-Dual Proximal Gradient Descent Adversarial Attack, 2021"

    steps: Steps = 500
    step_size: Annotated[float, Field(gt=0, description="step size of the perturbation at the start")] = 0.01
    step_decay: Annotated[
        float, Field(gt=0, le=1, description="step size at the end over that at the start; it falls exponentially")
    ] = 0.01
    dual_step_size: Annotated[float, Field(gt=0, description="step size of lambda at the start")] = 0.1
    dual_step_decay: Annotated[
        float, Field(gt=0, le=1, description="step size of lambda at the end over that at the start; it falls linearly")
    ] = 0.1
    ratio: Annotated[
        float, Field(gt=0, description="r: weight of the norm over that of all constraints, at the start")
    ] = 1.0
    smoothing: Annotated[float, Field(ge=0, lt=1, description="smoothing of the constraints' weights")] = 0.9
    smallest_weight: Annotated[
        float, Field(gt=0, lt=1, description="smallest weight of a constraint: bounds |lambda| by -log of it")
    ] = 1e-12
    masking: Annotated[
        Masking, Field(description="how many of the largest constraints are discarded, as in alma-prox")
    ] = "none"

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Descend on the perturbation, ascend on the weights."""
        problem, x = tracker.problem, tracker.problem.images
        masking = ConstraintMask(problem, self.masking, self.steps)
        weights = DualWeights(problem, self.ratio, self.smoothing, self.smallest_weight)
        delta, adam = torch.zeros_like(x), Adam(x)
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))
            report(query, constraints=weights.total)
            if t == self.steps:
                return
            d, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
            d.nan_to_num_(nan=0.0)
            g = query.gradient(pullback(sigmoid(d) * weights.value.to(d.dtype)))
            rate = exponential(self.step_size, self.step_size * self.step_decay, t, self.steps)
            delta = self.move(delta, g, rate, weights.total.to(d.dtype), adam, x)
            dual_rate = linear(self.dual_step_size, self.dual_step_size * self.dual_step_decay, t, self.steps)
            weights.ascend(d, masking(d, t), dual_rate)

    @abstractmethod
    def move(self, delta: Tensor, g: Tensor, rate: float, total: Tensor, adam: "Adam", x: Tensor) -> Tensor:
        """The next perturbation, in the box.

        Args:
            delta: the perturbation, `[B, C, H, W]`.
            g: the gradient of the weighted constraints.
            rate: the step size.
            total: the weight of all constraints together, `[B]`; the norm has the rest.
            adam: turns gradients into directions.
            x: the images.
        """


class DualWeights:
    """Weights of the constraints, positive and summing to less than 1; what is missing is the norm's weight.

    They are `m e^lambda / (1 + sum of m e^lambda)`, averaged over the iterations. lambda starts so that the norm and
    all constraints together weigh `ratio` to 1, and climbs where a constraint is violated.
    """

    def __init__(self, problem: Problem, ratio: float, smoothing: float, smallest: float) -> None:
        counted = problem.counted.clamp(min=1).to(finest(problem.images.device))
        self.bound, self.smoothing = -math.log(smallest), smoothing
        self.log = (-(ratio * counted).log()).view(-1, 1, 1).expand(problem.mask.shape).clone()
        self.value = self._project(problem.mask)

    def _project(self, mask: Tensor) -> Tensor:
        largest = self.log.flatten(1).amax(1).clamp(min=0).view(-1, 1, 1) if self.log.numel() else self.log
        raised = mask * (self.log - largest).exp()  # scaled down together: exp cannot overflow
        return raised / ((-largest).exp() + raised.flatten(1).sum(1).view(-1, 1, 1))

    def ascend(self, constraints: Tensor, mask: Tensor, rate: float) -> None:
        """A step on the sign of each constraint `[B, H, W]`, where `mask` is true."""
        self.log.add_(constraints.sign() * mask, alpha=rate).clamp_(-self.bound, self.bound)
        self.value = torch.lerp(self._project(mask), self.value, self.smoothing)

    @property
    def total(self) -> Tensor:
        """The weight of all constraints together, `[B]`."""
        return self.value.flatten(1).sum(1)


class Adam:
    """The step of Adam (Kingma, Ba, 2015) and its metric."""

    def __init__(self, like: Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.betas, self.t = betas, 0
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    def __call__(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The direction to go against, and the diagonal of the metric."""
        self.t += 1
        a, b = self.betas
        self.first.lerp_(gradient, 1 - a)
        self.second.mul_(b).addcmul_(gradient, gradient, value=1 - b)
        metric = (self.second / (1 - b**self.t)).sqrt_().add_(1e-8)
        return self.first / (1 - a**self.t) / metric, metric
