"""PALMA, projected augmented Lagrangian minimal attack: the smallest ball in which enough pixels give way."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Cost, MinimalAttack, ProgressReporter
from segprox.attacks.lagrangian import ConstraintMask, Masking
from segprox.attacks.rounds import IMPROVEMENT, Ball, Penalty, Rounds, Trust
from segprox.fusion import fusible
from segprox.losses import Loss, choose, dlr_plus, margin, soft_margin
from segprox.norms import NormName, distance, dual, per_image, project, scale, unit
from segprox.problem import Problem
from segprox.query import Query
from segprox.tracker import Tracker

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
CONSTRAINTS = {"margin": margin, "dlr+": dlr_plus}
RADIUS: dict[NormName, float] = {"linf": 5.0, "l2": 1.5, "l1": 1.5}  # there pixels share the ball: less is wasted
MOMENTUM: dict[NormName, float] = {"linf": 0.85, "l2": 0.6, "l1": 0.6}  # and those that gave way must not be pushed on
LEAST_SLOPE = 1e-12  # keeps the first radius finite where the gradient vanishes
MULTIPLIERS = 0.1, 10.0  # around their mean of 1; smaller ones would take too long to grow again
FIRST_STEP = 0.5  # of the first descent, over the radius
LAST_STEP = 0.05  # over the radius, where a sweep ends
RESERVE = 0.005  # share of the pixels that are pushed though they need not give way: without it the last ones take long
OPEN, LEAST_OPEN = 5.0, 0.001  # how open it is, in a descent, which class a pixel shall become, over missing pixels
SWEEP_OPEN = 0.3  # the same where a sweep begins; it gets less along the sweep's cosine, whatever is missing
TRIMS = 10  # queries that are kept back, in 8 bits, for undoing changes that are not needed
HALF_LEVEL = 0.5  # shorter steps are invisible in whole numbers


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Palma(MinimalAttack):
    """Constraints d <= 0 on a share nu of the pixels, one multiplier each, in a ball whose radius follows the APSR.

    Nothing depends on the number of steps: a run of N steps is the beginning of every longer one.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> problem = segprox.Problem.build(scene.image[None], scene.label[None])
        >>> found = segprox.Palma(steps=50).run(segprox.load_model("demo-standard"), problem)
        >>> bool(found.success), round(255 * found.norm.item())
        (True, 4)
    """

    paper: ClassVar[str] = "segprox, see docs/why/palma.md"

    norm: Annotated[Literal["linf", "l2", "l1"], Field(description="how perturbations are measured")] = "linf"
    steps: Annotated[int, Field(ge=1, description="N: iterations; a longer run begins like a shorter one")] = 200
    radius: Annotated[
        Positive | Literal["auto"],
        Field(description="first radius, in units of what the first gradient suggests; auto: 5 (linf), 1.5 (l2, l1)"),
    ] = "auto"
    rate: Annotated[float, Field(gt=0, le=1, description="gamma: change of the log radius per step, at first")] = 0.15
    step_size: Annotated[
        float, Field(gt=0, description="alpha: length of the longest step, in units of the radius")
    ] = 2.0
    momentum: Annotated[
        Share | Literal["auto"],
        Field(description="share of the last direction that is kept; auto: 0.85 (linf), 0.6 (l2, l1)"),
    ] = "auto"
    temperature: Annotated[
        float, Field(gt=0, description="tau: softness of the constraints, in units of their mean size")
    ] = 0.05
    smoothing: Annotated[
        float, Field(ge=0, le=1, description="smoothing of the multipliers; 1 leaves them all equal")
    ] = 0.95
    constraint: Annotated[
        Literal["margin", "dlr+"],
        Field(description="the function of the logits that a success makes negative at a pixel"),
    ] = "margin"
    masking: Annotated[
        Masking,
        Field(description="how many of the largest constraints are discarded: none, a share 1 - nu, or a growing one"),
    ] = "fixed"
    sweep: Annotated[int, Field(ge=2, description="steps of the first sweep; each later one has twice as many")] = 50
    patience: Annotated[
        int, Field(ge=0, description="leave out an image after so many steps without a norm 1 % smaller; 0: never")
    ] = 0
    bits: Annotated[
        Literal[0, 8, 16],
        Field(description="8 or 16: search among images of so many bits, and change few values; 0: any image"),
    ] = 0

    @property
    def rounds_to(self) -> int:
        """The steps of 8 or 16 bits."""
        return (1 << self.bits) - 1

    def cost(self) -> Cost:
        """N queries; the last leads nowhere and needs no gradient."""
        return Cost(self.steps, self._searched() - 1)

    def _searched(self) -> int:
        """The queries of the search proper."""
        return self.steps - TRIMS if self.bits and self.steps > 2 * TRIMS else self.steps

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Weigh the constraints, take a step, fit the ball, round after round; 8-bit images are trimmed in the end."""
        problem, x, steps = tracker.problem, tracker.problem.images, self._searched()
        masking = ConstraintMask(problem, self.masking, steps, RESERVE)
        momentum = MOMENTUM[self.norm] if self.momentum == "auto" else self.momentum
        radius = RADIUS[self.norm] if self.radius == "auto" else self.radius
        rounds, ball, idle = Rounds(tracker, self.sweep), Ball(tracker, self.rate), Patience(tracker, self.patience)
        trust = Trust(tracker, HALF_LEVEL / self.rounds_to if self.bits else 0.0)
        delta, direction = torch.zeros_like(x), torch.zeros_like(x)
        spare = Spare(tracker)
        mu = rested = torch.ones_like(x[:, 0])  # multipliers, and those that the last descent ended with
        for t in range(1, steps + 1):
            point = self._image(x + delta)
            query = tracker.query(point)
            report(query, radius=ball.radius)
            if self.bits:
                spare.keep(point, query, direction, rounds.age > 0)
            if t == steps or idle():
                break
            d, pullback = CONSTRAINTS[self.constraint](query.logits, problem.labels, targeted=problem.wanted)
            d.nan_to_num_(nan=0.0)
            size = problem.mean(d.abs()).clamp(min=torch.finfo(d.dtype).tiny).view(-1, 1, 1)
            rounds.count()
            if self.constraint == "margin" and not problem.targeted:
                softness = _softness(size, 1 - query.apsr - ball.allowed, rounds)
                soft = soft_margin(query.logits, problem.labels, softness=softness)
                chosen = soft if problem.protected is None else choose(problem.protected, Loss(d, pullback), soft)
                pullback = chosen.pullback
            trust.judge(d, self.step_size * ball.radius, rounds)
            trust.length = trust.length * ball.fit(query, rounds, trust.length, trust.kept)
            penalty = Penalty(mu * masking(d, t), self.temperature * size)
            weights = penalty.derivative(d)
            g = query.gradient(pullback(weights))
            if t == 1:
                ball.start(radius * _linear_distance(problem.balanced(weights * d), g, self.norm))
                trust.length = FIRST_STEP * ball.radius
            mu = self._normalised(torch.lerp(weights, mu, self.smoothing), problem)
            direction = momentum * direction + unit(g, "l1")
            length = _step_length(self.step_size, ball.radius, trust.length, rounds)
            ahead = project(delta - scale(self._steepest(direction), length), ball.radius, self.norm)
            ahead = (x + ahead).clamp_(0, 1).sub_(x)
            trust.predict(penalty, d, g, ahead - delta)
            over, swept = rounds.over(ball.leaping), rounds.sweeping
            delta, direction = _next_start(over, swept, x, tracker.best.images, ahead, direction)
            mu, rested = _next_multipliers(over, swept, mu, rested)
            ball.restart(over, swept)
            trust.restart(over)
            rounds.restart(over)
        if steps < self.steps:
            self._trim(tracker, report, spare.images, spare.direction)

    def _normalised(self, mu: Tensor, problem: Problem) -> Tensor:
        """Multipliers of mean 1: only their proportions matter, as steps have a length of their own."""
        mean = problem.mean(mu).clamp(min=torch.finfo(mu.dtype).tiny)
        return mu.div_(mean.view(-1, 1, 1)).clamp_(*MULTIPLIERS)

    def _steepest(self, direction: Tensor) -> Tensor:
        """A direction of norm 1: signs, or the direction itself where the ball is round or sparse."""
        return direction.sign() if self.norm == "linf" else unit(direction, self.norm)

    def _image(self, points: Tensor) -> Tensor:
        """Points as they are queried: in the box, and in whole numbers if asked for."""
        points = points.clamp(0, 1)
        return points.mul_(self.rounds_to).round_().div_(self.rounds_to) if self.bits else points

    def _trim(self, tracker: Tracker, report: ProgressReporter, best: Tensor, direction: Tensor) -> None:
        """Undo as many changes as the success survives: those along which the constraints change least go first.

        Bisection over their number, forward passes only, for each image on its own.
        """
        x = tracker.problem.images
        untouched = self._image(x)
        changed = (best != untouched).flatten(1)
        worth = torch.where(changed, ((untouched - best) * direction).flatten(1), torch.inf)
        rank = worth.argsort(1).argsort(1)
        kept_back, undone = changed.sum(1), torch.zeros_like(changed.sum(1))
        for _ in range(TRIMS):
            tried = (kept_back + undone + 1) // 2
            undo = (rank < tried.view(-1, 1)).view_as(x)
            query = tracker.query(torch.where(undo, untouched, best))
            report(query)
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


