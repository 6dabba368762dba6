"""What every attack is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from segprox.models.segmenter import Segmenter
from segprox.norms import NormName
from segprox.problem import Problem
from segprox.tracker import Attacked


class Progress(NamedTuple):
    """What a callback sees of one iteration. Tensors have one entry per image.

    Example:
        >>> import segprox
        >>> scene, seen = segprox.load_dataset("demo")[0], []
        >>> model = segprox.load_model("demo-standard")
        >>> _ = segprox.attack(model, scene.image[None], scene.label[None], steps=2, callback=seen.append)
        >>> [progress.iteration for progress in seen], list(seen[0].details)
        ([1, 2], ['scale', 'step_size', 'multiplier'])
    """

    iteration: int  # t, from 1
    norm: Tensor  # of the point just queried
    apsr: Tensor  # of the point just queried
    details: Mapping[str, Tensor]  # what the attack adapts, by name


Callback = Callable[[Progress], None]


class Attack(ABC):
    """A frozen dataclass: its fields are hyper-parameters, `run` is the mathematics.

    Example:
        >>> import segprox
        >>> segprox.make_attack("alma-prox", steps=100)
        AlmaProx(steps=100, ...
    """

    name: ClassVar[str]
    norm: ClassVar[NormName]
    family: ClassVar[Literal["minimal", "budget"]]
    paper: ClassVar[str]

    @abstractmethod
    def run(self, model: Segmenter, problem: Problem, callback: Callback | None = None) -> Attacked:
        """Attack the images of `problem`, each on its own, and return the best points found."""
