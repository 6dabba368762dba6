"""Whether minimal and fixed-epsilon attacks agree on which images break within epsilon, from their records."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from segprox.report.groups import Group, by_norm
from segprox.report.results import RunResults
from segprox.report.tables import Column, Table, Value
from segprox.report.units import Unit
from segprox.run.record import ImageError, Record

Side = Literal["minimal", "fixed"]
SIDES: tuple[Side, Side] = ("minimal", "fixed")
IMAGE = (Column("image"), Column("broken by"), Column("too weak"))
Line = tuple[Value, ...]
FAR_MORE = 0.2  # of the pixels: damage without gradients that an attack along gradients should not have missed
NAMED = 5  # images in a sentence
SHOWN = 100  # disagreements in a page; more are not read


@dataclass(frozen=True)
class Finding:
    """What a minimal and a fixed-epsilon attack found on one image.

    An image that one of them breaks within epsilon and the other does not was not beyond the other's reach: it was too
    weak there, and its verdict on other images deserves less trust.
    """

    image: str  # its name
    epsilon: float
    norm: float | None  # the smallest perturbation that the minimal attack broke the image with, if it did
    apsr: float | None  # what the fixed-epsilon attack reached within epsilon, unless it could not attack the image
    broken_by: tuple[Side, ...]  # who broke the image within epsilon
    errors: dict[Side, str]  # why the image could not be attacked, and by whom
    masked: bool = False  # whether the attack that asks for no gradient found what the one along gradients missed

    @property
    def too_weak(self) -> Side | None:
        """Who missed what the other found, where both attacked the image."""
        if self.errors or len(self.broken_by) != 1:
            return None
        return "fixed" if self.broken_by == ("minimal",) else "minimal"

    @property
    def robust(self) -> bool:
        """Whether both attacked the image and neither broke it within epsilon."""
        return not (self.errors or self.broken_by)


@dataclass(frozen=True, eq=False)
class Agreement:
    """A minimal and a fixed-epsilon run of a group, compared on the images that both have tried."""

    group: Group
    minimal: str  # label of the run in its group
    fixed: str

    @property
    def unit(self) -> Unit:
        """How sizes are measured."""
        return self.group.unit

    @cached_property
    def epsilon(self) -> float:
        """The size within which the attacks are compared."""
        epsilon = self.group.runs[self.fixed].epsilon
        assert epsilon is not None  # that is what a fixed-epsilon run is
        return epsilon

    @cached_property
    def free(self) -> Side | None:
        """Which of the two asked for no gradient, if just one did."""
        free = [side for side in SIDES if _without_gradients(self.group.runs[self.name(side)].records)]
        return free[0] if len(free) == 1 else None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """One for each image, by name; an image that has changed between the runs is not the same image."""
        first, second = (_by_name(self.group.runs[label]) for label in (self.minimal, self.fixed))
        pairs = [(first[name], second[name]) for name in sorted(first.keys() & second.keys())]
        return tuple(self._find(*pair) for pair in pairs if _same_image(*pair))

    def _find(self, minimal: Record | ImageError, fixed: Record | ImageError) -> Finding:
        norm = minimal.size(self.unit.norm) if isinstance(minimal, Record) and minimal.found.success else None
        broken: dict[Side, bool] = {
            "minimal": norm is not None and norm <= self.epsilon,
            "fixed": isinstance(fixed, Record) and fixed.found.success,
        }
        sides: dict[Side, Record | ImageError] = {"minimal": minimal, "fixed": fixed}
        return Finding(
            image=minimal.image,
            epsilon=self.epsilon,
            norm=norm,
            apsr=fixed.found.apsr if isinstance(fixed, Record) else None,
            broken_by=tuple(side for side in broken if broken[side]),
            errors={side: entry.reason for side, entry in sides.items() if isinstance(entry, ImageError)},
            masked=_masked(self.free, minimal, fixed, broken),
        )

    @property
    def compared(self) -> list[Finding]:
        """Images that both attacked."""
        return [finding for finding in self.findings if not finding.errors]

    @property
    def disagreements(self) -> list[Finding]:
        """Images on which one of the two was too weak."""
        return [finding for finding in self.findings if finding.too_weak]

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        count, weak = len(self.compared), Counter(self.name(f.too_weak) for f in self.findings if f.too_weak)
        robust = sum(finding.robust for finding in self.compared)
        parts = [f"{robust} of {count} images withstood both attacks within {self.unit.text(self.epsilon)}."]
        if weak:
            who = ", ".join(f"{name} was too weak on {weak[name]}" for name in sorted(weak))
            parts.append(f"The attacks disagree on {weak.total()}: {who}; there, believe the one that succeeded.")
        masked = [finding.image for finding in self.findings if finding.masked]
        if masked:
            parts.append(self._verdict(masked))
        elif count and not weak:
            parts.append("The attacks agree on all of them.")
        if errors := len(self.findings) - count:
            parts.append(f"{errors} {'image' if errors == 1 else 'images'} could not be attacked by both: not counted.")
        return " ".join(parts)

    def _verdict(self, masked: Sequence[str]) -> str:
        """What it means that images gave way to the attack without gradients."""
        free, other = (self.minimal, self.fixed) if self.free == "minimal" else (self.fixed, self.minimal)
        shown = ", ".join(masked[:NAMED]) + (f" and {len(masked) - NAMED} more" if len(masked) > NAMED else "")
        return (
            f"Gradients are masked on {shown}: {free}, which asks for no gradient, found what {other} missed. "
            f"Unless {other} finds it with more steps, its figures say little about this model."
        )

    def name(self, side: Side) -> str:
        """The label of one of the two."""
        return self.minimal if side == "minimal" else self.fixed

    def cells(self, finding: Finding) -> Line:
        """Image, broken by, too weak, smallest size, APSR."""
        who = [
            f"{self.name(side)}{': error' if side in finding.errors else ''}"
            for side in SIDES
            if side in (*finding.errors, *finding.broken_by)
        ]
        return (
            finding.image,
            ", ".join(who) or "neither",
            self.name(finding.too_weak) if finding.too_weak else None,
            None if finding.norm is None else finding.norm * self.unit.factor,
            finding.apsr,
        )

    def table(self) -> Table:
        """A line for each image."""
        errors = [
            f"{finding.image} could not be attacked by {self.name(side)}: {reason}"
            for finding in self.findings
            for side, reason in finding.errors.items()
        ]
        title = f"{self.minimal} and {self.fixed} within {self.unit.text(self.epsilon)}: {self.group.title}"
        columns = (*IMAGE, Column(f"{self.minimal}: {self.unit.name}", ".2f"), Column(f"{self.fixed}: APSR", ".2%"))
        return Table("audit", title, columns, tuple(map(self.cells, self.findings)), tuple(errors))


def _by_name(run: RunResults) -> dict[str, Record | ImageError]:
    entries: tuple[Record | ImageError, ...] = (*run.records, *run.errors)
    return {entry.image: entry for entry in entries}


def _masked(
    free: Side | None, minimal: Record | ImageError, fixed: Record | ImageError, broken: dict[Side, bool]
) -> bool:
    """Whether an attack without gradients broke what the other did not, or did far more damage in a smaller ball."""
    if free is None or isinstance(minimal, ImageError) or isinstance(fixed, ImageError):
        return False
    if free == "minimal":
        return broken["minimal"] and not broken["fixed"]
    # A minimal attack that broke nothing at any size reports the most damage that it has seen.
    more = not minimal.found.success and fixed.found.apsr > minimal.found.apsr + FAR_MORE
    return (broken["fixed"] and not broken["minimal"]) or more


def _without_gradients(records: Sequence[Record]) -> bool:
    """Whether an attack asked for answers but never for a gradient."""
    return any(record.forwards for record in records) and not any(record.backwards for record in records)


def _same_image(first: Record | ImageError, second: Record | ImageError) -> bool:
    if isinstance(first, ImageError) or isinstance(second, ImageError):
        return True  # what could not be read has no hash
    return first.image_hash == second.image_hash


def agreements(groups: Sequence[Group]) -> Iterator[Agreement]:
    """Every pair of a minimal and a fixed-epsilon run of a group."""
    for group in groups:
        for minimal, fixed in product(group.of_family("minimal").runs, group.of_family("fixed-epsilon").runs):
            yield Agreement(group, minimal, fixed)


def agreement_tables(groups: Sequence[Group]) -> list[Table]:
    """For each norm how many images every pair of attacks agrees on, and the first images on which they do not."""
    return [table for unit, some in by_norm(groups).items() for table in _tables(unit, some) if table.rows]


def _tables(unit: Unit, groups: Sequence[Group]) -> Iterator[Table]:
    pairs = [pair for pair in agreements(groups) if pair.compared]
    several = len(groups) > 1  # one model, dataset and goal needs no column
    place, epsilon = (Column("on"),) if several else (), Column(f"epsilon, {unit.name}", ".2f")
    on: dict[Agreement, Line] = {pair: (pair.group.title,) if several else () for pair in pairs}
    counts = ("images", "neither broke", "both broke", "only the minimal", "only the fixed")
    columns = (*place, Column("minimal"), Column("fixed-epsilon"), epsilon, *(Column(count, "d") for count in counts))
    rows = tuple(
        (*on[pair], pair.minimal, pair.fixed, pair.epsilon * unit.factor, len(pair.compared), *_outcomes(pair))
        for pair in pairs
    )
    yield Table("agreement", "How often they agree", columns, rows)
    columns = (*place, *IMAGE, epsilon, Column(f"smallest, {unit.name}", ".2f"), Column("APSR within epsilon", ".2%"))
    found: list[Line] = [
        (*on[pair], image, broken, weak, pair.epsilon * unit.factor, *numbers)
        for pair in pairs
        for image, broken, weak, *numbers in map(pair.cells, pair.disagreements)
    ]
    more = (f"The first {SHOWN} of {len(found)}: segprox audit lists all of a pair.",) if len(found) > SHOWN else ()
    yield Table("disagreement", "Where one missed what the other found", columns, tuple(found[:SHOWN]), more)


def _outcomes(pair: Agreement) -> Iterator[int]:
    """Images that neither broke, that both did, and that only the first or the second did."""
    found = Counter(finding.broken_by for finding in pair.compared)
    yield from (found[who] for who in ((), SIDES, SIDES[:1], SIDES[1:]))
