"""The paper's published numbers, beside own runs of the same model, dataset, goal and attack."""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from math import nan
from typing import Any, NamedTuple

import numpy as np
import yaml

from segprox.attacks.registry import PAPER_ATTACKS
from segprox.data import DATASETS, UNTARGETED, describe, published_length
from segprox.errors import SegproxError
from segprox.models import PAPER_MODELS
from segprox.naming import Name
from segprox.report.contents import MEDIAN, PLACE
from segprox.report.groups import attack_labels
from segprox.report.results import RunResults
from segprox.report.statistics import Summary, summarise
from segprox.report.tables import Column, Table, Value
from segprox.report.units import LINF
from segprox.run.execution import HOW
from segprox.run.plan import Run, Spec

PAPER, OURS = "paper", "alma-prox"
DEVIATES = " *"
OF = "of: how many images the paper attacked, the whole validation set."
Place = tuple[Any, ...]  # what an evaluation of the paper is told by, but for its attack


class PublishedNorms(NamedTuple):
    """What the paper gives for an attack on a model: linf x 255, where what was not broken is 255, and seconds."""

    median: float
    mean: float
    seconds: float


UNKNOWN = PublishedNorms(nan, nan, nan)


@cache
def published() -> dict[str, Any]:
    """All published numbers, as they are in `published.yaml`.

    Example:
        >>> published()["models"]["mmseg:deeplabv3plus-r50b-cityscapes"]["untargeted"]["alma-prox"]
        [0.24, 0.26, 161.9]
    """
    content: dict[str, Any] = yaml.safe_load((resources.files("segprox.report") / "published.yaml").read_text("utf-8"))
    return content


def published_norms(model: str, goal: str, attack: str) -> PublishedNorms:
    """The numbers of an attack on one of the paper's models; NaN where there are none."""
    found = published()["models"][model]["untargeted" if goal == UNTARGETED else "targeted"].get(attack)
    return UNKNOWN if found is None else PublishedNorms(*found)


@cache
def _paper_runs() -> dict[Place, dict[str, Run]]:
    """The paper's runs by place and by attack; of an ablation's variants the one of the tables, which comes first."""
    text = (resources.files("segprox.run") / "specs" / f"{PAPER}.yaml").read_text("utf-8")
    runs: dict[Place, dict[str, Run]] = {}
    for run in Spec.read_text(text).runs():
        runs.setdefault(_place(run), {}).setdefault(run.attack.name, run)
    return runs


def _place(run: Run) -> Place:
    """Model, dataset, goal and threshold; it does not matter in which folder a dataset is."""
    name = Name.parse(run.dataset)
    source = DATASETS.get(name.source)
    options = {**(describe(source) if source else {}), **name.options}
    where = (name.source, options.get("split"), options.get("size"))
    return run.model.partition("?")[0], where, run.goal, run.settings.threshold


class _Beside(NamedTuple):
    """A run, its numbers, and where the paper has its own."""

    label: str
    result: RunResults
    summary: Summary
    paper: dict[str, Run]  # of the same place, by attack

    @property
    def model(self) -> str:
        return self.result.run.model.partition("?")[0]

    @property
    def attack(self) -> str:
        return self.result.run.attack.name

    @property
    def published(self) -> PublishedNorms:
        return published_norms(self.model, self.result.run.goal, self.attack)

    @property
    def deviates(self) -> bool:
        """Whether an attack of the paper was run in another way than there."""
        run, paper = self.result.run, self.paper.get(self.attack)
        options = {*Name.parse(run.model).options, *run.settings.model_options} - {*HOW, "checkpoint"}
        same = paper is not None and not options and run.settings.max_queries is run.settings.samples is None
        return paper is not None and not (same and run.attack.make() == paper.attack.make())

    @property
    def names(self) -> tuple[Value, ...]:
        run = self.result.run
        label = f"{self.label}{DEVIATES if self.deviates else ''}"
        return self.model, Name.parse(run.dataset).source, run.goal, label

    @property
    def counts(self) -> tuple[Value, ...]:
        """Images here and there."""
        return self.summary.images, published_length(next(iter(self.paper.values())).dataset)

    @property
    def order(self) -> tuple[int, bool, int]:
        """As in the paper's tables; attacks that it does not have come last."""
        place = PAPER_ATTACKS.index(self.attack) if self.attack in PAPER_ATTACKS else len(PAPER_ATTACKS)
        return PAPER_MODELS.index(self.model), self.result.run.goal != UNTARGETED, place


