"""The one call most people need."""

from collections.abc import Iterable, Sequence
from typing import Any, overload

from torch import Tensor, nn

from segprox.attacks import Attack, Callback, make_attack
from segprox.errors import SegproxError
from segprox.result import AttackResult


@overload
def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    attack: str | Attack = "palma",
    *,
    target: Tensor | int | None = None,
    ignore: Iterable[int] = (255,),
    mask: Tensor | None = None,
    threshold: float = 0.99,
    seed: int = 0,
    callback: Callback | None = None,
    max_queries: int | None = None,
    epsilon: float | str | None = None,
    **options: Any,
) -> AttackResult: ...


@overload
def attack(
    model: nn.Module, images: Tensor, labels: Tensor | None = None, attack: str | Attack = "palma", *,
    epsilon: list[Any] | tuple[Any, ...], **options: Any,
) -> list[AttackResult]: ...  # fmt: skip


def attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    attack: str | Attack = "palma",
    *,
    target: Tensor | int | None = None,
    ignore: Iterable[int] = (255,),
    mask: Tensor | None = None,
    threshold: float = 0.99,
    seed: int = 0,
    callback: Callback | None = None,
    max_queries: int | None = None,
    epsilon: float | str | Sequence[float | str] | None = None,
    **options: Any,
) -> AttackResult | list[AttackResult]:
    """Find the smallest perturbation of each image that makes (almost) every pixel wrong, or what you want it to be.

    Args:
        model: a `Segmenter`, or any network that takes images in [0, 1] and returns logits. A plain network is left as
            it was found: its train mode and `requires_grad` flags are put back.
        images: floats in [0, 1], `[B, C, H, W]`. They do not influence each other.
        labels: true labels `[B, H, W]`.
        attack: an attack, or its name; `segprox list attacks` lists them.
        target: attack towards this class or label map instead of away from `labels`.
        ignore: label values of pixels that do not count.
        mask: True where a pixel counts, `[B, H, W]`.
        threshold: the share of counted pixels that makes a success.
        seed: of random starts; an image gets the same ones in any batch.
        callback: called with a `Progress` at every iteration.
        max_queries: the most forwards plus backwards of an image; the attack's own number if left out.
        epsilon: the largest perturbation, for fixed-epsilon attacks. With a list there is a list of results.
        options: the attack's other hyper-parameters, such as `steps`, where `attack` is a name.

    Example:
        >>> import torch, segprox
        >>> network = torch.nn.Conv2d(3, 4, kernel_size=1)
        >>> images, labels = torch.rand(2, 3, 8, 8), torch.randint(0, 4, (2, 8, 8))
        >>> result = segprox.attack(network, images, labels, steps=5)
        >>> result.images.shape, result.norm.shape
        (torch.Size([2, 3, 8, 8]), torch.Size([2]))
        >>> curve = segprox.attack(network, images, labels, "pgd", epsilon=["2/255", "8/255"], steps=5)
        >>> [bool(result.norm.max() <= limit) for result, limit in zip(curve, [2.01 / 255, 8.01 / 255])]
        [True, True]
    """
    if isinstance(epsilon, (list, tuple)):
        each = [_choose(attack, options | {"epsilon": value}) for value in epsilon]
    else:
        each = [_choose(attack, options if epsilon is None else options | {"epsilon": epsilon})]
    found = [
        chosen(
            model, images, labels, target=target, ignore=ignore, mask=mask, threshold=threshold, seed=seed,
            callback=callback, max_queries=max_queries,
        )
        for chosen in each
    ]  # fmt: skip
    return found if isinstance(epsilon, (list, tuple)) else found[0]


def _choose(attack: str | Attack, options: dict[str, Any]) -> Attack:
    if isinstance(attack, str):
        return make_attack(attack, **options)
    if options:
        names = ", ".join(options)
        raise SegproxError(f"{names} cannot be given beside an attack that is made already: give it to the attack")
    return attack
