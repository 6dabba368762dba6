"""What PALMA adapts, per image: its rounds, the ball they search in, and the length of steps that can be trusted."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from segprox.fusion import fusible
from segprox.norms import distance, elementwise_, per_image
from segprox.query import Query
from segprox.tracker import Tracker

FASTEST_SHRINK, SLOWEST_SHRINK, FASTEST_GROWTH = -2.0, -0.3, 1.0  # of log radius, in units of the rate
HASTE = 2.0  # what is added to the growth as long as all pixels are missing: such a ball is much too small
PATIENCE = 20  # the radius waits while, at the present pace, enough pixels will have given way within so many steps
RECENT = 0.8  # weight of the past in the mean of missing pixels that tells the pace
LAST_RATE = 0.001  # of log radius, where a sweep ends
FASTER, SLOWER, PACES = 1.1, 0.85, (0.002, 0.3)  # how a descent's rate follows successes and losses, and its range
LEEWAY = 1.2  # the radius stays within this times the best norm: there is nothing to find beyond
STIFF = 0.1  # below this share of the radius, steps are short: then balls are left by leaps, not by small changes
LEAP, LEAST_LEAP, GRACE = 0.7, 0.02, 3  # of log radius: the first leap, the last; steps until one is judged
SHORT, LONGER = 0.05, 1.5  # steps shorter than this share of the radius get longer where the ball would have grown
TRUSTED = 0.2  # the share of the predicted decrease at which steps keep their length
TRUST_CHANGE = 0.6, 1.4  # the factors by which a length may change
SETTLED, LOOK = 0.98, 10  # a descent is over when the best norm keeps this share over so many steps,
EXHAUSTED = 0.995  # or this share, where the last sweep did not gain anything
INSIDE, GENTLE = 0.997, 0.01  # a descent from the best point: radius over norm, rate
AGAIN = 1.4  # its steps over those that the last one ended with, twice: before and after the sweep
IMPROVEMENT = 0.99  # of the best norm: what counts for patience


class Penalty(NamedTuple):
    """Polyak's log-sigmoid Lagrangian (2001) as a function of the constraints: sum_i 2 w_i T softplus(d_i / T)."""

    weights: Tensor  # w, [B, H, W]: multipliers of the constraints that count, 0 for the others
    softness: Tensor  # T, [B, 1, 1]

    @fusible
    def values(self, d: Tensor) -> Tensor:
        """The terms of the sum, `[B, H, W]`."""
        return elementwise_(softplus, d / self.softness).mul_(self.weights).mul_(2 * self.softness)

    @fusible
    def derivative(self, d: Tensor) -> Tensor:
        """With respect to d, `[B, H, W]`: w where a constraint is tight, 2 w far from it, 0 far beyond it."""
        return elementwise_(torch.sigmoid, d / self.softness).mul_(self.weights).mul_(2)


class Rounds:
    """What each image is at: a descent until it settles, then a sweep, then a descent from the best point, and so on.

    A descent takes steps as long as the gradient can be believed; a sweep begins at the image with steps that are too
    long, which get shorter along a cosine. One finds a way where the other does not.
    """

    def __init__(self, tracker: Tracker, sweep: int) -> None:
        self.tracker = tracker
        self.sweeping = torch.zeros_like(tracker.best.success)  # bool [B]: which images are in a sweep
        self.age = torch.zeros_like(tracker.forwards)  # [B]: queries of the round
        self.mark = torch.full_like(tracker.best.norm, torch.inf)  # [B]: the best norm when last looked at
        self.enough = torch.full_like(self.mark, SETTLED)  # [B]: the share of it at which a descent is over
        self.length = torch.full_like(tracker.forwards, sweep)  # [B]: of the next sweep
        self.wave = torch.ones_like(self.mark)  # [B]: from 1 to 0 over a sweep, along half a cosine

    @fusible
    def count(self) -> None:
        """One more query."""
        self.age = self.age + 1
        share = (self.age - 1) / (self.length - 1)
        self.wave = (1 + torch.cos(math.pi * share.clamp(max=1))) / 2

    def anneal(self, first: float, last: float) -> Tensor:
        """From the first value to the last along half a cosine over a sweep, `[B]`."""
        return (last + (first - last) * self.wave).to(self.mark.dtype)

    @fusible
    def over(self, leaping: Tensor) -> Tensor:
        """Whose round is over, bool `[B]`: sweeps by their length, descents when they have settled.

        A descent that is `leaping` (bool `[B]`) may be without a success for long: it goes on, and is looked at only
        when it no longer leaps.
        """
        look = torch.where(self.sweeping, self.age >= self.length, self.age % LOOK == 0) & self.tracker.best.success
        settled = (self.tracker.best.norm > self.enough * self.mark) & ~leaping
        over = look & (self.sweeping | settled)
        swept, fruitless = over & self.sweeping, self.tracker.best.norm > IMPROVEMENT * self.mark
        self.enough = torch.where(swept, torch.where(fruitless, EXHAUSTED, SETTLED), self.enough)
        self.length = torch.where(swept, 2 * self.length, self.length)
        self.mark = torch.where(look, self.tracker.best.norm, self.mark)
        self.mark.masked_fill_(leaping & ~self.sweeping, torch.inf)
        return over

    @fusible
    def restart(self, over: Tensor) -> None:
        """Begin the next round of these images."""
        self.sweeping = self.sweeping ^ over
        self.age.masked_fill_(over, 0)


