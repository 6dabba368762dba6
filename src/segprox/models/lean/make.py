"""Makes a model lean, and checks that its gradient stays what it was."""

import math
from contextlib import nullcontext
from typing import NamedTuple

from torch import Tensor

from segprox.models.lean.blocks import checkpoint_blocks, release_blocks
from segprox.models.lean.heap import return_what_is_freed
from segprox.models.lean.meter import held_bytes
from segprox.models.lean.operations import OPERATIONS, LeanOperations
from segprox.models.lean.self_check import SMALL, TOLERANCE, gradient_on, in_double, random_image, relative_error
from segprox.models.segmenter import Segmenter
from segprox.seeding import seeded

REPEATED_TOLERANCE = 1e-4  # of one that is computed again, by the same operations, in the precision of the model
SINGLE_TOLERANCE = 0.05  # where rounding moves some values across the kink of a ReLU


class Leanness(NamedTuple):
    """What came of making a model lean."""

    plain: tuple[str, ...]  # operations that are left as they are, because their gradients disagreed
    blocks: int  # that are computed again
    error: float  # of the gradient on a random image, relative to its largest entry


def make_lean(
    model: Segmenter, *, recompute: bool = False, size: tuple[int, int] = SMALL, at_least: int = 0
) -> Leanness:
    """Let a model hold only what the gradient of its images needs, from now on.

    Its gradient on a random image is compared with the plain one, in double precision. Operations that make it differ
    are left plain, so that the result is exact in any case; all of them, if the network cannot take such an image.

    Args:
        model: the model, which is changed.
        recompute: let repeated blocks, where that pays, keep their inputs only and compute the rest again: slower, and
            smaller for transformers, whose operations have more to remember than a sign.
        size: height and width of the random image.
        at_least: leave a model alone that holds fewer bytes than this for a pixel.
    """
    images = random_image(model, size)
    lower, model.autocast, model.operations = model.autocast, None, nullcontext()
    try:
        with seeded(images.device, 0):
            held = held_bytes(model, images)
        if held < at_least * size[0] * size[1]:
            return Leanness(tuple(OPERATIONS), 0, 0.0)
        plain, error = _checked(model, images)
    except Exception:  # a network that cannot take such an image, whatever it may raise: nothing can be checked
        return Leanness(tuple(OPERATIONS), 0, math.nan)
    finally:
        model.autocast = lower
    model.operations = LeanOperations(plain)
    if model.device.type == "cpu":
        return_what_is_freed()
    return Leanness(plain, _recomputed(model, images) if recompute else 0, error)


def _recomputed(model: Segmenter, images: Tensor) -> int:
    """How many blocks are computed again: none if that changes the gradient, as where one changes what it is fed."""
    expected = gradient_on(model, images, nullcontext())
    blocks = checkpoint_blocks(model, images)
    try:
        error = relative_error(gradient_on(model, images, nullcontext()), expected)
    except RuntimeError:  # torch sees it too
        error = math.inf
    if error <= REPEATED_TOLERANCE:
        return len(blocks)
    release_blocks(model, blocks)
    return 0


def _checked(model: Segmenter, images: Tensor) -> tuple[tuple[str, ...], float]:
    try:
        with in_double(model):
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
    """The error of the gradient within these operations; infinite if there is none."""
    expected = gradient_on(model, images, nullcontext())
    try:
        return relative_error(gradient_on(model, images, operations), expected)
    except (RuntimeError, TypeError, AttributeError, ValueError):  # whatever an operation may break
        return math.inf
