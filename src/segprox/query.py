"""The model's answer at a point, and its gradient."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segprox.errors import SegproxError
from segprox.norms import distance

if TYPE_CHECKING:
    from segprox.tracker import Tracker


@dataclass(eq=False)
class Query:
    """The model's answer at one point. `gradient` may be asked for once; it frees the graph."""

    logits: Tensor  # [B, K, H, W], detached; 0 for images that were not asked about
    satisfied: Tensor  # [B, H, W]: the pixels that are as the attack wants them
    norm: Tensor  # [B]
    apsr: Tensor  # [B]; the best so far of images that were not asked about
    success: Tensor  # [B]
    _tracker: "Tracker" = field(repr=False)
    _images: Tensor = field(repr=False)
    _outputs: Tensor = field(repr=False)
    _asked: Tensor | None = field(repr=False)  # bool [B]; None: all

    def gradient(self, cotangent: Tensor) -> Tensor:
        """Pull a gradient with respect to the logits `[B, K, H, W]` back to the images `[B, C, H, W]`.

        Where the model yields NaN the gradient is 0, so that such an image cannot poison the state kept for it. Where
        some pixels are protected, these and the attacked ones weigh the same: see `Problem.balanced`.
        """
        if not self._images.requires_grad:
            raise SegproxError("this point was queried without differentiable=True, so it has no gradient")
        allowed = self._tracker.affordable(self._asked)  # None: all
        if not self._outputs.requires_grad:  # nobody could afford to ask
            return torch.zeros_like(self._images)
        self._tracker.count_backwards(allowed)
        cotangent = self._tracker.problem.balanced(cotangent)
        if self._tracker.model.autocast == torch.float16:  # small gradients would vanish on their way
            factor = _power_of_two_over(cotangent)
            (gradient,) = torch.autograd.grad(self._outputs, self._images, cotangent * factor)
            gradient = gradient / factor
        else:
            (gradient,) = torch.autograd.grad(self._outputs, self._images, cotangent)
        if allowed is not None and self._tracker.max_queries is not None:
            gradient *= allowed.view(-1, 1, 1, 1)
        if self._tracker.problem.fixed is not None:
            gradient = gradient.masked_fill_(self._tracker.problem.fixed.unsqueeze(1), 0.0)
        return gradient.nan_to_num_(0.0, 0.0, 0.0)


def _power_of_two_over(values: Tensor) -> Tensor:
    """The power of two by which each image's largest value comes near 1, `[B, 1, 1, 1]`; scaling by it rounds nothing.

    Float16 ends at 6e-8, and the weight of a pixel among millions is not far from that.
    """
    largest = distance(values.nan_to_num(0.0, 0.0, 0.0), "linf").clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(-largest.log2().floor()).clamp(max=2.0**100).view(-1, 1, 1, 1)
