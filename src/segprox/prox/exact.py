"""The size of the proximity operator's result, exact to rounding, in a few passes over the image.

With a_i = |clipped point_i|, r_i = |point_i| >= a_i and the metric s_i, the derivative of the objective in beta is

    lambda - F(beta),    F(beta) = sum over {a_i > beta} of s_i (r_i - beta).

F falls with beta: linearly, with a kink at each a_i, and with a jump down there if the box clips that element
(r_i > a_i). The answer is the smallest beta with F(beta) <= lambda.

Passes over all elements run on the tensors' device and end with one synchronisation each; what is small, a sample and
the elements near the answer, is sorted on the host, where an operation on a thousand numbers takes microseconds.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SORTED = 2048  # so few elements are sorted outright
SAMPLE = 256, 16  # so many runs of so many neighbours make a sample: neighbours, because they share cache lines
NEWTON_STEPS = 10
MARGIN = 64  # how many elements of the sample lie between the guess and either end of the bracket around it
ROW = 4096  # elements added up in their own precision before float64 takes over

Array = NDArray[np.float64]


class _Sums(NamedTuple):
    """Sums over active elements, those larger than some beta."""

    weight: float = 0.0  # of s
    moment: float = 0.0  # of s r

    def exceed(self, step: float, beta: float) -> bool:
        """Whether F(beta) > lambda while exactly these elements are active."""
        return self.moment - beta * self.weight > step


class _Bracket(NamedTuple):
    """What is known of the answer: it lies in [low, high], and these elements above high are active."""

    low: float
    high: float
    outer: _Sums = _Sums()


class _Elements(NamedTuple):
    """Elements on the host, in float64."""

    size: Array  # a
    weight: Array  # s
    moment: Array  # s r

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.intp] | slice) -> "_Elements":
        return _Elements(self.size[chosen], self.weight[chosen], self.moment[chosen])

    def sums(self, chosen: NDArray[np.bool_], outer: _Sums) -> _Sums:
        # einsum, not dot: BLAS would wake threads for this, which then spin in the way of torch's
        weight, moment = (float(np.einsum("i,i->", chosen, values)) for values in (self.weight, self.moment))
        return _Sums(outer.weight + weight, outer.moment + moment)


def exact_size(
    size: Tensor, reach: Tensor, weight: Tensor | None, step: float, largest: float, scratch: Tensor
) -> float:
    """The size beta of one image's result.

    A sample brackets the answer between two elements. One pass adds up what is above the bracket, one gathers the few
    percent of the elements within it, and the answer is found among those.

    Args:
        size: a = |clipped point|, `[n]`.
        reach: r = |point|, `[n]`.
        weight: s, the diagonal of the metric, `[n]`, or ones.
        step: lambda.
        largest: the largest size.
        scratch: a tensor like `size` to write to.
    """
    bracket = _Bracket(0.0, largest)
    if len(size) > SORTED:
        bottom, top = _guess(_sample(size, reach, weight), len(size), step, bracket)
        if bottom == 0 and not _sums(size, reach, weight, 0.0, scratch).exceed(step, 0.0):
            return 0.0
        outer = _Sums() if top == bracket.high else _sums(size, reach, weight, top, scratch)
        near = _between(size, bottom, top, scratch)
        elements = _to_host(size[near], reach[near], None if weight is None else weight[near])
        not_below = bottom == bracket.low or elements.sums(elements.size > bottom, outer).exceed(step, bottom)
        if not_below and not outer.exceed(step, top):  # nearly always: else the sample misled
            return _solve(elements, step, _Bracket(bottom, top, outer))
    return _solve(_to_host(size, reach, weight), step, bracket)


def _solve(elements: _Elements, step: float, bracket: _Bracket) -> float:
    """The answer among elements on the host."""
    newton = _by_newton(elements, step, bracket)
    return _by_bracketing(elements, step, bracket) if newton is None else newton


def _by_newton(elements: _Elements, step: float, bracket: _Bracket) -> float | None:
    """The answer, if Newton's method finds it in a linear piece of F, as it does where no box is in the way."""
    low, high, before = bracket.low, bracket.high, None
    beta = low
    for _ in range(NEWTON_STEPS):
        sums = elements.sums(elements.size > beta, bracket.outer)
        if sums == before:  # the same elements are active: beta is the root of its own piece
            return beta
        if sums.exceed(step, beta):
            low = beta
        else:
            high = beta
        if sums.weight == 0:
            return None
        beta, before = (sums.moment - step) / sums.weight, sums
        if not low <= beta <= high:  # F jumps in between
            return None
    return None


