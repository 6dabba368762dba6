"""Makes a model lean, and checks that its gradient stays what it was."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from segprox.models.lean.blocks import checkpoint_blocks, release_blocks
from segprox.models.lean.heap import return_what_is_freed
from segprox.models.lean.meter import held_bytes
from segprox.models.lean.operations import OPERATIONS, LeanOperations
from segprox.models.segmenter import Segmenter

TOLERANCE = 1e-9  # of a gradient in double precision
REPEATED_TOLERANCE = 1e-4  # of one that is computed again, by the same operations, in the precision of the model
SINGLE_TOLERANCE = 0.05  # where rounding moves some values across the kink of a ReLU


class Leanness(NamedTuple):
    """What came of making a model lean."""

    plain: tuple[str, ...]  # operations that are left as they are, because their gradients disagreed
    blocks: int  # that are computed again
    error: float  # of the gradient on a random image, relative to its largest entry


def make_lean(
    model: Segmenter, *, again: bool = False, size: tuple[int, int] = (64, 96), at_least: int = 0
) -> Leanness:
    """Let a model hold only what the gradient of its images needs, from now on.

    Its gradient on a random image is compared with the plain one, in double precision. Operations that make it differ
    are left plain, so that the result is exact in any case; all of them, if the network cannot take such an image.

    Args:
        model: the model, which is changed.
        again: let repeated blocks, where that pays, keep their inputs only and compute the rest again: slower, and
            smaller for transformers, whose operations have more to remember than a sign.
        size: height and width of the random image.
        at_least: leave a model alone that holds fewer bytes than this for a pixel.
    """
    generator = torch.Generator().manual_seed(0)
    channels = max(3, model.mean.numel()) if model.mean.numel() > 1 else 3
    images = torch.rand(1, channels, *size, generator=generator).to(model.device)
    lower, model.autocast, model.operations = model.autocast, None, nullcontext()
    try:
        if held_bytes(model, images) < at_least * size[0] * size[1]:
            return Leanness(tuple(OPERATIONS), 0, 0.0)
        plain, error = _checked(model, images)
    except Exception:  # a network that cannot take such an image, whatever it may raise: nothing can be checked
        return Leanness(tuple(OPERATIONS), 0, math.nan)
    finally:
        model.autocast = lower
    model.operations = LeanOperations(plain)
    if model.device.type == "cpu":
        return_what_is_freed()
    return Leanness(plain, _computed_again(model, images) if again else 0, error)


def _computed_again(model: Segmenter, images: Tensor) -> int:
    """How many blocks are computed again: none if that changes the gradient, as where one changes what it is fed."""
    expected = _gradient(model, images, nullcontext())
    blocks = checkpoint_blocks(model, images)
    try:
        error = (_gradient(model, images, nullcontext()) - expected).abs().max() / expected.abs().max()
    except RuntimeError:  # torch sees it too
        error = torch.tensor(torch.nan)
    if error <= REPEATED_TOLERANCE:
        return len(blocks)
    release_blocks(model, blocks)
    return 0


def _checked(model: Segmenter, images: Tensor) -> tuple[tuple[str, ...], float]:
    try:
        with _in_double(model):
            return _left_plain(model, images.double(), TOLERANCE)
    except (RuntimeError, TypeError):  # a network that insists on single precision
        return _left_plain(model, images, SINGLE_TOLERANCE)


def _left_plain(model: Segmenter, images: Tensor, tolerance: float) -> tuple[tuple[str, ...], float]:
    """The fewest operations, found one at a time, without which the gradient is right; and its error then."""
    plain: tuple[str, ...] = ()
    error = _error(model, images, LeanOperations(plain))
    while error > tolerance and len(plain) < len(OPERATIONS):
        rest = [name for name in OPERATIONS if name not in plain]
        errors = {name: _error(model, images, LeanOperations((*plain, name))) for name in rest}
        best = min(rest, key=errors.__getitem__)
        plain, error = (*plain, best), errors[best]
    return plain, error


def _error(model: Segmenter, images: Tensor, operations: LeanOperations) -> float:
    """The largest error of the gradient of a random combination of logits; infinite if there is none."""
    expected = _gradient(model, images, nullcontext())
    try:
        found = _gradient(model, images, operations)
    except (RuntimeError, TypeError, AttributeError, ValueError):  # whatever an operation may break
        return torch.inf
    difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
    return torch.nan_to_num(difference, nan=torch.inf).item()


def _gradient(model: Segmenter, images: Tensor, operations: AbstractContextManager[Any]) -> Tensor:
    images = images.detach().requires_grad_()
    with operations:
        logits = model.logits(images)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (gradient,) = torch.autograd.grad(logits, images, weights.to(logits.device))
    return gradient


@contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """The model in double precision, and afterwards exactly as it was: doubles hold every float."""
    kinds = {name: value.dtype for name, value in [*model.named_parameters(), *model.named_buffers()]}
    model.double()
    try:
        yield
    finally:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data = value.data.to(kinds[name])
