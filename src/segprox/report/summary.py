"""What runs found, in numbers and in plain sentences."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segprox.errors import SegproxError
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.results import FAILED_NORM, RunResults

Floats = NDArray[np.float64]
Kind = Literal["good", "bad", "warning", "note"]
POINTS = 300  # of a curve; more cannot be told apart on a screen
# A rule of thumb for a change of at most so many 255ths in every value of a photograph.


class Setting(NamedTuple):
    """What attacks are compared on."""

    model: str
    dataset: str
    goal: str

    def __str__(self) -> str:
        return " · ".join(self)


@dataclass(frozen=True)
class RunSummary:
    """One run as a line of a table; sizes are linf norms, and what nothing is known of is NaN."""

    images: int
    failed: int
    broken: int
    broken_rounded: int
    median: float  # of sizes; an image that was not broken counts as 1
    mean: float
    apsr: float
    clean_miou: float
    miou: float
    clean_accuracy: float
    accuracy: float
    forwards: float  # per image, as the rest
    backwards: float
    seconds: float

    @property
    def broken_share(self) -> float:
        """The share of attacked images that were broken."""
        return self.broken / self.images if self.images else np.nan

    @property
    def rounded_share(self) -> float:
        """The share that is still broken in 8 bits."""
        return self.broken_rounded / self.images if self.images else np.nan


class Statement(NamedTuple):
    """A finding, for a reader who knows nothing of attacks."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Verdict:
    """How one model fares against all attacks of a setting together: each image counts by its smallest change."""

    setting: Setting
    images: int
    broken: int
    half: float  # at least half of the images fall to a change of this size; 1 if they do not
    statements: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether fewer than half of the images were broken."""
        return self.half >= FAILED_NORM

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.holds:
            return f"{'Fewer than half of the images fall' if self.broken else 'No image falls'} to any attack here."
        if self.half == 0:
            return "Half of the images need no change at all: the model is wrong already."
        who = "Half of the images fall" if self.images > 1 else "The image falls"
        return f"{who} to a change of at most {size_text(self.half)} of the brightness range."


class Damage(NamedTuple):
    """What the perturbations found leave of a model's quality, for attackers of growing strength."""

    epsilon: Floats
    accuracy: Floats
    miou: Floats


def size_text(norm: float) -> str:
    """A linf norm as people in the field write it.

    Example:
        >>> size_text(0.0129), size_text(0.001), size_text(1.0)
        ('3.3/255', '0.26/255', '255/255')
    """
    value = norm * 255
    digits = 0 if value >= 100 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}/255"


def summarize(result: RunResults) -> RunSummary:
    """The numbers of one run."""
    records = result.records
    counts = [result.counts(clean=clean) if records else None for clean in (True, False)]
    clean_miou, miou = (mean_iou(*c) if c else np.nan for c in counts)
    clean_accuracy, accuracy = (pixel_accuracy(*c) if c else np.nan for c in counts)
    return RunSummary(
        images=len(records),
        failed=len(result.failures),
        broken=int(result.success.sum()),
        broken_rounded=sum(record.rounded.success for record in records),
        median=float(np.median(result.norms)) if records else np.nan,
        mean=_mean(result.norms),
        apsr=_mean(record.found.apsr for record in records),
        clean_miou=clean_miou,
        miou=miou,
        clean_accuracy=clean_accuracy,
        accuracy=accuracy,
        forwards=_mean(record.forwards for record in records),
        backwards=_mean(record.backwards for record in records),
        seconds=_mean(record.seconds for record in records),
    )


def by_setting(results: Sequence[RunResults]) -> dict[Setting, list[RunResults]]:
    """Runs that differ in their attack only, in the order given."""
    groups: dict[Setting, list[RunResults]] = {}
    for result in results:
        groups.setdefault(Setting(result.run.model, result.run.dataset, result.run.goal), []).append(result)
    return groups


def attack_names(results: Sequence[RunResults]) -> list[str]:
    """A name per run that is unique within its setting: the attack, and whatever else differs where that is not enough.

    Runs of one attack may differ in seed or budget, or come from two folders.
    """
    names = [str(result.run.attack) for result in results]
    settings = [Setting(r.run.model, r.run.dataset, r.run.goal) for r in results]
    for field in ("seed", "budget", "threshold", "model_options"):
        values = [getattr(result.run.settings, field) for result in results]
        names = [
            f"{name} {field}={values[i]}" if _ambiguous(i, names, settings, values) else name
            for i, name in enumerate(names)
        ]
    seen: Counter[tuple[Setting, str]] = Counter()
    for i, entry in enumerate(zip(settings, names)):
        seen[entry] += 1
        if seen[entry] > 1:
            names[i] = f"{entry[1]} #{seen[entry]}"
    return names


def _ambiguous(i: int, names: Sequence[str], settings: Sequence[Setting], values: Sequence[object]) -> bool:
    """Whether a run of the same name and setting has another value."""
    return any(
        names[j] == names[i] and settings[j] == settings[i] and values[j] != values[i] for j in range(len(names))
    )


