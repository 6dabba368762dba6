"""The one call most people need."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from segprox.attacks import Callback, make_attack
from segprox.models import Segmenter, restored
from segprox.problem import Problem
from segprox.tracker import Attacked


def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    attack: str = "palma",
    *,
    target: Tensor | int | None = None,
    ignore: Iterable[int] = (255,),
    mask: Tensor | None = None,
    threshold: float = 0.99,
    seed: int = 0,
    callback: Callback | None = None,
    **options: Any,
) -> Attacked:
    """Find the smallest perturbation of each image that makes (almost) every pixel wrong, or what you want it to be.

    Args:
        model: a `Segmenter`, or any network that takes images in [0, 1] and returns logits. A plain network is left as
            it was found: its train mode and `requires_grad` flags are put back.
        images: floats in [0, 1], `[B, C, H, W]`. They do not influence each other.
        labels: true labels `[B, H, W]`.
        attack: the attack's name; `segprox list attacks` lists them.
        target: attack towards this class or label map instead of away from `labels`.
        ignore: label values of pixels that do not count.
        mask: True where a pixel counts, `[B, H, W]`.
        threshold: the share of counted pixels that makes a success.
        seed: of random starts; an image gets the same ones in any batch.
        callback: called with a `Progress` at every iteration.
        options: the attack's hyper-parameters, such as `steps`.

    Example:
        >>> import torch, segprox
        >>> network = torch.nn.Conv2d(3, 4, kernel_size=1)
        >>> images, labels = torch.rand(2, 3, 8, 8), torch.randint(0, 4, (2, 8, 8))
        >>> result = segprox.attack(network, images, labels, steps=5)
        >>> result.images.shape, result.norm.shape
        (torch.Size([2, 3, 8, 8]), torch.Size([2]))
    """
    chosen = make_attack(attack, **options)
    with nullcontext() if isinstance(model, Segmenter) else restored(model):
        segmenter = model if isinstance(model, Segmenter) else Segmenter(model)
        problem = Problem.build(
            images.to(segmenter.device), labels, target=target, ignore=ignore, mask=mask, threshold=threshold, seed=seed
        )
        return chosen.run(segmenter, problem, callback)
