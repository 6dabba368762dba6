"""Projected gradient ascent within a ball: PGD and, with other fields, (M)I-FGSM, SegPGD, CosPGD, Houdini."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Cost, FixedEpsilonAttack, ProgressReporter
from segprox.attacks.objectives import OBJECTIVES, ObjectiveName, gradient
from segprox.norms import random_within, scale, steepest, unit
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Pgd(FixedEpsilonAttack):
    """PGD (Madry et al., ICLR 2018) on any objective, with momentum and restarts.

    Each of `restarts` runs queries `steps` points: its start, and the points after steps of `step_size * epsilon`. The
    first run starts at the image itself, unless `random_start`; the others at random points of the ball.
    """

    paper: ClassVar[str] = "Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, ICLR 2018"

    objective: Annotated[ObjectiveName, Field(description="what to maximise, by name")] = "ce"
    steps: Annotated[int, Field(ge=1, description="N: points queried per run")] = 40
    step_size: Annotated[float, Field(gt=0, description="alpha / epsilon: length of a step")] = 0.1 / 3
    momentum: Annotated[float, Field(ge=0, description="mu: how much of the earlier gradients is kept")] = 0.0
    restarts: Annotated[int, Field(ge=1, description="number of runs, each from another start")] = 1
    random_start: Annotated[bool, Field(description="also start the first run at a random point")] = False

    def cost(self) -> Cost:
        """N queries per run; the last of a run needs no gradient."""
        return Cost(self.restarts * self.steps, self.restarts * (self.steps - 1))

    def run_within(self, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        """Run after run, in balls of radius `epsilon` `[B]`."""
        images, sources = tracker.problem.images, tracker.problem.generators()
        for run in range(self.restarts):
            start = images
            if run > 0 or self.random_start:
                start = (images + random_within(images, epsilon, self.norm, sources)).clamp_(0, 1)
            self._ascend(start, tracker, epsilon, report)

    def _ascend(self, x: Tensor, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        problem, objective = tracker.problem, OBJECTIVES[self.objective]
        kept = torch.zeros_like(x)
        for t in range(1, self.steps + 1):
            if tracker.finished:
                return
            query = tracker.query(x)
            report(query)
            if t == self.steps:
                return
            g = gradient(objective, query, problem, (t - 1) / self.steps)
            kept = self.momentum * kept + unit(g, "l1")
            x = self.project(x + scale(steepest(kept, self.norm), self.step_size * epsilon), epsilon, problem.images)
