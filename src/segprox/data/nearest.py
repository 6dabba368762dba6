"""The nearest pixel of a set, for every pixel of an image, exactly."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


def fill_nearest(labels: Tensor, known: Tensor) -> Tensor:
    """Labels `[H, W]` in which every pixel that is not `known` (bool `[H, W]`) has the label of the nearest that is.

    Distances are Euclidean. At least one pixel must be known.

    Example:
        >>> labels = torch.tensor([[1, 0, 0, 0, 2]])
        >>> fill_nearest(labels, labels > 0).tolist()
        [[1, 1, 1, 2, 2]]
    """
    mask = known.numpy()
    rows = np.flatnonzero(~mask.all(1))  # the others need nothing
    down, distance = _along_columns(mask)
    across = _along_rows(distance[rows])
    filled = labels.clone()
    filled[torch.from_numpy(rows)] = labels[torch.from_numpy(down[rows[:, None], across]), torch.from_numpy(across)]
    return filled


def _along_columns(mask: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """The row of the nearest known pixel of the same column, and how far it is; both `[H, W]`."""
    height, width = mask.shape
    far = height + width  # its square is beyond every distance within the image
    row = np.arange(height)[:, None]
    above = np.maximum.accumulate(np.where(mask, row, -far), axis=0)
    below = np.minimum.accumulate(np.where(mask, row, height + far)[::-1], axis=0)[::-1]
    nearest = np.where(row - above <= below - row, above, below)
    return nearest.clip(0, height - 1), np.abs(nearest - row).clip(max=far)


def _along_rows(distance: Ints) -> Ints:
    """The column of the nearest known pixel, `[R, W]`, from the distances within columns.

    The squared distance of pixel x to the nearest known pixel of column s is the parabola (x - s)^2 + distance[s]^2:
    the answer is the lower envelope of a row's parabolas. It is built from left to right, as in Meijster, Roerdink and
    Hesselink (2000), in whole numbers, for all rows at once: a stack per row of the columns on the envelope, and of the
    pixel from which each of them is the lowest.
    """
    count, width = distance.shape
    height = distance**2
    row = np.arange(count)
    column, start = np.zeros((count, width), dtype=np.int64), np.zeros((count, width), dtype=np.int64)
    top = np.zeros(count, dtype=np.int64)
    for x in range(1, width):
        hidden = row  # rows whose top parabola may be hidden by the new one
        while len(hidden):
            old, begin = column[hidden, top[hidden]], start[hidden, top[hidden]]
            beaten = (begin - old) ** 2 + height[hidden, old] > (begin - x) ** 2 + height[hidden, x]
            hidden = hidden[beaten]
            top[hidden] -= 1
            hidden = hidden[top[hidden] >= 0]
        empty = top < 0
        old = column[row, top]  # of no meaning where empty
        crossing = (x * x - old * old + height[:, x] - height[row, old]) // (2 * np.maximum(x - old, 1)) + 1
        pushed = empty | (crossing < width)
        top[pushed] += 1
        column[row[pushed], top[pushed]] = x
        start[row[pushed], top[pushed]] = np.where(empty, 0, crossing)[pushed]
    nearest = np.empty_like(column)
    for x in range(width - 1, -1, -1):
        nearest[:, x] = column[row, top]
        top -= start[row, top] == x
    return nearest
