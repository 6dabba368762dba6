"""Operations of a frozen network with gradients of their input only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from segprox.models.lean.masks import pack_bits, select

Operation = Callable[..., Any]


def applied(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """What a function of this room makes of its arguments."""
    made: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch gives `apply` no types
    return made


class Gate(torch.autograd.Function):
    """An operation whose derivative is 1 or a constant: a bit per value tells where it is 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, apply: Operation, passes: Operation | None, otherwise: float, inplace: bool
    ) -> Tensor:
        """Apply `apply`, which works in place if `inplace`; `passes` makes the mask: of what is not 0 if left out."""
        mask = None if passes is None else passes(x)
        y: Tensor = apply(x)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(pack_bits(y.bool() if mask is None else mask))  # on CPUs far faster than a comparison
        ctx.otherwise = otherwise
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Let the gradient through where the mask says so."""
        (packed,) = ctx.saved_tensors
        return select(gradient, packed, ctx.otherwise), None, None, None, None


class Slopes(torch.autograd.Function):
    """PReLU: the identity above 0, below it a frozen slope per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slopes: Tensor) -> Tensor:
        """Values `[B, C, ...]` and slopes `[C]` or `[1]`."""
        ctx.save_for_backward(pack_bits(x > 0), slopes)
        return torch.prelu(x, slopes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient above 0, times the slope below."""
        packed, slopes = ctx.saved_tensors
        below = gradient * slopes.view(-1, *[1] * (gradient.dim() - 2))
        return select(gradient, packed).add_(select(below, ~packed)), None


class Scale(torch.autograd.Function):
    """Batch norm in eval mode: a scale and a shift per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, apply: Operation) -> Tensor:
        """Values `[B, C, ...]` and scale `[1, C, 1, ...]`; `apply` is torch's own."""
        ctx.save_for_backward(scale)
        made: Tensor = apply(x)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient times the scale."""
        return (gradient * ctx.saved_tensors[0]).to(gradient.dtype), None, None


class Shaped(torch.autograd.Function):
    """A linear operation whose gradient needs the shape of its input only: padding, averages of windows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Operation, backward: Operation) -> Tensor:
        """Apply `apply`; `backward` is torch's own, of the gradient and something of the input's shape."""
        ctx.shape, ctx.pull_back = x.shape, backward
        made: Tensor = apply(x)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Call torch's own with a tensor whose values are never read."""
        return ctx.pull_back(gradient, gradient.new_empty(ctx.shape)), None, None


class Convolution(torch.autograd.Function):
    """A convolution of frozen weights, transposed or not; its gradient is the other kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Images `[B, C, H, W]`; options are those of torch's functions, and `transposed`."""
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
        """The gradient through the convolution of the other kind."""
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


class NormOfNorm(torch.autograd.Function):
    """A layer norm of another one's result, which it makes again from the input that the other one keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, make: Operation, arguments: tuple[Any, ...]) -> Tensor:
        """Values `[..., C]` that are `make(first)`; arguments are torch's: shape, weight, bias, eps."""
        shape, weight, bias, eps = arguments
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(first, mean, rstd, weight, bias)
        ctx.make, ctx.shape = make, shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Torch's own gradient, at the values made again."""
        first, mean, rstd, weight, bias = ctx.saved_tensors
        result, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, ctx.make(first), ctx.shape, mean, rstd, weight, bias, [True, False, False]
        )
        return result, None, None, None


class MaxPool(torch.autograd.Function):
    """Max pooling that remembers where in its window each maximum was, a byte each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Tensor:
        """Images `[B, C, H, W]`; options are pairs, down and across."""
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
        """The gradient at the places of the maxima; windows may overlap."""
        (where,), (kernel, stride, padding, dilation) = ctx.saved_tensors, ctx.options
        result = gradient.new_zeros(ctx.shape)
        rows, columns = _corners(result, gradient, stride, padding)
        place = where.long()
        down = rows + (place // kernel[1]) * dilation[0]
        indices = down * ctx.shape[-1] + columns + (place % kernel[1]) * dilation[1]
        result.flatten(2).scatter_add_(2, indices.flatten(2), gradient.flatten(2))
        return result, None, None, None, None, None


class SizeOfAttention(torch.autograd.Function):
    """On the meta device: what the fused kernels of real devices keep, which the one for meta does not imitate."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
        """Something of the query's shape."""
        made = torch.empty_like(query)
        projected = [torch.empty_like(part) for part in (query, key, value)]
        ctx.save_for_backward(*projected, made, query.new_empty(*query.shape[:-1], heads))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Something of the arguments' shapes."""
        return (*(torch.empty_like(part) for part in ctx.saved_tensors[:3]), None)


def _corners(x: Tensor, y: Tensor, stride: Any, padding: Any) -> tuple[Tensor, Tensor]:
    """The first row and column of each window, which may lie outside of the image."""
    rows = torch.arange(y.shape[-2], device=x.device).mul_(stride[0]).sub_(padding[0]).view(-1, 1)
    columns = torch.arange(y.shape[-1], device=x.device).mul_(stride[1]).sub_(padding[1])
    return rows, columns
