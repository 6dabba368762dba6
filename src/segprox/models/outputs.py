"""What networks return, as logits at the size of the image."""

from typing import Any

from torch import Tensor

from segprox.errors import SegproxError
from segprox.models.windows import Size, resized, size_of

SUM_TOLERANCE = 1e-3  # how far from 1 the sum of a softmax may be, in half precision


def unwrapped(outputs: Any) -> Tensor:
    """The logits `[B, K, h, w]` in what a network returned: a tensor, or something that holds one."""
    if isinstance(outputs, dict):
        outputs = outputs.get("out", outputs.get("logits"))
    elif isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    elif hasattr(outputs, "logits"):
        outputs = outputs.logits
    if not isinstance(outputs, Tensor) or outputs.ndim != 4:
        found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise SegproxError(
            "the model must return logits [batch, classes, height, width], as a tensor, first of a tuple, "
            f"'out' or 'logits' of a dict, or .logits of an object, but returned {found}"
        )
    return outputs


def fitted(logits: Tensor, fed: Size, size: Size) -> Tensor:
    """Logits at that `size`, from those for the size `fed` to the network."""
    (height, width), found = fed, size_of(logits)
    # A coarser grid must still be the same picture: the sides may differ by the rounding of a stride, no more.
    if found[0] > height or found[1] > width or abs(found[0] * width - found[1] * height) > max(fed):
        raise SegproxError(
            f"the model's output is {found[0]}x{found[1]} for a {height}x{width} image: not a smaller version of it"
        )
    return resized(logits, size)


def within_unit_interval(values: Tensor) -> bool:
    """Whether all values are in [0, 1], up to rounding."""
    low, high = values.aminmax()
    return bool((low >= 0) & (high <= 1 + SUM_TOLERANCE))


def looks_like_probabilities(values: Tensor) -> bool:
    """Whether values `[B, K, H, W]` are in [0, 1] and sum to 1 at every pixel."""
    return within_unit_interval(values) and bool(((values.sum(1) - 1).abs() <= SUM_TOLERANCE).all())