def smallest(results: Iterable[RunResults]) -> dict[str, float]:
    """For each image the smallest change that any of the runs found, 1 where none broke it."""
    best: dict[str, float] = {}
    for result in results:
        for record, norm in zip(result.records, result.norms.tolist()):
            best[record.image] = min(norm, best.get(record.image, FAILED_NORM))
    return best


def damage(result: RunResults) -> Damage:
    """Accuracy and mean IoU against epsilon.

    An attacker who may change values by epsilon has every perturbation found that is no larger, whether or not it
    counts as a success; all other images stay as they were.
    """
    sizes = np.array([record.found.linf for record in result.records])
    order = np.argsort(sizes, kind="stable")
    clean, attacked = (np.stack(result.counts(clean=clean)).astype(np.int64) for clean in (True, False))  # [3, N, K]
    gains = np.concatenate([clean.sum(1, keepdims=True), (attacked - clean)[:, order]], axis=1)
    epsilon = np.concatenate([[0.0], sizes[order]])
    last = np.append(np.diff(epsilon) > 0, True)  # of equal sizes only the last tells the truth
    epsilon, pooled = epsilon[last], gains.cumsum(1)[:, last]
    kept = np.unique(np.linspace(0, len(epsilon) - 1, POINTS).round().astype(int))
    points = [pooled[:, None, i] for i in kept]
    return Damage(
        epsilon[kept],
        np.array([pixel_accuracy(*point) for point in points]),
        np.array([mean_iou(*point) for point in points]),
    )


def verdicts(results: Sequence[RunResults]) -> list[Verdict]:
    """One per setting that has a record."""
    names = dict(zip(map(id, results), attack_names(results)))
    return [
        _verdict(setting, {names[id(run)]: run for run in runs if run.records})
        for setting, runs in by_setting(results).items()
        if any(run.records for run in runs)
    ]


def budget(result: RunResults) -> float | None:
    """The size that an attack stays within by design; none for attacks that look for the smallest change.

    An attack of a later segprox, which cannot be made here, is taken for one of those.
    """
    try:
        attack = result.run.attack.make()
    except SegproxError:
        return None
    if attack.family == "minimal":
        return None
    return float(getattr(attack, "epsilon", 0.0)) if attack.norm == "linf" else 0.0