@fusible
def _softness(size: Tensor, missing: Tensor, rounds: Rounds) -> Tensor:
    """The softness of the margin, `[B, 1, 1]`, in proportion to the mean `size` of the constraints `[B, 1, 1]`.

    While many pixels are `missing` `[B]`, a descent leaves it open what they become. A sweep decides step by step,
    however it goes: the two end in different places, and on some images only one of these is near the best.
    """
    descending, sweeping = OPEN * missing, rounds.anneal(SWEEP_OPEN, LEAST_OPEN)
    openness = torch.where(rounds.sweeping, sweeping, descending.clamp(min=OPEN * LEAST_OPEN))
    return openness.to(size.dtype).view(-1, 1, 1) * size


@fusible
def _step_length(longest: float, radius: Tensor, trusted: Tensor, rounds: Rounds) -> Tensor:
    """How far to go, `[B]`: a descent as far as its steps are `trusted`, a sweep along its cosine."""
    return torch.where(rounds.sweeping, rounds.anneal(longest, LAST_STEP) * radius, trusted)


@fusible
def _next_start(
    over: Tensor, swept: Tensor, x: Tensor, best: Tensor, ahead: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor]:
    """The next perturbation and direction: where a round is over (bool `[B]`), those that another kind begins with.

    A descent that follows a sweep begins at the best point, a sweep at the image.
    """
    over, swept = over.view(-1, 1, 1, 1), swept.view(-1, 1, 1, 1)
    start = torch.where(swept, best - x, 0.0)
    return torch.where(over, start, ahead), torch.where(over, 0.0, direction)


