"""A radius below which no attack can succeed, for networks simple enough that it can be computed."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segprox.losses import margin
from segprox.models import Segmenter
from segprox.problem import Problem

ROUNDING = 1e-5  # of the largest logit: what float32 may add to or take from a margin

KEEPS = nn.Identity | nn.ReLU | nn.ReLU6 | nn.Dropout | nn.Dropout2d  # functions with a Lipschitz constant of 1


class Lipschitz(NamedTuple):
    """How much a function from images to logits can enlarge a perturbation, in either norm."""

    linf: float
    l2: float


class Certificate(NamedTuple):
    """For each image, the norm below which fewer than the threshold's share of pixels can be wrong, `[B]` each."""

    linf: Tensor
    l2: Tensor


def certify(model: Segmenter, problem: Problem) -> Certificate | None:
    """The certified radii of an untargeted problem, or None where the network is not simple enough.

    A pixel of margin m changes its class only if two of its logits change by m together. Within linf, each logit of
    each pixel changes by at most L times the norm, so that a pixel needs m / 2L; a success needs the k-th smallest of
    these, with k the number of pixels that makes a success. Within l2, the pixels share the change of all logits, which
    is at most L times the norm, and each needs m / sqrt(2): a success needs the root of the sum of the k smallest
    m^2 / 2, over L.
    """
    constants = lipschitz(model)
    if constants is None or problem.targeted or problem.protected is not None:
        return None
    with torch.no_grad():
        if model.model(model._prepare(problem.images)).shape[2:] != problem.images.shape[2:]:
            return None  # logits that are interpolated
        logits = model.logits(problem.images).double()
    margins = margin(logits, problem.labels).values - ROUNDING * logits.abs().max()
    linf, l2 = [], []
    for values, mask in zip(margins.clamp(min=0), problem.mask):
        counted = values[mask].sort().values
        least = counted[: math.ceil(problem.threshold * len(counted) - 1e-9)]
        # Without a pixel to attack there is no success at any norm.
        linf.append(least[-1] / (2 * constants.linf) if len(least) else least.new_tensor(math.inf))
        l2.append(least.square().sum().div(2).sqrt() / constants.l2 if len(least) else least.new_tensor(math.inf))
    return Certificate(torch.stack(linf), torch.stack(l2))


def lipschitz(model: Segmenter) -> Lipschitz | None:
    """The product of the constants of a network's layers, or None if one of them is not known.

    Known are sequences of convolutions with zero padding, batch norms, average pooling and ReLU.
    """
    if model.resize is not None or model.multiple > 1 or model.window is not None or model.views:
        return None
    if model.output == "probabilities" or model.autocast is not None:
        return None
    width = 255.0 if model.scale_255 else 1.0 if model.range is None else model.width.max().item()
    scale = width / model.std.min().item()
    linf = l2 = scale
    for layer in _layers(model.model):
        constants = _constants(layer)
        if constants is None:
            return None
        linf, l2 = linf * constants.linf, l2 * constants.l2
    return Lipschitz(linf, l2) if linf > 0 and l2 > 0 else None


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    if type(network) is nn.Sequential:  # a class that inherits it may do anything
        for part in network:
            yield from _layers(part)
    else:
        yield network


def _constants(layer: nn.Module) -> Lipschitz | None:
    if isinstance(layer, KEEPS):
        return Lipschitz(1.0, 1.0)
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        return _convolution(layer)
    if type(layer) is nn.BatchNorm2d and layer.running_var is not None:
        gain = (layer.running_var.double() + layer.eps).rsqrt()
        largest = (gain if layer.weight is None else gain * layer.weight.double()).abs().max().item()
        return Lipschitz(largest, largest)
    whole = type(layer) is nn.AvgPool2d and not layer.ceil_mode and layer.divisor_override is None
    # A mean of zeros that are added at the border is smaller; one that leaves them out would weigh pixels more.
    return Lipschitz(1.0, 1.0) if whole and (layer.count_include_pad or layer.padding in (0, (0, 0))) else None


def _convolution(layer: nn.Conv2d) -> Lipschitz:
    """Row sums for linf, which are exact; for l2 the smaller of two upper bounds.

    These are the root of the largest row sum times the largest column sum (Schur), and the norm of the matrix from a
    patch to an output, times the root of how many patches share a pixel; the latter is exact for kernels of one pixel.
    """
    weight = layer.weight.detach().double()
    groups = weight.view(layer.groups, -1, *weight.shape[1:])  # [G, O / G, I / G, h, w]
    rows, columns = groups.abs().sum((2, 3, 4)).max().item(), groups.abs().sum((1, 3, 4)).max().item()
    shared = weight.shape[2] * weight.shape[3]
    by_patch = torch.linalg.matrix_norm(groups.flatten(2), 2).max().item() * math.sqrt(shared)
    return Lipschitz(rows, min(math.sqrt(rows * columns), by_patch))
