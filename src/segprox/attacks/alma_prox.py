"""ALMA prox (CVPR 2023): minimal linf perturbations by an augmented Lagrangian and a proximal step."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, MinimalAttack, ProgressReporter, Steps
from segprox.attacks.lagrangian import ConstraintMask, Masking, RhoRule
from segprox.attacks.penalty import Derivative, penalty_derivative
from segprox.attacks.pilot import halfway_radius
from segprox.fusion import fusible
from segprox.losses import dlr_plus
from segprox.prox import prox_linf_box, prox_workspace
from segprox.tracker import Tracker

PAPER_STEP = 1e-3
PILOT = 12  # queries spent on finding the step size
STEPS_TO_HALFWAY = 12  # the paper's step on networks that are half-way at 3/255


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class AlmaProx(MinimalAttack):
    """Algorithm 3 of the paper. One multiplier and one penalty parameter per pixel; images do not influence each other.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> problem = segprox.Problem.build(scene.image[None], scene.label[None])
        >>> found = segprox.AlmaProx(steps=3).run(segprox.load_model("demo-standard"), problem)
        >>> found.backwards.tolist()  # the last point is scored but leads nowhere
        [2]
    """

    paper: ClassVar[str] = "Rony et al., Proximal Splitting Adversarial Attack for Semantic Segmentation, CVPR 2023"

    norm: Annotated[Literal["linf"], Field(description="how perturbations are measured")] = "linf"
    steps: Steps = 500
    step_size: Annotated[
        Annotated[float, Field(gt=0)] | Literal["auto"],
        Field(description="lambda(0): step size at the start; auto: the paper's 0.001, or more if the image needs it"),
    ] = "auto"
    step_decay: Annotated[
        float, Field(gt=0, le=1, description="lambda(N) / lambda(0): step size at the end over that at the start")
    ] = 0.1
    smoothing: Annotated[float, Field(ge=0, lt=1, description="alpha: smoothing of the multipliers and the metric")] = (
        0.8
    )
    multiplier: Annotated[float, Field(gt=0, description="mu(0): multipliers at the start")] = 1.0
    multiplier_min: Annotated[float, Field(gt=0, description="mu_min: smallest multiplier")] = 1e-12
    multiplier_max: Annotated[float, Field(gt=0, description="mu_max: largest multiplier")] = 1.0
    multiplier_of: Annotated[
        Literal["scaled", "unscaled"],
        Field(description="the constraints that multipliers estimate: w d as in the authors' code, or d as in line 13"),
    ] = "scaled"
    penalty: Annotated[float, Field(gt=0, description="rho(0): penalty parameter; the paper has 0.01")] = 0.03
    penalty_growth: Annotated[float, Field(ge=1, description="gamma: factor by which rho grows")] = 2.0
    penalty_every: Annotated[int, Field(ge=1, description="M: steps between two updates of rho")] = 10
    improvement: Annotated[
        float,
        Field(gt=0, le=1, description="tau: a constraint has improved if it is below this share of its last value"),
    ] = 0.95
    scale_min: Annotated[float, Field(gt=0, le=1, description="w_min: smallest scale of the constraints")] = 0.1
    scale_rate: Annotated[float, Field(ge=0, lt=1, description="gamma_w: change of the scale per step")] = 0.02
    masking: Annotated[
        Masking,
        Field(
            description="which of the largest constraints to discard: none, a share 1 - nu, or a share growing to it"
        ),
    ] = "decay"
    tolerance: Annotated[float, Field(ge=0, description="epsilon: added to the constraints to tighten them")] = 1e-4
    metric_floor: Annotated[float, Field(gt=0, description="epsilon: added to the metric H")] = 1e-8
    prox: Annotated[
        Literal["exact", "ternary"], Field(description="how the proximity operator is computed; ternary: Algorithm 1")
    ] = "exact"
    prox_precision: Annotated[float, Field(gt=0, description="Delta beta: precision of the ternary search")] = 1e-5
    derivative: Annotated[
        Derivative, Field(description="derivative of the penalty: exact, or as in the authors' code")
    ] = "exact"

    @model_validator(mode="after")
    def _check(self) -> "AlmaProx":
        if self.multiplier_min > self.multiplier_max:
            raise ValueError("multiplier_min must not exceed multiplier_max")
        return self

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Algorithm 3, line by line."""
        problem, x = tracker.problem, tracker.problem.images
        start, steps = self._first_step_size(tracker, report)
        masking = ConstraintMask(problem, self.masking, steps)
        step_sizes = StepSizes(start, self.step_decay, steps)
        lower, upper = -x, 1 - x  # the box Lambda
        delta, v, metric = (torch.zeros_like(x) for _ in range(3))  # line 1
        w = x.new_ones(len(problem), 1, 1)
        mu = torch.full_like(x[:, 0], self.multiplier)
        rho = RhoRule(self.penalty, self.penalty_growth, self.penalty_every, self.improvement, mu)
        beta, workspace = None, prox_workspace(x)
        for t in range(1, steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))  # line 3; the clamp undoes rounding only
            d, pullback = dlr_plus(  # line 4
                query.logits, problem.labels, targeted=problem.wanted, tolerance=self.tolerance
            )
            d.nan_to_num_(nan=0.0)
            enough = problem.rate(d <= 0) >= problem.threshold
            w = _adjust_scale(w, enough, self.scale_rate, self.scale_min)  # lines 5 to 10
            kept = masking(d, t)  # lines 11 and 12
            y = w * d
            mu_hat = penalty_derivative(y, rho.value, mu, self.derivative).mul_(kept)  # line 13
            if self.multiplier_of == "unscaled":
                mu_hat *= w
            mu = mu_hat.lerp_(mu, self.smoothing).clamp_(self.multiplier_min, self.multiplier_max)  # line 14
            rho.update(t, d, kept)  # lines 15 to 21
            step_size = step_sizes(t, query.success)
            report(query, scale=w.flatten(), step_size=step_size, multiplier=problem.mean(mu))
            if t == steps:
                return  # delta(N) would never be scored
            pixel_weights = penalty_derivative(y, rho.value, mu, self.derivative).mul_(kept).mul_(w)
            g = query.gradient(pullback(pixel_weights))  # lines 22 and 23
            v.mul_(self.smoothing).addcmul_(g, g, value=1 - self.smoothing)  # line 24
            torch.div(v, 1 - self.smoothing**t, out=metric).sqrt_().add_(self.metric_floor)  # line 25
            delta.sub_(g.div_(metric).mul_(step_size.view(-1, 1, 1, 1)))  # line 26
            beta = prox_linf_box(
                delta, step_size, lower, upper, metric, self.prox,
                precision=self.prox_precision, guess=beta, out=delta, workspace=workspace,
            ).beta  # fmt: skip

    def _first_step_size(self, tracker: Tracker, report: ProgressReporter) -> tuple[Tensor, int]:
        """lambda(0) of each image, `[B]`, and how many steps are left.

        In N / 2 steps of the paper's size an attack gets far enough for ordinary networks. Robust ones need more: the
        step is scaled to the radius at which a short pilot attack is half-way.
        """
        if self.step_size != "auto":
            return torch.full_like(tracker.best.norm, self.step_size), self.steps
        if self.steps < 10 * PILOT:
            return torch.full_like(tracker.best.norm, PAPER_STEP), self.steps
        radius = halfway_radius(tracker, report, PILOT)
        return (radius / STEPS_TO_HALFWAY).clamp(min=PAPER_STEP), self.steps - PILOT


@fusible
def _adjust_scale(w: Tensor, satisfied: Tensor, rate: float, least: float) -> Tensor:
    """Lower the constraints' scale w where enough of them are satisfied, raise it elsewhere."""
    change = torch.where(satisfied, rate, -rate).to(w.dtype).view(-1, 1, 1)
    return (w / (1 + change)).clamp(least, 1)


class StepSizes:
    """lambda(t): constant until the image's first success (at most half of the steps), then falling hyperbolically."""

    def __init__(self, start: Tensor, decay: float, steps: int) -> None:
        self.start, self.decay, self.steps = start, decay, steps
        self.since = torch.full_like(start, steps // 2)

    def __call__(self, t: int, success: Tensor) -> Tensor:
        """The step size of each image, `[B]`."""
        i = t - 1
        self.since = torch.where(success, self.since.clamp(max=i), self.since)
        if self.decay == 1:
            return self.start
        period = self.decay / (1 - self.decay) * (self.steps - self.since).clamp(min=1)
        return self.start * period / ((i - self.since).clamp(min=0) + period)
