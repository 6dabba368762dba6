"""The size of the proximity operator's result, exact to rounding, in a few passes over the image.

With a_i = |clipped point_i|, r_i = |point_i| >= a_i and the metric s_i, the derivative of the objective in beta is

    lambda - F(beta),    F(beta) = sum over {a_i > beta} of s_i (r_i - beta).

F falls with beta: linearly, with a kink at each a_i, and with a jump down there if the box clips that element
(r_i > a_i). The answer is the smallest beta with F(beta) <= lambda.

Passes over all elements run on the tensors' device and end with one synchronisation each; what is small, a sample and
the elements near the answer, is solved on the host, where an operation on a thousand numbers takes microseconds.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE = 128, 16  # so many runs of so many neighbours make a sample: neighbours, because they share cache lines
SORTED = 2048  # so few elements are sorted outright; the sample is one of them
FEW = 32  # so few elements of the sample say little about where the answer is among them
GOOD_GUESS = 0.05  # how far, relative to it, the answer may seem from a guess that is worth following
NEWTON_STEPS = 12
ROW = 4096  # elements added up in their own precision before float64 takes over

Array = NDArray[np.float64]


class _Sums(NamedTuple):
    """Sums over active elements, those larger than some beta."""

    weight: float = 0.0  # of s
    moment: float = 0.0  # of s r

    def exceed(self, step: float, beta: float) -> bool:
        """Whether F(beta) > lambda while exactly these elements are active."""
        return self.moment - beta * self.weight > step

    def root(self, step: float) -> float:
        """The beta with F(beta) = lambda, were exactly these elements active at it."""
        return (self.moment - step) / self.weight if self.weight else 0.0

    def plus(self, other: "_Sums") -> "_Sums":
        return _Sums(self.weight + other.weight, self.moment + other.moment)

    def without(self, other: "_Sums") -> "_Sums":
        return _Sums(self.weight - other.weight, self.moment - other.moment)


class _Bracket(NamedTuple):
    """What is known of the answer: it lies in [low, high], and these are the sums over the elements above high."""

    low: float = 0.0
    high: float = math.inf
    outer: _Sums = _Sums()


class _Elements(NamedTuple):
    """Elements on the host, in float64."""

    size: Array  # a
    moment: Array  # s r
    weight: Array | None  # s, or ones

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.intp] | slice) -> "_Elements":
        return _Elements(self.size[chosen], self.moment[chosen], None if self.weight is None else self.weight[chosen])

    def weights(self) -> Array:
        return np.ones_like(self.size) if self.weight is None else self.weight

    def above(self, beta: float) -> _Sums:
        """The sums over the elements larger than beta."""
        active = self.size > beta
        # einsum, not dot: BLAS would wake threads for this, which then spin in the way of torch's
        weight = np.count_nonzero(active) if self.weight is None else np.einsum("i,i->", active, self.weight)
        return _Sums(float(weight), float(np.einsum("i,i->", active, self.moment)))


class _Image(NamedTuple):
    """All elements, on their device."""

    size: Tensor
    reach: Tensor
    weight: Tensor | None
    scratch: Tensor

    def all(self) -> _Elements:
        return _to_host(self.size, self.reach, self.weight)

    def sample(self) -> _Elements:
        runs, length = SAMPLE

        def choose(values: Tensor) -> Tensor:
            return values[: len(values) // runs * runs].view(runs, -1)[:, :length].flatten()

        return _to_host(choose(self.size), choose(self.reach), None if self.weight is None else choose(self.weight))

    def rounded(self, beta: float) -> float:
        """The beta that elements can be compared with on host and device alike."""
        return self.size.new_tensor(beta).item()

    def above(self, beta: float) -> _Sums:
        """The sums over the elements larger than beta, in one pass that allocates nothing."""
        active = torch.gt(self.size, beta, out=self.scratch)  # as 0.0 and 1.0: far faster than comparing into bools
        weight_sum = _sum(active if self.weight is None else active.mul_(self.weight))
        return _Sums(weight_sum, _sum(active.mul_(self.reach)))

    def between(self, low: float, high: float) -> _Elements:
        """The elements in (low, high]."""
        if self.size.device.type == "cpu":
            # numpy compares and searches several times as fast, if it need not ask for memory
            sizes, flags = self.size.numpy(), self.scratch.view(torch.uint8).numpy().view(np.bool_)
            near, within = flags[: len(sizes)], flags[len(sizes) : 2 * len(sizes)]
            np.greater(sizes, low, out=near)
            if high < math.inf:
                np.logical_and(near, np.less_equal(sizes, high, out=within), out=near)
            chosen = torch.from_numpy(np.flatnonzero(near))
        else:
            chosen = ((self.size > low) & (self.size <= high)).nonzero().squeeze(1)
        return _to_host(self.size[chosen], self.reach[chosen], None if self.weight is None else self.weight[chosen])


def _to_host(size: Tensor, reach: Tensor, weight: Tensor | None) -> _Elements:
    sizes, moments = (values.cpu().numpy().astype(np.float64) for values in (size, reach))
    if weight is None:
        return _Elements(sizes, moments, None)
    weights = weight.cpu().numpy().astype(np.float64)
    return _Elements(sizes, np.multiply(moments, weights, out=moments), weights)


def _sum(values: Tensor) -> float:
    """The sum, row by row: the errors of short rows are tiny and average out when float64 adds them up."""
    even = len(values) // ROW * ROW
    return (values[:even].view(-1, ROW).sum(1).sum(dtype=torch.float64) + values[even:].sum()).item()


def exact_size(
    size: Tensor, reach: Tensor, weight: Tensor | None, step: float, scratch: Tensor, guess: float | None = None
) -> float:
    """The size beta of one image's result.

    A sample gives a guess. One pass adds up what is above the guess, which tells on which side of it and about how far
    away the answer is; one more gathers the elements in between, about one percent, and the answer is found there.

    Args:
        size: a = |clipped point|, `[n]`.
        reach: r = |point|, `[n]`.
        weight: s, the diagonal of the metric, `[n]`, or ones.
        step: lambda.
        scratch: a tensor like `size` to write to.
        guess: where the answer is expected, if known; if that proves right, no sample is taken.
    """
    image = _Image(size, reach, weight, scratch)
    if len(size) <= SORTED:
        return _solve(image.all(), step, _Bracket())
    if guess:
        guess = image.rounded(guess)
        sums = image.above(guess)
        if abs(sums.root(step) - guess) < GOOD_GUESS * guess:
            return _near(guess, sums, _Bracket(), image, step)
    sample = image.sample()
    guess = _solve(sample, step * len(sample.size) / len(size), _Bracket())
    if not guess and weight is None and _sum(reach) <= step:  # at least F(0): nothing is worth its price
        return 0.0
    likely = _around(guess, sample)
    if likely.high < math.inf:
        guess = image.rounded(guess)
        return _near(guess, image.above(guess), likely, image, step)
    larger = image.between(likely.low, math.inf)  # so few elements are larger that they can all be gathered
    sums = larger.above(likely.low)
    if sums.exceed(step, likely.low):
        return _solve(larger, step, likely)
    return _near(likely.low, sums, _Bracket(), image, step)


def _near(guess: float, sums: _Sums, likely: _Bracket, image: _Image, step: float) -> float:
    """The answer, from a guess and the sums above it."""
    if sums.exceed(step, guess):
        high = min(image.rounded(2 * sums.root(step) - guess), likely.high)  # twice as far as it seems
        elements = image.between(guess, high)
        outer = sums.without(elements.above(guess))
        if 2 * outer.weight < sums.weight or 2 * outer.moment < sums.moment:
            outer = image.above(high)  # a difference of nearly equal numbers would be inaccurate
        if outer.exceed(step, high):  # rarely: the guess misled
            return _solve(image.between(high, math.inf), step, _Bracket(low=high))
        return _solve(elements, step, _Bracket(guess, high, outer))
    # Left of the guess F is at least what its piece there would be, continued: the answer is not below that root.
    lowest = max(image.rounded(sums.root(step)), 0.0)
    low = max(lowest, likely.low)
    beta = _solve(image.between(low, guess), step, _Bracket(low, guess, sums))
    if beta > low or low == lowest:
        return beta
    return _solve(image.between(lowest, guess), step, _Bracket(lowest, guess, sums))  # rarely: the guess misled


def _around(guess: float, sample: _Elements) -> _Bracket:
    """Two elements of the sample between which the answer most likely lies; 0 or infinity where there is none."""
    above = int(np.count_nonzero(sample.size > guess))
    below, margin = len(sample.size) - above, int(2 * math.sqrt(above)) + 4  # by how much such a count may be off
    ranks = [rank for rank in (below - margin, below + margin) if 0 <= rank < len(sample.size)]
    ordered = np.partition(sample.size, ranks)
    low = float(ordered[below - margin]) if below >= margin else 0.0
    high = float(ordered[below + margin]) if above > max(margin, FEW) else math.inf
    return _Bracket(low, high)


def _solve(elements: _Elements, step: float, bracket: _Bracket) -> float:
    """The answer among the elements within the bracket."""
    newton = _by_newton(elements, step, bracket)
    return _by_halving(elements, step, bracket) if newton is None else newton


def _by_newton(elements: _Elements, step: float, bracket: _Bracket) -> float | None:
    """The answer, if Newton's method finds it in a linear piece of F, as it does where no box is in the way."""
    low, high, before = bracket.low, bracket.high, None
    beta = low
    for _ in range(NEWTON_STEPS):
        sums = elements.above(beta).plus(bracket.outer)
        if sums == before:  # the same elements are active: beta is the root of its own piece
            return beta
        if sums.exceed(step, beta):
            low = beta
        elif before is None:
            return low
        else:
            high = beta
        beta, before = sums.root(step), sums
        if not low <= beta <= high:  # F jumps in between
            return None
    return None


