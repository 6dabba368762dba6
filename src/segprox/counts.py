"""Right and wrong pixels of each class: all that metrics need to know of a prediction."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segprox.errors import SegproxError

Whole = NDArray[np.int64]
Ratios = NDArray[np.float64]
Absent = Literal["skip", "zero", "one"]  # what a class that does not occur is worth; "skip" leaves it out


class Counts(NamedTuple):
    """Pixels per class, each `[..., K]`: of one image, or of many along the leading axes.

    Example:
        >>> import numpy as np
        >>> counts = Counts(tp=np.array([3, 1, 0]), fp=np.array([1, 0, 0]), fn=np.array([0, 1, 0]))
        >>> counts.iou().tolist(), counts.iou(absent="one").tolist()
        ([0.75, 0.5, nan], [0.75, 0.5, 1.0])
        >>> float(counts.pixel_accuracy())
        0.8
    """

    tp: Whole  # of the class and predicted as it
    fp: Whole  # predicted as the class but of another
    fn: Whole  # of the class but predicted as another, or as none (NaN)

    def iou(self, absent: Absent = "skip") -> Ratios:
        """`tp / (tp + fp + fn)`, `[..., K]`; absent is a class that is neither there nor predicted."""
        return _ratio(self.tp, self.tp + self.fp + self.fn, absent)

    def class_accuracy(self, absent: Absent = "skip") -> Ratios:
        """`tp / (tp + fn)`, `[..., K]`; absent is a class that is not there, predicted or not."""
        return _ratio(self.tp, self.tp + self.fn, absent)

    def pixel_accuracy(self) -> Ratios:
        """The share of counted pixels that are right, `[...]`; NaN if none counts."""
        return _ratio(self.tp.sum(-1), (self.tp + self.fn).sum(-1), "skip")


def class_counts(prediction: Tensor, label: Tensor, num_classes: int, ignore: Iterable[int] = (255,)) -> Counts:
    """Count the pixels of one image, each `[K]`.

    Args:
        prediction: a class per pixel, int `[H, W]`, or K where the logits were NaN (see `problem.predictions`). Such a
            pixel is wrong: a false negative of its label, and a false positive of nothing.
        label: true classes, int `[H, W]`.
        num_classes: K.
        ignore: label values of pixels that do not count.

    Example:
        >>> import torch
        >>> counts = class_counts(torch.tensor([[0, 1, 2, 1]]), torch.tensor([[0, 0, 1, 255]]), num_classes=2)
        >>> [values.tolist() for values in counts]
        [[1, 0], [0, 1], [1, 1]]
    """
    counted = ~torch.isin(label, torch.tensor(list(ignore), dtype=label.dtype, device=label.device))
    prediction, label = prediction[counted], label[counted]
    for name, values, highest in (("label", label, num_classes - 1), ("prediction", prediction, num_classes)):
        strange = values[(values < 0) | (values > highest)]
        if len(strange):
            raise SegproxError(
                f"{name} {int(strange[0])} is not one of the {num_classes} classes (0 to {num_classes - 1}); "
                "if it marks pixels that do not count, add it to ignore"
            )
    hits = _histogram(label[prediction == label], num_classes)
    return Counts(hits, _histogram(prediction, num_classes) - hits, _histogram(label, num_classes) - hits)


def _histogram(values: Tensor, num_classes: int) -> Whole:
    found: Whole = torch.bincount(values, minlength=num_classes)[:num_classes].cpu().numpy()
    return found


def _ratio(part: Whole, total: Whole, absent: Absent) -> Ratios:
    worth = {"skip": np.nan, "zero": 0.0, "one": 1.0}[absent]
    ratios: Ratios = np.divide(part, total, out=np.full(np.shape(total), worth), where=total > 0)
    return ratios
