"""What to run: one model, dataset, attack and goal at a time, and grids of them in a YAML file."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from segprox.attacks import Attack, make_attack
from segprox.data import UNTARGETED
from segprox.draws import Sampling, make_sampling
from segprox.errors import SegproxError
from segprox.models import model_options
from segprox.naming import Name, read_share
from segprox.run.execution import HOW
from segprox.run.record import digest
from segprox.text import read_text, read_yaml

FIELDS = ConfigDict(extra="forbid")
SaveFormat = Literal["float", "png", "preview"]
# Options of models that older runs did not have: where they are not given, folders keep their names.
LATER = ("range", "window", "stride", "tta")
Share = Annotated[float, Field(gt=0, lt=1), BeforeValidator(read_share)]
_IF_RANDOM = Field(exclude_if=lambda value: value is None)  # headers of other runs do not mention it


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

    def each(self) -> "Iterator[AttackEntry]":
        """One entry for every epsilon, where there is a list of them, as `[2/255, 4/255]` or `2/255,4/255`."""
        several = self.set.get("epsilon")
        several = several.split(",") if isinstance(several, str) else several
        for epsilon in several if isinstance(several, list) else [several]:
            yield self if several is None else dataclasses.replace(self, set=self.set | {"epsilon": epsilon})

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{field}={value}" for field, value in self.set.items())])


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Settings:
    """What all runs of a grid share."""

    limit: Annotated[int | None, Field(ge=1, description="images per run; all if left out")] = None
    until: Annotated[
        Share | None, Field(description="how narrow the median's interval must be, such as 5%; all images if left out")
    ] = None
    threshold: Annotated[float, Field(gt=0, le=1, description="share of pixels that makes a success")] = 0.99
    seed: Annotated[int, Field(description="seed of random starts")] = 0
    max_queries: Annotated[int | None, Field(ge=1, description="most forwards plus backwards per image")] = None
    samples: Annotated[int | None, _IF_RANDOM, Field(description="draws of a query of a random model")] = None
    score_draws: Annotated[int | None, _IF_RANDOM, Field(description="draws by which such a model is judged")] = None
    score_share: Annotated[
        float | None, _IF_RANDOM, Field(description="share of those draws that must be successes")
    ] = None
    save: Annotated[tuple[SaveFormat, ...], Field(description="what to keep of perturbed images")] = ("preview",)
    model_options: Annotated[dict[str, Any], Field(description="options of every model, such as precision")] = (
        dataclasses.field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        sampling = self.sampling  # refused now if its numbers do not fit together
        if sampling is not None:
            sampling.check_limit(self.max_queries)

    @property
    def sampling(self) -> Sampling | None:
        """How a random model is asked and judged; None for any other."""
        return make_sampling(self.samples, self.score_draws, self.score_share)

    @property
    def identity(self) -> list[Any]:
        """What of all this determines the results of an image."""
        plain = [self.threshold, self.seed, self.max_queries]
        return plain if self.sampling is None else [*plain, dataclasses.asdict(self.sampling)]


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Run:
    """One model, one dataset, one attack, one goal."""

    model: str
    dataset: str
    attack: AttackEntry
    goal: str = UNTARGETED
    settings: Settings = dataclasses.field(default_factory=Settings)

    @property
    def model_title(self) -> str:
        """What people call the model: the `name=` among its options, or else its whole name."""
        return self.settings.model_options.get("name") or Name.parse(self.model).options.get("name") or self.model

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.model_title} | {self.dataset} | {self.attack} | {self.goal}"

    @property
    def targeted(self) -> bool:
        """Whether the goal is a target."""
        return self.goal.partition("?")[0] != UNTARGETED

    @property
    def identity(self) -> dict[str, Any]:
        """All that determines its results, as plain data: runs that agree in it are one run.

        How many images there are, what is kept of them and how the run is executed does not belong here; nor does it
        matter in which of several ways a field is written.
        """
        settings = self.settings
        try:
            options = dataclasses.asdict(model_options(self.model, **settings.model_options))
            later = {option for option in LATER if options[option] is None}
            model = {option: value for option, value in options.items() if option not in {*HOW, *later}}
            attack = self.attack.make().described()
        except SegproxError:  # what cannot be made is told apart by its text; `check_runs` says what is wrong with it
            model, attack = {self.model: settings.model_options}, dataclasses.asdict(self.attack)
        return {
            "model": [self.model.partition("?")[0], model],
            "dataset": self.dataset,
            "attack": attack,
            "goal": self.goal,
            "settings": settings.identity,
        }

    @property
    def folder(self) -> str:
        """The name of its folder: readable, and different for different runs."""
        model = self.model.partition("?")[0]
        parts = [model, self.dataset, self.attack.name, self.goal]
        readable = "+".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part).strip("-")[-40:] for part in parts)
        return f"{readable}+{digest(self.identity)[:8]}"


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
        attacks = [attack for entry in self.attacks for attack in entry.each()]
        for model, dataset, goal, attack in itertools.product(self.models, self.datasets, self.goals, attacks):
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
        return cls.read_text(read_text(path), str(path))

    @classmethod
    def read_text(cls, text: str, name: str = "the spec") -> "Spec":
        """From YAML; everything that does not fit is named at once."""
        content = read_yaml(text, name)
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            found = [f"{'.'.join(map(str, entry['loc'])) or 'the whole'}: {entry['msg']}" for entry in error.errors()]
            raise SegproxError(f"{name} does not fit: {'; '.join(found)}") from None

    def runs(self) -> list[Run]:
        """All runs; of those that are one and the same, however they are written, the first."""
        found: dict[str, Run] = {}
        for grid in self.grids:
            for run in grid.runs(self.settings):
                found.setdefault(run.folder, run)
        return list(found.values())


def check_runs(runs: Sequence[Run]) -> list[str]:
    """What is wrong with attacks and goals, found without loading anything: a sentence each."""
    problems: dict[str, None] = {}
    for run in runs:
        try:
            attack = run.attack.make()
            if not run.targeted and getattr(attack, "targeted_only", False):
                problems[f"{run.attack} needs a target, but a goal of its runs is {run.goal}"] = None
            if run.settings.until is not None and attack.family != "minimal":
                about = "until is about the median of smallest perturbations"
                problems[f"{about}, but {run.attack} stays within an epsilon: choose its images by limit"] = None
        except SegproxError as error:
            problems[str(error)] = None
    return list(problems)
