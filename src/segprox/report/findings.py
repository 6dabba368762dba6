"""What runs found, in plain sentences for readers who know nothing of attacks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from segprox.norms import NormName
from segprox.report.groups import Group, epsilon_of
from segprox.report.results import RunResults, Sizes
from segprox.report.statistics import common_norms
from segprox.report.units import Unit
from segprox.sizes import FEWEST, is_narrow, median_interval, median_size

Kind = Literal["good", "bad", "warning", "note"]


class Statement(NamedTuple):
    """A finding, and whether it is good news."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Verdict:
    """How one model fares against all attacks of a group together: each image counts by its smallest change."""

    group: Group
    images: int
    broken: int
    half: float  # at least half of the images fall to a change of this size, if it is not that of an unbroken image
    statements: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether fewer than half of the images were broken."""
        return self.half >= self.group.unit.unbroken

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.holds:
            return f"{'Fewer than half of the images fall' if self.broken else 'No image falls'} to any attack here."
        if self.half == 0:
            return "Half of the images need no change at all: the model is wrong already."
        who = "Half of the images fall" if self.images > 1 else "The image falls"
        of = " of the brightness range" if self.group.norm == "linf" else ""
        return f"{who} to a change of at most {self.group.unit.text(self.half)}{of}."


Image = tuple[str, int]  # see `RunResults.by_image`


def smallest(results: Iterable[RunResults]) -> dict[Image, float]:
    """For each image the smallest change that any of the runs found."""
    best: dict[Image, float] = {}
    for result in results:
        for image, norm in result.by_image.items():
            best[image] = min(norm, best.get(image, norm))
    return best


def verdicts(groups: Sequence[Group]) -> list[Verdict]:
    """One per group that has a record."""
    return [_verdict(group) for group in groups if group.attacked]


def _verdict(group: Group) -> Verdict:
    unbroken = group.unit.unbroken
    norms = np.array(sorted(smallest(group.attacked.values()).values()))
    broken = int((norms < unbroken).sum())
    return Verdict(group, len(norms), broken, median_size(norms), tuple(_about_attacks(group)))


def _about_attacks(group: Group) -> list[str]:
    """The strongest and the weakest attack, on the images that all have attacked.

    Where some look for the smallest change, those that stay within an epsilon do not compete.
    """
    unit, runs = group.unit, group.attacked
    runs = {name: run for name, run in runs.items() if epsilon_of(run) is None} or runs
    if len(runs) < 2:
        return [f"Only {next(iter(runs))} looked for the smallest change: another attack may find smaller ones."]
    norms: dict[str, Sizes] = dict(zip(runs, common_norms(list(runs.values()))))
    if not norms[next(iter(runs))].size:
        return ["The attacks have no image in common, so they cannot be compared."]
    ranked = sorted(norms, key=lambda name: (median_size(norms[name]), float(norms[name].mean())))
    first, last = ranked[0], ranked[-1]
    best, worst = (median_size(norms[name]) for name in (first, last))
    if best >= unit.unbroken:
        return ["No attack breaks half of the images."]
    if np.array_equal(norms[first], norms[last]):
        return ["All attacks find the same changes."]
    share = f"{int((norms[last] < unit.unbroken).sum())} of {len(norms[last])}"
    how = f"breaks {share}" if worst >= unit.unbroken else f"needs {unit.text(worst)}"
    return [f"Strongest attack: {first}, median {unit.text(best)}.", f"Weakest: {last}, {how}."]


def until_sentence(result: RunResults) -> str | None:
    """How many images it took until the median was known well enough, or that it is not, where that was asked for."""
    until, done = result.run.settings.until, len(result.records) + len(result.errors)
    if until is None:
        return None
    total = max(done, min(result.header["images"], result.run.settings.limit or result.header["images"]))
    if len(result.norms) < FEWEST:
        return f"{done} of {total} images, too few for a 95 % interval of the median, which takes {FEWEST}"
    low, high = (size * result.unit.factor for size in median_interval(result.norms))
    what = f"the 95 % interval of the median ({result.unit.name}: {low:.2f} to {high:.2f})"
    if is_narrow(result.norms, until):
        return f"{done} of {total} images, until {what} was within {until * 100:.3g} % of it"
    return f"{done} of {total} images, and {what} is not within {until * 100:.3g} % of it"


def until_statements(groups: Sequence[Group]) -> list[Statement]:
    """The same of every run."""
    found = [(f"{group.title} · {label}", until_sentence(run)) for group in groups for label, run in group.runs.items()]
    return [Statement("note", f"{where}: {sentence}.") for where, sentence in found if sentence is not None]


def statements(groups: Sequence[Group]) -> list[Statement]:
    """What a reader should know before looking at tables, most important first."""
    results = [run for group in groups for run in group.runs.values()]
    return [
        *_compare_models(groups),
        *_never_broken(groups),
        *_weak_attacks(groups),
        *_rounding(results),
        *_unequal(groups),
        *until_statements(groups),
        *_own_labels(results),
        *_fixed_epsilons(groups),
        *_several_norms(groups),
        *_errors(results),
    ]


def same_images(runs: Iterable[RunResults]) -> bool:
    """Whether the runs that attacked anything attacked the same images, so that their numbers may be compared."""
    return len({frozenset(run.by_image) for run in runs if run.records}) <= 1


def _unequal(groups: Sequence[Group]) -> list[Statement]:
    # Runs that stop by themselves are of different lengths on purpose, and their images are drawn at random.
    still = [[run for run in group.runs.values() if run.run.settings.until is None] for group in groups]
    found = [group.title for group, runs in zip(groups, still) if not same_images(runs)]
    if not found:
        return []
    text = f"Not all attacks have seen the same images yet, so their rows cannot be compared: {'; '.join(found)}."
    return [Statement("warning", text)]


def _compare_models(groups: Sequence[Group]) -> list[Statement]:
    """Each model against the next more robust one, on the same images under the same attacks."""
    tasks: dict[tuple[str, str, NormName], list[Group]] = {}
    for group in groups:
        if group.attacked:
            tasks.setdefault((group.dataset, group.goal, group.norm), []).append(group)
    found = []
    for task, some in tasks.items():
        where = f" ({', '.join(task)})" if len(tasks) > 1 else ""
        ranked = sorted(some, key=lambda group: -median_size([*smallest(group.attacked.values()).values()]))
        for stronger, weaker in pairwise(ranked):
            found.append(_compare(stronger, weaker, where))
    return found


def _compare(stronger: Group, weaker: Group, where: str) -> Statement:
    one, other = stronger.model, weaker.model
    attacks = stronger.attacked.keys() & weaker.attacked.keys()
    first, second = (smallest(group.attacked[name] for name in attacks) for group in (stronger, weaker))
    images = sorted(first.keys() & second.keys())
    if not images:
        return Statement("note", f"{one} and {other} cannot be compared{where}: no image was attacked in the same way.")
    x, y = np.array([first[i] for i in images]), np.array([second[i] for i in images])
    if (x > y).sum() < (y > x).sum():
        one, other, x, y = other, one, y, x
    wins, ties = int((x > y).sum()), int((x == y).sum())
    if wins <= (y > x).sum():
        return Statement("note", f"{one} and {other} are equally robust{where} on the same {_images(len(images))}.")
    tied = f", {ties} alike" if ties else ""
    return Statement(
        "good",
        f"{one} is more robust than {other}{where}: on the same {_images(len(images))}, breaking it takes "
        f"{_how_much_more(x, y, stronger.unit)}. It holds out longer on {wins} of {len(images)}{tied}.",
    )


def _how_much_more(x: Sizes, y: Sizes, unit: Unit) -> str:
    if (x >= unit.unbroken).mean() >= 0.5:
        return "more than any attack found, on half of them"
    both = x < np.inf
    ratio = float(np.median(x[both] / np.maximum(y[both], 1e-9)))
    return f"a change typically {ratio:.1f} times as large" if ratio < 200 else "far more"


def _never_broken(groups: Sequence[Group]) -> list[Statement]:
    norms = [(group.unit.unbroken, np.array([*smallest(group.runs.values()).values()])) for group in groups]
    total, held = sum(len(n) for _, n in norms), sum(int((n >= unbroken).sum()) for unbroken, n in norms)
    if not total:
        return [Statement("bad", "No image was attacked, so nothing is known of the model.")]
    what = "images" if len(groups) == 1 else "cases (an image, a model and a goal)"
    if not held:
        every = f"Every one of the {total} {what} was" if total > 1 else "The image was"
        return [Statement("bad", f"{every} broken by at least one attack.")]
    text = f"{held} of {total} {what} withstood every attack. A stronger or longer attack may still break them."
    return [Statement("note" if held < total else "good", text)]


def _weak_attacks(groups: Sequence[Group]) -> list[Statement]:
    """Attacks that do not break what another breaks: their curves speak of the attack, not of the model."""
    missed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for group in groups:
        known, unbroken = smallest(group.runs.values()), group.unit.unbroken
        for name, run in group.runs.items():
            reach = epsilon_of(run)
            most = np.nextafter(unbroken, 0) if reach is None else reach
            tried = [norm for image, norm in run.by_image.items() if known[image] <= most]
            total[name] += len(tried)
            missed[name] += sum(norm >= unbroken for norm in tried)
    return [
        Statement(
            "warning",
            f"{name} did not break {missed[name]} of the {_images(total[name])} that it might have broken: "
            "another attack did, so there it says more about the attack than about the model.",
        )
        for name in total
        if total[name] and missed[name] / total[name] >= 0.1
    ]


def _rounding(results: Sequence[RunResults]) -> list[Statement]:
    broken = [record for run in results for record in run.records if record.found.success]
    undone = sum(not record.rounded.success for record in broken)
    if not broken:
        return []
    if not undone:
        return [Statement("bad", f"Rounding to 8 bits undoes none of the {len(broken)} successful attacks.")]
    return [
        Statement(
            "note",
            f"Rounding to 8 bits, as in a picture file, undoes {undone} of {len(broken)} successful attacks. "
            "That is no defence: an attacker who knows of it can round first.",
        )
    ]


def _own_labels(results: Sequence[RunResults]) -> list[Statement]:
    own = sorted({run.run.dataset for run in results if any(record.labels == "model" for record in run.records)})
    if not own:
        return []
    return [
        Statement(
            "warning",
            f"{' and '.join(own)}: there are no true labels, so the model's own predictions on the unchanged images "
            "took their place. Accuracy and IoU before the attack are perfect by construction: they say nothing here.",
        )
    ]


def _several_norms(groups: Sequence[Group]) -> list[Statement]:
    norms = list(dict.fromkeys(group.norm for group in groups))
    if len(norms) < 2:
        return []
    listed = f"{', '.join(norms[:-1])} and {norms[-1]}"
    return [Statement("note", f"Sizes are in {listed}, each attack in the norm it minimises: they are never compared.")]


def _fixed_epsilons(groups: Sequence[Group]) -> list[Statement]:
    found = {(name, group.unit): epsilon_of(run) for group in groups for name, run in group.runs.items()}
    return [
        Statement(
            "note", f"{attack} stays within {unit.text(most)}: it tells how many images fall to that, not to less."
        )
        for (attack, unit), most in found.items()
        if most
    ]


def _errors(results: Sequence[RunResults]) -> list[Statement]:
    errors = sum(len(run.errors) for run in results)
    if not errors:
        return []
    return [Statement("warning", f"{_images(errors)} could not be attacked and count nowhere; the reasons are below.")]


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"