def _verdict(setting: Setting, runs: Mapping[str, RunResults]) -> Verdict:
    norms = np.array(sorted(smallest(runs.values()).values()))
    broken = int((norms < FAILED_NORM).sum())
    # The median of the tables, unless it lies between an image that was broken and one that was not.
    middle = norms[(len(norms) - 1) // 2], norms[len(norms) // 2]
    half = float(np.mean(middle)) if middle[1] < FAILED_NORM else float(middle[0])
    return Verdict(setting, len(norms), broken, half, tuple(_about_attacks(runs)))


def _about_attacks(runs: Mapping[str, RunResults]) -> list[str]:
    """The strongest and the weakest attack, on the images that all have attacked.

    Where some look for the smallest change, those that stay within a budget do not compete.
    """
    runs = {name: run for name, run in runs.items() if budget(run) is None} or runs
    if len(runs) < 2:
        return [f"Only {next(iter(runs))} looked for the smallest change: another attack may find smaller ones."]
    shared = set.intersection(*({record.image for record in run.records} for run in runs.values()))
    if not shared:
        return ["The attacks have no image in common, so they cannot be compared."]
    norms = {
        name: np.array([n for record, n in zip(run.records, run.norms.tolist()) if record.image in shared])
        for name, run in runs.items()
    }
    ranked = sorted(norms, key=lambda name: (float(np.median(norms[name])), float(norms[name].mean())))
    first, last = ranked[0], ranked[-1]
    best, worst = (float(np.median(norms[name])) for name in (first, last))
    if best >= FAILED_NORM:
        return ["No attack breaks half of the images."]
    if np.array_equal(norms[first], norms[last]):
        return ["All attacks find the same changes."]
    how = f"breaks {_share(norms[last])}" if worst >= FAILED_NORM else f"needs {size_text(worst)}"
    return [f"Strongest attack: {first}, median {size_text(best)}.", f"Weakest: {last}, {how}."]


def statements(results: Sequence[RunResults]) -> list[Statement]:
    """What a reader should know before looking at tables, most important first."""
    groups = by_setting(results)
    found = [*_compare_models(groups), *_never_broken(groups), *_weak_attacks(groups, results), *_rounding(results)]
    return [
        *found,
        *_unequal(groups),
        *_own_labels(results),
        *_budgets(results),
        *_other_norms(results),
        *_failed(results),
    ]


def same_images(runs: Iterable[RunResults]) -> bool:
    """Whether the runs that attacked anything attacked the same images, so that their numbers may be compared."""
    return len({tuple(record.image for record in run.records) for run in runs if run.records}) <= 1


def _unequal(groups: Mapping[Setting, Sequence[RunResults]]) -> list[Statement]:
    found = [str(setting) for setting, runs in groups.items() if not same_images(runs)]
    if not found:
        return []
    text = f"Not all attacks have seen the same images yet, so their rows cannot be compared: {'; '.join(found)}."
    return [Statement("warning", text)]


def _compare_models(groups: Mapping[Setting, Sequence[RunResults]]) -> list[Statement]:
    """Each model against the next more robust one, on the same images under the same attacks."""
    tasks: dict[tuple[str, str], dict[str, list[RunResults]]] = {}
    for (model, dataset, goal), runs in groups.items():
        tasks.setdefault((dataset, goal), {})[model] = [run for run in runs if run.records]
    found = []
    for (dataset, goal), models in tasks.items():
        where = f" ({dataset}, {goal})" if len(tasks) > 1 else ""
        ranked = sorted(
            (m for m in models if models[m]), key=lambda m: -float(np.median([*smallest(models[m]).values()]))
        )
        for stronger, weaker in pairwise(ranked):
            found += _compare(stronger, models[stronger], weaker, models[weaker], where)
    return found


def _compare(
    one: str, ones: Sequence[RunResults], other: str, others: Sequence[RunResults], where: str
) -> list[Statement]:
    attacks = {str(run.run.attack) for run in ones} & {str(run.run.attack) for run in others}
    first, second = (smallest(run for run in runs if str(run.run.attack) in attacks) for runs in (ones, others))
    images = sorted(first.keys() & second.keys())
    if not images:
        return [
            Statement("note", f"{one} and {other} cannot be compared{where}: no image was attacked in the same way.")
        ]
    x, y = np.array([first[i] for i in images]), np.array([second[i] for i in images])
    if (x > y).sum() < (y > x).sum():
        one, other, x, y = other, one, y, x
    wins, ties = int((x > y).sum()), int((x == y).sum())
    if wins <= (y > x).sum():
        return [Statement("note", f"{one} and {other} are equally robust{where} on the same {_images(len(images))}.")]
    ratios = x / np.maximum(y, 1e-9)
    times = f"a change typically {np.median(ratios):.1f} times as large" if np.median(ratios) < 200 else "far more"
    if (x >= FAILED_NORM).mean() >= 0.5:
        times = "more than any attack found, on half of them"
    tied = f", {ties} alike" if ties else ""
    return [
        Statement(
            "good",
            f"{one} is more robust than {other}{where}: on the same {_images(len(images))}, breaking it takes {times}. "
            f"It holds out longer on {wins} of {len(images)}{tied}.",
        )
    ]


def _never_broken(groups: Mapping[Setting, Sequence[RunResults]]) -> list[Statement]:
    norms = [np.array([*smallest(runs).values()]) for runs in groups.values()]
    total, held = sum(map(len, norms)), sum(int((n >= FAILED_NORM).sum()) for n in norms)
    if not total:
        return [Statement("bad", "No image was attacked, so nothing is known of the model.")]
    what = "images" if len(groups) == 1 else "cases (an image, a model and a goal)"
    if not held:
        every = f"Every one of the {total} {what} was" if total > 1 else "The image was"
        return [Statement("bad", f"{every} broken by at least one attack.")]
    text = f"{held} of {total} {what} withstood every attack. A stronger or longer attack may still break them."
    return [Statement("note" if held < total else "good", text)]


def _weak_attacks(groups: Mapping[Setting, Sequence[RunResults]], results: Sequence[RunResults]) -> list[Statement]:
    """Attacks that fail where another succeeds: their curves speak of the attack, not of the model."""
    names = dict(zip(map(id, results), attack_names(results)))
    missed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for runs in groups.values():
        known = smallest(runs)
        for run in runs:
            reach = budget(run)
            most = np.nextafter(FAILED_NORM, 0) if reach is None else reach
            tried = [record for record in run.records if known[record.image] <= most]
            total[names[id(run)]] += len(tried)
            missed[names[id(run)]] += sum(not record.found.success for record in tried)
    return [
        Statement(
            "warning",
            f"{name} failed on {missed[name]} of the {_images(total[name])} that it might have broken: "
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


def _other_norms(results: Sequence[RunResults]) -> list[Statement]:
    others = {
        str(run.run.attack): str(run.header["norm"]) for run in results if run.header.get("norm", "linf") != "linf"
    }
    return [
        Statement("note", f"{attack} looks for a small {norm} norm; this page shows the linf norm of what it found.")
        for attack, norm in others.items()
    ]


def _budgets(results: Sequence[RunResults]) -> list[Statement]:
    found = {str(run.run.attack): budget(run) for run in results}
    return [
        Statement(
            "note", f"{attack} stays within {size_text(most)}: it tells how many images fall to that, not to less."
        )
        for attack, most in found.items()
        if most
    ]


def _failed(results: Sequence[RunResults]) -> list[Statement]:
    failed = sum(len(run.failures) for run in results)
    if not failed:
        return []
    return [Statement("warning", f"{_images(failed)} could not be attacked and count nowhere; the reasons are below.")]


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _share(norms: Floats) -> str:
    return f"{int((norms < FAILED_NORM).sum())} of {len(norms)}"


def _mean(values: Iterable[float] | Floats) -> float:
    array = np.fromiter(values, dtype=np.float64)
    return float(array.mean()) if len(array) else np.nan
