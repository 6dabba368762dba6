"""What every attack is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.errors import SegproxError
from segprox.models.segmenter import Segmenter
from segprox.norms import NormName, project
from segprox.problem import Problem
from segprox.tracker import Attacked, BudgetSpent, Query, Tracker

FIELDS = ConfigDict(extra="forbid")  # of every attack: a misspelt hyper-parameter must not pass unnoticed


class Progress(NamedTuple):
    """What a callback sees of one iteration. Tensors have one entry per image.

    Example:
        >>> import segprox
        >>> scene, seen = segprox.load_dataset("demo")[0], []
        >>> model = segprox.load_model("demo-standard")
        >>> _ = segprox.attack(model, scene.image[None], scene.label[None], steps=2, callback=seen.append)
        >>> [progress.iteration for progress in seen], list(seen[0].details)
        ([1, 2], ['radius'])
    """

    iteration: int  # t, from 1: how many times the model was queried
    norm: Tensor  # of the point just queried
    apsr: Tensor  # of the point just queried
    details: Mapping[str, Tensor]  # what the attack adapts, by name


class Cost(NamedTuple):
    """The most that an attack asks of the model, per image."""

    forwards: int
    backwards: int


Callback = Callable[[Progress], None]


class Attack(ABC):
    """A frozen dataclass: its fields are hyper-parameters, `search` is the mathematics.

    Example:
        >>> import segprox
        >>> segprox.make_attack("alma-prox", steps=100)
        AlmaProx(norm='linf', steps=100, ...
    """

    norm: NormName
    family: ClassVar[Literal["minimal", "budget"]]
    paper: ClassVar[str]
    stops_at_success: ClassVar[bool] = False
    targeted_only: ClassVar[bool] = False

    @abstractmethod
    def search(self, tracker: Tracker, watch: "Watch") -> None:
        """Query points through `tracker`, which keeps the best of each image and counts; tell `watch` about each."""

    @abstractmethod
    def cost(self) -> Cost:
        """The most that the attack asks of the model, per image."""

    def run(
        self, model: Segmenter, problem: Problem, callback: Callback | None = None, budget: int | None = None
    ) -> Attacked:
        """Attack the images of `problem`, each on its own, and return the best points found.

        Args:
            model: the model.
            problem: what is to be achieved.
            callback: called with a `Progress` at every iteration.
            budget: the most forwards plus backwards that may be spent on an image, whatever the attack would like.
        """
        if self.targeted_only and not problem.targeted:
            raise SegproxError(f"{type(self).__name__.lower()} needs a target: it has no untargeted form")
        goal: Literal["smallest", "most"] = "smallest" if self.family == "minimal" else "most"
        tracker = Tracker(model, problem, self.norm, goal, self.stops_at_success, budget)
        with suppress(BudgetSpent):
            self.search(tracker, Watch(callback))
        return tracker.result()


class Watch:
    """Hands the iterations of an attack, and of the attacks it is made of, to a callback, numbered in one row."""

    def __init__(self, callback: Callback | None) -> None:
        self.callback, self.iteration = callback, 0

    def __call__(self, query: Query, **details: Tensor) -> None:
        """Report a query and, by name, what the attack adapts."""
        self.iteration += 1
        if self.callback is not None:
            self.callback(Progress(self.iteration, query.norm, query.apsr, details))


def _fraction(value: Any) -> Any:
    """Reads "8/255" as people write it."""
    try:
        return float(Fraction(value.replace(" ", ""))) if isinstance(value, str) and "/" in value else value
    except (ValueError, ZeroDivisionError):
        return value


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class BudgetAttack(Attack):
    """An attack that does the most damage within a given distance."""

    family: ClassVar[Literal["minimal", "budget"]] = "budget"

    epsilon: Annotated[
        float,
        Field(gt=0, description="epsilon: the largest perturbation, as 0.03 or 8/255"),
        BeforeValidator(_fraction),
    ] = 8 / 255
    norm: Annotated[Literal["linf", "l2"], Field(description="how perturbations are measured")] = "linf"

    def search(self, tracker: Tracker, watch: Watch) -> None:
        """Spend the same budget on every image."""
        self.spend(tracker, torch.full_like(tracker.best_norm, self.epsilon), watch)

    @abstractmethod
    def spend(self, tracker: Tracker, epsilon: Tensor, watch: Watch) -> None:
        """Query points within `epsilon` `[B]` of their images."""

    def within(self, points: Tensor, epsilon: Tensor, images: Tensor) -> Tensor:
        """Points `[B, C, H, W]` moved into the ball of radius `epsilon` around `images`, and into the box."""
        return (images + project(points - images, epsilon, self.norm)).clamp_(0, 1)
