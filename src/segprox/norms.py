"""Norms of perturbations, one number per image, and the balls they make."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from segprox.devices import together
from segprox.shrinkage import threshold

NormName = Literal["l0", "l1", "l2", "linf"]


def per_image(reduce: Callable[..., Tensor], batch: Tensor) -> Tensor:
    """Apply a full reduction to each image of `batch` `[B, ...]` on its own; returns `[B]`.

    `reduce` is called with an image, or with a flat batch and `dim=1`.

    On CPUs a reduction over a whole batch may add in another order than over a single image, because torch splits the
    work by shape and threads. Reducing image by image keeps results independent of the batch, bit for bit. Elsewhere
    the model's own rounding depends on the batch anyway, and one operation for all images is far quicker.
    """
    if not len(batch):
        return batch.new_zeros(0)
    if together(batch):
        return reduce(batch.flatten(1), dim=1)
    return torch.stack([reduce(image) for image in batch])


def elementwise_(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """An elementwise function of `batch` `[B, ...]`, which is overwritten on CPUs, one image at a time.

    Some kernels (sigmoid, softplus) round differently by where in the tensor an element lies, at sizes that do not
    divide evenly, so that an image's values would depend on its place in the batch.
    """
    if together(batch):
        return function(batch)
    for image in batch:
        image.copy_(function(image))
    return batch


def distance(difference: Tensor, norm: NormName) -> Tensor:
    """The norm of each image's perturbation: `[B, C, H, W]` to `[B]`.

    `l0` counts pixels (not channels) that changed.
    """
    flat = difference.flatten(1)
    if norm == "linf" and together(flat):
        return torch.linalg.vector_norm(flat, torch.inf, dim=1) if flat.shape[1] else flat.new_zeros(len(flat))
    if norm == "linf":  # a maximum does not depend on the order: no need to go image by image
        return flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    if norm == "l0":
        return (difference != 0).any(1).flatten(1).sum(1).to(difference.dtype)
    order = {"l1": 1, "l2": 2}[norm]
    return per_image(partial(torch.linalg.vector_norm, ord=order), flat)


def dual(norm: NormName) -> NormName:
    """The norm that bounds how much a linear function changes within a ball of `norm`."""
    duals: dict[NormName, NormName] = {"l0": "linf", "l1": "linf", "l2": "l2", "linf": "l1"}
    return duals[norm]


def scale(batch: Tensor, factor: Tensor) -> Tensor:
    """Each image of `batch` `[B, ...]` times its own factor `[B]`."""
    return batch * factor.view(-1, *[1] * (batch.ndim - 1))


def unit(batch: Tensor, norm: NormName = "l2") -> Tensor:
    """Each image of `batch` `[B, ...]` divided by its norm; 0 stays 0."""
    tiny = torch.finfo(batch.dtype).tiny
    moderate = scale(batch, 1 / distance(batch, "linf").clamp(min=tiny))  # so that squares neither vanish nor overflow
    return moderate if norm == "linf" else scale(moderate, 1 / distance(moderate, norm).clamp(min=tiny))


def steepest(gradient: Tensor, norm: NormName) -> Tensor:
    """The direction of norm 1 in which a linear function of this gradient grows fastest, for `l2` and `linf`."""
    return gradient.sign() if norm == "linf" else unit(gradient)


def project(difference: Tensor, radius: Tensor, norm: NormName) -> Tensor:
    """The nearest perturbation within a ball: `[B, C, H, W]` and a radius per image `[B]` to `[B, C, H, W]`."""
    if norm == "linf":
        bound = radius.view(-1, 1, 1, 1)
        return torch.clamp(difference, -bound, bound)
    if norm == "l2":
        length = distance(difference, "l2").clamp(min=torch.finfo(difference.dtype).tiny)
        return scale(difference, (radius / length).clamp(max=1))
    if together(difference):
        return _nearest_on_device(difference, radius, norm)
    pairs = zip(difference, radius.tolist())
    nearest = _nearest_in_l0_ball if norm == "l0" else _nearest_in_l1_ball
    return torch.stack([nearest(image, size) for image, size in pairs]) if len(radius) else difference.clone()


def _nearest_on_device(difference: Tensor, radius: Tensor, norm: NormName) -> Tensor:
    """The nearest perturbation in an l0 or l1 ball, for all images at once and without waiting for the device."""
    if norm == "l0":
        change = difference.square().sum(1).flatten(1)
        rank = change.argsort(1, descending=True).argsort(1)
        kept = (rank < radius.floor().unsqueeze(1)).view(len(change), 1, *difference.shape[2:])
        return difference * kept
    size = difference.abs().flatten(1)
    shrinkage = threshold(size, size, None, radius).view(-1, 1, 1, 1)
    return difference - torch.clamp(difference, -shrinkage, shrinkage)


def _nearest_in_l0_ball(image: Tensor, radius: float) -> Tensor:
    """Keep the pixels that changed most."""
    change = image.square().sum(0)
    if radius >= change.numel():
        return image.clone()
    kept = torch.zeros_like(change).flatten()
    kept[change.flatten().topk(int(max(radius, 0))).indices] = 1
    return image * kept.view_as(change)


def _nearest_in_l1_ball(image: Tensor, radius: float) -> Tensor:
    """Shrink every element by the same amount (Duchi et al., 2008)."""
    size = image.abs()
    if float(size.sum(dtype=torch.float64)) <= radius:
        return image.clone()
    ordered = size.flatten().double().sort(descending=True).values
    excess = (ordered.cumsum(0) - radius) / torch.arange(1, len(ordered) + 1, device=image.device)
    kept = max(int((ordered > excess).sum()), 1)  # of the largest; one at least, whatever rounding says
    shrinkage = excess[kept - 1].clamp(min=0).to(image.dtype)
    return image.sign() * (size - shrinkage).clamp_(min=0)


def random_within(images: Tensor, radius: Tensor, norm: NormName, sources: Sequence[torch.Generator]) -> Tensor:
    """Perturbations drawn uniformly from balls of `l2` or `linf`, each from its image's own source of randomness."""

    def draw(source: torch.Generator) -> Tensor:
        shape, dtype = images.shape[1:], images.dtype  # drawn on the host: the same numbers on every device
        if norm == "linf":
            return 2 * torch.rand(shape, generator=source, dtype=dtype) - 1
        direction = torch.randn(shape, generator=source, dtype=dtype)
        length = torch.rand((), generator=source, dtype=dtype) ** (1 / direction.numel())
        scaled: Tensor = direction * (length / torch.linalg.vector_norm(direction))
        return scaled

    drawn = torch.stack([draw(source) for source in sources]) if len(sources) else torch.zeros(images.shape)
    return scale(drawn.to(images), radius)
