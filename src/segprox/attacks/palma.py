"""PALMA, projected augmented Lagrangian minimal attack: the smallest ball in which enough pixels give way."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import softplus

from segprox.attacks.base import FIELDS, Attack, Cost, Watch
from segprox.attacks.lagrangian import ConstraintMask, Masking
from segprox.losses import dlr_plus, margin
from segprox.norms import NormName, distance, dual, per_image, project, scale, unit
from segprox.problem import Problem
from segprox.tracker import Query, Tracker

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
CONSTRAINTS = {"margin": margin, "dlr+": dlr_plus}
RADIUS: dict[NormName, float] = {"linf": 3.0, "l2": 1.5, "l1": 1.5}  # there pixels share the ball: less is wasted
MOMENTUM: dict[NormName, float] = {"linf": 0.85, "l2": 0.6, "l1": 0.6}  # and those that gave way must not be pushed on
LEAST_SLOPE = 1e-12  # keeps the first radius finite where the gradient vanishes
MULTIPLIERS = 0.1, 10.0  # around their mean of 1; smaller ones would take too long to grow again
FASTEST_SHRINK, SLOWEST_SHRINK, FASTEST_GROWTH = -2.0, -0.3, 1.0  # of log radius, in units of the rate
HOPEFUL = 0.88  # the radius waits while fewer pixels miss than this share of their recent mean
RECENT = 0.8  # weight of the past in that mean
LAST_RATE, LAST_STEP = 0.001, 0.05  # where a sweep ends: change of log radius, step over radius
FASTER, SLOWER, PACES = 1.1, 0.85, (0.002, 0.3)  # how a descent's rate follows successes and losses, and its range
LEEWAY = 1.2  # the radius stays within this times the best norm: there is nothing to find beyond
TRUSTED = 0.15  # the share of the predicted decrease at which steps keep their length
TRUST_GAIN, TRUST_CHANGE = 0.5, (0.7, 1.25)  # how strongly the length follows that share, and the factors allowed
SETTLED, LOOK = 0.98, 10  # a descent is over when the best norm keeps this share over so many steps,
EXHAUSTED = 0.995  # or this share, where the last sweep did not gain anything
INSIDE, GENTLE = 0.997, 0.01  # a descent from the best point: radius over norm, rate
AGAIN = 1.4  # its steps over those that the last one ended with, twice: before and after the sweep
IMPROVEMENT = 0.99  # of the best norm: what counts for patience
TRIMS = 10  # queries that are kept back, in 8 bits, for undoing changes that are not needed
HALF_LEVEL = 0.5 / 255  # shorter steps are invisible in 8 bits


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Palma(Attack):
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

    family: ClassVar[Literal["minimal", "budget"]] = "minimal"
    paper: ClassVar[str] = "segprox, see docs/palma.md"

    norm: Annotated[Literal["linf", "l2", "l1"], Field(description="how perturbations are measured")] = "linf"
    steps: Annotated[int, Field(ge=1, description="N: iterations; a longer run begins with the shorter one")] = 200
    radius: Annotated[
        Positive | Literal["auto"],
        Field(description="first radius, over what the first gradient suggests; auto: 3 in linf, 1.5 in l2 and l1"),
    ] = "auto"
    rate: Annotated[float, Field(gt=0, le=1, description="gamma: change of log radius, at the beginning")] = 0.15
    step_size: Annotated[float, Field(gt=0, description="alpha: longest step, over the radius")] = 2.0
    momentum: Annotated[
        Share | Literal["auto"],
        Field(description="share of a direction that is kept; auto: 0.85 in linf, 0.6 in l2 and l1"),
    ] = "auto"
    temperature: Annotated[float, Field(gt=0, description="tau: softness of constraints, over their mean size")] = 0.05
    smoothing: Annotated[float, Field(ge=0, le=1, description="of multipliers; 1 leaves them all equal")] = 0.95
    constraint: Annotated[Literal["margin", "dlr+"], Field(description="what is to be negative at a pixel")] = "margin"
    masking: Annotated[
        Masking, Field(description="the largest constraints to discard: none, a share 1 - nu, or growing to it")
    ] = "fixed"
    sweep: Annotated[int, Field(ge=2, description="steps of the first sweep; each later one has twice as many")] = 50
    patience: Annotated[int, Field(ge=0, description="give up after so many steps without 1 % less; 0: never")] = 0
    bits: Annotated[Literal[0, 8], Field(description="8: only valid 8-bit images, few values changed; 0: any")] = 0

    def cost(self) -> Cost:
        """N queries; the last leads nowhere and needs no gradient."""
        return Cost(self.steps, self._searched() - 1)

    def _searched(self) -> int:
        """The queries of the search proper."""
        return self.steps - TRIMS if self.bits and self.steps > 2 * TRIMS else self.steps

    def search(self, tracker: Tracker, watch: Watch) -> None:
        """Weigh the constraints, take a step, fit the ball, round after round; 8-bit images are trimmed in the end."""
        problem, x, steps = tracker.problem, tracker.problem.images, self._searched()
        masking = ConstraintMask(problem, self.masking, steps)
        momentum = MOMENTUM[self.norm] if self.momentum == "auto" else self.momentum
        radius = RADIUS[self.norm] if self.radius == "auto" else self.radius
        rounds, ball, idle = Rounds(tracker, self.sweep), Ball(tracker, self.rate), Patience(tracker, self.patience)
        trust = Trust(tracker, HALF_LEVEL if self.bits else 0.0)
        delta, direction = torch.zeros_like(x), torch.zeros_like(x)
        spare = Spare(tracker)
        mu = rested = torch.ones_like(x[:, 0])  # multipliers, and those that the last descent ended with
        for t in range(1, steps + 1):
            point = self._image(x + delta)
            query = tracker.query(point)
            watch(query, radius=ball.radius)
            if self.bits:
                spare.keep(point, query, direction, rounds.age > 0)
            if t == steps or idle():
                break
            d, pullback = CONSTRAINTS[self.constraint](query.logits, problem.labels, targeted=problem.targeted)
            d.nan_to_num_(nan=0.0)
            rounds.count()
            trust.judge(d, self.step_size * ball.radius, rounds)
            trust.length = trust.length * ball.fit(query, rounds)  # a growing ball carries the steps along
            penalty = Penalty(mu * masking(d, t), self._softness(d, problem))
            weights = penalty.derivative(d)
            g = query.gradient(pullback(weights))
            if t == 1:
                ball.start(radius * _linear_distance(weights * d, g, self.norm))
                trust.length = self.step_size * ball.radius
            mu = self._normalised(torch.lerp(weights, mu, self.smoothing), problem)
            direction = momentum * direction + unit(g, "l1")
            sweeping = rounds.anneal(self.step_size, LAST_STEP) * ball.radius
            length = torch.where(rounds.sweeping, sweeping, trust.length)
            ahead = project(delta - scale(self._steepest(direction), length), ball.radius, self.norm)
            ahead = (x + ahead).clamp_(0, 1).sub_(x)
            trust.predict(penalty, d, g, ahead - delta)
            over = rounds.over()
            start = _choose(rounds.sweeping, tracker.best_images - x, torch.zeros_like(x))  # of the other kind
            delta = _choose(over, start, ahead)
            direction = _choose(over, torch.zeros_like(x), direction)
            swept, ended = rounds.sweeping.view(-1, 1, 1), over.view(-1, 1, 1)
            rested = torch.where(ended & ~swept, mu, rested)
            mu = torch.where(ended, torch.where(swept, rested, 1.0), mu)
            ball.restart(over, rounds.sweeping)
            trust.restart(over)
            rounds.restart(over)
        if steps < self.steps:
            self._trim(tracker, watch, spare.images, spare.direction)

    def _softness(self, d: Tensor, problem: Problem) -> Tensor:
        """T, `[B, 1, 1]`: constraints are measured by their mean size, so the scale of the logits does not matter."""
        size = problem.mean(d.abs()).clamp(min=torch.finfo(d.dtype).tiny)
        return (self.temperature * size).view(-1, 1, 1)

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

    def _trim(self, tracker: Tracker, watch: Watch, best: Tensor, direction: Tensor) -> None:
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


def _choose(which: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """`yes` for some of the images (bool `[B]`), `no` for the others, `[B, C, H, W]`."""
    return torch.where(which.view(-1, 1, 1, 1), yes, no)


class Penalty(NamedTuple):
    """Polyak's log-sigmoid Lagrangian (2001) as a function of the constraints: sum_i 2 w_i T softplus(d_i / T)."""

    weights: Tensor  # w, [B, H, W]: multipliers of the constraints that count, 0 for the others
    softness: Tensor  # T, [B, 1, 1]

    def value(self, d: Tensor) -> Tensor:
        """The penalty of each image, `[B]`."""
        return per_image(torch.sum, softplus(d / self.softness).mul_(self.weights).mul_(2 * self.softness))

    def derivative(self, d: Tensor) -> Tensor:
        """With respect to d, `[B, H, W]`: w where a constraint is tight, 2 w far from it, 0 far beyond it."""
        return (d / self.softness).sigmoid_().mul_(self.weights).mul_(2)


