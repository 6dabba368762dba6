"""One function for the proximity operator, whatever solves it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from segprox.devices import together
from segprox.errors import SegproxError
from segprox.norms import distance
from segprox.prox.exact import exact_size
from segprox.prox.splitting import accelerated_dual_forward_backward, douglas_rachford, dual_forward_backward
from segprox.prox.ternary import ternary_size
from segprox.shrinkage import threshold

SolverName = Literal["exact", "ternary", "dfb", "adfb", "dr"]

SPLITTINGS: dict[str, Callable[..., Tensor]] = {
    "dfb": dual_forward_backward,
    "adfb": accelerated_dual_forward_backward,
    "dr": douglas_rachford,
}
SOLVERS: tuple[SolverName, ...] = get_args(SolverName)


class Prox(NamedTuple):
    """The result and its size beta, one per image."""

    result: Tensor  # shaped like the point
    beta: Tensor  # [B]: the linf norm that the result is clipped to


def prox_linf_box(
    point: Tensor,
    step: Tensor,
    lower: Tensor,
    upper: Tensor,
    metric: Tensor | None = None,
    solver: SolverName = "exact",
    *,
    precision: float = 1e-5,
    max_iterations: int = 10_000,
    guess: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Prox:
    """The p in [lower, upper] of least `1/2 ||p - point||^2_metric + step * ||p||_inf`, for each image on its own.

    For a given size beta the best p is the point clipped to the box and to [-beta, beta], so only beta has to be found.
    The objective is convex in beta and its minimum lies in [0, ||clipped point||_inf] (Proposition 1).

    Args:
        point: delta, `[B, ...]`, float32 or float64.
        step: lambda, `[B]`, not negative.
        lower: lower end of the box Lambda, shaped like `point`, at most 0.
        upper: upper end of the box Lambda, shaped like `point`, at least 0.
        metric: the diagonal s of the metric, positive, shaped like `point`; ones if left out.
        solver: `exact` (to rounding; on accelerators for all images at once, without a wait), `ternary` (Algorithm 1),
            or one of the splitting methods `dfb`, `adfb` and `dr`.
        precision: of `ternary`, the absolute precision of beta; of the splitting methods, the change to stop at.
        max_iterations: of the splitting methods.
        guess: of `exact`, where beta is expected, `[B]`: in a loop, the last one. A good guess saves time and a bad one
            costs some; the result is the same to rounding.
        out: where to write the result; may be `point` itself.
        workspace: memory from `prox_workspace`, to be used again in every call of a loop.

    Example:
        >>> import torch, segprox
        >>> point = torch.tensor([[3.0, -1.0, 0.5]])
        >>> box = torch.full_like(point, 4.0)
        >>> segprox.prox_linf_box(point, torch.tensor([1.0]), -box, box)
        Prox(result=tensor([[ 2.0000, -1.0000,  0.5000]]), beta=tensor([2.]))
    """
    _check(point, step, lower, upper, metric, solver)
    if solver == "exact" and together(point):
        return _on_device(point, step, lower, upper, metric, out)
    images = range(len(point))  # solved one by one: they need different numbers of passes
    if solver in SPLITTINGS:
        for i in images:
            _refuse_nan(i, distance(point[i : i + 1], "linf").item())
        solve = partial(SPLITTINGS[solver], precision=precision, max_iterations=max_iterations)
        solved = [solve(point[i], step[i], lower[i], upper[i]) for i in images]
        result = torch.stack(solved) if solved else point.clone()
        result = result if out is None else out.copy_(result)
        return Prox(result, distance(result, "linf"))
    result = torch.empty_like(point) if out is None else out
    size, reach, *scratch = prox_workspace(point) if workspace is None else workspace
    beta = []
    for i in images:
        torch.abs(point[i], out=reach)
        clipped = torch.clamp(point[i], lower[i], upper[i], out=result[i])  # from here on point[i] may be overwritten
        torch.abs(clipped, out=size)
        weight = None if metric is None else metric[i].flatten()
        _refuse_nan(i, size.sum().item())
        flat = size.flatten(), reach.flatten(), weight, step[i].item()
        one, two = scratch[0].flatten(), scratch[1].flatten()
        if solver == "ternary":
            beta.append(ternary_size(*flat, (one, two), precision))
        else:
            beta.append(exact_size(*flat, one, None if guess is None else guess[i].item()))
        clipped.clamp_(-beta[-1], beta[-1])
    return Prox(result, point.new_tensor(beta))


def _on_device(
    point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, metric: Tensor | None, out: Tensor | None
) -> Prox:
    """All images at once, in a fixed number of passes, so that the host need not wait."""
    reach = point.abs().flatten(1)
    clipped = torch.clamp(point, lower, upper, out=torch.empty_like(point) if out is None else out)
    weight = None if metric is None else metric.flatten(1)
    beta = threshold(clipped.abs().flatten(1), reach, weight, step)
    bound = beta.view(-1, *[1] * (point.ndim - 1))
    return Prox(torch.clamp(clipped, -bound, bound, out=clipped), beta)


def prox_workspace(point: Tensor) -> Tensor:
    """Memory for `prox_linf_box` on points `[B, ...]`: fresh memory may cost more time than what is computed in it."""
    return point.new_empty(4, *point.shape[1:])


def _refuse_nan(image: int, size: float) -> None:
    if math.isnan(size):
        raise SegproxError(f"point {image} of the batch holds NaN")


def _check(
    point: Tensor, step: Tensor, lower: Tensor, upper: Tensor, metric: Tensor | None, solver: SolverName
) -> None:
    if solver not in SOLVERS:
        raise SegproxError(f"there is no solver {solver!r}; known are: {', '.join(SOLVERS)}")
    if metric is not None and solver in SPLITTINGS:
        raise SegproxError(f"solver {solver!r} works without a metric only; use 'exact' or 'ternary'")
    if point.dtype not in (torch.float32, torch.float64):
        raise SegproxError(f"point must be float32 or float64 but is {point.dtype}")
    if step.shape != point.shape[:1]:
        raise SegproxError(f"step must have shape {list(point.shape[:1])}, one per image, but has {list(step.shape)}")
    if point.device.type == "cpu" and (step < 0).any():  # elsewhere to look at values is to wait for them
        raise SegproxError(f"step must not be negative but is {step.min().item():.4g}")
    for name, value in (("lower", lower), ("upper", upper), ("metric", metric)):
        if value is not None and value.shape != point.shape:
            raise SegproxError(f"{name} must be shaped like point, {list(point.shape)}, but is {list(value.shape)}")
