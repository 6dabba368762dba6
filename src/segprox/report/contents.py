"""The tables of a report."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from segprox.attacks.base import Family
from segprox.counts import Counts
from segprox.data import UNTARGETED
from segprox.report.findings import same_images, until_statements
from segprox.report.groups import Group, by_norm
from segprox.report.random import random_table
from segprox.report.results import RunResults
from segprox.report.statistics import (
    Paired,
    Summary,
    common_norms,
    compare_pair,
    head_to_head,
    optimality,
    summarise,
)
from segprox.report.tables import Column, Table, Value
from segprox.report.units import Unit
from segprox.sizes import FEWEST, Interval, median_size

PLACE = (Column("model"), Column("dataset"), Column("goal"))
COUNTS = (Column("images", "d"), Column("errors", "d"))
MEDIAN = (
    "The median is the smallest size that breaks at least half of the images; the paper takes the mean of the two in "
    "the middle where the number of images is even."
)
ERRORS = "Errors: images that could not be attacked; they are in no other number."
COMMON = "On the images that all attacks of a group have."
FAMILIES: tuple[Family, Family] = ("minimal", "fixed-epsilon")
Lines = tuple[tuple[Value, ...], ...]
Summaries = dict[tuple[str, str, str], dict[str, Summary]]  # by the names of a group, by attack


def report_tables(groups: Sequence[Group], critical: Sequence[str] = ()) -> list[Table]:
    """All of them, the most important first, for each norm; those with nothing to say are left out.

    Critical classes come first in the table of classes.
    """
    return [table for unit, some in by_norm(groups).items() for table in _tables(unit, some, critical)]


def _tables(unit: Unit, groups: Sequence[Group], critical: Sequence[str]) -> list[Table]:
    # Attacks that stay within epsilon do not look for the smallest perturbation: they are not compared with the others.
    minimal, fixed = (
        [chosen for group in groups if (chosen := group.of_family(family)).runs] for family in FAMILIES
    )  # fmt: skip
    known, sizes, within = (_summaries(some) for some in (groups, minimal, fixed))
    free, aimed = ({g.names: sizes[g.names] for g in minimal if g.targeted == targeted} for targeted in (False, True))
    apart = _apart(minimal)
    tables = [
        _norms(unit, free, "untargeted", apart), _norms(unit, aimed, "targeted", apart),
        replace(_summary(unit, sizes, minimal), apart=apart), replace(_fixed(unit, fixed, within), apart=_apart(fixed)),
        replace(_accuracy(known), apart=_apart(groups)), _classes(groups, critical),
        replace(_rounded(unit, sizes), apart=apart), random_table(groups),
        replace(_complexity(known), apart=_apart(groups)),
        _optimality(minimal), _mean_optimality(minimal), _head_to_head(minimal), _against_best(unit, minimal),
        _runs(groups),
    ]  # fmt: skip
    return [named(table, unit) for table in tables if table.rows]


def _apart(groups: Sequence[Group]) -> frozenset[tuple[Value, ...]]:
    """Groups whose attacks saw different images: none of them is better than another by its numbers."""
    return frozenset(group.names for group in groups if not same_images(group.runs.values()))


def _summaries(groups: Sequence[Group]) -> Summaries:
    return {group.names: {label: summarise(result) for label, result in group.runs.items()} for group in groups}


def _fixed(unit: Unit, groups: Sequence[Group], known: Summaries) -> Table:
    """What attacks within epsilon leave of a model."""
    rows = []
    for group in groups:
        for label, result in group.runs.items():
            s, epsilon = known[group.names][label], result.epsilon
            assert epsilon is not None  # that is how these groups were made
            left = (s.accuracy, s.attacked_accuracy, s.miou, s.attacked_miou)
            rows.append((*group.names, label, s.images, s.errors, epsilon * unit.factor, s.success_rate, *left))
    columns = [
        Column("epsilon", ".2f"), Column("broken", ".1%", "max"), Column("clean accuracy", ".2%"),
        Column("accuracy left", ".2%", "min"), Column("clean mIoU", ".2%"), Column("mIoU left", ".2%", "min"),
    ]  # fmt: skip
    note = (
        f"Epsilon is {unit.name}. Broken: the share of images on which the attack reached the threshold within epsilon."
    )
    return _table("fixed-epsilon", "What is left within epsilon", columns, tuple(rows), note, ERRORS)


def named(table: Table, unit: Unit) -> Table:
    """With its unit, unless that is linf in 255ths."""
    if not unit.suffix:
        return table
    return replace(table, name=f"{table.name}{unit.suffix}", title=f"{table.title}, {unit.name}")


def _not_broken(unit: Unit) -> str:
    return f"Norms are {unit.name}; an image that was not broken counts as {unit.unbroken_text}."


def _norms(unit: Unit, chosen: Summaries, name: str, apart: frozenset[tuple[Value, ...]]) -> Table:
    """The table of the paper: attacks by models and datasets."""
    attacks = list(dict.fromkeys(label for runs in chosen.values() for label in runs))
    columns, cells = [Column("attack")], [list[Value]([attack]) for attack in attacks]
    for names, runs in chosen.items():
        over = ", ".join(names[: 2 if names[2] == UNTARGETED else 3])
        best: Literal["min"] | None = None if names in apart else "min"
        columns += [Column("median", ".2f", best, over), Column("mean", ".2f", best, over)]
        columns.append(Column("broken", "", over=over))
        for attack, line in zip(attacks, cells):
            line += _norm_cells(unit, runs.get(attack))
    rows = tuple(tuple(line) for line in cells)
    return Table(
        f"norms-{name}", f"Smallest perturbations, {name}", tuple(columns), rows, (_not_broken(unit), MEDIAN, ERRORS)
    )


def _norm_cells(unit: Unit, summary: Summary | None) -> list[Value]:
    if summary is None:
        return [None] * 3
    errors = f", {summary.errors} errors" if summary.errors else ""
    return [summary.median * unit.factor, summary.mean * unit.factor, f"{summary.broken} of {summary.images}{errors}"]


def _long(known: Summaries, cells: Callable[[Summary], Sequence[Value]]) -> Lines:
    """A line for each run."""
    return tuple(
        (*names, label, summary.images, summary.errors, *cells(summary))
        for names, runs in known.items()
        for label, summary in runs.items()
    )


def _table(name: str, title: str, columns: Sequence[Column], rows: Lines, *notes: str) -> Table:
    return Table(name, title, (*PLACE, Column("attack"), *COUNTS, *columns), rows, notes, keys=3)


def _summary(unit: Unit, known: Summaries, groups: Sequence[Group]) -> Table:
    # In linf also what the perturbations are in other norms; an attack made for those is not to be judged by linf.
    others = [Column("l2", ".2f", "min"), Column("l1", ".0f", "min")] if unit.norm == "linf" else []

    def cells(s: Summary) -> Sequence[Value]:
        norms = (s.median * unit.factor, *_scaled(s.interval, unit), s.mean * unit.factor)
        reached = (s.reached_apsr, s.reached_size * unit.factor, s.reached_accuracy)
        return (s.broken, s.success_rate, *norms, *((s.l2, s.l1) if others else ()), s.apsr, *reached)

    columns = [
        Column("broken", "d"), Column("success", ".1%", "max"), Column("median", ".2f", "min"), Column("low", ".2f"),
        Column("high", ".2f"), Column("mean", ".2f", "min"), *others, Column("APSR", ".2%"),
        Column("unbroken: APSR", ".2%"), Column("at", ".2f"), Column("accuracy", ".2%"),
    ]  # fmt: skip
    reached = (
        "unbroken: what the attack reached on the images that it did not break, medians of APSR, size and accuracy."
    )
    interval = f"low and high: 95 % interval of the median, by order statistics, of {FEWEST} images or more. " + (
        "l2, l1 and APSR are medians." if others else "APSR is a median."
    )
    stopped = (statement.text for statement in until_statements(groups))
    notes = (_not_broken(unit), MEDIAN, ERRORS, interval, reached, *stopped)
    return _table("summary", "What each attack found", columns, _long(known, cells), *notes)


def _accuracy(known: Summaries) -> Table:
    def cells(s: Summary) -> Sequence[Value]:
        return s.accuracy, s.attacked_accuracy, s.miou, s.attacked_miou

    heads = (("clean accuracy", None), ("attacked accuracy", "min"), ("clean mIoU", None), ("attacked mIoU", "min"))
    columns = [Column(head, ".2%", "min" if best else None) for head, best in heads]
    note = "Of pixels, and pooled over images, against the labels; attacked: at what was found, broken or not."
    return _table("accuracy", "Before and after the attack", columns, _long(known, cells), note, ERRORS)


def _classes(groups: Sequence[Group], critical: Sequence[str]) -> Table:
    """What the strongest attack of each group leaves of each class, critical classes first."""
    rows: list[tuple[Value, ...]] = []
    for group in groups:
        if (label := group.strongest) is None:
            continue
        run = group.runs[label]
        before, after = (Counts(*(c.sum(0) for c in run.counts(clean=clean))).iou() for clean in (True, False))
        rank = {name: place for place, name in enumerate(critical)}
        order = sorted(range(len(before)), key=lambda k: rank.get(run.classes[k], len(rank)))
        rows += [
            (*group.names, label, len(run.records), len(run.errors), run.classes[k],
             "critical" if run.classes[k] in critical else "", float(before[k]), float(after[k]))
            for k in order
            if not np.isnan([before[k], after[k]]).all()
        ]  # fmt: skip
    columns = [Column("class"), Column("marked"), Column("clean IoU", ".2%"), Column("IoU left", ".2%")]
    note = "The attack with the smallest median. IoU is pooled over images, at what was found, broken or not."
    return _table("classes", "Classes under the strongest attack", columns, tuple(rows), note)


def _rounded(unit: Unit, known: Summaries) -> Table:
    def cells(s: Summary) -> Sequence[Value]:
        norms = (s.median, s.rounded_median, s.mean, s.rounded_mean)
        return (s.broken, int(s.rounded_broken), *(norm * unit.factor for norm in norms))

    how = unit.rounded
    columns = [
        Column("broken", "d"), Column(f"broken, {how}", "d", "max"), Column("median", ".2f"),
        Column(f"median, {how}", ".2f", "min"), Column("mean", ".2f"), Column(f"mean, {how}", ".2f", "min"),
    ]  # fmt: skip
    to = "a multiple of 1/255" if unit.eight_bit else "a whole number"
    note = f"{how}: the same perturbed images with every value rounded to {to}, as a file holds them."
    notes = (note, _not_broken(unit), MEDIAN, ERRORS)
    title = f"Perturbed images{' in' * unit.eight_bit} {how}"
    # Floats are not rounded: there is nothing to say of them.
    rounded = {
        names: own
        for names, some in known.items()
        if (own := {label: s for label, s in some.items() if not np.isnan(s.rounded_broken)})
    }
    return _table("8-bit" if unit.eight_bit else "rounded", title, columns, _long(rounded, cells), *notes)


def _complexity(known: Summaries) -> Table:
    def cells(s: Summary) -> Sequence[Value]:
        return s.forwards, s.backwards, s.seconds, s.total_seconds

    columns = [
        Column("forwards", ".0f", "min"), Column("backwards", ".0f", "min"), Column("seconds", ".2f", "min"),
        Column("seconds in all", ".1f"),
    ]  # fmt: skip
    note = "Forwards, backwards and seconds are medians per image."
    return _table("complexity", "What it cost", columns, _long(known, cells), note, ERRORS)


def _scores(groups: Sequence[Group]) -> Iterator[tuple[Group, int, dict[str, float]]]:
    """Optimality where there is something to compare, and on how many images."""
    for group in groups:
        if len(group.attacked) > 1:
            norms = common_norms(list(group.attacked.values()))
            yield group, norms.shape[1], dict(zip(group.attacked, optimality(norms, group.unit.unbroken).tolist()))


def _errors(group: Group, label: str) -> int:
    return len(group.runs[label].errors)


def _optimality(groups: Sequence[Group]) -> Table:
    rows = tuple(
        (*group.names, label, images, _errors(group, label), value)
        for group, images, scores in _scores(groups)
        for label, value in scores.items()
    )
    note = "1: no attack found less on any image; 0: never near the best. " + COMMON
    return _table("optimality", "Optimality", [Column("optimality", ".3f", "max")], rows, note)


def _mean_optimality(groups: Sequence[Group]) -> Table:
    found: dict[str, list[float]] = {}
    for _, _, scores in _scores(groups):
        for label, value in scores.items():
            if not np.isnan(value):
                found.setdefault(label, []).append(value)
    rows = tuple((label, len(values), float(np.mean(values))) for label, values in found.items())
    columns = (Column("attack"), Column("groups", "d"), Column("mean optimality", ".3f", "max"))
    several = rows if any(count > 1 for _, count, _ in rows) else ()
    note = "A group is a model, a dataset and a goal."
    return Table("optimality-mean", "Optimality, mean over models, datasets and goals", columns, several, (note,))


def _head_to_head(groups: Sequence[Group]) -> Table:
    several = [group for group in groups if len(group.attacked) > 1]
    labels = list(dict.fromkeys(label for group in several for label in group.attacked))
    rows: list[tuple[Value, ...]] = []
    for group in several:
        norms = common_norms(list(group.attacked.values()))
        for label, shares in zip(group.attacked, head_to_head(norms).tolist()):
            against = dict(zip(group.attacked, shares)) | {label: None}
            images, errors = norms.shape[1], _errors(group, label)
            rows.append((*group.names, label, images, errors, *(against.get(other) for other in labels)))
    columns = [Column(label, ".0%", over="needs less than") for label in labels]
    note = "The share of images on which the attack of the line needs less than that of the column; ties are half. "
    return _table("head-to-head", "Head to head", columns, tuple(rows), note + COMMON)


PAIRED = (
    Column("images", "d"), Column("errors", "d"), Column("median difference", "+.3f"), Column("low", "+.3f"),
    Column("high", "+.3f"), Column("larger", "d"), Column("equal", "d"), Column("smaller", "d"),
    Column("p-value", ".2g"),
)  # fmt: skip


def paired_notes(unit: Unit) -> tuple[str, ...]:
    """What the columns of a comparison mean."""
    return (
        f"Difference: the second's {unit.name} minus the first's, on the images that both have; not broken counts as "
        f"{unit.unbroken_text}.",
        "low and high: 95 % bootstrap interval. larger, smaller: images on which the second is larger or smaller.",
        "p-value: exact sign test, two-sided, not corrected for several comparisons.",
    )


def _against_best(unit: Unit, groups: Sequence[Group]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for group in groups:
        if len(group.attacked) < 2:
            continue
        medians = {label: median_size(result.norms) for label, result in group.attacked.items()}
        best = min(medians, key=lambda label: medians[label])
        for label, result in group.attacked.items():
            if label != best:
                pair = _pair_cells(group.attacked[best], result)
                rows.append((*group.names, best, label, *pair))
    columns = (*PLACE, Column("first"), Column("second"), *PAIRED)
    title = "Each attack against the one with the smallest median, image by image"
    return Table("paired", title, columns, tuple(rows), paired_notes(unit), keys=3)


def _pair_cells(first: RunResults, second: RunResults) -> tuple[Value, ...]:
    found: Paired = compare_pair(first, second)
    errors = len(first.errors) + len(second.errors)
    norms = (found.difference * first.unit.factor, *_scaled(found.interval, first.unit))
    return (found.images, errors, *norms, found.larger, found.equal, found.smaller, found.p_value)


def _runs(groups: Sequence[Group]) -> Table:
    """What short names stand for."""
    rows: Lines = tuple(
        (*group.names, label, len(result.records), len(result.errors), *_origin(result))
        for group in groups
        for label, result in group.runs.items()
    )
    columns = [Column(name) for name in ("whole dataset", "whole attack", "seed", "threshold", "max_queries", "folder")]
    return _table("runs", "Runs", columns, rows)


def _origin(result: RunResults) -> tuple[str, ...]:
    run, settings = result.run, result.run.settings
    max_queries = "" if settings.max_queries is None else str(settings.max_queries)
    return run.dataset, str(run.attack), str(settings.seed), f"{settings.threshold:g}", max_queries, result.folder.name


def _scaled(interval: Interval, unit: Unit) -> tuple[float, float]:
    return interval.low * unit.factor, interval.high * unit.factor
