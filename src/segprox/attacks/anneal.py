"""Anneal: the APSR itself, smoothed, climbed in a ball, by steps and with a smoothing that get ever smaller."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Cost, FixedEpsilonAttack, ProgressReporter
from segprox.attacks.objectives import OBJECTIVES, ObjectiveName, gradient
from segprox.attacks.schedules import cosine, share
from segprox.norms import scale, steepest, unit
from segprox.tracker import Tracker

LAST_STEP = 0.05  # over the radius
REHEARSAL = 0.5  # of a stage: after that share of its steps the ball is epsilon's


class Stage(NamedTuple):
    """A climb that begins coarse and ends fine."""

    objective: ObjectiveName
    start: Literal["image", "last"]  # or the best point of the stage before
    radius: float  # the first one, over epsilon
    step: float  # the first one, over the radius


FROM_IMAGE = Stage("smooth-apsr", "image", radius=2.0, step=2.0)
IN_TWO = (
    Stage("js", "image", radius=2.0, step=2.0),  # gives up the hard pixels early: on some images that leads further
    Stage("smooth-apsr", "last", radius=1.0, step=1.0),
)
STAGES = {200: (*IN_TWO, FROM_IMAGE), 60: IN_TWO, 1: (FROM_IMAGE,)}  # by the steps that they take at least


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Anneal(FixedEpsilonAttack):
    """PGD with momentum that climbs the APSR itself, smoothed; everything begins coarse and ends fine.

    Over a stage the width of the smoothing, the length of steps and, in its first half, the radius of the ball fall.
    With less than 60 steps there is one stage. Else the first climbs the Jensen-Shannon divergence, and the second goes
    on from its best point; from 200 steps on a third begins at the image. Points beyond epsilon do not count.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> problem = segprox.Problem.build(scene.image[None], scene.label[None])
        >>> found = segprox.Anneal(steps=20, epsilon="2/255").run(segprox.load_model("demo-standard"), problem)
        >>> bool(found.apsr > 0.3)
        True
    """

    paper: ClassVar[str] = "segprox, see docs/why/anneal.md"

    steps: Annotated[int, Field(ge=1, description="N: points queried, over all stages")] = 300
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the last direction that is kept")] = 0.75

    def cost(self) -> Cost:
        """N queries; the last of a stage needs no gradient."""
        return Cost(self.steps, self.steps - len(self._stages()))

    def _stages(self) -> list[tuple[int, Stage]]:
        """The stages, and how many points each queries."""
        stages = next(stages for least, stages in STAGES.items() if self.steps >= least)
        ends = [self.steps * i // len(stages) for i in range(len(stages) + 1)]
        return [(end - begin, stage) for begin, end, stage in zip(ends, ends[1:], stages)]

    def run_within(self, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        """Stage after stage, in balls that end at radius `epsilon` `[B]`."""
        last = tracker.problem.images
        for steps, stage in self._stages():
            done = tracker.best.success if tracker.stop_at_success else None
            child = tracker.child("most", skipped=done, stop_at_success=tracker.stop_at_success)
            start = tracker.problem.images if stage.start == "image" else last
            self._ascend(start, child, stage, steps, epsilon, report)
            last = child.best.images

    def _ascend(
        self, x: Tensor, tracker: Tracker, stage: Stage, steps: int, epsilon: Tensor, report: ProgressReporter
    ) -> None:
        problem, objective = tracker.problem, OBJECTIVES[stage.objective]
        direction = torch.zeros_like(x)
        radius = epsilon  # of the ball in which x lies: it starts in epsilon's
        for t in range(1, steps + 1):
            if tracker.finished:
                return
            query = (tracker if radius is epsilon else _aside(tracker)).query(x)
            report(query, radius=radius)
            if t == steps:
                return
            g = gradient(objective, query, problem, share(t, steps))
            direction = self.momentum * direction + unit(g, "l1")
            radius = self._radius(stage, t + 1, steps, epsilon)
            step = cosine(stage.step, LAST_STEP, t, steps) * radius
            x = self.project(x + scale(steepest(direction, self.norm), step), radius, problem.images)

    def _radius(self, stage: Stage, t: int, steps: int, epsilon: Tensor) -> Tensor:
        """The radius of the t-th point's ball, `[B]`: linear from the stage's first radius to `epsilon`."""
        ahead = 1 - share(t, steps) / REHEARSAL
        return (1 + (stage.radius - 1) * ahead) * epsilon if ahead > 0 and stage.radius > 1 else epsilon


def _aside(tracker: Tracker) -> Tracker:
    """Asks on behalf of `tracker` about points that cannot be a result."""
    return tracker.child("most", skipped=tracker.best.success if tracker.stop_at_success else None, share=False)
