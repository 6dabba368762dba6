"""Measurements of a model that need no attack: what `check` judges by."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segprox.devices import finest
from segprox.losses import margin
from segprox.models import Segmenter, copy_wrapper
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD
from segprox.problem import Problem, predictions
from segprox.seeding import seeded

# Of finite differences: beyond rounding, yet a fraction of a grey level.
STEPS = {torch.float64: 1e-6, torch.float32: 1e-4}
COARSE_STEP = 2e-3  # the same in half precision


@dataclass(frozen=True, eq=False)
class Glance:
    """What one forward and one backward of an image show; shares are of its pixels."""

    prediction: Tensor  # [H, W], K where a logit is NaN
    num_classes: int  # K
    lowest: float  # logit
    highest: float
    nonfinite: float  # share with a logit that is NaN or infinite
    saturated: float  # share whose largest softmax probability rounds to 1 in float32
    nonfinite_gradient: float  # share with a gradient that is NaN or infinite
    no_gradient: float  # share with a gradient of exactly zero in all channels


def glance(model: Segmenter, problem: Problem) -> Glance:
    """Look at the logits of one image and at the gradient of its summed margins."""
    images = problem.images.clone().requires_grad_()
    logits = model.logits(images)
    values, num_classes = logits.detach(), logits.shape[1]
    predicted = predictions(values)
    # The margin to the runner-up at every pixel: it needs no labels, never saturates, and attacks live on it.
    weights = margin(values, predicted.clamp(max=num_classes - 1)).pullback(torch.ones_like(values[:, 0]))
    gradient = image_gradient(logits, images, weights)
    return Glance(
        prediction=predicted[0],
        num_classes=num_classes,
        lowest=values.min().item(),
        highest=values.max().item(),
        nonfinite=_share(~values.isfinite().all(1)),
        saturated=_share(values.float().softmax(1).amax(1) == 1),
        nonfinite_gradient=_share(~gradient.isfinite().all(1)),
        no_gradient=_share((gradient == 0).all(1)),
    )


def image_gradient(outputs: Tensor, images: Tensor, weights: Tensor | None = None) -> Tensor:
    """The gradient of the weighted sum of `outputs`, like `images`; zero if no graph leads from one to the other."""
    if not outputs.requires_grad:
        return torch.zeros_like(images)
    (gradient,) = torch.autograd.grad(outputs, images, weights, allow_unused=True, materialize_grads=True)
    return gradient


def gap(first: Tensor, second: Tensor) -> float:
    """The largest difference of two maps of logits, over the range of the first; infinite if only one has a NaN."""
    same = (first == second) | (first.isnan() & second.isnan())
    largest = torch.where(same, 0, (first - second).abs()).nan_to_num(nan=torch.inf).max().item()
    finite = first[first.isfinite()]
    if largest == 0 or len(finite) == 0:
        return largest
    return largest / max((finite.max() - finite.min()).item(), torch.finfo(first.dtype).tiny)


@torch.no_grad()
def repeated_gap(model: Segmenter, images: Tensor) -> float:
    """How far two answers to the same images lie apart, as in `gap`."""
    return gap(model.logits(images), model.logits(images))


class _SameDraw(nn.Module):
    """A network that draws the same random numbers every time."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        with seeded(images.device, 0):
            return self.network(images)


def same_draw(model: Segmenter) -> Segmenter:
    """The same model with the same random numbers every time."""
    return _fed(model, model=_SameDraw(model.model))


class Variant(NamedTuple):
    """The same network, fed in another way."""

    expects: str
    option: str  # of the Segmenter, which feeds it so
    grave: bool  # whether the wrong choice makes another model of it, or just a worse one
    model: Segmenter


