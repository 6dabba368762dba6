"""Proximity operators of norms alone."""

import torch
from torch import Tensor

from segprox.devices import together
from segprox.norms import NormName, distance, scale
from segprox.prox.exact import exact_size
from segprox.shrinkage import threshold


def prox_norm(point: Tensor, step: Tensor, norm: NormName) -> Tensor:
    """The p of least `1/2 ||p - point||^2 + step * ||p||`, for each image: `[B, ...]` and `[B]` to `[B, ...]`.

    For `l1` every element shrinks by the step, for `l2` the image as a whole, for `linf` its largest elements.
    """
    if norm == "l1":
        bound = step.view(-1, *[1] * (point.ndim - 1))
        return point - torch.clamp(point, -bound, bound)
    if norm == "l2":
        length = distance(point, "l2").clamp(min=torch.finfo(point.dtype).tiny)
        return scale(point, (1 - step / length).clamp(min=0))
    if norm == "linf" and together(point):
        size = point.abs().flatten(1)
        beta = threshold(size, size, None, step).view(-1, *[1] * (point.ndim - 1))
        return torch.clamp(point, -beta, beta)
    if norm == "linf":
        return torch.stack([shrink_largest(*pair) for pair in zip(point, step)]) if len(step) else point.clone()
    raise ValueError(f"the proximity operator of {norm} is not a shrinkage")


def shrink_largest(point: Tensor, step: Tensor) -> Tensor:
    """The proximity operator of `step * ||.||_inf` for one image."""
    if together(point):
        return prox_norm(point[None], step[None], "linf")[0]
    size = point.abs().flatten()
    beta = exact_size(size, size, None, step.item(), torch.empty_like(size))
    return torch.clamp(point, -beta, beta)
