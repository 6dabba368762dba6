"""Losses of large maps of logits, a strip of rows at a time."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from segprox.devices import free_bytes, together
from segprox.losses.base import Loss

LARGEST = 1 << 25  # bytes of logits that are looked at as a whole
STRIP = 1 << 21  # bytes of logits of a strip on CPUs, otherwise: as much as stays within the caches
COPIES = 4  # maps like the logits that a loss may hold at a time


def in_strips(loss: Callable[..., Loss]) -> Callable[..., Loss]:
    """Let a loss, whose pixels do not influence each other, look at a strip of rows at a time if there are many.

    Its intermediate maps are then as small as a strip. The pullback computes them again. On accelerators, where every
    strip costs launches, only what would not fit into the memory that is left is cut.
    """

    @wraps(loss)
    def stripped(logits: Tensor, labels: Tensor, **options: Any) -> Loss:
        strip = _strip_bytes(logits)
        if logits.nbytes <= strip:
            return loss(logits, labels, **options)
        values = torch.empty_like(logits[:, 0])
        for rows in _strips(logits, strip):
            values[:, rows] = loss(logits[:, :, rows], labels[:, rows], **_within(rows, labels, options)).values

        def pullback(weights: Tensor) -> Tensor:
            gradient = torch.empty_like(logits)
            for rows in _strips(logits, strip):
                part = loss(logits[:, :, rows], labels[:, rows], **_within(rows, labels, options))
                gradient[:, :, rows] = part.pullback(weights[:, rows])
            return gradient

        return Loss(values, pullback)

    return stripped


def _within(rows: slice, labels: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a strip: those that have a value per pixel are cut as well."""
    per_pixel = (name for name, value in options.items() if isinstance(value, Tensor) and value.shape == labels.shape)
    return options | {name: options[name][:, rows] for name in per_pixel}


def _strip_bytes(logits: Tensor) -> int:
    """The most bytes of logits that are looked at together."""
    if logits.nbytes <= LARGEST:
        return LARGEST
    return free_bytes(logits.device) // (2 * COPIES) if together(logits) else STRIP


def _strips(logits: Tensor, strip: int) -> Iterator[slice]:
    height = logits.shape[2]
    count = max(1, height * strip // logits.nbytes)
    return (slice(start, start + count) for start in range(0, height, count))
