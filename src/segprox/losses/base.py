"""What a loss is."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Pullback = Callable[[Tensor], Tensor]


class Loss(NamedTuple):
    """Values per pixel `[B, H, W]`, and how to differentiate them.

    Given weights `w` `[B, H, W]`, the pullback returns the gradient of `sum(w * values)` with respect to the logits.
    """

    values: Tensor
    pullback: Pullback
