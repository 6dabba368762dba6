"""FMN: gradient steps in a ball that shrinks while the attack succeeds and grows while it does not."""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter, Steps
from segprox.attacks.schedules import cosine
from segprox.losses import margin
from segprox.norms import NormName, distance, dual, project, unit
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Fmn(MinimalAttack):
    """Fast minimum norm (Pintor et al., NeurIPS 2021) with the mean margin as loss and APSR >= nu as success."""

    paper: ClassVar[str] = "Pintor et al., Fast Minimum-norm Adversarial Attacks, NeurIPS 2021"

    norm: Annotated[NormName, Field(description="how perturbations are measured")] = "linf"
    steps: Steps = 500
    step_size: Annotated[float, Field(gt=0, description="alpha(0): l2 norm of the first step")] = 10.0
    step_decay: Annotated[float, Field(gt=0, le=1, description="alpha(N) / alpha(0): last step over first")] = 0.01
    rate: Annotated[
        float, Field(gt=0, lt=1, description="gamma(0): share by which the radius changes, at the start")
    ] = 0.05
    rate_end: Annotated[float, Field(gt=0, lt=1, description="gamma(N): the same at the end")] = 0.001

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Alternate between the radius and the perturbation."""
        problem, x = tracker.problem, tracker.problem.images
        delta = torch.zeros_like(x)
        radius = torch.full_like(tracker.best.norm, torch.inf)
        farthest = distance(torch.maximum(x, 1 - x), self.norm)  # no perturbation within the box is larger
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))
            report(query, radius=radius)
            if t == self.steps:
                return
            lead, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
            g = query.gradient(pullback(problem.shares(lead.dtype)))
            # to first order, the mean margin is 0 at this distance
            slope = distance(g, dual(self.norm)).clamp(min=1e-12)
            linear = query.norm + problem.mean(lead.nan_to_num(0.0)).abs() / slope
            gamma = cosine(self.rate, self.rate_end, t, self.steps)
            shrunk = torch.minimum(self._change(radius, -gamma), tracker.best.norm)
            grown = torch.where(tracker.best.success, self._change(radius, gamma), linear)
            radius = torch.where(query.success, shrunk, grown).clamp(max=farthest)
            delta.sub_(unit(g), alpha=cosine(self.step_size, self.step_size * self.step_decay, t, self.steps))
            delta = (x + project(delta, radius, self.norm)).clamp_(0, 1).sub_(x)

    def _change(self, radius: Tensor, gamma: float) -> Tensor:
        """A radius larger by a share gamma, by at least one pixel for l0, where a radius is a number of pixels."""
        changed = radius * (1 + gamma)
        if self.norm != "l0":
            return changed
        further = torch.maximum if gamma > 0 else torch.minimum
        return further(changed, radius + math.copysign(1, gamma)).floor().clamp(min=0)
