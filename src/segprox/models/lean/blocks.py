"""Blocks of a network that keep their input only, and are computed again when their gradient is asked for."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from segprox.models.lean.meter import WHOLE, bytes_of, storages
from segprox.models.segmenter import Segmenter

WORTH = 2  # times what a block is fed must be held within it, or computing it again is not worth the time
_CONTAINERS = (nn.Sequential, nn.ModuleList)


def checkpoint_blocks(model: Segmenter, images: Tensor) -> list[str]:
    """Let blocks that hold much more than they are fed compute it again; their names.

    Of blocks within blocks the outer ones leave less behind, but hold all of theirs when they are computed again: what
    is smaller together decides. It is measured on `images` `[B, C, H, W]`, with the model's operations as they are.
    """
    candidates = dict(_repeated(model.model))
    fed, held = storages(model, images, candidates)
    paying = [name for name in candidates if bytes_of(held[name]) > WORTH * bytes_of(fed[name])]
    outermost = [name for name in paying if not any(_lies_in(name, other) for other in paying)]
    innermost = [name for name in paying if not any(_lies_in(other, name) for other in paying)]

    def most_held(names: list[str]) -> int:
        again = {address for name in names for address in held[name]}
        stays = {address: storage for address, storage in held[WHOLE].items() if address not in again}
        inputs = {address: storage for name in names for address, storage in fed[name].items()}
        return bytes_of(stays | inputs) + max((bytes_of(held[name]) for name in names), default=0)

    chosen = min(innermost, outermost, key=most_held)
    for name in chosen:
        candidates[name].forward = partial(_again, candidates[name].forward, model.operations)
    return chosen


def _lies_in(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def release_blocks(model: Segmenter, names: list[str]) -> None:
    """Undo `checkpoint_blocks`."""
    for name in names:
        del model.model.get_submodule(name).__dict__["forward"]  # behind it is that of the class


def _repeated(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parts of their own of which a container has several of one kind, outer ones first."""
    for name, container in network.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        kinds = Counter(type(child) for child in container.children())
        for key, child in container.named_children():
            own = "forward" in vars(child)  # chosen before, or wrapped by someone else
            if kinds[type(child)] > 1 and any(child.children()) and not isinstance(child, _CONTAINERS) and not own:
                yield (f"{name}.{key}" if name else key), child


def _again(forward: Callable[..., Any], operations: AbstractContextManager[Any], *args: Any, **options: Any) -> Any:
    """A forward that is done again when its gradient is asked for."""

    def within(*again: Any, **others: Any) -> Any:
        with operations:
            return forward(*again, **others)

    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(within, *args, use_reentrant=False, preserve_rng_state=False, **options)
