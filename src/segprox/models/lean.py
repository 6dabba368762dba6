"""Input gradients that hold almost nothing.

An attack differentiates with respect to the image alone, through a network that is frozen and in eval mode. Autograd
does not know that: a convolution keeps its input for a gradient of its weights that nobody asks for, a ReLU keeps its
output where one bit per value would do. Inside `LeanOperations` these operations are replaced, whoever calls them, by
ones that keep only what the gradient of their input needs. Everything else runs as it is.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from segprox.models.segmenter import Segmenter

Operation = Callable[..., Any]

# Eight bytes of 0 or 1, read as one number, times this: their bits end up in the top byte.
_GATHER_BITS = 0x0102040810204080
TOLERANCE = 1e-9  # of a gradient in double precision
SINGLE_TOLERANCE = 0.05  # where rounding moves some values across the kink of a ReLU
_CHUNK = 1 << 16  # packed bytes that are unpacked at a time: what that takes stays within the caches
_UNPACKED: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # for each byte its eight bits, [256, 8]


def pack_bits(mask: Tensor) -> Tensor:
    """Eight values of a bool tensor in a byte: uint8, an eighth as long (rounded up)."""
    flat = mask.flatten()
    if flat.numel() % 8:
        flat = functional.pad(flat, (0, -flat.numel() % 8))
    return ((flat.view(torch.int64) * _GATHER_BITS) >> 56).to(torch.uint8)


def select(values: Tensor, packed: Tensor, otherwise: float = 0.0) -> Tensor:
    """`values` where the packed mask is true, and times `otherwise` elsewhere."""
    key = (values.device, values.dtype)
    if key not in _UNPACKED:
        bits = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and_(1)
        _UNPACKED[key] = bits.to(*key)
    table = _UNPACKED[key] if otherwise == 0 else _UNPACKED[key] * (1 - otherwise) + otherwise
    values = values.contiguous()
    result, flat = torch.empty_like(values), values.view(-1)
    out = result.view(-1)
    for start in range(0, packed.numel(), _CHUNK):
        bits = table.index_select(0, packed[start : start + _CHUNK].int()).view(-1)
        part = slice(8 * start, min(8 * (start + _CHUNK), flat.numel()))
        torch.mul(flat[part], bits[: part.stop - part.start], out=out[part])
    return result


class _Gate(torch.autograd.Function):
    """An operation whose derivative is 1 or a constant: a bit per value tells where it is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Operation, passes: Operation, otherwise: float, inplace: bool) -> Tensor:
        mask = passes(x)
        y: Tensor = apply(x)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(pack_bits(mask))
        ctx.otherwise = otherwise
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return select(gradient, packed, ctx.otherwise), None, None, None, None