class Rounds:
    """What each image is at: a descent until it settles, then a sweep, then a descent from the best point, and so on.

    A descent takes steps as long as the gradient can be believed; a sweep begins at the image with steps that are too
    long, which get shorter along a cosine. One finds a way where the other does not.
    """

    def __init__(self, tracker: Tracker, sweep: int) -> None:
        self.tracker = tracker
        self.index = torch.zeros_like(tracker.forwards)  # [B]: even in descents, odd in sweeps
        self.age = torch.zeros_like(tracker.forwards)  # [B]: queries of the round
        self.mark = torch.full_like(tracker.best_norm, torch.inf)  # [B]: the best norm when last looked at
        self.enough = torch.full_like(self.mark, SETTLED)  # [B]: the share of it at which a descent is over
        self.length = torch.full_like(tracker.forwards, sweep)  # [B]: of the next sweep

    @property
    def sweeping(self) -> Tensor:
        """Which images are in a sweep, bool `[B]`."""
        return self.index % 2 == 1

    def count(self) -> None:
        """One more query."""
        self.age += 1

    def anneal(self, first: float, last: float) -> Tensor:
        """From the first value to the last along half a cosine over a sweep, `[B]`."""
        share = (self.age - 1) / (self.length - 1)
        return (last + (first - last) * (1 + torch.cos(math.pi * share.clamp(max=1))) / 2).to(self.mark.dtype)

    def over(self) -> Tensor:
        """Whose round is over, bool `[B]`: sweeps by their length, descents when they have settled."""
        look = torch.where(self.sweeping, self.age >= self.length, self.age % LOOK == 0)
        known = self.tracker.success
        over = look & known & (self.sweeping | (self.tracker.best_norm > self.enough * self.mark))
        swept, fruitless = over & self.sweeping, self.tracker.best_norm > IMPROVEMENT * self.mark
        self.enough = torch.where(swept, torch.where(fruitless, EXHAUSTED, SETTLED), self.enough)
        self.length = torch.where(swept, 2 * self.length, self.length)
        self.mark = torch.where(look & known, self.tracker.best_norm, self.mark)
        return over

    def restart(self, over: Tensor) -> None:
        """Begin the next round of these images."""
        self.index = self.index + over
        self.age = torch.where(over, 0, self.age)


