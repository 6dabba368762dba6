"""Algorithm 1 of the paper: ternary search for the size of the proximity operator's result."""

import math

import torch
from torch import Tensor


def ternary_size(
    size: Tensor,
    reach: Tensor,
    weight: Tensor | None,
    step: float,
    scratch: tuple[Tensor, Tensor],
    precision: float,
) -> float:
    """The size beta of one image's result, to an absolute precision.

    Args:
        size: |clipped point|, `[n]`.
        reach: |point|, `[n]`; the signs do not matter, because p, the clipped point and the point agree in them.
        weight: the diagonal of the metric, `[n]`, or ones.
        step: lambda.
        scratch: two tensors like `size` to write to.
        precision: Delta beta.
    """
    low, high = 0.0, size.max().item() if len(size) else 0.0  # lines 2 and 3
    steps = math.ceil(math.log(precision / max(high, precision)) / math.log(2 / 3))  # line 4
    for _ in range(steps):  # lines 5 to 18
        third = (high - low) / 3
        # rounded as the elements are, so that both sides of the comparison see the same numbers
        left, right = size.new_tensor([low + third, high - third]).tolist()
        if _gain(size, reach, weight, left, right, scratch) >= step * (right - left):
            low = left
        else:
            high = right
    return (low + high) / 2  # line 19


def _gain(
    size: Tensor, reach: Tensor, weight: Tensor | None, left: float, right: float, scratch: tuple[Tensor, Tensor]
) -> float:
    """How much smaller `1/2 ||p - point||^2` is at beta = right than at beta = left.

    Lines 8 to 12 evaluate both objectives and compare them. Close to the minimum their difference drowns in rounding,
    so it is summed here by elements: 1/2 (a - r)^2 - 1/2 (b - r)^2 = (b - a)(r - (a + b) / 2), which is exactly 0 for
    an element that neither size clips.
    """
    at_left = torch.clamp(size, max=left, out=scratch[0])
    gain = torch.clamp(size, max=right, out=scratch[1]).sub_(at_left)
    at_left.add_(gain, alpha=0.5).neg_().add_(reach).mul_(gain)
    if weight is not None:
        at_left.mul_(weight)
    return at_left.sum().item()
