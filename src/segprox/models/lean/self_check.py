"""Gradients on a random image, by which changes of a model are checked."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from segprox.models.segmenter import Segmenter
from segprox.seeding import seeded

TOLERANCE = 1e-9  # of a gradient in double precision
SMALL = (64, 96)  # height and width that most networks take


def input_channels(model: Segmenter) -> int:
    """How many bands a model takes: as its normalisation or range says, else 3, or what its first convolution takes."""
    said = max(model.mean.numel(), len(model.range or ()))
    taken = [module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    return said if said > 1 else 3 if 3 in taken or not taken else taken[0]


def random_image(model: Segmenter, size: tuple[int, int] = SMALL) -> Tensor:
    """An image `[1, C, H, W]` that the model takes, as far as that can be seen, the same every time."""
    return torch.rand(1, input_channels(model), *size, generator=torch.Generator().manual_seed(0)).to(model.device)


def gradient_on(model: Segmenter, images: Tensor, operations: AbstractContextManager[Any]) -> Tensor:
    """The gradient `[B, C, H, W]` of a random combination of logits, computed within `operations`."""
    images = images.detach().requires_grad_()
    with operations, seeded(images.device, 0):  # a random model is to answer the same every time
        logits = model.in_one_piece(images)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (gradient,) = torch.autograd.grad(logits, images, weights.to(logits.device))
    return gradient


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest entry; infinite where there is NaN."""
    difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
    return torch.nan_to_num(difference, nan=torch.inf).item()


@contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """The model in double precision, and afterwards exactly as it was: doubles hold every float."""
    kinds = {name: value.dtype for name, value in [*model.named_parameters(), *model.named_buffers()]}
    usual = next((kind for kind in kinds.values() if kind.is_floating_point), torch.float32)
    model.double()
    try:
        yield
    finally:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data = value.data.to(kinds.get(name, usual))
