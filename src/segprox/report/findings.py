"""What runs found, in plain sentences for readers who know nothing of attacks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from segprox.norms import NormName
from segprox.report.groups import Group
from segprox.report.metrics import pixel_accuracy
from segprox.report.random import random_sentences
from segprox.report.results import Image, RunResults, Sizes
from segprox.report.statistics import SIGNIFICANT, common_norms, sign_test
from segprox.report.units import LINF, Unit
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
    def figure(self) -> tuple[str, str]:
        """The verdict as a number and what it counts."""
        unit = self.group.unit
        if (at := self._at_epsilon()) is not None:
            return f"{at[1]:.0%}", f" right at {unit.text(at[0])}"
        if self.holds:
            return str(self.images - self.broken), f"/{self.images} not broken"
        return unit.number(self.half), unit.after

    def _at_epsilon(self) -> tuple[float, float] | None:
        """Where all attacks stay within an epsilon: the epsilon of the strongest, and the accuracy that it leaves."""
        run = self.group.runs[self.group.strongest or ""]
        epsilon = run.epsilon
        return None if epsilon is None else (epsilon, pixel_accuracy(*run.counts()))

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if (at := self._at_epsilon()) is not None:
            left = f"An attacker who may change {self.group.unit.text(at[0])} leaves {at[1]:.1%} of the pixels right"
            return f"{left}. How small a change suffices was not looked for."
        if self.holds:
            few = "Fewer than half of the images are broken" if self.broken else "No image is broken"
            return f"{few} by the attacks that were run."
        if self.half == 0:
            return "Half of the images need no change at all: the model is wrong already."
        who = "Half of the images break" if self.images > 1 else "The image breaks"
        of = " of the brightness range" if self.group.unit == LINF else ""
        return f"{who} under a change of at most {self.group.unit.text(self.half)}{of}."


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
    said = (*_about_attacks(group), *_reached(group))
    return Verdict(group, len(norms), broken, median_size(norms), said)


def _reached(group: Group) -> list[str]:
    """What attacks reached on the images that none of them broke: such an image need not be unharmed."""
    best: dict[Image, tuple[float, float, float]] = {}  # APSR, size and accuracy of the attack with the highest APSR
    for run in group.attacked.values():
        of = run.columns
        reached = (of["found.apsr"], of.get(f"found.{group.norm}", of["norm"]), of["accuracy"])
        for image, *found in zip(run.by_image, *(values.tolist() for values in reached)):
            best[image] = max((found[0], found[1], found[2]), best.get(image, (found[0], found[1], found[2])))
    unbroken = [best[image] for image, size in smallest(group.attacked.values()).items() if size >= group.unit.unbroken]
    if not unbroken:
        return []
    apsr, size, accuracy = np.median(unbroken, axis=0).tolist()
    what = "as the target wants them" if group.targeted else "wrong"
    which = "On the image that is" if len(unbroken) == 1 else f"On the {len(unbroken)} images that are"
    return [
        f"{which} not broken, {apsr:.1%} of the pixels became {what} at {group.unit.text(size)}, and {accuracy:.1%} "
        f"stayed right{' (medians)' if len(unbroken) > 1 else ''}."
    ]


def _about_attacks(group: Group) -> list[str]:
    """The strongest and the weakest attack, on the images that all have attacked.

    Attacks that stay within an epsilon do not look for the smallest change, and do not compete.
    """
    unit, runs = group.unit, group.of_family("minimal").attacked
    if not runs:
        return []
    if len(runs) < 2:
        return [f"Only {next(iter(runs))} looked for the smallest change: another attack may find smaller ones."]
    norms: dict[str, Sizes] = dict(zip(runs, common_norms(list(runs.values()))))
    if not norms[next(iter(runs))].size:
        return ["The attacks have no image in common, so they cannot be compared."]
    ranked = sorted(norms, key=lambda name: (median_size(norms[name]), float(norms[name].mean())))
    first, last = ranked[0], ranked[-1]
    best, worst = (median_size(norms[name]) for name in (first, last))
    if best >= unit.unbroken:
        return ["No attack breaks half of the images on its own."]
    if np.array_equal(norms[first], norms[last]):
        return ["All attacks find the same changes."]
    share = f"{int((norms[last] < unit.unbroken).sum())} of {len(norms[last])}"
    how = f"breaks {share} images" if worst >= unit.unbroken else f"has {unit.text(worst)}"
    return [f"{first} has the smallest median, {unit.text(best)}; {last} {how}."]


def until_sentence(result: RunResults) -> str | None:
    """How many images it took until the median was known well enough, or that it is not, where that was asked for."""
    until, done = result.run.settings.until, len(result.records) + len(result.errors)
    if until is None:
        return None
    images = result.header.get("images", 0)
    total = max(done, min(images, result.run.settings.limit or images))
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
        _never_broken(groups),
        *_weak_attacks(groups),
        *(Statement("note", sentence) for sentence in random_sentences(groups)),
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


def _unequal(groups: Sequence[Group]) -> Iterator[Statement]:
    # Runs that stop by themselves are of different lengths on purpose, and their images are drawn at random.
    still = [[run for run in group.runs.values() if run.run.settings.until is None] for group in groups]
    if found := "; ".join(group.title for group, runs in zip(groups, still) if not same_images(runs)):
        yield Statement(
            "warning", f"Not all attacks have seen the same images yet, so their rows cannot be compared: {found}."
        )


def _compare_models(groups: Sequence[Group]) -> list[Statement]:
    """Each model against the next more robust one, on the same images under the same attacks."""
    tasks: dict[tuple[str, str, NormName], list[Group]] = {}
    for group in groups:
        if group.attacked:
            tasks.setdefault((group.dataset, group.goal, group.norm), []).append(group)
    pairs = []
    for task, some in tasks.items():
        where = f" ({', '.join(task)})" if len(tasks) > 1 else ""
        ranked = sorted(some, key=lambda group: -median_size([*smallest(group.attacked.values()).values()]))
        pairs += [(stronger, weaker, where) for stronger, weaker in pairwise(ranked)]
    return [_compare(*pair, SIGNIFICANT / len(pairs)) for pair in pairs]  # shared by all comparisons


def _compare(stronger: Group, weaker: Group, where: str, level: float) -> Statement:
    """Says that a model is more robust only where an exact sign test on the same images supports it.

    Fixed-epsilon attacks count where no other attack is on both sides, by the accuracy that they leave.
    """
    one, other = stronger.model, weaker.model
    common = stronger.attacked.keys() & weaker.attacked.keys()
    minimal = common & stronger.of_family("minimal").runs.keys()
    more = "needs the larger change" if minimal else "keeps more pixels right within the same epsilon"
    first, second = (
        smallest(group.attacked[name] for name in minimal) if minimal else _least_right(group, common)
        for group in (stronger, weaker)
    )
    images = sorted(first.keys() & second.keys())
    if not images:
        return Statement("note", f"{one} and {other} cannot be compared{where}: no image was attacked in the same way.")
    x, y = np.array([first[i] for i in images]), np.array([second[i] for i in images])
    if (x > y).sum() < (y > x).sum():
        one, other, x, y = other, one, y, x
    wins, losses = int((x > y).sum()), int((y > x).sum())
    p_value = sign_test(wins, losses)
    same, test = f"the same {_images(len(images))}", f"sign test, p = {p_value:.2g}"
    if p_value >= level:
        counts = f"of {same}, {one} {more} on {wins} and {other} on {losses} ({test})"
        return Statement("note", f"No difference in robustness is shown between {one} and {other}{where}: {counts}.")
    takes = f"breaking it takes {_how_much_more(x, y, stronger.unit)}, and " if minimal else ""
    won = f"on {same}, {takes}it {more} on {wins} of {len(images)} ({test})"
    return Statement("good", f"{one} is more robust than {other}{where}: {won}.")


def _least_right(group: Group, attacks: Iterable[str]) -> dict[Image, float]:
    """For each image the least accuracy that any of the attacks left."""
    least: dict[Image, float] = {}
    for run in (group.attacked[name] for name in attacks):
        for image, accuracy in run.accuracy_by_image.items():
            least[image] = min(accuracy, least.get(image, 1.0))
    return least


def _how_much_more(x: Sizes, y: Sizes, unit: Unit) -> str:
    if (x >= unit.unbroken).mean() >= 0.5:
        return "more than any attack found on at least half of them"
    both = x < np.inf
    ratio = float(np.median(x[both] / np.maximum(y[both], 1e-9)))
    return f"a change typically {ratio:.1f} times as large" if ratio < 200 else "far more"


def _never_broken(groups: Sequence[Group]) -> Statement:
    norms = [(group.unit.unbroken, np.array([*smallest(group.runs.values()).values()])) for group in groups]
    total, held = sum(len(n) for _, n in norms), sum(int((n >= unbroken).sum()) for unbroken, n in norms)
    if not total:
        return Statement("bad", "No image was attacked, so nothing is known of the model.")
    what = "images" if len(groups) == 1 else "cases (an image, a model and a goal)"
    if not held:
        every = f"Every one of the {total} {what} was" if total > 1 else "The image was"
        return Statement("bad", f"{every} broken by at least one attack.")
    but = "A stronger or longer attack may break them, and what is not broken need not be unharmed."
    return Statement("note", f"{held} of {total} {what} were broken by no attack. {but}")


def _weak_attacks(groups: Sequence[Group]) -> Iterator[Statement]:
    """Attacks that do not break what another breaks: their curves speak of the attack, not of the model."""
    missed: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for group in groups:
        known, unbroken = smallest(group.runs.values()), group.unit.unbroken
        for name, run in group.runs.items():
            reach = run.epsilon
            most = np.nextafter(unbroken, 0) if reach is None else reach
            tried = [norm for image, norm in run.by_image.items() if known[image] <= most]
            key = (name, "" if reach is None else f" with at most {group.unit.text(reach)}")
            total[key] += len(tried)
            missed[key] += sum(norm >= unbroken for norm in tried)
    for key, count in total.items():
        if count and missed[key] / count >= 0.1:
            name, within = key
            tells = "there its numbers tell of the attack rather than of the model"
            text = f"{name} missed {missed[key]} of {_images(count)} that another attack broke{within}: {tells}."
            yield Statement("warning", text)


def _rounding(results: Sequence[RunResults]) -> Iterator[Statement]:
    results = [run for run in results if not np.isnan(run.columns["rounded.success"]).any()]  # as it is of floats
    broken = sum(int(run.success.sum()) for run in results)
    undone = sum(int((run.columns["rounded.success"][run.success] == 0).sum()) for run in results)
    bits = (
        "8 bits, as in a picture file" if all(run.unit.eight_bit for run in results) else "whole numbers, as in files"
    )
    text = f"Rounding to {bits}, undoes {undone} of {broken} successful attacks."
    if undone:
        yield Statement("note", f"{text} That is no defence: an attacker who knows of it can round first.")
    elif broken:
        yield Statement("bad", text)


def _own_labels(results: Sequence[RunResults]) -> Iterator[Statement]:
    if own := sorted({run.run.dataset for run in results if (run.columns["labels"] == "model").any()}):
        yield Statement(
            "warning",
            f"{' and '.join(own)}: there are no true labels, so the model's own predictions on the unchanged images "
            "took their place. Accuracy and IoU before the attack are perfect by construction: they say nothing here.",
        )


def _several_norms(groups: Sequence[Group]) -> Iterator[Statement]:
    norms = list(dict.fromkeys(group.norm for group in groups))
    if len(norms) > 1:
        why = "each attack in the norm it minimises: they are never compared"
        yield Statement("note", f"Sizes are in {_listed(norms)}, {why}.")


def _fixed_epsilons(groups: Sequence[Group]) -> Iterator[Statement]:
    tried: dict[tuple[str, Unit], set[float]] = {}
    for group in groups:
        for attack, runs in group.by_epsilon.items():
            tried.setdefault((attack, group.unit), set()).update(run.epsilon or 0.0 for run in runs)
    for (attack, unit), sizes in tried.items():
        within = _listed([unit.text(size) for size in sorted(sizes)])
        what = "it tells what is left of the model there, not how small a change suffices"
        yield Statement("note", f"{attack} was run within {within}: {what}.")


def _errors(results: Sequence[RunResults]) -> Iterator[Statement]:
    if errors := sum(len(run.errors) for run in results):
        yield Statement("warning", f"{_images(errors)} could not be attacked and count nowhere; the reasons are below.")


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
