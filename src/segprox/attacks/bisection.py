"""From a fixed-epsilon attack to a minimal one: bisection on the radius."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Cost, FixedEpsilonAttack, MinimalAttack, ProgressReporter
from segprox.norms import NormName, distance
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Bisection(MinimalAttack):
    """The smallest radius at which `attack` succeeds, each image with its own interval.

    For linf the first radius is 1, the whole range of an image, and each round halves the interval: after R rounds the
    radius is known to 2^(1 - R). (The paper says 2^-13 for 13 rounds; as its code, this one reaches 2^-12.) For l2 the
    first radius is the distance to the farthest corner of the box. An image that is unbroken at the first radius
    goes on with larger ones, which cannot leave the box but make larger steps.

    A round queries many points, and its success need not lie on the surface of its ball. `keep` says which success is
    returned: the smallest of all rounds, or what the paper's code returns and measures, which is never smaller. The
    points queried are the same.
    """

    paper: ClassVar[str] = "Rony et al., Proximal Splitting Adversarial Attack for Semantic Segmentation, CVPR 2023"

    attack: Annotated[FixedEpsilonAttack, Field(description="the fixed-epsilon attack, whose epsilon is not used")]
    rounds: Annotated[int, Field(ge=1, description="number of radii that are tried")] = 13
    stop_early: Annotated[
        bool, Field(description="end an image's round at its first success: the same radii for fewer queries")
    ] = False
    keep: Annotated[
        Literal["smallest-point", "smallest-radius"],
        Field(
            description="which success to return: the one of smallest norm, or, as the paper's code does, the one of "
            "highest APSR in the smallest radius that succeeded"
        ),
    ] = "smallest-point"

    @property
    def norm(self) -> NormName:  # type: ignore[override]  # that of the attack within
        """How perturbations are measured."""
        return self.attack.norm

    def cost(self) -> Cost:
        """The cost of all rounds together."""
        forwards, backwards = self.attack.cost()
        return Cost(self.rounds * forwards, self.rounds * backwards)

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Round after round."""
        low = torch.zeros_like(tracker.best.norm)
        high = 2 * self._farthest(tracker.problem.images)
        for _ in range(self.rounds):
            finished = tracker.best.success & (tracker.best.norm == 0)  # wrong without any perturbation
            hopeless = ~tracker.problem.attackable
            middle = (low + high) / 2
            child = tracker.child(
                "most",
                skipped=finished | hopeless,
                stop_at_success=self.stop_early,
                radius=middle if self.keep == "smallest-radius" else None,
            )
            if child.finished:
                return
            self.attack.run_within(child, middle, report)
            low, high = torch.where(child.best.success, low, middle), torch.where(child.best.success, middle, high)

    def _farthest(self, images: Tensor) -> Tensor:
        corner = torch.maximum(images, 1 - images)
        return torch.ones_like(images[:, 0, 0, 0]) if self.norm == "linf" else distance(corner, self.norm)
