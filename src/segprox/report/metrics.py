"""Metrics of a whole dataset, from counts of pixels `[images, classes]` (see `segprox.counts`).

Classes that do not occur: a mean over classes must say what such a class is worth. `absent="skip"`, the default, leaves
it out; `"zero"` and `"one"` give it that value. For an IoU a class is absent if it is neither there nor predicted; for
an accuracy, if it is not there.

Counts that are pooled over images lack a class only if no image has it; a mean over images meets absent classes in
nearly every image, so there the choice matters more. A mean of nothing is NaN.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from segprox.counts import Absent, Counts, Ratios, Whole

Measure = Callable[[Whole, Whole, Whole], float]  # of counts `[images, classes]`
ENOUGH = 1e-6  # a round that gains less is the last


def pixel_accuracy(tp: Whole, fp: Whole, fn: Whole) -> float:
    """The share of all counted pixels that are right; counts `[images, classes]`, of which `fp` says nothing new."""
    return float(_pooled(tp, fp, fn).pixel_accuracy())


def mean_class_accuracy(tp: Whole, fp: Whole, fn: Whole, absent: Absent = "skip") -> float:
    """Mean over classes of `tp / (tp + fn)`, pooled over images: counts `[images, classes]`."""
    return float(_mean(_pooled(tp, fp, fn).class_accuracy(absent)))


def mean_iou(tp: Whole, fp: Whole, fn: Whole, absent: Absent = "skip") -> float:
    """Mean over classes of `tp / (tp + fp + fn)`, pooled over images: counts `[images, classes]`.

    Example:
        >>> import numpy as np
        >>> tp, fp, fn = np.array([[[8, 0], [1, 0]], [[0, 0], [1, 0]], [[0, 0], [0, 2]]])
        >>> mean_iou(tp, fp, fn)  # 9/10 and 0/2
        0.45
        >>> mean_image_iou(tp, fp, fn)  # the first image is perfect; the second has 1/2 and 0/2
        0.625
        >>> mean_image_iou(tp, fp, fn, absent="zero")  # the first has no second class
        0.375
    """
    return float(_mean(_pooled(tp, fp, fn).iou(absent)))


def mean_image_iou(tp: Whole, fp: Whole, fn: Whole, absent: Absent = "skip") -> float:
    """Mean over images of each image's own mean IoU: counts `[images, classes]`.

    Images without a counted pixel are left out whatever `absent` says: nothing is known of them.
    """
    counts = Counts(tp, fp, fn)
    return float(_mean(_mean(counts.iou(absent))[(tp + fn).sum(-1) > 0]))


def _pooled(tp: Whole, fp: Whole, fn: Whole) -> Counts:
    return Counts(tp.sum(0), fp.sum(0), fn.sum(0))


def _mean(values: Ratios) -> Ratios:
    """Along the last axis, of what is not NaN; NaN if nothing is (numpy's nanmean would warn)."""
    known = ~np.isnan(values)
    how_many = known.sum(-1)
    empty = np.full(how_many.shape, np.nan)
    means: Ratios = np.divide(np.nansum(values, -1), how_many, out=empty, where=how_many > 0)
    return means


def worst_case_miou(tp: Whole, fp: Whole, fn: Whole) -> tuple[float, NDArray[np.intp]]:
    """The lowest pooled mean IoU that choosing one of several attacks for each image can give, found greedily.

    Starts from the single worst attack and goes through the images, giving each the attack that lowers the mean IoU
    most, until a round gains nothing (Croce, Singh, Hein, 2024).

    Args:
        tp: counts of true positives, `[attacks, images, classes]`.
        fp: of false positives.
        fn: of false negatives.

    Returns:
        The mean IoU, and the attack chosen for each image.

    Example:
        >>> import numpy as np
        >>> tp, fp = np.array([[[9], [1]], [[2], [8]]]), np.zeros((2, 2, 1), dtype=int)  # each attack spares one image
        >>> miou, chosen = worst_case_miou(tp, fp, 10 - tp)
        >>> round(miou, 2), chosen.tolist()
        (0.15, [1, 0])
    """
    attacks, images = tp.shape[:2]
    everything = np.arange(images)
    chosen = np.full(images, np.argmin([mean_iou(tp[a], fp[a], fn[a]) for a in range(attacks)]))
    counts = np.stack([tp, fp, fn])  # [3, attacks, images, classes]
    pooled = counts[:, chosen, everything].sum(1)  # [3, classes]
    best = mean_iou(*pooled[:, None])
    while True:
        before = best
        for i in everything:
            others = pooled - counts[:, chosen[i], i]
            values = [mean_iou(*(others + counts[:, a, i])[:, None]) for a in range(attacks)]
            if min(values) < best:
                chosen[i] = int(np.argmin(values))
                best, pooled = min(values), others + counts[:, chosen[i], i]
        if before - best < ENOUGH:
            return best, chosen
