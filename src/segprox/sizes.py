"""The one definition of the median size of perturbations, and of how well it and a share are known."""

from functools import cache
from math import inf, nan, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FEWEST = 6  # images for which there is an interval of the median
NORMAL = 1.959964  # the 97.5 % point of the normal distribution


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def unbroken_size(norm: str) -> float:
    """What an image that was not broken counts as: in linf the whole range, as in the paper."""
    return 1.0 if norm == "linf" else inf


def median_sizes(sizes: ArrayLike, axis: int = 0) -> NDArray[np.float64]:
    """The smallest size that breaks at least half of the images, along an axis; NaN without images.

    Images that are not broken have a size that is larger than all others. Of an even number of images it is the smaller
    one of the two in the middle: their mean would mix a size that was found with one that stands for "not broken".

    Example:
        >>> median_sizes([[0.1, 0.2], [1.0, 0.4]]).tolist()
        [0.1, 0.2]
    """
    values = np.asarray(sizes, dtype=np.float64)
    count = values.shape[axis]
    if not count:
        return np.full(np.delete(values.shape, axis), np.nan)
    found: NDArray[np.float64] = np.take(np.sort(values, axis=axis), (count - 1) // 2, axis=axis)
    return found


def median_size(sizes: ArrayLike) -> float:
    """The same of one list of sizes.

    Example:
        >>> median_size([0.3, 0.1, 1.0, 1.0]), median_size([0.1, 1.0, 1.0])
        (0.3, 1.0)
    """
    return float(median_sizes(sizes))


def median_interval(sizes: ArrayLike) -> Interval:
    """The 95 % confidence interval of the median, by order statistics; NaN for fewer than `FEWEST` images.

    An image that is drawn at random lies below the median of all images in one case of two. So the k-th smallest and
    the k-th largest of n sizes enclose that median unless n tosses of a coin show fewer than k heads, or fewer than k
    tails; k is the largest number for which this happens in at most one case of twenty. Nothing is assumed about how
    sizes are distributed.

    Example:
        >>> median_interval([6, 3, 1, 2, 5, 4]), median_interval([1, 2, 3, 4, 5])
        (Interval(low=1.0, high=6.0), Interval(low=nan, high=nan))
    """
    values = np.sort(np.asarray(sizes, dtype=np.float64))
    k = _outside(len(values))
    return Interval(float(values[k - 1]), float(values[-k])) if k else Interval(nan, nan)


@cache
def _outside(count: int) -> int:
    """The largest k for which fewer than k heads in that many tosses have a chance of at most 2.5 %."""
    k, ways, tail = 0, 1, 1  # ways: to toss k heads; tail: to toss k heads or fewer
    while 40 * tail <= 2**count:
        ways = ways * (count - k) // (k + 1)
        k, tail = k + 1, tail + ways
    return k


def is_narrow(sizes: ArrayLike, share: float) -> bool:
    """Whether both ends of the median's interval are within this share of the median.

    Example:
        >>> is_narrow([9, 10, 10, 10, 10, 11], 0.1), is_narrow([8, 10, 10, 10, 10, 11], 0.1)
        (True, False)
    """
    (low, high), median = median_interval(sizes), median_size(sizes)
    return (1 - share) * median <= low and high <= (1 + share) * median


def wilson(successes: int, count: int) -> Interval:
    """Wilson's 95 % interval of a share.

    Example:
        >>> [round(value, 3) for value in wilson(9, 10)]
        [0.596, 0.982]
    """
    if not count:
        return Interval(nan, nan)
    share, spread = successes / count, NORMAL**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = NORMAL * sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return Interval(middle - half if successes else 0.0, middle + half if successes < count else 1.0)
