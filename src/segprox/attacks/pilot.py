"""A few queries that tell how far an image is from giving way, so that an attack can scale its steps."""

import torch
from torch import Tensor

from segprox.attacks.base import ProgressReporter
from segprox.attacks.objectives import OBJECTIVES, gradient
from segprox.tracker import Tracker

SMALLEST, LARGEST = 1 / 255, 110 / 255  # the radii tried
UNKNOWN = 24 / 255  # of an image that none of them brings half-way: too much for most networks, enough for robust ones


def halfway_radius(tracker: Tracker, report: ProgressReporter, queries: int) -> Tensor:
    """The linf radius at which sign steps bring an image half of the way from its clean APSR to success, `[B]`.

    The radius grows by the same factor from query to query; an image that is half-way asks no more. One that never gets
    there within `queries` gets `UNKNOWN`: sign steps tell nothing about it, as happens with targets.
    """
    problem, x = tracker.problem, tracker.problem.images
    growth = (LARGEST / SMALLEST) ** (1 / max(queries - 2, 1))
    child, delta, radius = tracker.child(), torch.zeros_like(x), SMALLEST
    found = torch.full_like(tracker.best.norm, UNKNOWN)
    done, half = ~problem.attackable, torch.zeros_like(tracker.best.apsr)
    child.skipped = done
    for k in range(queries):
        if child.finished:
            break
        query = child.query((x + delta).clamp_(0, 1))
        report(query)
        if k == 0:
            half = (query.apsr + problem.threshold) / 2
        reached = ~done & (query.apsr >= half)
        found, done = torch.where(reached, query.norm, found), done | reached
        child.skipped = done
        if k == queries - 1 or bool(done.all()):
            break
        g = gradient(OBJECTIVES["masked-ce"], query, problem, 0.0)
        delta = (delta + radius / 2 * g.sign()).clamp_(-radius, radius)
        delta = (x + delta).clamp_(0, 1).sub_(x)
        radius *= growth
    return found
