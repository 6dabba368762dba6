"""The one definition of the median size of perturbations."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