class Ball:
    """The radius of each image's ball, `[B]`: smaller after a success, larger where pixels are missing for good."""

    def __init__(self, tracker: Tracker, rate: float) -> None:
        problem, x = tracker.problem, tracker.problem.images
        self.tracker, self.rate = tracker, rate
        self.farthest = distance(torch.maximum(x, 1 - x), tracker.norm)  # no perturbation within the box is larger
        self.radius = self.farthest
        self.pace = torch.full_like(self.farthest, rate / 1.5)  # of descents, once there is a success
        self.missing = torch.ones_like(tracker.best_apsr)  # the share of pixels, a recent mean
        counted = problem.counted.clamp(min=1)
        self.allowed = ((1 - problem.threshold) * counted).clamp(min=1) / counted

    def start(self, guess: Tensor) -> None:
        """The first radius, `[B]`."""
        self.radius = torch.minimum(guess, self.farthest)

    def restart(self, over: Tensor, swept: Tensor) -> None:
        """Begin another round where one is over: a descent after a sweep, a sweep after a descent."""
        share = torch.where(swept, INSIDE, LEEWAY)
        radius = torch.minimum(share.to(self.radius.dtype) * self.tracker.best_norm, self.farthest)
        self.radius = torch.where(over & self.tracker.success, radius, self.radius)
        self.pace = torch.where(over, GENTLE, self.pace)
        self.missing = torch.where(over, 1.0, self.missing)

    def fit(self, query: Query, rounds: Rounds) -> Tensor:
        """Change the logarithm of the radius by at most some times the rate, in proportion to how many pixels miss.

        Returns by what factor the ball of a descent has grown, `[B]`, 1 where it has not.
        """
        missing, success, known = 1 - query.apsr, query.success, self.tracker.success
        excess = (missing / self.allowed).log().clamp_(FASTEST_SHRINK, FASTEST_GROWTH)
        growth = torch.where(missing < HOPEFUL * self.missing, 0.0, excess.clamp(min=0))
        rate = torch.where(known, self.pace, self.rate)
        rate = torch.where(rounds.sweeping, rounds.anneal(self.rate, LAST_RATE), rate)
        change = rate * torch.where(success, excess.clamp(max=SLOWEST_SHRINK), growth)
        reached = torch.where(rounds.sweeping, query.norm, self.tracker.best_norm)
        held = torch.where(success, torch.minimum(self.radius, reached), self.radius)
        radius = torch.minimum(held * change.exp().to(held.dtype), self.farthest)
        radius = torch.where(known, torch.minimum(radius, LEEWAY * self.tracker.best_norm), radius)
        begun = rounds.age > 1  # the point that a round begins at says nothing about its ball
        radius = torch.where(begun, radius, self.radius)
        grown = torch.where(rounds.sweeping, 1.0, (radius / self.radius).clamp(min=1))
        self.radius = radius
        pace = self.pace * torch.where(success, FASTER, torch.where(known, SLOWER, 1.0)).to(self.pace.dtype)
        self.pace = torch.where(begun, pace.clamp(*PACES), self.pace)
        past = (1 - 2 / (rounds.age + 1)).clamp(max=RECENT).to(missing.dtype)  # short at first: all is new then
        self.missing = torch.where(success, missing, torch.lerp(missing, self.missing, past))
        return grown