def against(results: Sequence[RunResults], source: str = PAPER) -> list[Table]:
    """Own runs beside published numbers: norms, the unchanged images, and costs.

    Runs that nothing is published for are named in a note of the first table.
    """
    if source != PAPER:
        raise SegproxError(f"own runs can be shown against {PAPER!r} only, but got {source!r}")
    places = [_paper_runs().get(_place(r.run)) if _comparable(r) else None for r in results]
    labelled = zip(attack_labels(results), results, places)
    beside = [_Beside(label, result, summarise(result), paper) for label, result, paper in labelled if paper]
    beside.sort(key=lambda entry: entry.order)
    others = [result.run.title for result, paper in zip(results, places) if not paper]
    tables = [_norms(beside, others), _clean(beside), _costs(beside)]
    return [table for table in tables if table.rows or table is tables[0]]


def _comparable(result: RunResults) -> bool:
    return bool(result.records) and result.unit == LINF and result.epsilon is None


def _norms(beside: Sequence[_Beside], others: Sequence[str]) -> Table:
    rows = []
    for entry in beside:
        median, mean = entry.summary.median * LINF.factor, entry.summary.mean * LINF.factor
        there, ours = entry.published, published_norms(entry.model, entry.result.run.goal, OURS)
        sizes = (median, there.median, median / there.median, mean, there.mean, mean / there.mean)
        rows.append((*entry.names, *entry.counts, *sizes, median / ours.median))
    columns = (
        *PLACE, Column("attack"), Column("images", "d"), Column("of", "d"), Column("median", ".2f"),
        Column("paper", ".2f"), Column("ratio", ".2f"), Column("mean", ".2f"), Column("paper's mean", ".2f"),
        Column("mean ratio", ".2f"), Column("to ALMA prox", ".2f"),
    )  # fmt: skip
    notes = [
        f"Norms are {LINF.name}; an image that was not broken counts as {LINF.unbroken_text}, as in the paper.",
        MEDIAN,
        f"{OF} ratio: own over published, which is rounded to two decimals. to ALMA prox: own median over the one that "
        "the paper gives for ALMA prox.",
    ]
    if any(entry.deviates for entry in beside):
        notes.append("*: other fields, options or a limit than in `segprox spec paper`.")
    if any(entry.result.run.goal != UNTARGETED and "cityscapes" in entry.model for entry in beside):
        notes.append("Cityscapes, targeted: the authors smoothed their target by hand, so it is not the same.")
    if others:
        notes.append(f"Nothing is published for: {'; '.join(others)}.")
    return Table(f"against-{PAPER}", "Beside the paper: smallest perturbations", columns, tuple(rows), tuple(notes), 3)


def _clean(beside: Sequence[_Beside]) -> Table:
    """A line for each model: by the run with most images."""
    rows = []
    for model in dict.fromkeys(entry.model for entry in beside):
        entry = max((entry for entry in beside if entry.model == model), key=lambda entry: entry.summary.images)
        own, there = entry.summary, published()["models"][model]["clean"]
        accuracy, miou = there["accuracy"] / 100, there["miou"] / 100
        cells = (own.accuracy, accuracy, own.accuracy - accuracy, own.miou, miou, own.miou - miou)
        rows.append((*entry.names[:2], *entry.counts, *cells))
    columns = (
        *PLACE[:2], Column("images", "d"), Column("of", "d"), Column("accuracy", ".2%"), Column("paper", ".1%"),
        Column("difference", "+.2%"), Column("mIoU", ".2%"), Column("paper's mIoU", ".1%"),
        Column("mIoU difference", "+.2%"),
    )  # fmt: skip
    note = "Of pixels, and pooled over images, at the size that was attacked: the paper does not resize either."
    return Table(f"against-{PAPER}-clean", "Beside the paper: unchanged images", columns, tuple(rows), (note, OF), 2)


def _costs(beside: Sequence[_Beside]) -> Table:
    rows = []
    for entry in beside:
        forwards, backwards = published()["complexity"].get(entry.attack, (None, None))
        means = [float(np.mean(entry.result.columns[name])) for name in ("forwards", "backwards", "seconds")]
        cells = (means[0], forwards, means[1], backwards, means[2], entry.published.seconds)
        rows.append((*entry.names, entry.summary.images, *cells))
    columns = (
        *PLACE, Column("attack"), Column("images", "d"), Column("forwards", ".0f"), Column("paper", "d"),
        Column("backwards", ".0f"), Column("paper's backwards", "d"), Column("seconds", ".1f"),
        Column("paper's seconds", ".1f"),
    )  # fmt: skip
    note = "Averages per image; the paper gives forwards and backwards over all models, and seconds on an A100."
    return Table(f"against-{PAPER}-cost", "Beside the paper: what it cost", columns, tuple(rows), (note,), 3)