class _Scale(torch.autograd.Function):
    """Batch norm in eval mode: a scale and a shift per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return torch.addcmul(shift, x, scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient * ctx.saved_tensors[0]).to(gradient.dtype), None, None


class _Pad(torch.autograd.Function):
    """Padding by reflection or repetition of the border; its gradient needs the size of its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pad: list[int], mode: str) -> Tensor:
        ctx.shape, ctx.pad, ctx.mode = x.shape, pad, mode
        return functional.pad(x, pad, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kind = {"reflect": "reflection", "replicate": "replication"}[ctx.mode]
        backward = getattr(torch.ops.aten, f"{kind}_pad2d_backward")
        result: Tensor = backward(gradient, gradient.new_empty(ctx.shape), ctx.pad)
        return result, None, None


class _Convolution(torch.autograd.Function):
    """A convolution of frozen weights, transposed or not; its gradient is the other kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.options, ctx.size = options, x.shape[2:]
        if options["transposed"]:
            return functional.conv_transpose2d(
                x, weight, bias, options["stride"], options["padding"], options["output_padding"], options["groups"],
                options["dilation"],
            )  # fmt: skip
        return functional.conv2d(
            x, weight, bias, options["stride"], options["padding"], options["dilation"], options["groups"]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), options = ctx.saved_tensors, ctx.options
        stride, padding, dilation, groups = (options[name] for name in ("stride", "padding", "dilation", "groups"))
        if options["transposed"]:
            return functional.conv2d(gradient, weight, None, stride, padding, dilation, groups), None, None, None
        # What the strides skipped at the end of the input gets no gradient, but must be there.
        rest = [
            size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, out, s, p, d, k in zip(
                ctx.size, gradient.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        result = functional.conv_transpose2d(gradient, weight, None, stride, padding, rest, groups, dilation)
        return result, None, None, None


class _MaxPool(torch.autograd.Function):
    """Max pooling that remembers where in its window each maximum was, a byte each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Tensor:
        y, indices = functional.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
        rows, columns = _corners(x, y, stride, padding)
        width = x.shape[-1]
        down = ((indices // width) - rows) // dilation[0]
        across = ((indices % width) - columns) // dilation[1]
        ctx.save_for_backward((down * kernel[1] + across).to(torch.uint8))
        ctx.shape, ctx.options = x.shape, (kernel, stride, padding, dilation)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (where,), (kernel, stride, padding, dilation) = ctx.saved_tensors, ctx.options
        result = gradient.new_zeros(ctx.shape)
        rows, columns = _corners(result, gradient, stride, padding)
        place = where.long()
        down = rows + (place // kernel[1]) * dilation[0]
        indices = down * ctx.shape[-1] + columns + (place % kernel[1]) * dilation[1]
        result.flatten(2).scatter_add_(2, indices.flatten(2), gradient.flatten(2))
        return result, None, None, None, None, None


class _SizeOfAttention(torch.autograd.Function):
    """On the meta device: what the fused kernels of real devices keep, which the one for meta does not imitate."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
        made = torch.empty_like(query)
        projected = [torch.empty_like(part) for part in (query, key, value)]
        ctx.save_for_backward(*projected, made, query.new_empty(*query.shape[:-1], heads))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.empty_like(part) for part in ctx.saved_tensors[:3]), None)


def _corners(x: Tensor, y: Tensor, stride: Any, padding: Any) -> tuple[Tensor, Tensor]:
    """The first row and column of each window, which may lie outside of the image."""
    rows = torch.arange(y.shape[-2], device=x.device).mul_(stride[0]).sub_(padding[0]).view(-1, 1)
    columns = torch.arange(y.shape[-1], device=x.device).mul_(stride[1]).sub_(padding[1])
    return rows, columns


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _differentiates(x: Any, *frozen: Tensor | None) -> bool:
    """Whether only the gradient of `x` is wanted, so that there is something to save."""
    return (
        isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
        and not any(isinstance(part, Tensor) and part.requires_grad for part in frozen)
    )  # fmt: skip


def _can_change(x: Tensor) -> bool:
    """Whether a custom operation may work in place: views and leaves are for torch itself."""
    return not x._is_view() and not x.is_leaf


def _gated(x: Tensor, apply: Operation, in_place: Operation, passes: Operation, otherwise: float, inplace: bool) -> Any:
    if not _differentiates(x) or (inplace and not _can_change(x)):
        return NotImplemented
    made: Tensor = _Gate.apply(x, in_place if inplace else apply, passes, otherwise, inplace)  # type: ignore[no-untyped-call]
    return made


def _relu(input: Tensor, inplace: bool = False) -> Any:
    return _gated(input, torch.relu, torch.relu_, lambda x: x > 0, 0.0, inplace)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    def within(x: Tensor) -> Tensor:
        return (x > min_val) & (x < max_val)

    def clamp_(x: Tensor) -> Tensor:
        return x.clamp_(min_val, max_val)

    return _gated(input, lambda x: x.clamp(min_val, max_val), clamp_, within, 0.0, inplace)


def _relu6(input: Tensor, inplace: bool = False) -> Any:
    return _hardtanh(input, 0.0, 6.0, inplace)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    plain, changing = torch._C._nn.leaky_relu, torch._C._nn.leaky_relu_
    return _gated(
        input, lambda x: plain(x, negative_slope), lambda x: changing(x, negative_slope), lambda x: x > 0,
        negative_slope, inplace,
    )  # fmt: skip


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None or not _differentiates(input, weight, bias):
        return NotImplemented
    scale = (running_var + eps).rsqrt_()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    shift = shift if bias is None else shift + bias
    shape = (1, -1, *[1] * (input.dim() - 2))
    made: Tensor = _Scale.apply(input, scale.view(shape), shift.view(shape))  # type: ignore[no-untyped-call]
    return made


def _in_precision(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Tensors in the precision of autocast, if that is on: a gradient is taken outside of it and must find them so."""
    if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
        return [x, *others]
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if part is None else part.to(dtype) for part in (x, *others)]


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if not _differentiates(input, weight, bias) or input.dim() != 4 or isinstance(padding, str):
        return NotImplemented
    options = {
        "stride": _pair(stride), "padding": _pair(padding), "dilation": _pair(dilation), "groups": groups,
        "transposed": False,
    }  # fmt: skip
    made: Tensor = _Convolution.apply(*_in_precision(input, weight, bias), options)  # type: ignore[no-untyped-call]
    return made


def _conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if not _differentiates(input, weight, bias) or input.dim() != 4:
        return NotImplemented
    options = {
        "stride": _pair(stride), "padding": _pair(padding), "dilation": _pair(dilation), "groups": groups,
        "output_padding": _pair(output_padding), "transposed": True,
    }  # fmt: skip
    made: Tensor = _Convolution.apply(*_in_precision(input, weight, bias), options)  # type: ignore[no-untyped-call]
    return made


def _pad(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    if mode not in ("reflect", "replicate") or len(pad) != 4 or input.dim() != 4 or not _differentiates(input):
        return NotImplemented
    made: Tensor = _Pad.apply(input, list(pad), mode)  # type: ignore[no-untyped-call]
    return made


def _max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    kernel = _pair(kernel_size)
    if not _differentiates(input) or input.dim() != 4 or return_indices or kernel[0] * kernel[1] > 256:
        return NotImplemented
    step = kernel if stride is None or stride == [] else _pair(stride)
    made: Tensor = _MaxPool.apply(input, kernel, step, _pair(padding), _pair(dilation), ceil_mode)  # type: ignore[no-untyped-call]
    return made


def _attention(*args: Any, **options: Any) -> Any:
    """Attention whose weights are asked for by default and then dropped: without them they need not be kept."""
    if not options.get("need_weights", True):
        return NotImplemented
    query, key, value, _, heads = args[:5]
    if query.device.type == "meta":
        return _SizeOfAttention.apply(query, key, value, heads), None  # type: ignore[no-untyped-call]
    return functional.multi_head_attention_forward(*args, **{**options, "need_weights": False})


# By name, so that a report can say which one is left plain.
OPERATIONS: dict[str, tuple[Operation, tuple[Operation, ...]]] = {
    "convolution": (_conv2d, (functional.conv2d,)),
    "transposed convolution": (_conv_transpose2d, (functional.conv_transpose2d,)),
    "batch norm": (_batch_norm, (functional.batch_norm,)),
    "relu": (_relu, (functional.relu, torch.relu, Tensor.relu)),
    "relu in place": (lambda input: _relu(input, True), (torch.relu_, Tensor.relu_)),
    "relu6": (_relu6, (functional.relu6,)),
    "hardtanh": (_hardtanh, (functional.hardtanh,)),
    "leaky relu": (_leaky_relu, (functional.leaky_relu,)),
    "max pooling": (_max_pool2d, (functional.max_pool2d, torch.max_pool2d)),
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


def checkpoint_blocks(network: nn.Module, operations: LeanOperations) -> list[str]:
    """Let the repeated blocks of a network keep their input only and compute the rest again; their names.

    These are the outermost modules, with parts of their own, of which a container has several of one kind.
    """
    chosen: list[str] = []
    for name, container in network.named_modules():
        if not isinstance(container, (nn.Sequential, nn.ModuleList)) or name.startswith(tuple(f"{c}." for c in chosen)):
            continue
        kinds = Counter(type(child) for child in container.children())
        for key, child in container.named_children():
            if isinstance(child.forward, partial):
                continue  # done already
            if kinds[type(child)] > 1 and any(child.children()) and not isinstance(child, _CONTAINERS):
                child.forward = partial(_again, child.forward, operations)
                chosen.append(f"{name}.{key}" if name else key)
    return chosen


_CONTAINERS = (nn.Sequential, nn.ModuleList)


def _again(forward: Operation, operations: "LeanOperations", *args: Any, **options: Any) -> Any:
    """A forward that is done again when its gradient is asked for."""

    def within(*again: Any, **others: Any) -> Any:
        with operations:
            return forward(*again, **others)

    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(within, *args, use_reentrant=False, preserve_rng_state=False, **options)


class Leanness(NamedTuple):
    """What came of making a model lean."""

    plain: tuple[str, ...]  # operations that are left as they are, because their gradients disagreed
    blocks: int  # that are computed again
    error: float  # of the gradient on a random image, relative to its largest entry


def make_lean(
    model: Segmenter, *, again: bool = False, size: tuple[int, int] = (64, 96), at_least: int = 0
) -> Leanness:
    """Let a model hold only what the gradient of its images needs, from now on.

    Its gradient on a random image is compared with the plain one, in double precision. Operations that make it differ
    are left plain, so that the result is exact in any case; all of them, if the network cannot take such an image.

    Args:
        model: the model, which is changed.
        again: let repeated blocks keep their inputs only and compute the rest again: slower, and smaller for
            transformers, whose operations have more to remember than a sign.
        size: height and width of the random image.
        at_least: leave a model alone that holds fewer bytes than this for a pixel.
    """
    generator = torch.Generator().manual_seed(0)
    channels = max(3, model.mean.numel()) if model.mean.numel() > 1 else 3
    images = torch.rand(1, channels, *size, generator=generator).to(model.device)
    lower, model.autocast, model.operations = model.autocast, None, nullcontext()
    try:
        if held_bytes(model, images) < at_least * size[0] * size[1]:
            return Leanness(tuple(OPERATIONS), 0, 0.0)
        plain, error = _checked(model, images)
    except Exception:  # a network that cannot take such an image, whatever it may raise: nothing can be checked
        return Leanness(tuple(OPERATIONS), 0, math.nan)
    finally:
        model.autocast = lower
    operations = LeanOperations(plain)
    model.operations = operations
    return Leanness(plain, len(checkpoint_blocks(model.model, operations)) if again else 0, error)


def _checked(model: Segmenter, images: Tensor) -> tuple[tuple[str, ...], float]:
    try:
        with _in_double(model):
            return _left_plain(model, images.double(), TOLERANCE)
    except (RuntimeError, TypeError):  # a network that insists on single precision
        return _left_plain(model, images, SINGLE_TOLERANCE)


def _left_plain(model: Segmenter, images: Tensor, tolerance: float) -> tuple[tuple[str, ...], float]:
    """The fewest operations, found one at a time, without which the gradient is right; and its error then."""
    plain: tuple[str, ...] = ()
    error = _error(model, images, LeanOperations(plain))
    while error > tolerance and len(plain) < len(OPERATIONS):
        rest = [name for name in OPERATIONS if name not in plain]
        errors = {name: _error(model, images, LeanOperations((*plain, name))) for name in rest}
        best = min(rest, key=errors.__getitem__)
        plain, error = (*plain, best), errors[best]
    return plain, error


def _error(model: Segmenter, images: Tensor, operations: LeanOperations) -> float:
    """The largest error of the gradient of a random combination of logits; infinite if there is none."""
    expected = _gradient(model, images, nullcontext())
    try:
        found = _gradient(model, images, operations)
    except (RuntimeError, TypeError, AttributeError, ValueError):  # whatever an operation may break
        return torch.inf
    difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
    return torch.nan_to_num(difference, nan=torch.inf).item()


def _gradient(model: Segmenter, images: Tensor, operations: AbstractContextManager[Any]) -> Tensor:
    images = images.detach().requires_grad_()
    with operations:
        logits = model.logits(images)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (gradient,) = torch.autograd.grad(logits, images, weights.to(logits.device))
    return gradient


@contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """The model in double precision, and afterwards exactly as it was: doubles hold every float."""
    kinds = {name: value.dtype for name, value in [*model.named_parameters(), *model.named_buffers()]}
    model.double()
    try:
        yield
    finally:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data = value.data.to(kinds[name])


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