class Ball:
    """The radius of each image's ball, `[B]`: smaller after a success, larger where pixels are missing for good.

    How it gets smaller depends on the steps. Where they are about as long as the ball is wide, a success is soon found
    again, and the radius follows the share of missing pixels. Where the gradient can be trusted over a small part of
    the ball only (`stiff`), adapting to any smaller ball takes some twenty steps, so each success is followed by a
    leap; leaps get shorter when one led too far and the ball had to grow again.
    """

    def __init__(self, tracker: Tracker, rate: float) -> None:
        problem, x = tracker.problem, tracker.problem.images
        self.tracker, self.rate = tracker, rate
        self.farthest = distance(torch.maximum(x, 1 - x), tracker.norm)  # no perturbation within the box is larger
        self.radius = self.farthest
        self.pace = torch.full_like(self.farthest, rate / 1.5)  # of descents, once there is a success
        self.leap = torch.full_like(self.farthest, LEAP)  # of log radius, after a success of a stiff image
        self.stiff = torch.zeros_like(tracker.best.success)  # as of the last success of a descent
        self.regrown = torch.zeros_like(self.stiff)  # whether the ball has grown since the last success
        self.missing = torch.ones_like(tracker.best.apsr)  # the share of pixels, a recent mean
        self.since = torch.ones_like(tracker.forwards)  # queries since the last success, or since the round began
        counted = problem.counted.clamp(min=1)
        self.allowed = ((1 - problem.threshold) * counted).clamp(min=1) / counted

    @property
    def leaping(self) -> Tensor:
        """Which images change their ball by leaps, bool `[B]`."""
        return self.stiff & (self.leap > LEAST_LEAP)

    def start(self, guess: Tensor) -> None:
        """The first radius, `[B]`."""
        self.radius = torch.minimum(guess, self.farthest)

    @fusible
    def restart(self, over: Tensor, swept: Tensor) -> None:
        """Begin another round where one is over: a descent after a sweep, a sweep after a descent."""
        share = torch.where(swept, INSIDE, LEEWAY)
        radius = torch.minimum(share.to(self.radius.dtype) * self.tracker.best.norm, self.farthest)
        self.radius = torch.where(over & self.tracker.best.success, radius, self.radius)
        self.pace.masked_fill_(over, GENTLE)
        self.leap.masked_fill_(over, LEAP / 2)
        self.regrown = self.regrown & ~over
        self.missing.masked_fill_(over, 1.0)
        self.since.masked_fill_(over, 1)

    @fusible
    def fit(self, query: Query, rounds: Rounds, length: Tensor, kept: Tensor) -> Tensor:
        """Change the radius by what the query says.

        Args:
            query: at the last point.
            rounds: what each image is at.
            length: of trusted steps, `[B]`.
            kept: whether the last step kept its promise, bool `[B]`.

        Returns:
            By what factor steps should get longer, `[B]`, 1 where they should not.
        """
        missing, success, known = 1 - query.apsr, query.success, self.tracker.best.success
        begun = rounds.age > 1  # the point that a round begins at says nothing about its ball
        self.stiff = torch.where(success & ~rounds.sweeping, length < STIFF * self.radius, self.stiff)
        stiff = self.stiff & ~rounds.sweeping
        self.leap = torch.where(success & stiff & self.regrown, self.leap / 2, self.leap)
        excess = (missing / self.allowed).log()  # negative when few enough are missing
        past = (1 - 2 / (self.since + 1)).clamp(0, RECENT)  # its weight in the mean: short at first, when all is new
        hopeful = self._hopeful(missing, excess, past) | stiff & (self.since <= GRACE)
        # A ball that cannot be crossed with such steps is large enough: then the steps are what is too short, unless
        # even these do not keep their promise. Such steps must get shorter still, or both would grow without end.
        short = begun & ~(success | hopeful | rounds.sweeping) & (length < SHORT * self.radius)
        change = self._change(missing, excess, success, rounds, stiff)
        change = torch.where(begun & (success | ~hopeful) & ~short, change, 0.0)
        reached = torch.where(rounds.sweeping, query.norm, self.tracker.best.norm)
        held = torch.where(success & begun, torch.minimum(self.radius, reached), self.radius)
        radius = torch.minimum(held * change.exp().to(held.dtype), self.farthest)
        radius = torch.where(known & begun, torch.minimum(radius, LEEWAY * self.tracker.best.norm), radius)
        grown = torch.where(rounds.sweeping, 1.0, (radius / self.radius).clamp(min=1))
        self.radius = radius
        self.regrown = known & ~success & (self.regrown | (grown > 1))
        pace = self.pace * torch.where(success, FASTER, torch.where(known, SLOWER, 1.0)).to(self.pace.dtype)
        self.pace = torch.where(begun & ~stiff, pace.clamp(*PACES), self.pace)
        self.missing = torch.where(success, missing, torch.lerp(missing, self.missing, past.to(missing.dtype)))
        self.since = (self.since + 1).masked_fill_(success, 1)
        along = torch.where(known, 0.5, (1 + missing.square()) / 2).to(grown.dtype)  # at first steps grow with the ball
        return torch.where(short, torch.where(kept, LONGER, 1.0).to(grown.dtype), grown**along)

    def _hopeful(self, missing: Tensor, excess: Tensor, past: Tensor) -> Tensor:
        """Where enough pixels will have given way soon, if it goes on as it did lately, bool `[B]`."""
        lately = (self.missing / missing.clamp(min=torch.finfo(missing.dtype).tiny)).log()  # over 1 / (1 - past) steps
        return PATIENCE * lately * (1 - past) > excess.clamp(min=0)

    def _change(self, missing: Tensor, excess: Tensor, success: Tensor, rounds: Rounds, stiff: Tensor) -> Tensor:
        """The change of log radius, `[B]`: by how clear a success is, or a leap; else by how much is missing."""
        known = self.tracker.best.success
        growth = torch.where(known, torch.where(stiff, self.leap.clamp(max=self.rate), self.pace), self.rate)
        descent = torch.where(success, self.pace, growth)
        rate = torch.where(rounds.sweeping, rounds.anneal(self.rate, LAST_RATE), descent)
        fastest = FASTEST_GROWTH + torch.where(known, 0.0, HASTE * missing**4)
        clear, lacking = excess.clamp(FASTEST_SHRINK, SLOWEST_SHRINK), excess.clamp(min=0).minimum(fastest)
        return torch.where(success & stiff, -self.leap, rate * torch.where(success, clear, lacking))


