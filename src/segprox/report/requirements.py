"""What a model is required to withstand, and whether its records show that it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from segprox.errors import SegproxError
from segprox.naming import read_fraction
from segprox.report.findings import smallest
from segprox.report.groups import Group
from segprox.report.metrics import pixel_accuracy
from segprox.report.results import RunResults
from segprox.report.statistics import RESAMPLES
from segprox.report.tables import Column, Table
from segprox.sizes import Interval, wilson
from segprox.text import read_text, read_yaml

Outcome = Literal["pass", "fail", "too few images"]
FIELDS = ConfigDict(extra="forbid")


Size = Annotated[float, Field(gt=0), BeforeValidator(read_fraction)]
Share = Annotated[float, Field(gt=0, le=1)]


@checked_dataclass(frozen=True, kw_only=True, config=FIELDS)
class Withstand:
    """A share of the images must not be broken, by any attack, with a perturbation of this size."""

    withstand: Size
    share: Share = 0.9


@checked_dataclass(frozen=True, kw_only=True, config=FIELDS)
class Accuracy:
    """So much of the pixels must be right under the strongest attack with perturbations no larger than epsilon."""

    accuracy: Share
    epsilon: Size


@checked_dataclass(frozen=True, kw_only=True, config=FIELDS)
class ClassIou:
    """So large must the IoU of a class be under the strongest attack with perturbations no larger than epsilon."""

    of_class: Annotated[str, Field(alias="class")]
    iou: Share
    epsilon: Size


Requirement = Withstand | Accuracy | ClassIou


@dataclass(frozen=True)
class Judged:
    """A requirement on one model, dataset and goal, and what was measured."""

    requirement: str
    where: str
    required: float
    measured: float
    interval: Interval  # 95 %
    images: int

    @property
    def outcome(self) -> Outcome:
        """Pass or fail if the whole interval says so; else there are too few images to tell."""
        if self.interval.low >= self.required:
            return "pass"
        return "fail" if self.interval.high < self.required else "too few images"


def read_requirements(content: Any, source: str = "the requirements") -> list[Requirement]:
    """Requirements from plain data, a list of mappings; what does not fit is refused.

    Example:
        >>> read_requirements([{"withstand": "2/255", "share": 0.9}])
        [Withstand(withstand=0.00784..., share=0.9)]
    """
    if not isinstance(content, list) or not content:
        raise SegproxError(f"{source} must be a list, such as [{{withstand: 2/255, share: 0.9}}]")
    return [_read(entry, source) for entry in content]


def _read(entry: Any, source: str) -> Requirement:
    kinds: dict[str, type[Requirement]] = {"withstand": Withstand, "accuracy": Accuracy, "iou": ClassIou}
    kind = next((cls for name, cls in kinds.items() if isinstance(entry, dict) and name in entry), None)
    if kind is None:
        raise SegproxError(f"{source}: {entry!r} has none of {', '.join(kinds)}")
    try:
        made: Requirement = TypeAdapter(kind).validate_python(entry)
    except ValidationError as error:
        first = error.errors()[0]
        raise SegproxError(f"{source}: {'.'.join(map(str, first['loc']))} of {entry!r}: {first['msg']}") from None
    return made


def load_requirements(path: Path) -> list[Requirement]:
    """Requirements from a YAML file."""
    return read_requirements(read_yaml(read_text(path), str(path)), str(path))


def judge_all(requirements: Sequence[Requirement], groups: Sequence[Group]) -> list[Judged]:
    """Every requirement on every group."""
    return [judge(requirement, group) for group in groups for requirement in requirements]


def judge(requirement: Requirement, group: Group) -> Judged:
    """Whether the runs of a group meet a requirement."""
    if isinstance(requirement, Withstand):
        return _judge_share(requirement, group)
    epsilon = requirement.epsilon
    at = f"at {group.unit.text(epsilon)}"
    if isinstance(requirement, Accuracy):
        found = quality_at(group, epsilon, lambda counts: pixel_accuracy(*counts))
        return Judged(f"pixel accuracy {at}", group.title, requirement.accuracy, *found)
    name = requirement.of_class
    classes = next(iter(group.runs.values())).classes
    if name not in classes:
        raise SegproxError(f"there is no class {name!r} in {group.title}; the classes are: {', '.join(classes)}")
    index = classes.index(name)

    def iou(counts: Any) -> float:
        tp, fp, fn = (part[..., index].sum() for part in counts)
        return float(tp / (tp + fp + fn)) if tp + fp + fn else nan

    return Judged(f"IoU of {name} {at}", group.title, requirement.iou, *quality_at(group, epsilon, iou))


def _judge_share(requirement: Withstand, group: Group) -> Judged:
    norms = np.array([*smallest(group.runs.values()).values()])
    held = int((norms > requirement.withstand).sum())
    share = held / len(norms) if len(norms) else nan
    what = f"images that withstand {group.unit.text(requirement.withstand)}"
    return Judged(what, group.title, requirement.share, share, wilson(held, len(norms)), len(norms))


def quality_at(group: Group, epsilon: float, measure: Callable[[Any], float]) -> tuple[float, Interval, int]:
    """What the run that leaves least leaves within epsilon, its 95 % interval, and of how many images.

    The measure is of counts `[3, images, classes]`; the interval is of images drawn with replacement.
    """
    left = {label: measure(_counts_at(run, epsilon)) for label, run in group.attacked.items()}
    if not left:
        return nan, Interval(nan, nan), 0
    worst = group.runs[min(left, key=lambda label: left[label])]
    counts, generator = _counts_at(worst, epsilon), np.random.default_rng(0)
    size = counts.shape[1]
    drawn = [measure(counts[:, generator.integers(size, size=size)]) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return min(left.values()), Interval(float(low), float(high)), size


def _counts_at(run: RunResults, epsilon: float) -> Any:
    """Counts `[3, images, classes]` where an attacker has every perturbation that was found and is no larger."""
    clean, attacked = np.stack(run.counts(clean=True)), np.stack(run.counts())
    return np.where((run.sizes <= epsilon)[None, :, None], attacked, clean)


def conclude(judged: Sequence[Judged]) -> tuple[Outcome, str]:
    """All requirements together, in a word and in a sentence."""
    outcomes, total = [entry.outcome for entry in judged], len(judged)
    failed, unknown = outcomes.count("fail"), outcomes.count("too few images")
    open_ = f"{unknown} of {total} cannot be decided with so few images"
    if failed:
        return "fail", f"{failed} of {total} requirements failed{f'; {open_}' if unknown else ''}."
    if unknown:
        return "too few images", f"{open_}; no requirement failed."
    return "pass", f"All {total} requirements are met." if total > 1 else "The requirement is met."


def requirement_table(judged: Sequence[Judged]) -> Table:
    """A line for each requirement."""
    columns = (
        Column("on"), Column("requirement"), Column("at least", ".1%"), Column("measured", ".1%"), Column("low", ".1%"),
        Column("high", ".1%"), Column("images", "d"), Column("outcome"),
    )  # fmt: skip
    rows = tuple((j.where, j.requirement, j.required, j.measured, *j.interval, j.images, j.outcome) for j in judged)
    note = "low and high: 95 % interval. An interval on both sides of what is required needs more images to decide."
    return Table("requirements", "Requirements", columns, rows, (note,), keys=1)
