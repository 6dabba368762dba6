"""ASMA: gradient ascent towards a target mask, in steps that grow with the overlap."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter, Steps
from segprox.norms import scale
from segprox.problem import Problem, predictions
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Asma(MinimalAttack):
    """Adaptive segmentation mask attack (Ozbulak et al., MICCAI 2019); it needs a target.

    Ascends on the target's logits at the pixels that are not there yet, minus the squared distance. A step is
    `rate * IoU + rate_min` times the gradient, with the IoU of each image's prediction and target: the mean over the
    classes of the target.
    """

    targeted_only: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Ozbulak et al., Impact of Adversarial Examples on Deep Learning Models for Biomedical Image Segmentation, "
        "MICCAI 2019"
    )

    norm: Annotated[Literal["l2"], Field(description="how perturbations are measured")] = "l2"
    steps: Steps = 500
    rate: Annotated[float, Field(ge=0, description="beta: step size per IoU of prediction and target")] = 1e-6
    rate_min: Annotated[float, Field(gt=0, description="tau: step size where they do not overlap")] = 1e-7

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Plain gradient ascent."""
        problem, x = tracker.problem, tracker.problem.images
        points = x
        for t in range(1, self.steps + 1):
            query = tracker.query(points)
            report(query)
            if t == self.steps:
                return
            pending = problem.mask & ~query.satisfied
            logits_gradient = torch.zeros_like(query.logits)
            logits_gradient.scatter_(1, problem.labels.unsqueeze(1), pending.unsqueeze(1).to(query.logits.dtype))
            g = query.gradient(logits_gradient).sub_(points - x, alpha=2)
            overlap = torch.zeros_like(tracker.best.norm) if t == 1 else _overlap(query.logits, problem)
            points = (points + scale(g, self.rate * overlap + self.rate_min)).clamp_(0, 1)


def _overlap(logits: Tensor, problem: Problem) -> Tensor:
    """Mean IoU of prediction and target over the classes of the target, `[B]`."""
    predicted, wanted, counted = predictions(logits).flatten(1), problem.labels.flatten(1), problem.mask.flatten(1)

    def count(classes: Tensor, pixels: Tensor) -> Tensor:  # per class, and one for NaN, [B, K + 1]
        return classes.new_zeros(len(problem), logits.shape[1] + 1).scatter_add_(1, classes, pixels.long())

    there, both = count(wanted, counted), count(wanted, counted & (predicted == wanted))
    iou = both / (there + count(predicted, counted) - both).clamp(min=1)  # 0 for classes that are not there
    return (iou.sum(1) / (there > 0).sum(1).clamp(min=1)).to(logits.dtype)
