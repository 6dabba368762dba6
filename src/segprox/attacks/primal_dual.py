"""What PDGD and PDPGD share: a weight for every constraint, and Adam for the perturbation."""

import math

import torch
from torch import Tensor

from segprox.problem import Problem


class DualWeights:
    """Weights of the constraints, positive and summing to less than 1; what is missing is the norm's weight.

    They are `m e^lambda / (1 + sum of m e^lambda)` (paper, appendix on PDPGD), averaged over the iterations. lambda
    starts so that the norm and all constraints together weigh `ratio` to 1, and climbs where a constraint is violated.
    """

    def __init__(self, problem: Problem, ratio: float, smoothing: float, smallest: float) -> None:
        counted = problem.mask.flatten(1).sum(1).clamp(min=1).double()
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
