"""Which calls of torch are replaced, and by what: `NotImplemented` leaves a call plain."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from segprox.models.lean.functions import (
    Convolution,
    Gate,
    MaxPool,
    NormOfNorm,
    Operation,
    Scale,
    Shaped,
    SizeOfAttention,
    Slopes,
    applied,
)

LARGEST_WINDOW = 256  # places in a window of max pooling that fit a byte


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _differentiates(x: Any, *frozen: Any) -> bool:
    """Whether only the gradient of `x` is wanted, so that there is something to save."""
    return (
        isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
        and not any(isinstance(part, Tensor) and part.requires_grad for part in frozen)
    )  # fmt: skip


def _can_change(x: Tensor) -> bool:
    """Whether a custom operation may work in place: views and leaves are for torch itself."""
    return not x._is_view() and not x.is_leaf


def _gated(
    x: Tensor, plain: Operation, changing: Operation, passes: Operation | None, otherwise: float, inplace: bool
) -> Any:
    if not _differentiates(x) or (inplace and not _can_change(x)):
        return NotImplemented
    return applied(Gate, x, changing if inplace else plain, passes, otherwise, inplace)


def _relu(input: Tensor, inplace: bool = False) -> Any:
    return _gated(input, torch.relu, torch.relu_, None, 0.0, inplace)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return _gated(
        input, lambda x: x.clamp(min_val, max_val), lambda x: x.clamp_(min_val, max_val),
        lambda x: (x > min_val) & (x < max_val), 0.0, inplace,
    )  # fmt: skip


def _relu6(input: Tensor, inplace: bool = False) -> Any:
    return _hardtanh(input, 0.0, 6.0, inplace)


def _clamp(input: Tensor, min: Any = None, max: Any = None, *, out: Any = None, inplace: bool = False) -> Any:
    """Unlike hardtanh's, its gradient passes at the bounds themselves."""
    if out is not None or not all(bound is None or isinstance(bound, (int, float)) for bound in (min, max)):
        return NotImplemented

    low, high = -torch.inf if min is None else min, torch.inf if max is None else max

    def within(x: Tensor) -> Tensor:
        return (x >= low) & (x <= high)

    return _gated(input, lambda x: x.clamp(min, max), lambda x: x.clamp_(min, max), within, 0.0, inplace)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    plain, changing = torch._C._nn.leaky_relu, torch._C._nn.leaky_relu_
    return _gated(
        input, lambda x: plain(x, negative_slope), lambda x: changing(x, negative_slope), lambda x: x > 0,
        negative_slope, inplace,
    )  # fmt: skip


def _prelu(input: Tensor, weight: Tensor) -> Any:
    if not _differentiates(input, weight) or input.dim() < 2 or input.dtype != weight.dtype:
        return NotImplemented
    return applied(Slopes, input, weight)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if training or running_mean is None or running_var is None or not _differentiates(input, weight, bias):
        return NotImplemented
    scale = (running_var + eps).rsqrt_()
    scale = scale if weight is None else scale * weight
    arguments = (running_mean, running_var, weight, bias, False, momentum, eps)
    return applied(
        Scale, input, scale.view(1, -1, *[1] * (input.dim() - 2)), lambda x: functional.batch_norm(x, *arguments)
    )


def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """With the statistics of training it is a batch norm; with those of the image nothing can be saved."""
    return _batch_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """It has to keep its input, unless that is the result of another one, as at the beginning of transformers' stages.

    Results say how they are made, for the next one to see; not after a change in place.
    """
    if not _differentiates(input, weight, bias) or _lowers_precision(input):
        return NotImplemented
    arguments = (list(normalized_shape), weight, bias, eps)
    first, others, version = getattr(input, "_made_by_norm", (None, (), None))
    if first is not None and version == input._version:
        return applied(NormOfNorm, input, first, lambda x: functional.layer_norm(x, *others), arguments)
    made = functional.layer_norm(input, *arguments)
    made._made_by_norm = (input.detach(), arguments, made._version)  # type: ignore[attr-defined]  # a note
    return made


def _lowers_precision(x: Tensor) -> bool:
    """Whether autocast is on."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _in_precision(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Tensors in the precision of autocast, if that is on: a gradient is taken outside of it and must find them so."""
    if not _lowers_precision(x):
        return [x, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if part is None else part.to(dtype) for part in (x, *others)]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, transposed: bool, **pairs: Any) -> Any:
    """Options besides are numbers, or pairs down and across."""
    if not _differentiates(x, weight, bias) or x.dim() != 4:
        return NotImplemented
    options = {"groups": groups, "transposed": transposed, **{name: _pair(value) for name, value in pairs.items()}}
    return applied(Convolution, *_in_precision(x, weight, bias), options)


