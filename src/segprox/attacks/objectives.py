"""What fixed-epsilon attacks maximise: a loss for every pixel, and which pixels it is about.

An objective takes a query, the problem and the progress of the attack, from 0 to 1, and returns a `Loss` whose values
are to grow, targeted or not. A pixel is pending while it is not yet as the attack wants it.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from segprox.losses import Loss, cross_entropy, dlr, houdini, js_divergence, margin, tsallis
from segprox.naming import Choices
from segprox.problem import Problem
from segprox.query import Query
from segprox.registry import Registry

SHARPEST = 0.03  # the width of the smoothed step in the end, over the mean size of margins; 1 to begin with

Objective = Callable[[Query, Problem, float], Loss]


def _away_from_label(loss: Callable[[Tensor, Tensor], Loss]) -> Objective:
    """The loss itself where a pixel shall become anything but its label, its negative where it shall become it."""

    def objective(query: Query, problem: Problem, progress: float) -> Loss:
        return _signed(loss(query.logits, problem.labels), problem)

    return objective


def difference_of_logits(query: Query, problem: Problem, progress: float) -> Loss:
    """Minus the margin by which the label leads (or the target trails)."""
    values, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
    return Loss(-values, lambda weights: pullback(-weights))


def difference_of_logits_ratio(query: Query, problem: Problem, progress: float) -> Loss:
    """DLR (Croce, Hein, 2020)."""
    return dlr(query.logits, problem.labels, targeted=problem.wanted)


def segpgd(query: Query, problem: Problem, progress: float) -> Loss:
    """SegPGD (Gu et al., 2022): pending pixels count 1 - lambda, the others lambda, which grows from 0 to 1/2."""
    satisfied, share = query.satisfied.to(query.logits.dtype), progress / 2
    return _weighted(satisfied * share + (1 - satisfied) * (1 - share), query, problem)


def cospgd(query: Query, problem: Problem, progress: float) -> Loss:
    """CosPGD (Agnihotri et al., 2024): pixels count by the cosine of softmax and label, 1 minus that if targeted."""
    p = torch.softmax(query.logits, 1)
    cosine = p.gather(1, problem.labels.unsqueeze(1)).squeeze(1) / torch.linalg.vector_norm(p, dim=1)
    if isinstance(problem.wanted, Tensor):
        return _weighted(torch.where(problem.wanted, 1 - cosine, cosine), query, problem)
    return _weighted(1 - cosine if problem.wanted else cosine, query, problem)


def masked_cross_entropy(query: Query, problem: Problem, progress: float) -> Loss:
    """Pending pixels only (Croce, Singh, Hein, 2024)."""
    return _weighted((~query.satisfied).to(query.logits.dtype), query, problem)


def balanced_masked_cross_entropy(query: Query, problem: Problem, progress: float) -> Loss:
    """Pending pixels only, each class of an image counting the same (Croce, Singh, Hein, 2024).

    They divide by the number of a class's pixels in the training set, which an attack does not have; here it is the
    number in the image.
    """
    labels, counted = problem.labels.flatten(1), problem.mask.flatten(1).long()
    counts = labels.new_zeros(len(problem), query.logits.shape[1]).scatter_add_(1, labels, counted)
    counts = counts.clamp_(min=1).gather(1, labels).view_as(problem.labels)
    return _weighted(~query.satisfied / counts.to(query.logits.dtype), query, problem)


def tsallis_schedule(query: Query, problem: Problem, progress: float) -> Loss:
    """TsallisPGD (2026): q grows from -2 to 1 over the attack."""
    return _signed(tsallis(query.logits, problem.labels, 3 * progress - 2), problem)


def smoothed_success(query: Query, problem: Problem, progress: float) -> Loss:
    """What the APSR counts, the step at the boundary replaced by a sigmoid of the margin that gets ever steeper.

    Its width is measured by the mean size of the margins at this query, so that logits of any scale lead to the same
    attack. Wide, it pushes all pixels alike; narrow, those near the boundary, on either side of it.
    """
    d, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
    known, tiny = problem.mean((~d.isnan()).to(d.dtype)), torch.finfo(d.dtype).tiny
    size = problem.mean(d.nan_to_num(nan=0.0).abs()) / known.clamp(min=tiny)
    width = (SHARPEST**progress * size).clamp(min=tiny).view(-1, 1, 1)
    values = (d / -width).sigmoid_()
    slope = values * (1 - values) / width
    return Loss(values, lambda weights: pullback(-slope * weights))


OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    {
        "ce": _away_from_label(cross_entropy),
        "dl": difference_of_logits,
        "dlr": difference_of_logits_ratio,
        "segpgd": segpgd,
        "cospgd": cospgd,
        "masked-ce": masked_cross_entropy,
        "balanced-ce": balanced_masked_cross_entropy,
        "js": _away_from_label(js_divergence),
        "tsallis": tsallis_schedule,
        "houdini": _away_from_label(houdini),
        "smooth-apsr": smoothed_success,
    },
)


def _known(name: str) -> str:
    OBJECTIVES.find(name)
    return name


ObjectiveName = Annotated[str, AfterValidator(_known), Choices(OBJECTIVES)]


def register_objective(name: str) -> Callable[[Objective], Objective]:
    """A decorator that gives an objective a name, which every attack with a field `objective` then knows.

    Example:
        >>> import segprox
        >>> from segprox.losses import margin
        >>> @segprox.register_objective("minus-margin")
        ... def minus_margin(query, problem, progress):
        ...     values, pullback = margin(query.logits, problem.labels, targeted=problem.wanted)
        ...     return segprox.Loss(-values, lambda weights: pullback(-weights))
        >>> segprox.make_attack("pgd", objective="minus-margin").objective
        'minus-margin'
    """

    def decorate(objective: Objective) -> Objective:
        OBJECTIVES.register(name, objective, objective)
        return objective

    return decorate


def gradient(objective: Objective, query: Query, problem: Problem, progress: float) -> Tensor:
    """The gradient of the objective's mean over counted pixels with respect to the images, `[B, C, H, W]`."""
    pullback = objective(query, problem, progress).pullback
    return query.gradient(pullback(problem.shares(query.logits.dtype)).nan_to_num_(0.0, 0.0, 0.0))


def _signed(loss: Loss, problem: Problem) -> Loss:
    if problem.wanted is False:
        return loss
    sign, (values, pullback) = 1.0 - 2.0 * problem.wanted, loss
    return Loss(sign * values, lambda weights: pullback(sign * weights))


def _weighted(pixels: Tensor, query: Query, problem: Problem) -> Loss:
    """Cross-entropy times a factor per pixel, which is taken as constant."""
    values, pullback = _signed(cross_entropy(query.logits, problem.labels), problem)
    return Loss(pixels * values, lambda weights: pullback(pixels * weights))
