"""Runs that may be compared with each other, and what to call them."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from segprox.attacks.base import Family
from segprox.data import UNTARGETED
from segprox.norms import NormName
from segprox.report.metrics import pixel_accuracy
from segprox.report.results import RunResults
from segprox.report.units import Unit
from segprox.sizes import median_size

LABELLED_SETTINGS = (
    "seed",
    "max_queries",
    "samples",
    "score_draws",
    "score_share",
    "model_options",
)  # which may tell two runs of an attack apart


@dataclass(frozen=True, eq=False)
class Group:
    """The attacks on one model and dataset with one goal, in one norm, by label."""

    model: str
    dataset: str  # short where that is unambiguous
    goal: str
    norm: NormName
    runs: dict[str, RunResults]
    eight_bit: bool = True

    @property
    def unit(self) -> Unit:
        """How its sizes are measured."""
        return Unit(self.norm, self.eight_bit)

    @property
    def title(self) -> str:
        """What it is, for people."""
        return " · ".join([*self.names, *([] if self.norm == "linf" else [self.norm])])

    @property
    def targeted(self) -> bool:
        """Whether an attack wants to see something."""
        return not self.goal.startswith(UNTARGETED)

    @property
    def names(self) -> tuple[str, str, str]:
        """What it is, for tables, of which each has one norm."""
        return self.model, self.dataset, self.goal

    def of_family(self, family: Family) -> "Group":
        """The same with its minimal or its fixed-epsilon attacks only, the latter by growing epsilon."""
        chosen = [(label, run) for label, run in self.runs.items() if (run.epsilon is None) == (family == "minimal")]
        return dataclasses.replace(self, runs=dict(sorted(chosen, key=lambda item: item[1].epsilon or 0.0)))

    @property
    def epsilon_labels(self) -> dict[str, str]:
        """Labels of its fixed-epsilon attacks by growing epsilon, and the same without it."""
        return {label: re.sub(r" epsilon=\S+", "", label) for label in self.of_family("fixed-epsilon").runs}

    @property
    def by_epsilon(self) -> dict[str, list[RunResults]]:
        """Its fixed-epsilon attacks: the runs of each by growing epsilon, under the label that they share."""
        found: dict[str, list[RunResults]] = {}
        for label, shared in self.epsilon_labels.items():
            if self.runs[label].records:
                found.setdefault(shared, []).append(self.runs[label])
        return found

    @property
    def strongest(self) -> str | None:
        """The minimal attack with the smallest median; among fixed-epsilon attacks, the one that leaves least right."""
        minimal = self.of_family("minimal").attacked
        if minimal:
            return min(minimal, key=lambda label: (median_size(minimal[label].norms), minimal[label].norms.mean()))
        return min(self.attacked, key=lambda label: pixel_accuracy(*self.runs[label].counts()), default=None)

    @property
    def attacked(self) -> dict[str, RunResults]:
        """The runs with at least one record."""
        return {label: result for label, result in self.runs.items() if result.records}


def group_runs(results: Sequence[RunResults]) -> list[Group]:
    """Groups in order of appearance, linf before other norms and untargeted before targeted.

    Runs with different success thresholds or norms solve different problems, so they are never in one group.
    """
    datasets = _short({result.run.dataset: result.run.dataset.split(":")[0] for result in results})
    models = _short({result.run.model: result.run.model_title for result in results})
    thresholds = {result.run.settings.threshold for result in results}
    groups: dict[tuple[str, str, str, Unit], list[tuple[str, RunResults]]] = {}
    for label, result in zip(attack_labels(results), results):
        run = result.run
        goal = run.goal if len(thresholds) == 1 else f"{run.goal}, {run.settings.threshold:g} of pixels"
        place = (models[run.model], datasets[run.dataset], goal, result.unit)
        groups.setdefault(place, []).append((label, result))
    found = [
        Group(model, dataset, goal, unit.norm, _unique(members), unit.eight_bit)
        for (model, dataset, goal, unit), members in groups.items()
    ]
    return sorted(found, key=lambda group: (group.norm != "linf", group.norm, not group.eight_bit, group.targeted))


def by_norm(groups: Sequence[Group]) -> dict[Unit, list[Group]]:
    """Groups whose sizes may stand side by side."""
    return {unit: list(some) for unit, some in groupby(groups, key=lambda group: group.unit)}


def attack_labels(results: Sequence[RunResults]) -> list[str]:
    """The name of each run's attack, with those of its fields in which runs of that attack differ."""
    fields = [_fields(result) for result in results]
    labels = []
    for result, own in zip(results, fields):
        name = result.run.attack.name
        others = [other for that, other in zip(results, fields) if that.run.attack.name == name]
        telling = [key for key in own if any(other.get(key) != own[key] for other in others)]
        labels.append(" ".join([name, *(f"{key}={own[key]}" for key in telling)]))
    return labels


def _fields(result: RunResults) -> dict[str, Any]:
    settings = {key: getattr(result.run.settings, key) for key in LABELLED_SETTINGS}
    return {**result.run.attack.set, **{key: value for key, value in settings.items() if value not in (None, {})}}


def _unique(members: Iterable[tuple[str, RunResults]]) -> dict[str, RunResults]:
    """The same run from two folders gets the folder's name, or failing that a number."""
    members = list(members)
    often = Counter(label for label, _ in members)
    named: dict[str, RunResults] = {}
    for label, result in members:
        name = label if often[label] == 1 else f"{label} ({result.folder.parent.name})"
        number = 1 + sum(known == name or known.startswith(f"{name} #") for known in named)
        named[name if number == 1 else f"{name} #{number}"] = result
    return named


def _short(names: dict[str, str]) -> dict[str, str]:
    """Short names, as `voc` for `voc:data/VOCdevkit?split=val`, unless there is another voc."""
    often = Counter(names.values())
    return {name: short if often[short] == 1 else name for name, short in names.items()}
