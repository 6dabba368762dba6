"""Metrics of a whole dataset."""

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
ENOUGH = 1e-6  # a round that gains less is the last


def mean_iou(tp: Counts, fp: Counts, fn: Counts) -> float:
    """Mean over classes of `tp / (tp + fp + fn)`, pooled over images: counts `[images, classes]`.

    Classes that are neither there nor predicted do not count.
    """
    hits, union = tp.sum(0), (tp + fp + fn).sum(0)
    return float((hits[union > 0] / union[union > 0]).mean()) if (union > 0).any() else float("nan")


def worst_case_miou(tp: Counts, fp: Counts, fn: Counts) -> tuple[float, NDArray[np.intp]]:
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
