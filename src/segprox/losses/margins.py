"""Losses of differences of logits.

As constraints (paper, equation 3) the values of `margin` and `dlr_plus` are positive while the attack has not reached
its goal at a pixel and negative once it has, targeted or not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from segprox.devices import together
from segprox.losses.base import Loss, choose
from segprox.losses.strips import in_strips

SMALLEST_RANGE = 1e-8  # the least value of DLR's normaliser, for pixels whose logits are all equal


@in_strips
def margin(logits: Tensor, labels: Tensor, *, targeted: bool | Tensor = False, tolerance: float = 0.0) -> Loss:
    """Difference of logits: `z_y - max_{j != y} z_j` untargeted, its negative targeted; plus `tolerance`.

    Args:
        logits: z, `[B, K, H, W]` with K >= 2.
        labels: y or t, `[B, H, W]`, valid classes everywhere.
        targeted: whether `labels` are wanted rather than true; for each pixel if bool `[B, H, W]`.
        tolerance: epsilon; added last, so it tightens the constraint `values <= 0` in both modes.
    """
    sign = 1.0 - 2.0 * targeted
    own, other = _own_and_other(logits, labels)
    values = (own - other).mul_(sign)

    def pullback(weights: Tensor) -> Tensor:
        known = (sign * weights).masked_fill_(values.isnan(), 0)  # NaN logits push nowhere
        return _gradient(logits, labels, known, own, [(other, -known)])

    return Loss(values + tolerance, pullback)


@in_strips
def soft_margin(logits: Tensor, labels: Tensor, *, softness: Tensor) -> Loss:
    """The untargeted margin with a soft maximum: `z_y - s log sum_{j != y} exp(z_j / s)`.

    Its gradient pushes towards every other class, by their softmax at temperature s; `margin` pushes towards the
    largest alone and commits a pixel to the class that is the nearest at the moment.

    Args:
        logits: z, `[B, K, H, W]` with K >= 2.
        labels: y, `[B, H, W]`, valid classes everywhere.
        softness: s > 0 of each image, `[B, 1, 1]`.
    """
    own, other = _own_and_other(logits, labels)
    share = (logits - other.unsqueeze(1)).div_(softness.unsqueeze(1)).exp_().nan_to_num_(nan=0.0)
    share.scatter_(1, labels.unsqueeze(1), 0.0)
    total = share.sum(1).clamp_(min=1)  # the largest other class has 1 in it, unless there is a NaN

    def pullback(weights: Tensor) -> Tensor:
        known = torch.where(own.isnan() | other.isnan(), 0, weights)  # NaN logits push nowhere
        gradient = share * (known / total).neg_().unsqueeze(1)
        return gradient.scatter_add_(1, labels.unsqueeze(1), known.unsqueeze(1))

    return Loss((own - other).sub_(softness * total.log()), pullback)


@in_strips
def dlr_plus(logits: Tensor, labels: Tensor, *, targeted: bool | Tensor = False, tolerance: float = 0.0) -> Loss:
    """DLR+ (paper, section 3): the margin over the range of the leading logits; invariant to their scale.

    Untargeted `(z_y - max_{j != y} z_j) / (z_(1) - z_(3)) + tolerance`, with `z_(i)` the i-th largest logit; targeted,
    the negative margin over `z_(1) - (z_(3) + z_(4)) / 2`, plus the tolerance.

    With two or three classes some of these do not exist; they are taken to lie one unit below the smallest logit. With
    two classes DLR+ then is `m / (1 + |m|)` of the margin m.

    Arguments as for `margin`.
    """
    if isinstance(targeted, Tensor):
        wanted, unwanted = (dlr_plus(logits, labels, targeted=kind, tolerance=tolerance) for kind in (True, False))
        return choose(targeted, wanted, unwanted)
    sign = -1.0 if targeted else 1.0
    ranked = _largest(logits, 4 if targeted else 3)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    other = torch.where(own == ranked[0], ranked[1], ranked[0])
    lows = _low_ends(ranked, 2 if targeted else 1)
    width = ranked[0].clone()
    for low in lows:
        width.sub_(low.value - low.below, alpha=1 / len(lows))
    width.clamp_(min=SMALLEST_RANGE)
    ratio = (own - other).mul_(sign).div_(width)

    def pullback(weights: Tensor) -> Tensor:
        per_width = weights / width
        # d(ratio)/d(width) = -ratio / width, and the width grows with its high end and falls with its low ends
        through_width = per_width * ratio
        own_leads = torch.gt(own, other, out=torch.empty_like(own))  # the high end is the label's logit, or the other
        at_label = (sign * per_width).addcmul_(through_width, own_leads, value=-1)
        at_other = (through_width * own_leads).sub_(through_width).sub_(per_width, alpha=sign)
        through_low = through_width / len(lows)
        return _gradient(
            logits, labels, at_label, own, [(other, at_other), *((low.value, through_low) for low in lows)]
        )

    return Loss(ratio + tolerance, pullback)


def dlr(logits: Tensor, labels: Tensor, *, targeted: bool | Tensor = False) -> Loss:
    """The difference-of-logits-ratio loss, which attacks maximise: the negative of `dlr_plus` without tolerance."""
    values, pullback = dlr_plus(logits, labels, targeted=targeted)
    return Loss(values.neg_(), lambda weights: pullback(-weights))


class _LowEnd(NamedTuple):
    value: Tensor  # a logit of each pixel, [B, H, W]
    below: float  # how far below it the low end of the normaliser lies


def _low_ends(ranked: list[Tensor], count: int) -> list[_LowEnd]:
    """The third largest logit, or the third and fourth, with stand-ins where the model has too few classes."""
    real = [_LowEnd(value, 0.0) for value in ranked[2 : 2 + count]]
    return real + [_LowEnd(ranked[-1], 1.0)] * (count - len(real))


def _largest(logits: Tensor, count: int) -> list[Tensor]:
    """The `count` largest logits of each pixel (or all K if fewer), largest first, each `[B, H, W]`.

    On CPUs insertion by minima and maxima, one class plane after the other: vectorised, unlike topk over a strided
    axis. Elsewhere one maximum after the other, each over all classes: few operations, whatever K is.
    """
    if together(logits):
        return _maxima(logits, min(count, logits.shape[1]))
    planes = logits.unbind(1)
    ranked = [planes[0].clone()]
    for plane in planes[1:]:
        for i, value in enumerate(ranked):
            lower = torch.minimum(value, plane) if i + 1 < count else plane
            torch.maximum(value, plane, out=value)
            plane = lower
        if len(ranked) < count:
            ranked.append(plane)
    return ranked


def _maxima(logits: Tensor, count: int) -> list[Tensor]:
    """The `count` largest logits of each pixel: the maximum is taken out as often as needed."""
    left, ranked = logits.clone() if count > 1 else logits, []
    for i in range(count):
        value, index = left.max(1, keepdim=True)
        ranked.append(value.squeeze(1))
        if i + 1 < count:
            left.scatter_(1, index, -torch.inf)
    return ranked


def _own_and_other(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logit of each pixel's label, and the largest of the other classes, `[B, H, W]` each."""
    index = labels.unsqueeze(1)
    own = logits.gather(1, index).squeeze(1)
    if together(logits):
        return own, logits.scatter(1, index, -torch.inf).amax(1)
    first, second = _largest(logits, 2)
    return own, torch.where(own == first, second, first)


def _gradient(
    logits: Tensor, labels: Tensor, at_label: Tensor, own: Tensor, terms: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """A gradient of a few entries per pixel: on CPUs one class plane after the other, which stays within the caches.

    It is `at_label` at the label, plus, for each (value, weight) of `terms`, the weight wherever a logit equals the
    value. The first of these values is another class's, so its weight leaves out the label.
    """
    (other, at_other), *rest = terms
    if together(logits):
        gradient = (logits == other.unsqueeze(1)) * at_other.unsqueeze(1)
        for value, weight in rest:
            gradient.addcmul_((logits == value.unsqueeze(1)).to(weight.dtype), weight.unsqueeze(1))
    else:
        gradient, equal = torch.empty_like(logits), torch.empty_like(own)
        for plane, result in zip(logits.unbind(1), gradient.unbind(1)):
            torch.mul(torch.eq(plane, other, out=equal), at_other, out=result)
            for value, weight in rest:
                result.addcmul_(torch.eq(plane, value, out=equal), weight)
    at_label = at_label.addcmul((own == other).to(at_label.dtype), at_other, value=-1)
    return gradient.scatter_add_(1, labels.unsqueeze(1), at_label.unsqueeze(1))
