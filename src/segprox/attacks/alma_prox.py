"""ALMA prox (CVPR 2023): minimal linf perturbations by an augmented Lagrangian and a proximal step."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import Attack, Callback, Progress
from segprox.attacks.penalty import Derivative, penalty_derivative
from segprox.losses import dlr_plus
from segprox.models.segmenter import Segmenter
from segprox.norms import NormName
from segprox.problem import Problem
from segprox.prox import prox_linf_box, prox_workspace
from segprox.tracker import Attacked, Tracker

PENALTY_MAX = 1e12  # keeps rho^2 y^3 within float32 however long an attack runs


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class AlmaProx(Attack):
    """Algorithm 3 of the paper. One multiplier and one penalty parameter per pixel; images do not influence each other.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> problem = segprox.Problem.build(scene.image[None], scene.label[None])
        >>> found = segprox.AlmaProx(steps=3).run(segprox.load_model("demo-standard"), problem)
        >>> found.backwards.tolist()  # the last point is scored but leads nowhere
        [2]
    """

    name: ClassVar[str] = "alma-prox"
    norm: ClassVar[NormName] = "linf"
    family: ClassVar[Literal["minimal", "budget"]] = "minimal"
    paper: ClassVar[str] = "Rony et al., Proximal Splitting Adversarial Attack for Semantic Segmentation, CVPR 2023"

    steps: Annotated[int, Field(ge=1, description="N: iterations")] = 500
    step_size: Annotated[float, Field(gt=0, description="lambda(0): step size at the start")] = 1e-3
    step_decay: Annotated[float, Field(gt=0, le=1, description="lambda(N) / lambda(0)")] = 0.1
    smoothing: Annotated[float, Field(ge=0, lt=1, description="alpha: of multipliers and metric")] = 0.8
    multiplier: Annotated[float, Field(gt=0, description="mu(0)")] = 1.0
    multiplier_min: Annotated[float, Field(gt=0, description="mu_min")] = 1e-12
    multiplier_max: Annotated[float, Field(gt=0, description="mu_max")] = 1.0
    multiplier_of: Annotated[
        Literal["scaled", "unscaled"],
        Field(description="the constraints that multipliers estimate: w d as in the authors' code, or d as in line 13"),
    ] = "scaled"
    penalty: Annotated[float, Field(gt=0, description="rho(0): penalty parameter")] = 0.01
    penalty_growth: Annotated[float, Field(ge=1, description="gamma: growth of rho")] = 2.0
    penalty_every: Annotated[int, Field(ge=1, description="M: steps between two looks at rho")] = 10
    improvement: Annotated[float, Field(gt=0, le=1, description="tau: what counts as improved")] = 0.95
    scale_min: Annotated[float, Field(gt=0, le=1, description="w_min: least constraint scale")] = 0.1
    scale_rate: Annotated[float, Field(ge=0, lt=1, description="gamma_w: change of the scale")] = 0.02
    masking: Annotated[
        Literal["none", "fixed", "decay"],
        Field(
            description="which of the largest constraints to discard: none, a share 1 - nu, or a share growing to it"
        ),
    ] = "decay"
    tolerance: Annotated[float, Field(ge=0, description="epsilon: tightens the constraints")] = 1e-4
    metric_floor: Annotated[float, Field(gt=0, description="epsilon of the metric H")] = 1e-8
    prox: Annotated[
        Literal["exact", "ternary"], Field(description="how the proximity operator is computed; ternary: Algorithm 1")
    ] = "exact"
    prox_precision: Annotated[float, Field(gt=0, description="Delta beta: of the ternary search")] = 1e-5
    derivative: Annotated[Derivative, Field(description="of the penalty: exact, or as in the authors' code")] = "exact"

    @model_validator(mode="after")
    def _check(self) -> "AlmaProx":
        if self.multiplier_min > self.multiplier_max:
            raise ValueError("multiplier_min must not exceed multiplier_max")
        return self

    def run(self, model: Segmenter, problem: Problem, callback: Callback | None = None) -> Attacked:
        """Attack every image of the batch; see the class for the algorithm."""
        x, m = problem.images, problem.mask
        tracker = Tracker(model, problem, self.norm)
        masking = ConstraintMask(problem, self.masking, self.steps)
        step_sizes = StepSizes(self.step_size, self.step_decay, self.steps, len(problem), x)
        lower, upper = -x, 1 - x  # the box Lambda
        delta, v = torch.zeros_like(x), torch.zeros_like(x)  # line 1
        w = x.new_ones(len(problem), 1, 1)
        mu = torch.full_like(x[:, 0], self.multiplier)
        rho = RhoRule(self, mu)
        beta, workspace = None, prox_workspace(x)
        for t in range(1, self.steps + 1):
            query = tracker.query((x + delta).clamp_(0, 1))  # line 3; the clamp undoes rounding only
            d, pullback = dlr_plus(  # line 4
                query.logits, problem.labels, targeted=problem.targeted, tolerance=self.tolerance
            )
            d.nan_to_num_(nan=0.0)
            w = self._adjust_scale(w, problem.rate(d <= 0) >= problem.threshold)  # lines 5 to 10
            kept = masking(d, t)  # lines 11 and 12
            mu_hat = kept * penalty_derivative(w * d, rho.value, mu, self.derivative)  # line 13
            if self.multiplier_of == "unscaled":
                mu_hat = mu_hat * w
            mu = torch.lerp(mu_hat, mu, self.smoothing).clamp_(self.multiplier_min, self.multiplier_max)  # line 14
            rho.update(t, d, kept)  # lines 15 to 21
            step_size = step_sizes(t, query.success)
            if callback is not None:
                details = {"scale": w.flatten(), "step_size": step_size, "multiplier": _mean(mu, m)}
                callback(Progress(t, query.norm, query.apsr, details))
            if t == self.steps:
                break  # delta(N) would never be scored
            pixel_weights = kept * w * penalty_derivative(w * d, rho.value, mu, self.derivative)
            g = query.gradient(pullback(pixel_weights))  # lines 22 and 23
            v.mul_(self.smoothing).addcmul_(g, g, value=1 - self.smoothing)  # line 24
            metric = (v / (1 - self.smoothing**t)).sqrt_().add_(self.metric_floor)  # line 25
            delta.sub_(g.div_(metric).mul_(step_size.view(-1, 1, 1, 1)))  # line 26
            beta = prox_linf_box(
                delta, step_size, lower, upper, metric, self.prox,
                precision=self.prox_precision, guess=beta, out=delta, workspace=workspace,
            ).beta  # fmt: skip
        return tracker.result()

    def _adjust_scale(self, w: Tensor, satisfied: Tensor) -> Tensor:
        """Lower the constraints' scale w where enough of them are satisfied, raise it elsewhere."""
        rate = torch.where(satisfied, self.scale_rate, -self.scale_rate).to(w.dtype).view(-1, 1, 1)
        return (w / (1 + rate)).clamp_(self.scale_min, 1)


