"""What to run: one model, dataset, attack and goal at a time, and grids of them in a YAML file."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from segprox.attacks import Attack, make_attack
from segprox.errors import SegproxError
from segprox.run.record import digest

FIELDS = ConfigDict(extra="forbid")
UNTARGETED = "untargeted"
SaveFormat = Literal["float", "png", "preview"]


def _entry(value: Any) -> Any:
    """Reads a bare attack name."""
    return {"name": value} if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class AttackEntry:
    """An attack by name with the fields that differ from its defaults."""

    name: str
    set: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> Attack:
        """The attack."""
        return make_attack(self.name, **self.set)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{field}={value}" for field, value in self.set.items())])


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Settings:
    """What all runs of a grid share."""

    limit: Annotated[int | None, Field(ge=1, description="images per run; all if left out")] = None
    threshold: Annotated[float, Field(gt=0, le=1, description="share of pixels that makes a success")] = 0.99
    seed: Annotated[int, Field(description="of random starts")] = 0
    max_queries: Annotated[int | None, Field(ge=1, description="most forwards plus backwards per image")] = None
    save: Annotated[tuple[SaveFormat, ...], Field(description="what to keep of perturbed images")] = ("preview",)
    model_options: Annotated[dict[str, Any], Field(description="options of every model, such as device")] = (
        dataclasses.field(default_factory=dict)
    )


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Run:
    """One model, one dataset, one attack, one goal."""

    model: str
    dataset: str
    attack: AttackEntry
    goal: str = UNTARGETED
    settings: Settings = dataclasses.field(default_factory=Settings)

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.model} | {self.dataset} | {self.attack} | {self.goal}"

    @property
    def folder(self) -> str:
        """The name of its folder: readable, and different for different runs.

        How many images, and which are kept, does not make it another run.
        """
        parts = [self.model, self.dataset, self.attack.name, self.goal]
        readable = "+".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-")[-40:] for part in parts)
        varied = {**dataclasses.asdict(self), "settings": dataclasses.asdict(self.settings) | {"limit": 0, "save": 0}}
        return f"{readable}+{digest(varied)[:8]}"


Entries = Annotated[tuple[Annotated[AttackEntry, BeforeValidator(_entry)], ...], Field(min_length=1)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Grid:
    """Every combination of these."""

    models: Names
    datasets: Names
    attacks: Entries
    goals: Names = (UNTARGETED,)

    def runs(self, settings: Settings) -> Iterator[Run]:
        """One after the other, all attacks of a model before the next model."""
        for model, dataset, goal, attack in itertools.product(self.models, self.datasets, self.goals, self.attacks):
            yield Run(model=model, dataset=dataset, attack=attack, goal=goal, settings=settings)


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Spec:
    """Grids, and the settings of all of them.

    Example:
        >>> spec = Spec.read_text("grids: [{models: [demo-robust], datasets: [demo], attacks: [fmn, {name: pgd}]}]")
        >>> [run.title for run in spec.runs()]
        ['demo-robust | demo | fmn | untargeted', 'demo-robust | demo | pgd | untargeted']
    """

    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    settings: Settings = dataclasses.field(default_factory=Settings)

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """From a file."""
        try:
            return cls.read_text(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise SegproxError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SegproxError(f"cannot read {path}: it is not text in UTF-8") from None

    @classmethod
    def read_text(cls, text: str, name: str = "the spec") -> "Spec":
        """From YAML; everything that does not fit is named at once."""
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SegproxError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, entry['loc'])) or 'the whole'}: {entry['msg']}" for entry in error.errors()]
            raise SegproxError(f"{name} does not fit: {'; '.join(found)}") from None

    def runs(self) -> list[Run]:
        """All runs, without repetitions."""
        return list({run.folder: run for grid in self.grids for run in grid.runs(self.settings)}.values())


def check_runs(runs: Sequence[Run]) -> list[str]:
    """What is wrong with attacks and goals, found without loading anything: a sentence each."""
    problems: dict[str, None] = {}
    for run in runs:
        try:
            attack = run.attack.make()
            if run.goal == UNTARGETED and getattr(attack, "targeted_only", False):
                problems[f"{run.attack} needs a target, but a goal of its runs is {UNTARGETED}"] = None
        except SegproxError as error:
            problems[str(error)] = None
    return list(problems)
