"""PALMA, projected augmented Lagrangian minimal attack: the smallest ball in which enough pixels give way."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Attack, Cost, Watch
from segprox.attacks.lagrangian import ConstraintMask, Masking
from segprox.attacks.schedules import cosine
from segprox.losses import dlr_plus, margin
from segprox.norms import NormName, distance, dual, per_image, project, scale, unit
from segprox.problem import Problem
from segprox.tracker import Query, Tracker

CONSTRAINTS = {"margin": margin, "dlr+": dlr_plus}
LEAST_SLOPE = 1e-12  # keeps the first radius finite where the gradient vanishes
FASTEST_SHRINK, SLOWEST_SHRINK, FASTEST_GROWTH = -2.0, -0.3, 1.0  # of log radius, in units of the rate
HOPEFUL = 0.95  # the radius waits while each step leaves at most this share of the pixels that were missing
SHORTEST = 0.4  # of the first steps: calm ones get no shorter than that, else they could not follow a falling radius
MULTIPLIERS = 0.1, 10.0  # around their mean of 1; smaller ones would take too long to grow again
ANEW = (4.0, 1.0), (2.0, 0.25)  # of later rounds in turns: first radius over the best norm, share of the step size
IMPROVEMENT = 0.99  # of the best norm: what counts for patience
TRIMS = 10  # queries that are kept back, in 8 bits, for undoing changes that are not needed


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Palma(Attack):
    """Constraints d <= 0 on a share nu of the pixels, one multiplier each, in a ball whose radius follows the APSR.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> problem = segprox.Problem.build(scene.image[None], scene.label[None])
        >>> found = segprox.Palma(steps=50).run(segprox.load_model("demo-standard"), problem)
        >>> bool(found.success), round(255 * found.norm.item())
        (True, 4)
    """

    family: ClassVar[Literal["minimal", "budget"]] = "minimal"
    paper: ClassVar[str] = "segprox, see docs/palma.md"

    norm: Annotated[Literal["linf", "l2", "l1"], Field(description="how perturbations are measured")] = "linf"
    steps: Annotated[int, Field(ge=1, description="N: iterations")] = 200
    radius: Annotated[float, Field(gt=0, description="first radius, over what the first gradient suggests")] = 1.5
    rate: Annotated[float, Field(gt=0, le=1, description="gamma(0): change of log radius")] = 0.15
    rate_end: Annotated[float, Field(gt=0, le=1, description="gamma(N)")] = 0.001
    step_size: Annotated[float, Field(gt=0, description="alpha(0): length of a step, over the radius")] = 2.0
    step_end: Annotated[float, Field(gt=0, description="alpha(N)")] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of a direction that is kept")] = 0.85
    temperature: Annotated[float, Field(gt=0, description="tau: softness of constraints, over their mean size")] = 0.05
    smoothing: Annotated[float, Field(ge=0, le=1, description="of multipliers; 1 leaves them all equal")] = 0.95
    constraint: Annotated[Literal["margin", "dlr+"], Field(description="what is to be negative at a pixel")] = "margin"
    masking: Annotated[
        Masking, Field(description="the largest constraints to discard: none, a share 1 - nu, or growing to it")
    ] = "fixed"
    calm: Annotated[float, Field(gt=0, le=1, description="factor of steps that lead nowhere, before a success")] = 0.8
    round_steps: Annotated[
        int, Field(ge=2, description="of the first round; for twice as many, begin anew, differently")
    ] = 150
    patience: Annotated[int, Field(ge=0, description="give up after so many steps without 1 % less; 0: never")] = 0
    bits: Annotated[Literal[0, 8], Field(description="8: only valid 8-bit images, few values changed; 0: any")] = 0

    def cost(self) -> Cost:
        """N queries; the last of a round leads nowhere and needs no gradient."""
        return Cost(self.steps, self._searched() - len(self._rounds()))

    def _searched(self) -> int:
        """The queries of the search proper."""
        return self.steps - TRIMS if self.bits and self.steps > 2 * TRIMS else self.steps

    def _rounds(self) -> list[int]:
        """The queries of each round: the first is a short run, which a long one must not fall behind."""
        steps = self._searched()
        anew = steps // self.round_steps - 1
        if anew < 1:
            return [steps]
        rest = steps - self.round_steps
        return [self.round_steps, *(rest * (i + 1) // anew - rest * i // anew for i in range(anew))]

    def search(self, tracker: Tracker, watch: Watch) -> None:
        """Rounds that all begin at the image; 8-bit images are trimmed in the end."""
        ball, idle = Ball(tracker, self.calm), Patience(tracker, self.patience)
        direction = torch.zeros_like(tracker.problem.images)
        for i, steps in enumerate(self._rounds()):
            before = tracker.best_images.clone()
            beyond, share = ANEW[i % 2]
            latest = self._round(ball, watch, idle, steps, beyond, self.step_size * share)
            is_new = per_image(torch.any, tracker.best_images != before).view(-1, 1, 1, 1)
            direction = torch.where(is_new, latest, direction)
            if tracker.finished:
                break
        if self._searched() < self.steps:
            self._trim(tracker, watch, direction)

    def _round(
        self, ball: "Ball", watch: Watch, idle: "Patience", steps: int, beyond: float, step_size: float
    ) -> Tensor:
        """Weigh the constraints, take a step, fit the ball; the last direction, `[B, C, H, W]`."""
        tracker = ball.tracker
        problem, x = tracker.problem, tracker.problem.images
        masking = ConstraintMask(problem, self.masking, steps)
        delta, direction = torch.zeros_like(x), torch.zeros_like(x)
        mu = torch.ones_like(x[:, 0])
        for t in range(1, steps + 1):
            query = tracker.query(self._image(x + delta))
            watch(query, radius=ball.radius)
            if t == steps or idle():
                break
            d, pullback = CONSTRAINTS[self.constraint](query.logits, problem.labels, targeted=problem.targeted)
            d.nan_to_num_(nan=0.0)
            if t == 1:
                weights = problem.shares(d.dtype) * (d > 0)
            else:
                push = self._penalty_derivative(d, problem).mul_(masking(d, t))
                weights = mu * push
                mu = self._normalised(torch.lerp(weights, mu, self.smoothing), problem)
            g = query.gradient(pullback(weights))
            if t == 1:
                ball.start(self.radius * _linear_distance(weights * d, g, self.norm), beyond)
            else:
                ball.fit(query, cosine(self.rate, self.rate_end, t, steps))
            direction.mul_(self.momentum).add_(unit(g, "l1"))
            length = cosine(step_size, self.step_end, t, steps) * ball.stride
            delta.sub_(scale(self._steepest(direction), length))
            delta = (x + project(delta, ball.radius, self.norm)).clamp_(0, 1).sub_(x)
        return direction

    def _penalty_derivative(self, d: Tensor, problem: Problem) -> Tensor:
        """2 sigmoid(d / T): the derivative of the log-sigmoid penalty (Polyak, 2001), 1 where a constraint is tight.

        Constraints are measured by their mean size, so logits of any scale lead to the same attack.
        """
        size = problem.mean(d.abs()).clamp(min=torch.finfo(d.dtype).tiny)
        return (d / (self.temperature * size).view(-1, 1, 1)).sigmoid_().mul_(2)

    def _normalised(self, mu: Tensor, problem: Problem) -> Tensor:
        """Multipliers of mean 1: only their proportions matter, as steps have a length of their own."""
        mean = problem.mean(mu).clamp(min=torch.finfo(mu.dtype).tiny)
        return mu.div_(mean.view(-1, 1, 1)).clamp_(*MULTIPLIERS)

    def _steepest(self, direction: Tensor) -> Tensor:
        """A direction of norm 1: signs, or the direction itself where the ball is round or sparse."""
        return direction.sign() if self.norm == "linf" else unit(direction, self.norm)

    def _image(self, points: Tensor) -> Tensor:
        """Points as they are queried: in the box, and in 8 bits if asked for."""
        points = points.clamp(0, 1)
        return points.mul_(255).round_().div_(255) if self.bits else points

    def _trim(self, tracker: Tracker, watch: Watch, direction: Tensor) -> None:
        """Undo as many changes as the success survives: those along which the constraints change least go first.

        Bisection over their number, forward passes only, for each image on its own.
        """
        x, best = tracker.problem.images, tracker.best_images.clone()
        untouched = self._image(x)
        changed = (best != untouched).flatten(1)
        worth = torch.where(changed, ((untouched - best) * direction).flatten(1), torch.inf)
        rank = worth.argsort(1).argsort(1)
        kept_back, undone = changed.sum(1), torch.zeros_like(changed.sum(1))
        for _ in range(TRIMS):
            tried = (kept_back + undone + 1) // 2
            undo = (rank < tried.view(-1, 1)).view_as(x)
            query = tracker.query(torch.where(undo, untouched, best))
            watch(query)
            undone = torch.where(query.success, tried, undone)
            kept_back = torch.where(query.success, kept_back, tried)


def _linear_distance(violations: Tensor, gradient: Tensor, norm: NormName) -> Tensor:
    """How far away the violated constraints would vanish in the mean, were they linear, `[B]`.

    Args:
        violations: the constraints times their weights in the mean, `[B, H, W]`.
        gradient: of the mean, with respect to the images, `[B, C, H, W]`.
        norm: in which to measure.
    """
    return per_image(torch.sum, violations) / distance(gradient, dual(norm)).clamp(min=LEAST_SLOPE)


class Ball:
    """The radius of each image's ball, `[B]`: smaller after a success, larger where pixels are missing for good."""

    def __init__(self, tracker: Tracker, calm: float) -> None:
        problem, x = tracker.problem, tracker.problem.images
        self.tracker, self.calm = tracker, calm
        self.farthest = distance(torch.maximum(x, 1 - x), tracker.norm)  # no perturbation within the box is larger
        self.radius = torch.zeros_like(self.farthest)
        counted = problem.counted.clamp(min=1)
        self.allowed = ((1 - problem.threshold) * counted).clamp(min=1) / counted

    def start(self, guess: Tensor, beyond: float = 1.0) -> None:
        """Begin, or begin anew: `beyond` times the best norm, without one at a guess or where the last round ended."""
        known = beyond * self.tracker.best_norm
        radius = torch.where(self.tracker.success, known, torch.maximum(guess, self.radius))
        self.radius = self.first = torch.minimum(radius, self.farthest)
        self.pace = torch.ones_like(self.farthest)  # of the steps within
        self.missing = torch.ones_like(self.tracker.best_apsr)  # at the last query, the share of pixels

    @property
    def stride(self) -> Tensor:
        """What steps are measured by, `[B]`: the radius, less where they led nowhere, at least a share of the first."""
        return torch.maximum(self.pace * self.radius, torch.minimum(SHORTEST * self.first, self.radius))

    def fit(self, query: Query, rate: float) -> None:
        """Change the logarithm of the radius by at most some times `rate`, in proportion to how many pixels miss."""
        missing = 1 - query.apsr
        excess = (missing / self.allowed).log().clamp_(FASTEST_SHRINK, FASTEST_GROWTH)
        growth = torch.where(missing < HOPEFUL * self.missing, 0.0, excess.clamp(min=0))
        change = torch.where(query.success, excess.clamp(max=SLOWEST_SHRINK), growth)
        held = torch.where(query.success, torch.minimum(self.radius, self.tracker.best_norm), self.radius)
        self.radius = torch.minimum(held * (rate * change).exp().to(held.dtype), self.farthest)
        self.pace = torch.where((growth > 0) & ~self.tracker.success, self.pace * self.calm, self.pace)
        self.missing = missing


class Patience:
    """Leaves out images whose best norm has not fallen by a percent for long."""

    def __init__(self, tracker: Tracker, steps: int) -> None:
        self.tracker, self.steps = tracker, steps
        self.norm = torch.full_like(tracker.best_norm, torch.inf)
        self.waited = torch.zeros_like(tracker.forwards)

    def __call__(self) -> bool:
        """Whether no image is left."""
        if not self.steps:
            return False
        improved = ~self.tracker.success | (self.tracker.best_norm < IMPROVEMENT * self.norm)
        self.norm = torch.where(improved & self.tracker.success, self.tracker.best_norm, self.norm)
        self.waited = torch.where(improved, 0, self.waited + 1)
        self.tracker.skipped = self.waited >= self.steps
        return self.tracker.finished
