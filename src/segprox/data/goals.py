"""What an attack is to achieve on a dataset: every pixel wrong or on target, here and not there."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.data.base import Dataset, Sample
from segprox.data.files import read_index
from segprox.data.targets import Target, class_index, fitting, is_any, make_target
from segprox.errors import SegproxError
from segprox.naming import Name, checked
from segprox.text import is_folder

UNTARGETED = "untargeted"
Text = Annotated[str, Field(min_length=1)]  # where it is given
Share = Annotated[float | None, Field(gt=0, le=1)]
Region = Callable[[Sample], Tensor]  # which pixels belong to it, bool [H, W]


class Aim(NamedTuple):
    """What a goal means for one image, as `Problem.build` takes it."""

    target: Tensor | None  # labels to be seen, int64 [H, W]; None: anything but the own ones
    mask: Tensor | None  # the pixels that count, bool [H, W]; None: all
    protect: Tensor | None  # those among them that shall be what they are, bool [H, W]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class GoalOptions:
    """What may follow the ? of a goal."""

    only: Text = ""  # the region that is attacked; what is neither attacked nor protected does not count
    protect: Text = ""  # the region that shall be what it is
    share: Share = None  # of the attacked pixels, for a success
    protect_share: Share = None  # of the protected pixels, for a success
    split: Text = ""  # of the dataset whose labels a majority is made from


class Goal(NamedTuple):
    """What an attack is to achieve; call it with a labelled sample to get an `Aim`.

    Example:
        >>> import segprox
        >>> scenes = segprox.load_dataset("demo")
        >>> goal = make_goal("untargeted?only=car&protect=rest", scenes)
        >>> target, mask, protect = goal(scenes[0])
        >>> target, mask.all().item(), bool((protect == (scenes[0].label != scenes.classes.index("car"))).all())
        (None, True, True)
    """

    text: str
    target: Target | None
    only: Region | None  # None: everything that is not protected
    protect: Region | None  # None: nothing
    share: float | None
    protect_share: float | None
    uses_labels: bool  # whether it takes the sample's labels to say what is wanted
    ignore: tuple[int, ...]

    def __call__(self, sample: Sample) -> Aim:
        """What is wanted of an image."""
        target = None if self.target is None else self.target(sample)
        if self.only is None and self.protect is None:
            return Aim(target, None, None)
        everything = torch.ones_like(sample.label, dtype=torch.bool)
        protect = ~everything if self.protect is None else self.protect(sample)
        attacked = (everything if self.only is None else self.only(sample)) & ~protect
        if not (attacked & ~is_any(sample.label, self.ignore)).any():
            raise SegproxError(f"image {sample.name} has no pixel that {self.text} attacks")
        return Aim(target, attacked | protect, None if self.protect is None else protect)


def make_goal(text: str, dataset: Dataset, split: Callable[[str], Dataset] | None = None) -> Goal:
    """The goal of that name.

    Args:
        text: `untargeted` or a target, as `make_target` takes it, and options after a `?`, joined by `&`:
            `only=REGION`: attack these pixels; the others do not count, unless they are protected;
            `protect=REGION`: these pixels shall be what their labels say; `protect=rest` protects all that is not
            attacked, `protect=none` nothing;
            `share=0.9`, `protect_share=0.99`: what makes a success, instead of the threshold of the run;
            `split=train`: make `majority` or `smooth` from the labels of that split.
            A region is one class or several, joined by commas, or `png:FILE.png` or `png:FOLDER`, a map that is not 0
            there. `erase:CLASS` attacks the pixels of CLASS and protects the rest unless told otherwise.
        dataset: where classes and labels are from.
        split: opens another split of the dataset.
    """
    name = text.partition("?")[0]
    options = checked(GoalOptions, f"the goal {name}", **Name.parse(text).options)
    erased = name.removeprefix("erase:") if name.startswith("erase:") else ""
    only, protect = options.only or erased, options.protect or ("rest" if erased else "none")
    if protect == "rest" and not only:
        raise SegproxError(f"{text} protects the rest, so it must say what is attacked: add only=CLASS")
    if options.split and name not in ("majority", "smooth"):
        raise SegproxError(f"{text} names a split, but only majority and smooth are made from one")
    if options.split and split is None:
        raise SegproxError(f"{text} names a split, but the dataset has no name that it could be found by")
    source = split(options.split) if options.split and split else dataset
    target = None if name == UNTARGETED else make_target(name, source)
    attacked = _region(only, dataset) if only else None
    return Goal(
        text, target, attacked, _protected(protect, attacked, dataset), options.share, options.protect_share,
        uses_labels=bool(only or options.protect or (target and target.uses_labels)), ignore=dataset.ignore,
    )  # fmt: skip


def _protected(text: str, attacked: Region | None, dataset: Dataset) -> Region | None:
    if text == "none":
        return None
    if text == "rest" and attacked is not None:
        return lambda sample: ~attacked(sample)
    return _region(text, dataset)


def _region(text: str, dataset: Dataset) -> Region:
    if text.startswith("png:"):
        return _drawn(Path(text.removeprefix("png:")))
    wanted = [class_index(name, dataset.classes) for name in text.split(",")]
    return lambda sample: is_any(sample.label, wanted)


def _drawn(path: Path) -> Region:
    def region(sample: Sample) -> Tensor:
        file = path / f"{sample.name}.png" if is_folder(path) else path
        return fitting(torch.from_numpy(read_index(file)), sample, f"region {file}") != 0

    return region