class ConstraintMask:
    """The paper's constraint masking: discards the largest constraints, which are the least likely to be satisfied.

    The discarded share of the counted pixels grows linearly to 1 - nu (`decay`) or is 1 - nu throughout (`fixed`).
    """

    def __init__(self, problem: Problem, kind: str, steps: int) -> None:
        self.mask, self.kind, self.steps = problem.mask, kind, steps
        counted = self.mask.flatten(1).sum(1).double()
        self.spare = ((1 - problem.threshold) * counted + 1e-9).floor()  # pixels that need not be satisfied
        self.most = int(self.spare.max()) if len(problem) else 0

    def __call__(self, d: Tensor, t: int) -> Tensor:
        """m~(t), bool `[B, H, W]`."""
        if self.kind == "none" or self.most == 0:
            return self.mask
        share = 1.0 if self.kind == "fixed" else (t - 1) / max(self.steps - 1, 1)
        discarded = (self.spare * share).long()
        values = torch.where(self.mask, d, -torch.inf).flatten(1)
        largest = values.topk(self.most + 1, dim=1).values
        threshold = largest.gather(1, discarded.unsqueeze(1))  # xi: the largest one that is kept
        return self.mask & (d <= threshold.unsqueeze(2))


class RhoRule:
    """Lines 15 to 21: every M steps, rho grows where a kept constraint was neither satisfied lately nor improved."""

    def __init__(self, attack: AlmaProx, like: Tensor) -> None:
        self.attack = attack
        self.value = torch.full_like(like, attack.penalty)
        self.satisfied = torch.zeros_like(like, dtype=torch.bool)
        self.before: Tensor | None = None  # d(t - M); d(1) for the first look, as there is no d(0)

    def update(self, t: int, d: Tensor, kept: Tensor) -> None:
        """Take in the constraints of step t."""
        self.satisfied |= d <= 0
        if self.before is None:
            self.before = d
        if t % self.attack.penalty_every:
            return
        stalled = kept & ~self.satisfied & (d > self.attack.improvement * self.before)
        self.value = torch.where(stalled, self.value * self.attack.penalty_growth, self.value).clamp_(max=PENALTY_MAX)
        self.satisfied = torch.zeros_like(self.satisfied)
        self.before = d


class StepSizes:
    """lambda(t): constant until the image's first success (at most half of the steps), then falling hyperbolically."""

    def __init__(self, start: float, decay: float, steps: int, images: int, like: Tensor) -> None:
        self.start, self.decay, self.steps = start, decay, steps
        self.since = torch.full((images,), steps // 2, dtype=like.dtype, device=like.device)

    def __call__(self, t: int, success: Tensor) -> Tensor:
        """The step size of each image, `[B]`."""
        i = t - 1
        self.since = torch.where(success, self.since.clamp(max=i), self.since)
        if self.decay == 1:
            return torch.full_like(self.since, self.start)
        period = self.decay / (1 - self.decay) * (self.steps - self.since).clamp(min=1)
        return self.start * period / ((i - self.since).clamp(min=0) + period)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).flatten(1).sum(1) / mask.flatten(1).sum(1).clamp(min=1)
