"""ALMA: the augmented Lagrangian of ALMA prox with the norm as part of the loss, for l1 and l2."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter, Steps
from segprox.attacks.lagrangian import ConstraintMask, Masking, RhoRule
from segprox.attacks.penalty import penalty_derivative
from segprox.losses import dlr_plus
from segprox.norms import distance, scale, unit
from segprox.tracker import Tracker

FIRST_MOVE = {"l1": 1000.0, "l2": 1.0}


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Alma(MinimalAttack):
    """ALMA (Rony et al., ICCV 2021) with a constraint per pixel.

    The step size is chosen for each image so that the first step has length `first_move`; it falls exponentially from
    the first success on, or from the middle of the attack.
    """

    paper: ClassVar[str] = "Rony et al., Augmented Lagrangian Adversarial Attacks, ICCV 2021"

    norm: Annotated[Literal["l1", "l2"], Field(description="how perturbations are measured")] = "l2"
    steps: Steps = 500
    first_move: Annotated[float | None, Field(gt=0, description="length of the first step; 1 for l2, 1000 for l1")] = (
        None
    )
    step_decay: Annotated[float, Field(gt=0, le=1, description="step size at the end over that at the start")] = 0.1
    smoothing: Annotated[
        float, Field(ge=0, lt=1, description="alpha: smoothing of the multipliers, the metric and the momentum")
    ] = 0.8
    multiplier: Annotated[float, Field(gt=0, description="mu(0): multipliers at the start")] = 1e-4
    multiplier_min: Annotated[float, Field(gt=0, description="mu_min: smallest multiplier")] = 1e-12
    multiplier_max: Annotated[float, Field(gt=0, description="mu_max: largest multiplier")] = 1.0
    penalty: Annotated[float, Field(gt=0, description="rho(0): penalty parameter")] = 1.0
    penalty_growth: Annotated[float, Field(ge=1, description="gamma: factor by which rho grows")] = 1.2
    penalty_every: Annotated[int, Field(ge=1, description="M: steps between two updates of rho")] = 10
    improvement: Annotated[
        float,
        Field(gt=0, le=1, description="tau: a constraint has improved if it is below this share of its last value"),
    ] = 0.95
    masking: Annotated[
        Masking, Field(description="how many of the largest constraints are discarded, as in alma-prox")
    ] = "decay"
    tolerance: Annotated[float, Field(ge=0, description="epsilon: added to the constraints to tighten them")] = 1e-4

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """RMSprop with momentum on the norm plus the penalties."""
        problem, x = tracker.problem, tracker.problem.images
        masking = ConstraintMask(problem, self.masking, self.steps)
        mu = torch.full_like(x[:, 0], self.multiplier)
        rho = RhoRule(self.penalty, self.penalty_growth, self.penalty_every, self.improvement, mu)
        delta, move, v = (torch.zeros_like(x) for _ in range(3))
        step_size = torch.zeros_like(tracker.best.norm)
        decays_from = torch.full_like(step_size, self.steps // 2)
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))
            report(query, step_size=step_size, multiplier=problem.mean(mu))
            if t == self.steps:
                return
            d, pullback = dlr_plus(query.logits, problem.labels, targeted=problem.wanted, tolerance=self.tolerance)
            d.nan_to_num_(nan=0.0)
            kept = masking(d, t)
            rho.update(t, d, kept)
            if t > 1:
                mu_hat = kept * penalty_derivative(d, rho.value, mu, rho_min=0.0)
                mu = torch.lerp(mu_hat, mu, self.smoothing).clamp_(self.multiplier_min, self.multiplier_max)
            g = query.gradient(pullback(kept * penalty_derivative(d, rho.value, mu, rho_min=0.0)))
            g += delta.sign() if self.norm == "l1" else unit(delta)
            v.mul_(self.smoothing).addcmul_(g, g, value=1 - self.smoothing)
            metric = (v / (1 - self.smoothing**t)).sqrt_().add_(1e-12)
            move.mul_(self.smoothing).addcdiv_(g, metric)
            if t == 1:
                step_size = (self.first_move or FIRST_MOVE[self.norm]) / distance(move, self.norm).clamp(min=1e-12)
            decays_from = torch.where(query.success, decays_from.clamp(max=t - 1), decays_from)
            delta = (x + delta - scale(move, step_size * self._decay(t, decays_from))).clamp_(0, 1).sub_(x)

    def _decay(self, t: int, since: Tensor) -> Tensor:
        share = (t - 1 - since).clamp(min=0) / (self.steps - since).clamp(min=1)
        return torch.pow(self.step_decay, share)
