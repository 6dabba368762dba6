"""The best point of each image among those at which the model was queried."""

from typing import Literal

import torch
from torch import Tensor

from segprox.devices import finest
from segprox.fusion import fusible
from segprox.problem import Problem

Keep = Literal["smallest", "most"]


class BestPoints:
    """Keeps each image's best queried point; tensors have one entry per image.

    Args:
        problem: what is to be achieved.
        keep: what is best. `smallest`: among successes the point of smallest norm, before the first success the one of
            highest APSR. `most`: the point of highest APSR throughout.
    """

    def __init__(self, problem: Problem, keep: Keep) -> None:
        self.keep = keep
        self.images = problem.images.clone()
        self.norm = problem.images.new_zeros(len(problem))
        self.apsr = torch.full((len(problem),), -1.0, dtype=finest(problem.images.device), device=problem.images.device)
        self.success = torch.zeros(len(problem), dtype=torch.bool, device=problem.images.device)
        self.seen = False  # whether a point of every image was queried
        self._radius = torch.zeros_like(self.norm)  # of the ball that the best success was found in, if it had one

    @property
    def unseen(self) -> Tensor:
        """The images of which no point was queried yet, bool."""
        return self.apsr < 0

    def improved_by(self, norm: Tensor, apsr: Tensor, radius: Tensor | None) -> Tensor:
        """Which successes at this norm and APSR would be the best so far, bool.

        Where a `radius` is given, that of the ball they were searched in, `smallest` judges by it: the success of
        highest APSR in the smallest ball is best.
        """
        if self.keep == "most":
            return ~self.success | (apsr > self.apsr)
        if radius is None:
            return ~self.success | (norm <= self.norm)  # of equally small ones, the last
        return (
            ~self.success
            | (radius < self._radius)
            | ((radius == self._radius) & (apsr >= self.apsr))  # of equals, the last, as the paper's code
        )

    def update(
        self, points: Tensor, norm: Tensor, apsr: Tensor, success: Tensor, asked: Tensor | None, radius: Tensor | None
    ) -> None:
        """Take over the points `[B, C, H, W]` of the `asked` images (None: all) that are better than what is known."""
        self.seen = self.seen or asked is None
        better = self._take(norm, apsr, success, asked, radius)
        torch.where(better.view(-1, 1, 1, 1), points, self.images, out=self.images)

    @fusible
    def _take(self, norm: Tensor, apsr: Tensor, success: Tensor, asked: Tensor | None, radius: Tensor | None) -> Tensor:
        """Take over what is known of better points; returns whose are, bool `[B]`."""
        better = apsr > self.apsr
        if self.keep == "smallest":
            # before the first success the highest APSR counts, then the norm
            better = torch.where(success, self.improved_by(norm, apsr, radius), better & ~self.success)
        better = better if asked is None else better & asked
        self.norm = torch.where(better, norm, self.norm)
        self.apsr = torch.where(better, apsr, self.apsr)
        if radius is not None:
            self._radius = torch.where(better, radius, self._radius)
        self.success = self.success | success
        return better