class Trust:
    """The length of a descent's steps, `[B]`: what the last step did is compared with what its gradient predicted."""

    def __init__(self, tracker: Tracker, least: float) -> None:
        self.problem, self.least = tracker.problem, least
        self.length = torch.zeros_like(tracker.best.norm)
        self.predicted = torch.zeros_like(tracker.best.norm)  # change of the penalty; 0 before the first step
        self.kept = torch.ones_like(tracker.best.success)  # whether the last step did enough of what was predicted
        self.penalty: Penalty | None = None

    def predict(self, penalty: Penalty, d: Tensor, gradient: Tensor, move: Tensor) -> None:
        """Note what a move `[B, C, H, W]` should do to the penalty, were it linear."""
        self.penalty, self.value = penalty, self._total(penalty, d)
        self.predicted = per_image(torch.sum, gradient * move)

    def _total(self, penalty: Penalty, d: Tensor) -> Tensor:
        """The penalty of each image, `[B]`, of which `Query.gradient` gives the gradient."""
        return per_image(torch.sum, self.problem.balanced(penalty.values(d)))

    def judge(self, d: Tensor, longest: Tensor, rounds: Rounds) -> None:
        """Longer steps after one that kept its promise, at most the `longest` `[B]`, shorter ones otherwise."""
        if self.penalty is not None:
            self._follow(self._total(self.penalty, d) - self.value, longest, rounds)

    @fusible
    def _follow(self, change: Tensor, longest: Tensor, rounds: Rounds) -> None:
        """Lengths by the `change` of the penalty over the last step, `[B]`."""
        down = (self.predicted < 0) & ~rounds.sweeping
        ratio = change / torch.where(down, self.predicted, -1.0)
        factor = (1 + ratio - TRUSTED).clamp_(*TRUST_CHANGE)
        length = torch.where(down, self.length * factor, self.length)
        self.kept = ~down | (ratio >= TRUSTED)
        self.length = length.clamp(min=self.least).minimum(longest)

    @fusible
    def restart(self, over: Tensor) -> None:
        """The next descent goes on with steps as they were in the last one, a little longer."""
        self.length = torch.where(over, AGAIN * self.length, self.length)
        self.predicted.masked_fill_(over, 0.0)
