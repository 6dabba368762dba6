"""Models that are used by sliding windows, or by several scales and flips, with one piece of an image in memory.

Autograd would hold every window until the backward. Here each is computed again when its gradient is asked for, which
is as exact and takes another forward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from segprox.errors import SegproxError

Size = tuple[int, int]  # height and width
Place = tuple[slice, slice]  # rows and columns of a window
Augmentation = float | Literal["flip"]
MOST_SCALE = 16.0


def checked_windows(window: Size | None, stride: int | Size | None, multiple: int) -> tuple[Size | None, Size | None]:
    """Height and width of windows and of the steps between them, by default the window's, if they make sense."""
    if window is None:
        if stride is not None:
            raise SegproxError(f"stride={stride} needs a window, such as window=(1024, 1024)")
        return None, None
    stride = window if stride is None else (stride, stride) if isinstance(stride, int) else stride
    if not all(1 <= step <= side for step, side in zip(stride, window)):
        raise SegproxError(
            f"stride must be between 1 and the window's {_written(window)}, or pixels would be left out, but is "
            f"{_written(stride)}"
        )
    if any(side % multiple for side in window):
        raise SegproxError(f"window must have sides that are multiples of {multiple} but is {_written(window)}")
    return window, stride


def _written(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def places(size: Size, window: Size | None, stride: Size | None) -> list[Place]:
    """The windows on an image, row by row; the last ones end where the image does, and none is larger than it.

    Example:
        >>> places((10, 6), (6, 8), (5, 8))
        [(slice(0, 6, None), slice(0, 6, None)), (slice(4, 10, None), slice(0, 6, None))]
    """
    if window is None or stride is None:
        return [(slice(0, size[0]), slice(0, size[1]))]
    rows, columns = (list(_intervals(*along)) for along in zip(size, window, stride))
    return list(product(rows, columns))


def _intervals(length: int, window: int, stride: int) -> Iterator[slice]:
    room = max(length - window, 0)
    for i in range(-(-room // stride) + 1):
        start = min(i * stride, room)
        yield slice(start, min(start + window, length))


def size_of(images: Tensor) -> Size:
    """Height and width of images or logits `[B, C, H, W]`."""
    return images.shape[2], images.shape[3]


def resized(values: Tensor, size: Size) -> Tensor:
    """Images or logits `[B, C, H, W]` at another size, bilinearly."""
    if size_of(values) == size:
        return values
    return functional.interpolate(values, size=size, mode="bilinear", align_corners=False)


class View(NamedTuple):
    """An image at another scale, or mirrored."""

    scale: float = 1.0
    flip: bool = False

    def size(self, size: Size) -> Size:
        """The size of an image in this view."""
        height, width = (max(int(side * self.scale + 0.5), 1) for side in size)
        return height, width

    def see(self, images: Tensor) -> Tensor:
        """Images `[B, C, H, W]` in this view."""
        images = resized(images, self.size(size_of(images)))
        return images.flip(3) if self.flip else images

    def back(self, logits: Tensor, size: Size) -> Tensor:
        """Logits of this view as those of an image of that size."""
        return resized(logits.flip(3) if self.flip else logits, size)


def views_of(tta: Sequence[Augmentation]) -> tuple[View, ...]:
    """Every scale, as it is and, if `flip` is among them, mirrored.

    Example:
        >>> views_of([0.5, "flip"])
        (View(scale=0.5, flip=False), View(scale=0.5, flip=True))
    """
    scales = [entry for entry in tta if entry != "flip"]
    if len(set(tta)) < len(tta) or not all(
        isinstance(scale, (int, float)) and 0 < scale <= MOST_SCALE for scale in scales
    ):
        raise SegproxError(
            f"tta must be scales between 0 and {MOST_SCALE:.0f}, and 'flip', each of them once, but is {list(tta)}"
        )
    flips = (False, True) if "flip" in tta else (False,)
    return tuple(View(float(scale), flip) for scale in scales or [1.0] for flip in flips) if tta else ()


class _RandomState:
    """The random numbers that come next, to be drawn again: a network may have some of its own."""

    def __init__(self, device: torch.device) -> None:
        self.devices = [device] if device.type == "cuda" else []
        self.host = torch.get_rng_state()
        self.others = [torch.cuda.get_rng_state(device) for device in self.devices]

    @contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.host)
            for device, state in zip(self.devices, self.others):
                torch.cuda.set_rng_state(state, device)
            yield


def _pull_back(result: Tensor, images: Tensor, weights: Tensor) -> Tensor:
    """The gradient of a weighted result; zero for a network that has none, which `check` tells."""
    if not result.requires_grad:
        return torch.zeros_like(images)
    (gradient,) = torch.autograd.grad(result, images, weights, allow_unused=True, materialize_grads=True)
    return gradient


def average_of_windows(images: Tensor, network: Callable[[Tensor], Tensor], places: list[Place]) -> Tensor:
    """The mean at each pixel of the logits of all windows on it, as MMSegmentation's `slide` mode takes it.

    Logits are `[B, K, H, W]` for images `[B, C, H, W]`; the network returns those of a window at its size.
    """
    averaged: Tensor = _AverageOfWindows.apply(images, network, places)  # type: ignore[no-untyped-call]
    return averaged


class _AverageOfWindows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, network: Callable[[Tensor], Tensor], places: list[Place]) -> Tensor:
        ctx.network, ctx.places, ctx.random = network, places, _RandomState(images.device)
        ctx.save_for_backward(images)
        total: Tensor | None = None
        for rows, columns in places:
            logits = network(images[:, :, rows, columns])
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *images.shape[2:])
            total[:, :, rows, columns] += logits
        assert total is not None  # there is at least one window
        return total.div_(_windows_on(total, places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        (images,) = ctx.saved_tensors
        weights = weights / _windows_on(weights, ctx.places)
        gradient = torch.zeros_like(images)
        with ctx.random.again():
            for rows, columns in ctx.places:
                piece = images[:, :, rows, columns].detach().requires_grad_()
                with torch.enable_grad():
                    logits = ctx.network(piece)
                gradient[:, :, rows, columns] += _pull_back(logits, piece, weights[:, :, rows, columns])
        return gradient, None, None


def _windows_on(logits: Tensor, places: list[Place]) -> Tensor:
    """How many windows lie on each pixel, `[H, W]`, counted on the device."""
    count = logits.new_zeros(logits.shape[2:])
    for place in places:
        count[place] += 1
    return count


def average_of_views(images: Tensor, looks: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """The logarithm of the mean of the views' softmax probabilities, which MMSegmentation predicts by.

    Logits are `[B, K, H, W]` for images `[B, C, H, W]`; each look returns those of a view, at the images' size.
    """
    averaged: Tensor = _AverageOfViews.apply(images, looks)  # type: ignore[no-untyped-call]
    return averaged


class _AverageOfViews(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, looks: list[Callable[[Tensor], Tensor]]) -> Tensor:
        ctx.looks, ctx.random = looks, _RandomState(images.device)
        result = looks[0](images).log_softmax(1)
        for look in looks[1:]:
            result = torch.logaddexp(result, look(images).log_softmax(1))
        result -= math.log(len(looks))
        ctx.save_for_backward(images, result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None]:
        images, result = ctx.saved_tensors
        gradient = torch.zeros_like(images)
        with ctx.random.again():
            for look in ctx.looks:
                seen = images.detach().requires_grad_()
                with torch.enable_grad():
                    own = look(seen).log_softmax(1)
                share = (own.detach() - result).exp_() / len(ctx.looks)  # of this view in the mean
                gradient += _pull_back(own, seen, weights * share)
        return gradient, None