def _conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    if isinstance(padding, str):
        around = [d * (k - 1) * (padding == "same") for d, k in zip(_pair(dilation), weight.shape[2:], strict=True)]
        if any(total % 2 for total in around):  # one side would get more
            return NotImplemented
        padding = [total // 2 for total in around]
    return _convolution(input, weight, bias, groups, False, stride=stride, padding=padding, dilation=dilation)


def _conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    return _convolution(
        input, weight, bias, groups, True,
        stride=stride, padding=padding, output_padding=output_padding, dilation=dilation,
    )  # fmt: skip


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    if mode not in ("reflect", "replicate") or len(pad) != 4 or input.dim() != 4 or not _differentiates(input):
        return NotImplemented
    kind = {"reflect": "reflection", "replicate": "replication"}[mode]
    backward = getattr(torch.ops.aten, f"{kind}_pad2d_backward")
    sides = list(pad)
    return applied(Shaped, input, lambda x: functional.pad(x, sides, mode), lambda g, x: backward(g, x, sides))


def _avg_pool2d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    if not _differentiates(input) or input.dim() != 4:
        return NotImplemented
    kernel = _pair(kernel_size)
    step = kernel if stride is None or stride == [] else _pair(stride)
    options = (kernel, step, _pair(padding), ceil_mode, count_include_pad, divisor_override)
    backward = torch.ops.aten.avg_pool2d_backward
    return applied(Shaped, input, lambda x: functional.avg_pool2d(x, *options), lambda g, x: backward(g, x, *options))


def _adaptive_avg_pool2d(input: Tensor, output_size: Any) -> Any:
    if not _differentiates(input) or input.dim() != 4 or output_size in (1, (1, 1), [1, 1]):  # torch takes the mean
        return NotImplemented
    backward = torch.ops.aten._adaptive_avg_pool2d_backward
    return applied(Shaped, input, lambda x: functional.adaptive_avg_pool2d(x, output_size), backward)


def _max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    kernel = _pair(kernel_size)
    if not _differentiates(input) or input.dim() != 4 or return_indices or kernel[0] * kernel[1] > LARGEST_WINDOW:
        return NotImplemented
    step = kernel if stride is None or stride == [] else _pair(stride)
    return applied(MaxPool, input, kernel, step, _pair(padding), _pair(dilation), ceil_mode)


def _attention(*args: Any, **options: Any) -> Any:
    """Attention whose weights are asked for by default and then dropped: without them they need not be kept."""
    if not options.get("need_weights", True):
        return NotImplemented
    query, key, value, _, heads = args[:5]
    if query.device.type == "meta":
        return applied(SizeOfAttention, query, key, value, heads), None
    return functional.multi_head_attention_forward(*args, **{**options, "need_weights": False})


# By name, so that a report can say which one is left plain.
OPERATIONS: dict[str, tuple[Operation, tuple[Operation, ...]]] = {
    "convolution": (_conv2d, (functional.conv2d,)),
    "transposed convolution": (_conv_transpose2d, (functional.conv_transpose2d,)),
    "batch norm": (_batch_norm, (functional.batch_norm,)),
    "instance norm": (_instance_norm, (functional.instance_norm,)),
    "layer norm": (_layer_norm, (functional.layer_norm,)),
    "relu": (_relu, (functional.relu, torch.relu, Tensor.relu)),
    "relu in place": (partial(_relu, inplace=True), (torch.relu_, Tensor.relu_)),
    "relu6": (_relu6, (functional.relu6,)),
    "hardtanh": (_hardtanh, (functional.hardtanh,)),
    "hardtanh in place": (partial(_hardtanh, inplace=True), (functional.hardtanh_,)),
    "clamp": (_clamp, (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)),
    "clamp in place": (partial(_clamp, inplace=True), (torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_)),
    "leaky relu": (_leaky_relu, (functional.leaky_relu,)),
    "leaky relu in place": (partial(_leaky_relu, inplace=True), (functional.leaky_relu_,)),
    "prelu": (_prelu, (functional.prelu, torch.prelu, Tensor.prelu)),
    "max pooling": (_max_pool2d, (functional.max_pool2d, torch.max_pool2d)),
    "average pooling": (_avg_pool2d, (functional.avg_pool2d,)),
    "adaptive average pooling": (_adaptive_avg_pool2d, (functional.adaptive_avg_pool2d,)),
    "padding": (_pad, (functional.pad,)),
    "attention": (_attention, (functional.multi_head_attention_forward,)),
}


class LeanOperations(TorchFunctionMode):
    """Within it, operations on a frozen network keep only what the gradient of the image needs.

    Args:
        plain: names of operations (of `OPERATIONS`) to leave alone.
    """

    def __init__(self, plain: Collection[str] = ()) -> None:
        super().__init__()
        self.replaced = {
            function: lean
            for name, (lean, functions) in OPERATIONS.items()
            if name not in plain
            for function in functions
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the lean operation if there is one and it applies, the plain one otherwise."""
        lean = self.replaced.get(func)
        if lean is not None:
            result = lean(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))
