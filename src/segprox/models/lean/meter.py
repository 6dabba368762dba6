"""What a forward holds."""

import torch
from torch import Tensor, UntypedStorage

from segprox.models.segmenter import Segmenter


def held_bytes(model: Segmenter, images: Tensor) -> int:
    """What a forward keeps for the backward: bytes of distinct storages, the model's own weights aside.

    On the meta device nothing is computed, so this tells what would be held for images of any size.
    """
    own = {value.untyped_storage()._cdata for value in [*model.parameters(), *model.buffers()]}
    held: dict[int, UntypedStorage] = {}  # kept, so that no address is used twice

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        held[storage._cdata] = storage
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        model.logits(images.detach().requires_grad_())
    return sum(storage.nbytes() for address, storage in held.items() if address not in own)
