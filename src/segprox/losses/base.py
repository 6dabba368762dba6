"""What a loss is."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Pullback = Callable[[Tensor], Tensor]


class Loss(NamedTuple):
    """Values per pixel `[B, H, W]`, and how to differentiate them.

    Given weights `w` `[B, H, W]`, the pullback returns the gradient of `sum(w * values)` with respect to the logits.

    Example:
        >>> import torch
        >>> from segprox.losses import margin
        >>> loss = margin(torch.tensor([[[[3.0]], [[1.0]]]]), torch.tensor([[[0]]]))
        >>> loss.values.item(), loss.pullback(torch.ones(1, 1, 1)).flatten().tolist()
        (2.0, [1.0, -1.0])
    """

    values: Tensor
    pullback: Pullback


def choose(which: Tensor, yes: Loss, no: Loss) -> Loss:
    """One loss at some of the pixels (bool `[B, H, W]`), another at the others."""

    def pullback(weights: Tensor) -> Tensor:
        return yes.pullback(torch.where(which, weights, 0)).add_(no.pullback(torch.where(which, 0, weights)))

    return Loss(torch.where(which, yes.values, no.values), pullback)
