"""What every attack is."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from segprox.best import Keep
from segprox.devices import without_tf32
from segprox.draws import Sampling, make_sampling
from segprox.errors import SegproxError
from segprox.fusion import fusing
from segprox.models.segmenter import Segmenter, restored
from segprox.naming import read_fraction
from segprox.norms import NormName, project
from segprox.problem import Problem
from segprox.query import Query
from segprox.result import AttackResult
from segprox.tracker import QueriesExhausted, Tracker

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
Family = Literal["minimal", "fixed-epsilon"]
Steps = Annotated[int, Field(ge=1, description="N: iterations")]


class Attack(ABC):
    """A frozen dataclass: its fields are hyper-parameters, `search` is the mathematics. It can be called.

    Its two kinds are `MinimalAttack` and `FixedEpsilonAttack`.

    Example:
        >>> import segprox
        >>> segprox.make_attack("alma-prox", steps=100)
        AlmaProx(norm='linf', steps=100, ...
    """

    norm: NormName
    family: ClassVar[Family]
    paper: ClassVar[str] = "no publication"  # authors, title, venue and year
    revision: ClassVar[int] = 1  # goes up whenever the algorithm changes, so that old and new records never mix
    keeps: ClassVar[Keep]  # which of the queried points is the result
    stops_at_success: ClassVar[bool] = False
    targeted_only: ClassVar[bool] = False

    @property
    def rounds_to(self) -> int:
        """How many steps of the range it searches among, as files of whole numbers have; 0: it does not round."""
        return 0

    def described(self) -> dict[str, Any]:
        """Class, revision and every field, as plain data: all of the attack that determines a result."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]  # attacks are dataclasses
        plain = {name: value.described() if isinstance(value, Attack) else value for name, value in values.items()}
        return {"class": type(self).__name__, "revision": self.revision, **plain}

    @abstractmethod
    def search(self, tracker: Tracker, report: "ProgressReporter") -> None:
        """Query points through `tracker`, which counts and keeps the best of each image; `report` each query."""

    @abstractmethod
    def cost(self) -> Cost:
        """The most that the attack asks of the model, per image."""

    def run(
        self,
        model: Segmenter,
        problem: Problem,
        callback: Callback | None = None,
        max_queries: int | None = None,
        look_every: int = 1,
        sampling: Sampling | None = None,
    ) -> AttackResult:
        """Attack the images of `problem`, each on its own, and return the best points found.

        Args:
            model: the model.
            problem: what is to be achieved.
            callback: called with a `Progress` at every iteration.
            max_queries: the most forwards plus backwards of an image, whatever the attack would like.
            look_every: how often, in queries, attacks that leave out images wait for the device to know which are done.
            sampling: how a model that answers at random is asked and judged.
        """
        if self.targeted_only and not problem.targeted:
            raise SegproxError(f"{type(self).__name__.lower()} needs a target: it has no untargeted form")
        limits = max_queries, look_every
        tracker = Tracker(model, problem, self.norm, self.keeps, self.stops_at_success, *limits, sampling)
        with suppress(QueriesExhausted), without_tf32(), fusing(model.fused):
            self.search(tracker, ProgressReporter(callback))
        return tracker.result()

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor | None = None,
        *,
        target: Tensor | int | None = None,
        ignore: Iterable[int] = (255,),
        mask: Tensor | None = None,
        protect: Tensor | None = None,
        threshold: float = 0.99,
        protect_threshold: float | None = None,
        seed: int = 0,
        callback: Callback | None = None,
        max_queries: int | None = None,
        samples: int | None = None,
        score_draws: int | None = None,
        score_share: float | None = None,
    ) -> AttackResult:
        """Attack images; the arguments are those of `segprox.attack`.

        Example:
            >>> import torch, segprox
            >>> images, labels = torch.rand(2, 3, 8, 8), torch.randint(0, 4, (2, 8, 8))
            >>> segprox.Palma(steps=5)(torch.nn.Conv2d(3, 4, kernel_size=1), images, labels).norm.shape
            torch.Size([2])
        """
        sampling = make_sampling(samples, score_draws, score_share)
        with nullcontext() if isinstance(model, Segmenter) else restored(model):
            segmenter = model if isinstance(model, Segmenter) else Segmenter(model)
            images = images.to(segmenter.device)
            problem = Problem.build(
                images, labels, target=target, ignore=ignore, mask=mask, protect=protect, threshold=threshold,
                protect_threshold=protect_threshold, seed=seed,
            )  # fmt: skip
            return self.run(segmenter, problem, callback, max_queries, sampling=sampling)


class MinimalAttack(Attack):
    """An attack that looks for the smallest perturbation that succeeds.

    Example:
        >>> import segprox
        >>> isinstance(segprox.make_attack("fmn"), segprox.MinimalAttack)
        True
    """

    family: ClassVar[Family] = "minimal"
    keeps: ClassVar[Keep] = "smallest"

    steps: int

    def cost(self) -> Cost:
        """N queries; the last leads nowhere and needs no gradient."""
        return Cost(self.steps, self.steps - 1)


class ProgressReporter:
    """Hands the iterations of an attack, and of the attacks it is made of, to a callback, numbered in one row.

    Example:
        >>> import segprox
        >>> scene, model = segprox.load_dataset("demo")[0], segprox.load_model("demo-standard")
        >>> tracker = segprox.Tracker(model, segprox.Problem.build(scene.image[None], scene.label[None]), "linf")
        >>> report = segprox.ProgressReporter(lambda progress: print(progress.iteration, progress.norm.item()))
        >>> report(tracker.query(scene.image[None]))
        1 0.0
    """

    def __init__(self, callback: Callback | None) -> None:
        self.callback, self.iteration = callback, 0

    def __call__(self, query: Query, **details: Tensor) -> None:
        """Report a query and, by name, what the attack adapts."""
        self.iteration += 1
        if self.callback is not None:
            self.callback(Progress(self.iteration, query.norm, query.apsr, details))


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class FixedEpsilonAttack(Attack):
    """An attack that does the most damage within a given distance, epsilon.

    Example:
        >>> import segprox
        >>> attack = segprox.make_attack("pgd", epsilon="2/255")
        >>> isinstance(attack, segprox.FixedEpsilonAttack), round(attack.epsilon, 4)
        (True, 0.0078)
    """

    family: ClassVar[Family] = "fixed-epsilon"
    keeps: ClassVar[Keep] = "most"

    epsilon: Annotated[
        float,
        Field(gt=0, description="epsilon: the largest perturbation, as 0.03 or 8/255"),
        BeforeValidator(read_fraction),
    ] = 8 / 255
    norm: Annotated[Literal["linf", "l2"], Field(description="how perturbations are measured")] = "linf"

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Search within the same epsilon for every image."""
        self.run_within(tracker, torch.full_like(tracker.best.norm, self.epsilon), report)

    @abstractmethod
    def run_within(self, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        """Query points within `epsilon` `[B]` of their images."""

    def project(self, points: Tensor, epsilon: Tensor, images: Tensor) -> Tensor:
        """Points `[B, C, H, W]` moved into the ball of radius `epsilon` around `images`, and into the box."""
        return (images + project(points - images, epsilon, self.norm)).clamp_(0, 1)
