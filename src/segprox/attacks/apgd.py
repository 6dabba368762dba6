"""APGD: gradient ascent within a ball that chooses its own step size, in balls that shrink to the wanted one."""

from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Cost, FixedEpsilonAttack, ProgressReporter
from segprox.attacks.objectives import OBJECTIVES, ObjectiveName, gradient
from segprox.norms import random_within, scale, steepest
from segprox.tracker import Tracker

STAGES = (0.3, 2.0), (0.3, 1.5), (0.4, 1.0)  # shares of the steps, and radii / epsilon
MOMENTUM = 0.75  # the share of a step that is the gradient's; the rest repeats the last move
ENOUGH = 0.75  # the share of steps that must increase the loss between two checkpoints, or the step is halved


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Apgd(FixedEpsilonAttack):
    """APGD (Croce, Hein, ICML 2020) with the reducing radii and the losses of SEA (Croce, Singh, Hein, ECCV 2024).

    Three stages spend 30, 30 and 40 % of the steps in balls of radius 2, 1.5 and 1 epsilon; each starts from the point
    of highest APSR of the one before, moved into its ball. Only the last stage counts: its points are within epsilon.
    Steps are judged by the plain cross-entropy, because masked losses fall when an attack succeeds.
    """

    paper: ClassVar[str] = (
        "Croce, Singh, Hein, Towards Reliable Evaluation and Fast Training of Robust Semantic Segmentation Models, "
        "ECCV 2024"
    )

    objective: Annotated[ObjectiveName, Field(description="what to maximise, by name")] = "masked-ce"
    steps: Annotated[int, Field(ge=3, description="N: points queried, over all stages")] = 300
    reduce_radius: Annotated[
        bool, Field(description="search in three balls that shrink to epsilon; if not, in that of epsilon only")
    ] = True
    random_start: Annotated[bool, Field(description="start at a random point")] = True

    def cost(self) -> Cost:
        """N queries; the last of a stage needs no gradient."""
        return Cost(self.steps, self.steps - len(self._stages()))

    def _stages(self) -> list[tuple[int, float]]:
        """Points to query and radius / epsilon of each stage."""
        if not self.reduce_radius:
            return [(self.steps, 1.0)]
        counts = [max(1, round(share * self.steps)) for share, _ in STAGES[:-1]]
        return list(zip([*counts, self.steps - sum(counts)], (radius for _, radius in STAGES)))

    def run_within(self, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        """Stage after stage, the last in balls of radius `epsilon` `[B]`."""
        stages, x = self._stages(), tracker.problem.images
        if self.random_start:
            x = x + random_within(x, stages[0][1] * epsilon, self.norm, tracker.problem.generators())
        done = 0  # points queried in the stages before
        for steps, radius in stages:
            last = radius == 1
            stage = tracker.child("most", stop_at_success=tracker.stop_at_success and last, share=last)
            start = self.project(x, radius * epsilon, tracker.problem.images)
            self._ascend(start, stage, radius * epsilon, range(done, done + steps), report)
            x, done = stage.best.images, done + steps

    def _ascend(self, start: Tensor, tracker: Tracker, radius: Tensor, points: range, report: ProgressReporter) -> None:
        """One stage in balls of `radius` `[B]`, whose `points` are these of the attack's N."""
        problem, steps = tracker.problem, len(points)
        x, before = start, start
        step, rule = 2 * radius, StepRule(steps, radius)
        best = Best(start, torch.zeros_like(start), torch.full_like(radius, -torch.inf))
        for k in range(steps):
            if tracker.finished:
                return
            query = tracker.query(x)
            report(query, step_size=step)
            if k == steps - 1:
                return
            loss = problem.mean(OBJECTIVES["ce"](query, problem, 0.0).values.nan_to_num_(nan=-torch.inf))
            g = gradient(OBJECTIVES[self.objective], query, problem, points[k] / self.steps)
            rule.see(loss)
            best.update(x, g, loss)
            halved = rule.halve(k, best.loss)
            if halved is not None:
                step = torch.where(halved, step / 2, step)
                back = halved.view(-1, 1, 1, 1)
                x, g = torch.where(back, best.x, x), torch.where(back, best.g, g)
                before = torch.where(back, x, before)
            ahead = self.project(x + scale(steepest(g, self.norm), step), radius, problem.images)
            if k > 0:
                ahead = x + MOMENTUM * (ahead - x) + (1 - MOMENTUM) * (x - before)
            x, before = self.project(ahead, radius, problem.images), x


@plain_dataclass
class Best:
    """The point of largest loss so far, and its gradient, per image."""

    x: Tensor
    g: Tensor
    loss: Tensor

    def update(self, x: Tensor, g: Tensor, loss: Tensor) -> None:
        """Take over what is better."""
        better = loss > self.loss
        where = better.view(-1, 1, 1, 1)
        self.x, self.g = torch.where(where, x, self.x), torch.where(where, g, self.g)
        self.loss = torch.where(better, loss, self.loss)


class StepRule:
    """When to halve the step: at checkpoints ever closer together, where too few steps increased the loss.

    Or where neither the best loss improved since the last checkpoint nor the step was halved at it.
    """

    def __init__(self, steps: int, like: Tensor) -> None:
        self.window, self.shrinkage, self.least = (max(1, int(share * steps)) for share in (0.22, 0.03, 0.06))
        self.next = self.window
        self.last_loss = torch.full_like(like, torch.inf)
        self.increases = torch.zeros_like(like)
        self.best_at_checkpoint = torch.full_like(like, -torch.inf)
        self.halved_at_checkpoint = torch.zeros_like(like, dtype=torch.bool)

    def see(self, loss: Tensor) -> None:
        """Count the step that led to this loss."""
        self.increases += (loss > self.last_loss).to(loss.dtype)
        self.last_loss = loss

    def halve(self, k: int, best: Tensor) -> Tensor | None:
        """Which images' steps to halve, bool `[B]`, if step k ends at a checkpoint."""
        if k != self.next:
            return None
        stuck = ~self.halved_at_checkpoint & (self.best_at_checkpoint >= best)
        halved = (self.increases < ENOUGH * self.window) | stuck
        self.best_at_checkpoint, self.halved_at_checkpoint = best, halved
        self.increases = torch.zeros_like(self.increases)
        self.window = max(self.window - self.shrinkage, self.least)
        self.next = k + self.window
        return halved