def variants(model: Segmenter, channels: int) -> Iterator[Variant]:
    """Other ways to feed the network: those that people mix up."""
    scale, flip = not model.scale_255, not model.bgr
    if model.range is None:
        yield Variant(f"values in 0..{255 if scale else 1}", f"scale_255={scale}", True, _fed(model, scale_255=scale))
    else:
        yield Variant("values in 0..1", "range=0,1", True, _fed(model, range=None))
    if channels == 3:
        yield Variant("blue first" if flip else "red first", f"bgr={flip}", False, _fed(model, bgr=flip))
    if (
        channels == 3
        and not model.scale_255
        and model.range is None
        and not model.mean.any()
        and bool((model.std == 1).all())
    ):
        mean, std = (model.mean.new_tensor(values).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        option = f"mean={IMAGENET_MEAN}, std={IMAGENET_STD}"
        yield Variant("ImageNet's normalisation", option, True, _fed(model, mean=mean, std=std))


def _fed(model: Segmenter, /, **changes: bool | Tensor | nn.Module | None) -> Segmenter:
    """A copy of the wrapper around the same network."""
    other = copy_wrapper(model)
    for name, value in changes.items():
        setattr(other, name, value)
    other._plain = False
    return other


@torch.no_grad()
def pixel_accuracy(model: Segmenter, problems: Sequence[Problem]) -> float:
    """The share of counted pixels that are right."""
    right = sum(((predictions(model.logits(p.images)) == p.labels) & p.mask).sum().item() for p in problems)
    return right / sum(int(p.counted.sum()) for p in problems)


@torch.no_grad()
def mirror_agreement(model: Segmenter, problems: Sequence[Problem]) -> float:
    """How far predictions of an image and of its mirror image agree beyond chance (Cohen's kappa), mean over images.

    Needs no labels. Unlike confidence, it does not grow merely because inputs and hence logits do.
    """
    return sum(_kappa(model, problem.images) for problem in problems) / len(problems)


def _kappa(model: Segmenter, images: Tensor) -> float:
    logits = model.logits(images)
    bins = logits.shape[1] + 1  # one more for NaN
    straight, mirrored = predictions(logits), predictions(model.logits(images.flip(-1))).flip(-1)
    shares = [torch.bincount(p.flatten(), minlength=bins).cpu().double() / p.numel() for p in (straight, mirrored)]
    chance = (shares[0] * shares[1]).sum().item()
    return 0.0 if chance == 1 else (_share(straight == mirrored) - chance) / (1 - chance)


class Slope(NamedTuple):
    """How fast a smooth loss rises along the sign of its gradient, found in two ways."""

    autograd: float
    differences: float
    dtype: torch.dtype  # in which it was computed

    @property
    def error(self) -> float:
        """The relative difference; at least 1 if the signs differ."""
        return abs(self.autograd - self.differences) / max(abs(self.autograd), abs(self.differences))


def slope(model: Segmenter, images: Tensor) -> Slope:
    """Compare autograd with central differences, in float64 if the network can be copied and runs in it.

    The loss is the mean cross-entropy of the second most likely class of each pixel: smooth, and never saturated.
    """
    images = 0.01 + 0.98 * images  # away from the border, where a clamp inside the network has a kink
    precise = _in_float64(model, images)
    model, images = (model, images) if precise is None else (precise, images.double())
    dtype = model.mean.dtype
    step = STEPS.get(dtype, COARSE_STEP)
    start = images.clone().requires_grad_()
    logits = model.logits(start)
    wanted = logits.detach().topk(2, dim=1).indices[:, 1]
    gradient = image_gradient(_loss(logits, wanted), start).to(finest(start.device))
    direction = gradient.sign()
    move = step * direction.to(images.dtype)
    with torch.no_grad():
        ahead, behind = (_loss(model.logits(images + side * move), wanted).item() for side in (1, -1))
    return Slope((gradient * direction).sum().item(), (ahead - behind) / (2 * step), dtype)


def _loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(logits.to(finest(logits.device)), wanted)


def _in_float64(model: Segmenter, images: Tensor) -> Segmenter | None:
    try:
        precise = deepcopy(model).double()
        with torch.no_grad():
            precise.logits(images)
    except (RuntimeError, TypeError):  # cannot be copied, insists on another precision, or is too large for a copy
        return None
    return precise


def _share(pixels: Tensor) -> float:
    return pixels.to(finest(pixels.device)).mean().item()
