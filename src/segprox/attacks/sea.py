"""SEA: an ensemble of fixed-epsilon attacks of which each image gets the worst."""

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.apgd import Apgd
from segprox.attacks.base import FIELDS, Cost, FixedEpsilonAttack, ProgressReporter
from segprox.attacks.objectives import ObjectiveName
from segprox.tracker import Tracker


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Sea(FixedEpsilonAttack):
    """APGD on three losses, one after the other; every image keeps the point of highest APSR.

    The worst case of the mean IoU is a choice for a whole dataset, not for an image: run the `members` one by one and
    hand their counts to `segprox.report.worst_case_miou`.
    """

    paper: ClassVar[str] = (
        "Croce, Singh, Hein, Towards Reliable Evaluation and Fast Training of Robust Semantic Segmentation Models, "
        "ECCV 2024"
    )

    objectives: Annotated[
        tuple[ObjectiveName, ...], Field(min_length=1, description="objectives: APGD is run on each of them")
    ] = (
        "masked-ce",
        "balanced-ce",
        "js",
    )
    steps: Annotated[int, Field(ge=3, description="N: points queried per member")] = 300

    @property
    def members(self) -> list[Apgd]:
        """The attacks of the ensemble."""
        return [
            Apgd(objective=objective, steps=self.steps, epsilon=self.epsilon, norm=self.norm)
            for objective in self.objectives
        ]

    def cost(self) -> Cost:
        """The cost of all members together."""
        costs = [member.cost() for member in self.members]
        return Cost(sum(cost.forwards for cost in costs), sum(cost.backwards for cost in costs))

    def run_within(self, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        """Member after member, in balls of radius `epsilon` `[B]`."""
        for member in self.members:
            member.run_within(tracker, epsilon, report)
