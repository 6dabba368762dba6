"""Batch norms folded into the convolutions before them: the same function with fewer operations."""

import math
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.fusion import fuse_conv_bn_eval

from segprox.models.lean.self_check import TOLERANCE, gradient_on, in_double, random_image, relative_error
from segprox.models.segmenter import Segmenter

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


class _Pair(NamedTuple):
    """Names of a convolution and of the batch norm that alone is fed its result."""

    convolution: str
    norm: str


def fold_batch_norms(model: Segmenter) -> int:
    """Multiply batch norms into the convolutions before them, where nothing else sees those; how many there were.

    The network's gradient on a random image is compared with what it was, in double precision; if it differs, or if the
    network cannot take such an image, nothing is folded. The network gets new modules.
    """
    lower, operations, model.autocast, model.operations = model.autocast, model.operations, None, nullcontext()
    try:
        with in_double(model):
            return _folded(model, random_image(model).double())
    except Exception:  # a network that takes no such image, or no double precision, whatever it may raise
        return 0
    finally:
        model.autocast, model.operations = lower, operations


def _folded(model: Segmenter, image: Tensor) -> int:
    network = model.model
    pairs = _pairs(model, image)
    expected = gradient_on(model, image, nullcontext())
    before = {name: network.get_submodule(name) for pair in pairs for name in pair}
    error = math.inf
    try:
        for pair in pairs:
            _fuse(network, pair)
        error = relative_error(gradient_on(model, image, nullcontext()), expected)
    finally:  # also where the network looks for what is no longer there
        if error > TOLERANCE:
            for name, module in before.items():
                network.set_submodule(name, module)
    return len(pairs) if error <= TOLERANCE else 0


def _fuse(network: nn.Module, pair: _Pair) -> None:
    convolution, norm = network.get_submodule(pair.convolution), network.get_submodule(pair.norm)
    assert isinstance(convolution, _CONVOLUTIONS)
    assert isinstance(norm, _NORMS)
    fused = fuse_conv_bn_eval(convolution, norm, isinstance(convolution, nn.ConvTranspose2d))
    network.set_submodule(pair.convolution, fused)
    network.set_submodule(pair.norm, nn.Identity())


def _can_be_fused(convolution: nn.Module) -> bool:
    """Whether torch knows how: not with transposed ones in groups."""
    return type(convolution) is nn.Conv2d or (type(convolution) is nn.ConvTranspose2d and convolution.groups == 1)


def _pairs(model: Segmenter, image: Tensor) -> list[_Pair]:
    """Convolutions and batch norms that run once and are connected to each other only."""
    made: dict[Node, str] = {}  # by which convolution the result of a node was made
    fed: dict[str, Node] = {}  # the node whose result a batch norm is fed
    calls: Counter[str] = Counter()

    def see_result(name: str, _: nn.Module, __: Any, result: Tensor) -> None:
        calls[name] += 1
        if result.grad_fn is not None:
            made[result.grad_fn] = name

    def see_input(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls[name] += 1
        if inputs[0].grad_fn is not None:
            fed[name] = inputs[0].grad_fn

    with ExitStack() as hooks:
        for name, module in model.model.named_modules():
            if _can_be_fused(module):
                hooks.callback(module.register_forward_hook(partial(see_result, name)).remove)
            elif type(module) in _NORMS and not module.training and module.running_mean is not None:
                hooks.callback(module.register_forward_pre_hook(partial(see_input, name)).remove)
        logits = model.in_one_piece(image.detach().requires_grad_())
    uses = _uses(logits.grad_fn)
    pairs = [_Pair(made[node], norm) for norm, node in fed.items() if node in made and uses[node] == 1]
    return [pair for pair in pairs if calls[pair.convolution] == calls[pair.norm] == 1]


def _uses(last: Node | None) -> Counter[Node]:
    """How many operations the result of each operation goes into."""
    uses: Counter[Node] = Counter()
    waiting = [last] if last is not None else []
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None:
                uses[node] += 1
                if uses[node] == 1:
                    waiting.append(node)
    return uses
