"""Distances between images, one number per image."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

NormName = Literal["l0", "l1", "l2", "linf"]


def per_image(reduce: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Apply a full reduction to each image of `batch` `[B, ...]` on its own; returns `[B]`.

    A reduction over a whole batch may add in another order than over a single image, because torch splits the work
    by shape and threads. Reducing image by image keeps results independent of the batch, bit for bit.
    """
    return torch.stack([reduce(image) for image in batch]) if len(batch) else batch.new_zeros(0)


def distance(difference: Tensor, norm: NormName) -> Tensor:
    """The norm of each image's perturbation: `[B, C, H, W]` to `[B]`.

    `l0` counts pixels (not channels) that changed.
    """
    flat = difference.flatten(1)
    if norm == "linf":  # a maximum does not depend on the order: no need to go image by image
        return flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    if norm == "l0":
        return (difference != 0).any(1).flatten(1).sum(1).to(difference.dtype)
    order = {"l1": 1, "l2": 2}[norm]
    return per_image(lambda image: torch.linalg.vector_norm(image, order), flat)
