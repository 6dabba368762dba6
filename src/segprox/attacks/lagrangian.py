"""What the augmented-Lagrangian attacks share: which constraints count, and how hard each is pushed."""

from typing import Literal

import torch
from torch import Tensor

from segprox.problem import Problem

Masking = Literal["none", "fixed", "decay"]
PENALTY_MAX = 1e12  # keeps rho^2 y^3 within float32 however long an attack runs


class ConstraintMask:
    """The paper's constraint masking: discards the largest constraints, which are the least likely to be satisfied.

    The discarded share of the counted pixels grows linearly to 1 - nu (`decay`) or is 1 - nu throughout (`fixed`), less
    a `reserve`: a share of the pixels that are kept though they need not be satisfied, at most half of those.
    """

    def __init__(self, problem: Problem, kind: Masking, steps: int, reserve: float = 0.0) -> None:
        self.mask, self.kind, self.steps = problem.mask.to(problem.images.dtype), kind, steps
        regions = [(problem.attacked, problem.threshold)]
        if problem.protected is not None:
            regions.append((problem.protected, problem.protect_threshold))
        self.regions = [_Region(region, threshold, reserve, self.mask.dtype) for region, threshold in regions]

    def __call__(self, d: Tensor, t: int) -> Tensor:
        """m~(t), `[B, H, W]`: 1 where a constraint is kept, 0 elsewhere."""
        if self.kind == "none" or all(region.most == 0 for region in self.regions):
            return self.mask
        share = 1.0 if self.kind == "fixed" else (t - 1) / max(self.steps - 1, 1)
        first, *others = (region.kept(d, share) for region in self.regions)
        return sum(others, start=first)


class _Region:
    """Pixels of which a share must be satisfied."""

    def __init__(self, mask: Tensor, threshold: float, reserve: float, dtype: torch.dtype) -> None:
        self.mask, count = mask.to(dtype), mask.flatten(1).sum(1)
        self.outside = torch.where(mask, 0.0, -torch.inf)
        spare = ((1 - threshold) * count + 1e-9).floor()  # pixels that need not be satisfied
        self.spare = torch.maximum(spare - reserve * count, spare / 2).floor() if reserve else spare
        self.most = int(self.spare.max()) if len(mask) else 0

    def kept(self, d: Tensor, share: float) -> Tensor:
        """1 where a constraint is kept when a share of those that are to spare is discarded, `[B, H, W]`."""
        discarded = (self.spare * share).long()
        largest = (d + self.outside).flatten(1).topk(self.most + 1, dim=1).values
        threshold = largest.gather(1, discarded.unsqueeze(1))  # xi: the largest one that is kept
        return torch.le(d, threshold.unsqueeze(2), out=torch.empty_like(d)).mul_(self.mask)


class RhoRule:
    """Every M steps, rho grows where a kept constraint was neither satisfied lately nor improved (lines 15 to 21)."""

    def __init__(self, start: float, growth: float, every: int, improvement: float, like: Tensor) -> None:
        self.growth, self.every, self.improvement = growth, every, improvement
        self.value = torch.full_like(like, start)
        self.least = torch.full_like(like, torch.inf)  # of d since the last look
        self.before: Tensor | None = None  # d(t - M); d(1) for the first look, as there is no d(0)

    def update(self, t: int, d: Tensor, kept: Tensor) -> None:
        """Take in the constraints of step t."""
        torch.minimum(self.least, d, out=self.least)
        if self.before is None:
            self.before = d
        if t % self.every:
            return
        stalled = (kept > 0) & (self.least > 0) & (d > self.improvement * self.before)
        self.value = torch.where(stalled, self.value * self.growth, self.value).clamp_(max=PENALTY_MAX)
        self.least.fill_(torch.inf)
        self.before = d
