"""DDN: gradient steps on a sphere whose radius shrinks while the attack succeeds and grows while it does not."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter, Steps
from segprox.attacks.objectives import OBJECTIVES, gradient
from segprox.attacks.schedules import cosine
from segprox.norms import scale, unit
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Ddn(MinimalAttack):
    """Decoupled direction and norm (Rony et al., CVPR 2019), in l2, with APSR >= nu as success.

    Points are rounded to `levels` grey levels before they are queried, as an image file would.
    """

    paper: ClassVar[str] = (
        "Rony et al., Decoupling Direction and Norm for Efficient Gradient-Based L2 Attacks, CVPR 2019"
    )

    norm: Annotated[Literal["l2"], Field(description="how perturbations are measured")] = "l2"
    steps: Steps = 500
    step_size: Annotated[float, Field(gt=0, description="alpha(0): length of the first step")] = 1.0
    step_decay: Annotated[float, Field(gt=0, le=1, description="alpha(N) / alpha(0): last step over first")] = 0.01
    radius: Annotated[float, Field(gt=0, description="epsilon(0): the first radius")] = 1.0
    rate: Annotated[float, Field(gt=0, lt=1, description="gamma: share by which the radius changes")] = 0.05
    levels: Annotated[int, Field(ge=0, description="grey levels that images are rounded to; 0: no rounding")] = 256

    @property
    def rounds_to(self) -> int:
        """The steps between grey levels."""
        return max(self.levels - 1, 0)

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """A step along the gradient, then onto the sphere."""
        problem, x = tracker.problem, tracker.problem.images
        delta = torch.zeros_like(x)
        radius = torch.full_like(tracker.best.norm, self.radius)
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))
            report(query, radius=radius)
            if t == self.steps:
                return
            g = gradient(OBJECTIVES["ce"], query, problem, 0.0)
            radius = radius * torch.where(query.success, 1 - self.rate, 1 + self.rate)
            delta.add_(unit(g), alpha=cosine(self.step_size, self.step_size * self.step_decay, t, self.steps))
            delta = self._rounded((x + scale(unit(delta), radius)).clamp_(0, 1)).sub_(x)

    def _rounded(self, images: torch.Tensor) -> torch.Tensor:
        return images.mul_(self.levels - 1).round_().div_(self.levels - 1) if self.levels > 1 else images