class Trust:
    """The length of a descent's steps, `[B]`: what the last step did is compared with what its gradient predicted."""

    def __init__(self, tracker: Tracker, least: float) -> None:
        self.least = least
        self.length = torch.zeros_like(tracker.best_norm)
        self.predicted = torch.zeros_like(tracker.best_norm)  # change of the penalty; 0 before the first step
        self.penalty: Penalty | None = None

    def predict(self, penalty: Penalty, d: Tensor, gradient: Tensor, move: Tensor) -> None:
        """Note what a move `[B, C, H, W]` should do to the penalty, were it linear."""
        self.penalty, self.value = penalty, penalty.value(d)
        self.predicted = per_image(torch.sum, gradient * move)

    def judge(self, d: Tensor, longest: Tensor, rounds: Rounds) -> None:
        """Longer steps after one that kept its promise, at most the `longest` `[B]`, shorter ones otherwise."""
        if self.penalty is None:
            return
        down = (self.predicted < 0) & ~rounds.sweeping
        ratio = (self.penalty.value(d) - self.value) / torch.where(down, self.predicted, -1.0)
        factor = (1 + TRUST_GAIN * (ratio - TRUSTED)).clamp_(*TRUST_CHANGE)
        length = torch.where(down, self.length * factor, self.length)
        self.length = length.clamp(min=self.least).minimum(longest)

    def restart(self, over: Tensor) -> None:
        """The next descent goes on with steps as they were in the last one, a little longer."""
        self.length = torch.where(over, AGAIN * self.length, self.length)
        self.predicted = torch.where(over, 0.0, self.predicted)


class Spare:
    """Of the smallest successes in 8 bits, of which there are many, the one with most pixels to spare."""

    def __init__(self, tracker: Tracker) -> None:
        self.images = tracker.problem.images
        self.direction = torch.zeros_like(self.images)  # that led there, a measure of what each change is worth
        self.norm = torch.full_like(tracker.best_norm, torch.inf)
        self.apsr = torch.zeros_like(tracker.best_apsr)

    def keep(self, points: Tensor, query: Query, direction: Tensor, led: Tensor) -> None:
        """Take over the points that are better, where a direction has `led` to them (bool `[B]`)."""
        roomier = (query.norm == self.norm) & (query.apsr > self.apsr)
        better = query.success & led & ((query.norm < self.norm) | roomier)
        self.images = _choose(better, points, self.images)
        self.direction = _choose(better, direction, self.direction)
        self.norm, self.apsr = torch.where(better, query.norm, self.norm), torch.where(better, query.apsr, self.apsr)


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