def _by_bracketing(elements: _Elements, step: float, bracket: _Bracket) -> float:
    """The answer, from ever fewer elements around it, the last of which are sorted."""
    count = len(elements.size) + 1
    while SORTED < len(elements.size) < count:
        count = len(elements.size)
        stride = count // (SAMPLE[0] * SAMPLE[1]) + 1
        bottom, top = _guess(elements.where(slice(None, None, stride)), count, step, bracket)
        above = elements.sums(elements.size > top, bracket.outer)
        from_bottom = elements.sums(elements.size > bottom, bracket.outer)
        if above.exceed(step, top):
            elements, bracket = elements.where(elements.size > top), bracket._replace(low=top)
        elif from_bottom.exceed(step, bottom):
            inside = (elements.size > bottom) & (elements.size <= top)
            elements, bracket = elements.where(inside), _Bracket(bottom, top, above)
        else:
            elements, bracket = elements.where(elements.size <= bottom), _Bracket(bracket.low, bottom, from_bottom)
    return _by_sorting(elements, step, bracket)


def _by_sorting(elements: _Elements, step: float, bracket: _Bracket) -> float:
    """The answer from the elements in order, piece of F by piece."""
    ordered = elements.where(np.argsort(-elements.size))
    weight = bracket.outer.weight + np.append(0.0, ordered.weight.cumsum())  # with the j largest active, j = 0 .. n
    moment = bracket.outer.moment + np.append(0.0, ordered.moment.cumsum())
    lower, upper = np.append(ordered.size, bracket.low), np.append(bracket.high, ordered.size)  # while beta is within
    holds_root = moment - lower * weight > step
    j = int(holds_root.argmax())
    if not holds_root[j]:
        return bracket.low
    return float(min((moment[j] - step) / weight[j], upper[j]))  # the root, or the jump at the end of the piece


def _guess(sample: _Elements, count: int, step: float, bracket: _Bracket) -> tuple[float, float]:
    """A bracket (bottom, top) that most likely holds the answer among `count` elements, from a sample of them."""
    size, weight, moment = sample.where(np.argsort(-sample.size))
    stride, outer = count / len(size), bracket.outer
    larger_weight = outer.weight + stride * (weight.cumsum() - weight)
    larger_moment = outer.moment + stride * (moment.cumsum() - moment)
    above = int(np.count_nonzero(larger_moment - size * larger_weight <= step))  # so many are above the answer
    bottom = float(size[above + MARGIN]) if above + MARGIN < len(size) else bracket.low
    top = float(size[above - MARGIN]) if above >= MARGIN else bracket.high
    return bottom, top


def _sample(size: Tensor, reach: Tensor, weight: Tensor | None) -> _Elements:
    runs, length = SAMPLE

    def choose(values: Tensor) -> Tensor:
        return values[: len(values) // runs * runs].view(runs, -1)[:, :length].reshape(-1)

    return _to_host(choose(size), choose(reach), None if weight is None else choose(weight))


def _to_host(size: Tensor, reach: Tensor, weight: Tensor | None) -> _Elements:
    sizes, moments = (values.cpu().numpy().astype(np.float64) for values in (size, reach))
    if weight is None:
        return _Elements(sizes, np.ones_like(sizes), moments)
    weights = weight.cpu().numpy().astype(np.float64)
    return _Elements(sizes, weights, np.multiply(moments, weights, out=moments))


def _between(size: Tensor, bottom: float, top: float, scratch: Tensor) -> Tensor:
    """The indices of the elements in (bottom, top]."""
    if size.device.type != "cpu":
        return ((size > bottom) & (size <= top)).nonzero().squeeze(1)
    # numpy compares and searches several times as fast, if it need not ask for memory
    sizes, flags = size.numpy(), scratch.view(torch.uint8).numpy().view(np.bool_)
    above, within = flags[: len(sizes)], flags[len(sizes) : 2 * len(sizes)]
    np.logical_and(np.greater(sizes, bottom, out=above), np.less_equal(sizes, top, out=within), out=above)
    return torch.from_numpy(np.flatnonzero(above))


def _sums(size: Tensor, reach: Tensor, weight: Tensor | None, beta: float, scratch: Tensor) -> _Sums:
    """The sums over the elements larger than beta, in one pass that allocates nothing."""
    active = torch.gt(size, beta, out=scratch)  # as 0.0 and 1.0: far faster than comparing into bools
    weight_sum = _sum(active if weight is None else active.mul_(weight))
    return _Sums(weight_sum, _sum(active.mul_(reach)))


def _sum(values: Tensor) -> float:
    """The sum, row by row: the errors of short rows are tiny and average out when float64 adds them up."""
    even = len(values) // ROW * ROW
    return (values[:even].view(-1, ROW).sum(1).sum(dtype=torch.float64) + values[even:].sum()).item()
