"""Two evaluations side by side, image by image: which runs belong together, and whether they differ."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from segprox.errors import SegproxError
from segprox.report.contents import MEDIAN, named, paired_notes
from segprox.report.groups import attack_labels
from segprox.report.results import RunResults
from segprox.report.statistics import Paired, compare_pair
from segprox.report.tables import Column, Table, Value
from segprox.report.units import Unit

Pair = tuple[RunResults, RunResults]


def match_runs(first: Sequence[RunResults], second: Sequence[RunResults]) -> list[Pair]:
    """Pairs of runs, one of each side, that may be compared image by image.

    Only runs with one goal, threshold and norm are compared, and fixed-epsilon attacks only within one epsilon. On
    each dataset the runs of the same model and attack belong together; if there are none, those of the same attack;
    and if there are none either, the only run of each side. Two single runs are compared whatever their datasets are
    called: images are matched by their pixels.
    """
    if len(first) == len(second) == 1:
        one, other = first[0], second[0]
        if _task(one) != _task(other):
            raise SegproxError(
                f"{one.run.title} and {other.run.title} cannot be compared: goal, threshold, norm and epsilon must be "
                "the same"
            )
        return [(one, other)]
    pairs: list[Pair] = []
    for level in range(3):
        mine, theirs = (_singles(runs, level) for runs in (first, second))
        known = {_key(one, 2) for one, _ in pairs}
        pairs += [(mine[key], theirs[key]) for key in mine if key in theirs and _key(mine[key], 2) not in known]
    if not pairs:
        raise SegproxError("there is no run in common: the same dataset, goal, threshold and norm, and the same attack")
    return pairs


def _task(result: RunResults) -> tuple[Any, ...]:
    return result.run.goal, result.run.settings.threshold, result.unit.norm, result.epsilon


def _key(result: RunResults, level: int) -> tuple[Any, ...]:
    """What two runs must agree in to belong together: less at every level."""
    run = result.run
    attack = (str(run.attack), run.settings.seed, run.settings.max_queries, run.settings.sampling)
    return (run.dataset, *_task(result), *((run.model, attack), (attack,), ())[level])


def _singles(results: Sequence[RunResults], level: int) -> dict[tuple[Any, ...], RunResults]:
    """The runs that no other agrees with."""
    often = Counter(_key(result, level) for result in results)
    return {key: result for result in results if often[key := _key(result, level)] == 1}


class _Compared(NamedTuple):
    """A pair of runs, the names of their attacks, and what comparing them gave."""

    first: RunResults
    second: RunResults
    attacks: tuple[str, str]
    found: Paired

    @property
    def sides(self) -> tuple[str, str]:
        """What to call them: by what tells them apart."""
        models, attacks = (self.first.run.model, self.second.run.model), self.attacks
        if attacks[0] == attacks[1]:
            names = models if models[0] != models[1] else [f"{r.run.model} ({r.folder.parent.name})" for r in self[:2]]
        else:
            names = attacks if models[0] == models[1] else [", ".join(both) for both in zip(models, attacks)]
        return names[0], names[1]

    @property
    def shared(self) -> str:
        """What both have in common: an attack, or a model that attacks are compared on."""
        if self.attacks[0] == self.attacks[1]:
            return self.attacks[0]
        return self.first.run.model if self.first.run.model == self.second.run.model else ""

    def cells(self, factor: float) -> tuple[Value, ...]:
        """The line of a table."""
        found, run = self.found, self.first.run
        sizes = (value * factor for value in (found.difference, *found.interval))
        shares = (count / found.images for count in (found.larger, found.smaller))
        return (
            run.dataset, run.goal, " against ".join(self.sides), self.shared, found.images,
            *(median * factor for median in found.medians), found.ratio, *sizes, *shares, found.p_value,
        )  # fmt: skip

    def sentence(self) -> str:
        """What the test supports."""
        run, (weaker, stronger) = self.first.run, self.sides  # as one withstands less than the other
        where = f"({', '.join(filter(None, (self.shared, run.dataset, run.goal)))}; p = {self.found.p_value:.2g})"
        if not self.found.differs:
            return f"No difference is shown between {weaker} and {stronger} {where}."
        if self.found.larger < self.found.smaller:
            weaker, stronger = stronger, weaker
        if self.sides == self.attacks:
            return f"{weaker} is a stronger attack than {stronger} {where}."
        return f"{stronger} is more robust than {weaker} {where}."


def compare_tables(pairs: Sequence[Pair]) -> list[Table]:
    """Pairs of runs, image by image: a table for each norm, and one for attacks within an epsilon."""
    runs = list(dict.fromkeys(run for pair in pairs for run in pair))
    labels = dict(zip(runs, attack_labels(runs)))
    kinds: dict[tuple[Unit, bool], list[_Compared]] = {}
    for one, other in pairs:
        found = compare_pair(one, other)
        if not found.images:
            raise SegproxError(f"{one.run.title} and {other.run.title} have no image in common")
        kind = one.unit, one.epsilon is not None
        kinds.setdefault(kind, []).append(_Compared(one, other, (labels[one], labels[other]), found))
    return [_table(unit, fixed, some) for (unit, fixed), some in kinds.items()]


def _table(unit: Unit, fixed: bool, pairs: Sequence[_Compared]) -> Table:
    form, factor = (".1%", 1.0) if fixed else (".2f", unit.factor)
    columns = (
        Column("dataset"), Column("goal"), Column("first against second"), Column("with"), Column("images", "d"),
        Column("median 1", form), Column("median 2", form), Column("ratio", ".2f"), Column("difference", f"+{form}"),
        Column("low", f"+{form}"), Column("high", f"+{form}"), Column("larger", ".0%"), Column("smaller", ".0%"),
        Column("p-value", ".2g"),
    )  # fmt: skip
    difference, *others = paired_notes(unit)
    if fixed:
        difference = "Compared is the share of an image's pixels that are right after an attack with a fixed epsilon."
    else:
        others.append(MEDIAN)
    ratio = "ratio: the median over images of the second's value over the first's."
    errors = sum(len(run.errors) for pair in pairs for run in pair[:2])
    unattacked = [f"{errors} images could not be attacked; they are in no number."] if errors else []
    notes = (*(pair.sentence() for pair in pairs), difference, ratio, *others, *unattacked)
    title = f"Compared image by image{', accuracy left within epsilon' if fixed else ''}"
    rows = tuple(pair.cells(factor) for pair in pairs)
    return named(Table("comparison-epsilon" if fixed else "comparison", title, columns, rows, notes, keys=3), unit)
