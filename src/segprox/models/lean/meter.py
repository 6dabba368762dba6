"""What a forward holds."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from segprox.models.segmenter import Segmenter
from segprox.models.windows import size_of

WHOLE = ""  # the network, among the names of its parts
Storages = dict[int, UntypedStorage]  # by address; kept, so that none is used twice


def held_bytes(model: Segmenter, images: Tensor) -> int:
    """What a forward keeps for the backward: bytes of distinct storages, the model's own weights aside.

    On the meta device nothing is computed, so this tells what would be held for images of any size. Of a model that is
    used by windows or views, each is computed again in the backward: what the largest of them holds then counts too.
    """
    held = bytes_of(storages(model, images, asked=model.logits)[1][WHOLE])
    pieces = model.pieces(size_of(images))
    if len(pieces) == 1:
        return held
    largest = images.new_zeros(*images.shape[:2], *max(pieces, key=math.prod))
    return held + bytes_of(storages(model, largest)[1][WHOLE])


def storages(
    model: Segmenter,
    images: Tensor,
    blocks: Mapping[str, nn.Module] = {},
    asked: Callable[[Tensor], Tensor] | None = None,
) -> tuple[dict[str, Storages], dict[str, Storages]]:
    """The storages of the tensors that each block is fed, and of those that are held within it and in the whole.

    What is `asked` for logits is `model.in_one_piece`, or another way to use the model.
    """
    own = {value.untyped_storage()._cdata for value in [*model.parameters(), *model.buffers()]}
    fed: dict[str, Storages] = defaultdict(dict)
    held: dict[str, Storages] = defaultdict(dict)
    running = [WHOLE]

    def enter(name: str, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        running.append(name)
        for value in (*args, *options.values()):
            if isinstance(value, Tensor):
                fed[name][value.untyped_storage()._cdata] = value.untyped_storage()

    def leave(*_: Any) -> None:
        running.pop()

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        for name in running if storage._cdata not in own else ():
            held[name][storage._cdata] = storage
        return value

    with ExitStack() as stack, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        for name, block in blocks.items():
            entered = block.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
            for handle in (entered, block.register_forward_hook(leave)):
                stack.callback(handle.remove)
        (asked or model.in_one_piece)(images.detach().requires_grad_())
    return fed, held


def bytes_of(storages: Storages) -> int:
    """How large they are together."""
    return sum(storage.nbytes() for storage in storages.values())
