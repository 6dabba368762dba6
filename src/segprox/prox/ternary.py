"""Algorithm 1 of the paper: the proximity operator by ternary search over the size of the result."""

import math

import torch
from torch import Tensor

from segprox.norms import per_image


def prox_linf_box(
    point: Tensor,
    step: Tensor,
    lower: Tensor,
    upper: Tensor,
    metric: Tensor | None = None,
    *,
    precision: float = 1e-5,
) -> Tensor:
    """The p in [lower, upper] of least `1/2 ||p - point||^2_metric + step * ||p||_inf`, for each image on its own.

    For a given size beta the best p is the point clipped to the box and to [-beta, beta], so only beta has to be found.
    The objective is convex in beta and its minimum lies in [0, ||clipped point||_inf] (Proposition 1).

    Args:
        point: delta, `[B, ...]`.
        step: lambda, `[B]`.
        lower: lower end of the box Lambda, shaped like `point`, at most 0.
        upper: upper end of the box Lambda, shaped like `point`, at least 0.
        metric: the diagonal s of the metric, positive, shaped like `point`; ones if left out.
        precision: the absolute precision of beta.

    Returns:
        The result, shaped like `point`.

    Example:
        >>> import torch, segprox
        >>> point = torch.tensor([[3.0, -1.0, 0.5]])
        >>> box = torch.full_like(point, 4.0)
        >>> segprox.prox_linf_box(point, torch.tensor([1.0]), -box, box).round(decimals=4)
        tensor([[ 2.0000, -1.0000,  0.5000]])
    """
    clipped = torch.maximum(torch.minimum(point, upper), lower)  # line 1
    size, reach = clipped.abs().flatten(1), point.abs().flatten(1)
    high = size.amax(1) if size.shape[1] else size.new_zeros(len(size))  # line 3
    low = torch.zeros_like(high)  # line 2
    steps = torch.log(precision / high.clamp(min=precision)).div_(math.log(2 / 3)).ceil_()  # line 4
    weights = None if metric is None else metric.flatten(1)
    for t in range(int(steps.max()) if steps.numel() else 0):  # lines 5 to 18
        third = (high - low) / 3
        left, right = low + third, high - third
        rising = _difference(size, reach, weights, left, right) < step * (right - left)
        searching = t < steps  # an image with a smaller range needs fewer steps
        low = torch.where(searching & ~rising, left, low)
        high = torch.where(searching & rising, right, high)
    beta = ((low + high) / 2).view(-1, *[1] * (point.ndim - 1))  # line 19
    return torch.maximum(torch.minimum(clipped, beta), -beta)  # line 20


def _difference(size: Tensor, reach: Tensor, weights: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """How much smaller `1/2 ||p - point||^2` is at beta = right than at beta = left, `[B]`.

    Lines 8 to 12 of the algorithm evaluate both objectives and compare them. Close to the minimum their difference
    drowns in rounding, so it is summed by elements: 1/2 (a - r)^2 - 1/2 (b - r)^2 = (b - a)(r - (a + b) / 2), which
    is exactly 0 for an element that neither size clips. Signs are dropped: p, the clipped point and the point agree in
    them.
    """
    at_left = torch.minimum(size, left.unsqueeze(1))
    gain = torch.minimum(size, right.unsqueeze(1)).sub_(at_left)
    at_left.add_(gain, alpha=0.5).neg_().add_(reach).mul_(gain)
    if weights is not None:
        at_left.mul_(weights)
    return per_image(torch.sum, at_left)