@fusible
def _next_multipliers(over: Tensor, swept: Tensor, mu: Tensor, rested: Tensor) -> tuple[Tensor, Tensor]:
    """The next multipliers, and those that the last descent ended with, `[B, H, W]` each.

    A sweep begins with equal ones, a descent with those of the last.
    """
    over, swept = over.view(-1, 1, 1), swept.view(-1, 1, 1)
    rested = torch.where(over & ~swept, mu, rested)
    return torch.where(over, torch.where(swept, rested, 1.0), mu), rested


class Spare:
    """Keeps, of the many smallest successes in 8 bits, the one with most pixels to spare."""

    def __init__(self, tracker: Tracker) -> None:
        self.images = tracker.problem.images
        self.direction = torch.zeros_like(self.images)  # that led there, a measure of what each change is worth
        self.norm = torch.full_like(tracker.best.norm, torch.inf)
        self.apsr = torch.zeros_like(tracker.best.apsr)

    def keep(self, points: Tensor, query: Query, direction: Tensor, led: Tensor) -> None:
        """Take over the points that are better, where a direction has `led` to them (bool `[B]`)."""
        roomier = (query.norm == self.norm) & (query.apsr > self.apsr)
        better = query.success & led & ((query.norm < self.norm) | roomier)
        chosen = better.view(-1, 1, 1, 1)
        self.images = torch.where(chosen, points, self.images)
        self.direction = torch.where(chosen, direction, self.direction)
        self.norm, self.apsr = torch.where(better, query.norm, self.norm), torch.where(better, query.apsr, self.apsr)


class Patience:
    """Leaves out images whose best norm has not fallen by a percent for long."""

    def __init__(self, tracker: Tracker, steps: int) -> None:
        self.tracker, self.steps = tracker, steps
        self.norm = torch.full_like(tracker.best.norm, torch.inf)
        self.waited = torch.zeros_like(tracker.forwards)

    def __call__(self) -> bool:
        """Whether no image is left."""
        if not self.steps:
            return False
        improved = ~self.tracker.best.success | (self.tracker.best.norm < IMPROVEMENT * self.norm)
        self.norm = torch.where(improved & self.tracker.best.success, self.tracker.best.norm, self.norm)
        self.waited = torch.where(improved, 0, self.waited + 1)
        self.tracker.skipped = self.waited >= self.steps
        return self.tracker.finished
