"""Cross-entropy and its relatives: losses of the probability that a pixel gives to its label.

Their gradients with respect to the logits are all that of the cross-entropy, `p - e_y`, times a factor per pixel.
"""

import math

import torch
from torch import Tensor

from segprox.losses.base import Loss


def cross_entropy(logits: Tensor, labels: Tensor) -> Loss:
    """`-log p_y`."""
    p, log_p_label = _softmax(logits, labels)
    return Loss(-log_p_label, lambda weights: _gradient(p, labels, weights))


def js_divergence(logits: Tensor, labels: Tensor) -> Loss:
    """The Jensen-Shannon divergence of p and the one-hot label (Croce, Singh, Hein, 2024), at most log 2.

    Its gradient vanishes as p_y goes to 0: pixels that are wrong for good are left alone.
    """
    p, log_p_label = _softmax(logits, labels)
    p_label = log_p_label.exp()
    log_mixed = p_label.log1p()  # log(1 + p_y)
    # p log p, which is 0 for p = 0; NaN stays NaN
    product = torch.where(p_label == 0, p_label, p_label * (log_p_label - log_mixed))
    values = 0.5 * (2 * math.log(2) + product - log_mixed)
    slope = -0.5 * product
    return Loss(values, lambda weights: _gradient(p, labels, weights * slope))


def tsallis(logits: Tensor, labels: Tensor, q: float) -> Loss:
    """The Tsallis cross-entropy `(1 - p_y^(1 - q)) / (1 - q)`, for q <= 1; cross-entropy at q = 1."""
    p, log_p_label = _softmax(logits, labels)
    power = 1 - q
    if power == 0:
        return Loss(-log_p_label, lambda weights: _gradient(p, labels, weights))
    values = -torch.expm1(power * log_p_label) / power
    slope = (power * log_p_label).exp()
    return Loss(values, lambda weights: _gradient(p, labels, weights * slope))


def houdini(logits: Tensor, labels: Tensor) -> Loss:
    """Houdini (Cisse et al., 2017) with cross-entropy as the task loss: `Phi(max_j z_j - z_y) * -log p_y`.

    Phi is the normal distribution function. The authors leave the task loss constant; here, as in what others have used
    for segmentation, gradients flow through both factors: a constant one would push correct pixels nowhere, because
    their gap is 0 and stays 0 under any small change.
    """
    p, log_p_label = _softmax(logits, labels)
    first, top = logits.max(1)
    gap = first - logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    chance = torch.special.ndtr(gap)

    def pullback(weights: Tensor) -> Tensor:
        gradient = _gradient(p, labels, weights * chance)
        density = torch.exp(-0.5 * gap.square()) / math.sqrt(2 * math.pi)
        slope = torch.where(density == 0, density, -weights * log_p_label * density)
        gradient.scatter_add_(1, top.unsqueeze(1), slope.unsqueeze(1))
        return gradient.scatter_add_(1, labels.unsqueeze(1), -slope.unsqueeze(1))

    return Loss(-chance * log_p_label, pullback)


def _softmax(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """P `[B, K, H, W]` and log p_y `[B, H, W]`."""
    log_p = torch.log_softmax(logits, 1)
    log_p_label = log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return log_p.exp_(), log_p_label


def _gradient(p: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """`weights * (p - e_y)`."""
    return (p * weights.unsqueeze(1)).scatter_add_(1, labels.unsqueeze(1), -weights.unsqueeze(1))
