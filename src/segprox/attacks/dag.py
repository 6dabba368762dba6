"""DAG: normalised gradient descent on the pixels that are not yet wrong."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter
from segprox.losses import margin
from segprox.norms import unit
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Dag(MinimalAttack):
    """Dense adversary generation (Xie et al., ICCV 2017): an image is done once its APSR reaches nu."""

    paper: ClassVar[str] = "Xie et al., Adversarial Examples for Semantic Segmentation and Object Detection, ICCV 2017"
    stops_at_success: ClassVar[bool] = True

    norm: Annotated[Literal["linf"], Field(description="how perturbations are measured")] = "linf"
    steps: Annotated[int, Field(ge=1, description="N: the most iterations")] = 500
    step_size: Annotated[float, Field(gt=0, description="eta: linf norm of a step")] = 0.003

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Steps of the same size until the first success."""
        problem, x = tracker.problem, tracker.problem.images
        delta = torch.zeros_like(x)
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))
            report(query)
            if t == self.steps or tracker.finished:
                return
            lead, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
            pending = problem.mask & (lead > 0)  # the loss is sum of max(0, lead)
            g = query.gradient(pullback(pending.to(lead.dtype)))
            delta.sub_(unit(g, "linf"), alpha=self.step_size)  # may leave the box; only what is queried may not
