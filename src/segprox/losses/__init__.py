"""Per-pixel losses with gradients in closed form.

Each function takes logits `[B, K, H, W]` and labels `[B, H, W]` and returns a `Loss`: values and a pullback. No
autograd graph is built over a loss, so the memory of an attack is the model's own.
"""

from segprox.losses.base import Loss, Pullback, choose
from segprox.losses.entropies import cross_entropy, houdini, js_divergence, tsallis
from segprox.losses.margins import dlr, dlr_plus, margin, soft_margin

__all__ = [
    "Loss",
    "Pullback",
    "choose",
    "cross_entropy",
    "dlr",
    "dlr_plus",
    "houdini",
    "js_divergence",
    "margin",
    "soft_margin",
    "tsallis",
]