def _by_halving(elements: _Elements, step: float, bracket: _Bracket) -> float:
    """The answer, from half as many elements around it every time, the last of which are sorted."""
    while len(elements.size) > SORTED:
        half = len(elements.size) // 2
        middle = float(np.partition(elements.size, half)[half])
        if elements.above(middle).plus(bracket.outer).exceed(step, middle):
            elements, bracket = elements.where(elements.size > middle), bracket._replace(low=middle)
            continue
        outer = elements.above(math.nextafter(middle, 0.0)).plus(bracket.outer)  # now with the middle itself
        if outer.exceed(step, middle):
            return middle  # F jumps over lambda here
        elements, bracket = elements.where(elements.size < middle), _Bracket(bracket.low, middle, outer)
    return _by_sorting(elements, step, bracket)


def _by_sorting(elements: _Elements, step: float, bracket: _Bracket) -> float:
    """The answer from the elements in order, piece of F by piece."""
    ordered = elements.where(np.argsort(-elements.size))
    weight = bracket.outer.weight + np.append(0.0, ordered.weights().cumsum())  # with the j largest active
    moment = bracket.outer.moment + np.append(0.0, ordered.moment.cumsum())
    lower, upper = np.append(ordered.size, bracket.low), np.append(bracket.high, ordered.size)  # while beta is within
    holds_root = moment - lower * weight > step
    j = int(holds_root.argmax())
    if not holds_root[j]:
        return bracket.low
    return float(min((moment[j] - step) / weight[j], upper[j]))  # the root, or the jump at the end of the piece
