"""The results of an evaluation, for scripts and notebooks."""

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from rich.console import Console

from segprox.errors import SegproxError
from segprox.optional import require
from segprox.report.card import Card
from segprox.report.compare import compare_tables, match_runs
from segprox.report.contents import report_tables
from segprox.report.curves import Curve, measure_curve, share_above, unbroken_curve
from segprox.report.findings import smallest
from segprox.report.groups import Group, attack_labels, group_runs
from segprox.report.metrics import Measure, mean_iou, pixel_accuracy
from segprox.report.published import PAPER, against
from segprox.report.requirements import (
    Outcome,
    Requirement,
    judge_all,
    load_requirements,
    read_requirements,
    requirement_table,
)
from segprox.report.results import RunResults, load_runs
from segprox.report.tables import Table, to_screen
from segprox.report.units import Unit
from segprox.run.plan import Run
from segprox.run.record import Record

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]  # its stubs are a package of their own
    from matplotlib.axes import Axes

WIDTH = 160  # of tables as text: all columns of the widest
SCORES = ("linf", "l2", "l1", "apsr", "attacked", "protected", "share")  # columns of the rows


class SummaryTable:
    """A table of runs: text where it is printed, HTML in a notebook."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, force_jupyter=False)  # which would display it instead
        for table in self.tables:
            console.print(to_screen(table.said()))
        text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
        return text.rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(_to_html(table.said()) for table in self.tables)


def _to_html(table: Table) -> str:
    texts = [[html.escape(column.text(value)) for column, value in zip(table.columns, row)] for row in table.rows]
    for i, k in table.bold():
        texts[i][k] = f"<b>{texts[i][k]}</b>"

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ["left" if column.form is None else "right" for column in table.columns]
        styled = (f'<{tag} style="text-align:{side}">{cell}</{tag}>' for side, cell in zip(sides, cells))
        return f"<tr>{''.join(styled)}</tr>"

    head = line([html.escape(column.title) for column in table.columns], "th")
    body = "".join(line(row, "td") for row in texts)
    notes = f"<p><small>{html.escape(' '.join(table.notes))}</small></p>"
    return f"<h4>{html.escape(table.title)}</h4><table><thead>{head}</thead><tbody>{body}</tbody></table>{notes}"


class Requirements(SummaryTable):
    """Requirements that were judged, as a table; `met` is True if all of them passed."""

    def __init__(self, runs: Sequence[RunResults], requirements: Sequence[Requirement]) -> None:
        self.judged = judge_all(requirements, group_runs(runs))
        super().__init__([requirement_table(self.judged)])

    @property
    def outcomes(self) -> list[Outcome]:
        """`pass`, `fail` or `too few images`, one for each line."""
        return [entry.outcome for entry in self.judged]

    @property
    def met(self) -> bool:
        """Whether every requirement passed."""
        return all(outcome == "pass" for outcome in self.outcomes)


class Results(Sequence[RunResults]):
    """The runs of an evaluation: a sequence of `RunResults`, and what they say together.

    Example:
        >>> import segprox
        >>> found = segprox.evaluate("demo-standard", "demo", ["fmn", "dag-0.003"], limit=2, steps=20, progress=False)
        >>> len(found), len(found.rows()), found.only(attack="fmn").best().keys()
        (2, 4, dict_keys(['scene-0000', 'scene-0001']))
    """

    def __init__(self, runs: Sequence[RunResults]) -> None:
        self.runs = tuple(runs)

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, index: int) -> RunResults: ...
    @overload
    def __getitem__(self, index: slice) -> "Results": ...
    def __getitem__(self, index: int | slice) -> "RunResults | Results":
        return Results(self.runs[index]) if isinstance(index, slice) else self.runs[index]

    def __repr__(self) -> str:
        images = sum(len(run.records) for run in self.runs)
        errors = sum(len(run.errors) for run in self.runs)
        return f"Results({len(self)} runs, {images} attacked images{f', {errors} errors' if errors else ''})"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def only(
        self,
        *,
        model: str | None = None,
        dataset: str | None = None,
        attack: str | None = None,
        goal: str | None = None,
    ) -> "Results":
        """The runs of one model, dataset, attack or goal, as they are named."""
        given = {"model": model, "dataset": dataset, "attack": attack, "goal": goal}
        wanted = {name: value for name, value in given.items() if value is not None}

        def fits(run: Run) -> bool:
            own = {"model": run.model, "dataset": run.dataset, "attack": run.attack.name, "goal": run.goal}
            return all(
                value == own[name] or (name, value) == ("model", run.model_title) for name, value in wanted.items()
            )

        chosen = [run for run in self.runs if fits(run.run)]
        if not chosen:
            names = ", ".join(f"{name} {value!r}" for name, value in wanted.items())
            raise SegproxError(
                f"there is no run with {names}; there are: {'; '.join(run.run.title for run in self.runs)}"
            )
        return Results(chosen)

    def summary(self) -> SummaryTable:
        """What each attack found, and what is left of the model: tables that print, and render in notebooks."""
        kinds = ("summary", "fixed-epsilon", "accuracy", "random")
        return SummaryTable([t for t in report_tables(group_runs(self.runs)) if t.name.startswith(kinds)])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each image and attack, as plain data; sizes are in units of the image's range, [0, 1]."""
        rows = []
        for label, run in zip(attack_labels(self.runs), self.runs):
            names = {"model": run.run.model, "dataset": run.run.dataset, "goal": run.run.goal, "attack": label}
            for record in run.records:
                rows.append({
                    **names, "image": record.image, "broken": record.found.success, "norm": record.norm,
                    **{name: getattr(record.found, name) for name in SCORES},
                    "clean_accuracy": record.clean_accuracy, "accuracy": record.accuracy,
                    **_rounded(record, run.unit),
                    "forwards": record.forwards, "backwards": record.backwards, "seconds": record.seconds,
                    "error": None,
                })  # fmt: skip
            rows += [{**names, "image": error.image, "broken": None, "error": error.reason} for error in run.errors]
        return rows

    def to_pandas(self) -> "pandas.DataFrame":
        """The rows as a data frame; needs pandas."""
        frame: pandas.DataFrame = require("pandas", "pandas").DataFrame(self.rows())
        return frame

    def curve(self) -> Curve:
        """The share of images that no attack breaks with a perturbation of at most x."""
        norms = np.array([*self.best().values()])
        return share_above(norms[np.isfinite(norms)], max(len(norms), 1))

    def accuracy(self, epsilon: float, measure: Measure = pixel_accuracy) -> float:
        """The pixel accuracy that the strongest attack leaves with perturbations no larger than `epsilon`.

        Args:
            epsilon: a size, such as 8 / 255.
            measure: `segprox.report.pixel_accuracy`, `mean_iou`, or any other function of pooled counts.
        """
        return min(measure_curve(run, measure).at(epsilon) for run in self._group().runs.values())

    def miou(self, epsilon: float) -> float:
        """The mean IoU that the strongest attack leaves with perturbations no larger than `epsilon`."""
        return self.accuracy(epsilon, mean_iou)

    def best(self) -> dict[str, float]:
        """For each image the smallest norm that any attack broke it with; infinite where none did."""
        group = self._group()
        norms = smallest(group.runs.values())
        names = {key: record.image for run in group.runs.values() for key, record in zip(run.by_image, run.records)}
        return {names[key]: norm if norm < group.unit.unbroken else float("inf") for key, norm in norms.items()}

    def compare(self, other: "Results") -> SummaryTable:
        """Compare with other results on the same images: two models, two attacks, or before and after a change.

        Runs are matched by dataset, goal, threshold and norm (and epsilon, where it is fixed), and among those by model
        and attack; where no model is on both sides, by attack; and where no attack is either, if there is one run on
        each side. Images are matched by their pixels. For each pair: the medians of both on the images that both have,
        the median of the ratios, the median difference with its 95 % interval, the shares of images where the second
        is larger and smaller, and the p-value of an exact sign test. "More robust" is said where that is below 0.05.

        Example:
            >>> import segprox
            >>> one, other = (
            ...     segprox.evaluate(name, "demo", "fmn", limit=2, steps=20, progress=False)
            ...     for name in ("demo-standard", "demo-robust")
            ... )
            >>> one.compare(other).tables[0].notes[0]
            'No difference is shown between demo-standard and demo-robust (fmn, demo, untargeted; p = 0.5).'
        """
        return SummaryTable(compare_tables(match_runs(self.runs, other.runs)))

    def against(self, source: str = PAPER) -> SummaryTable:
        """The runs of the paper's models beside the numbers that it published, with ratios; names those it lacks.

        Example:
            >>> import segprox
            >>> found = segprox.evaluate("demo-standard", "demo", "fmn", limit=1, steps=5, progress=False)
            >>> found.against("paper").tables[0].notes[-1]
            'Nothing is published for: demo-standard | demo | fmn steps=5 | untargeted.'
        """
        return SummaryTable(against(self.runs, source))

    def card(self) -> Card:
        """What was found and how to repeat it, as a section of a model card: `markdown`, `data`, `write(folder)`.

        Example:
            >>> import segprox
            >>> found = segprox.evaluate("demo-standard", "demo", "fmn", limit=2, steps=20, progress=False)
            >>> found.card().data["segprox"][0]["runs"][0]["command"]
            'segprox evaluate --model demo-standard --dataset demo --attack fmn --set steps=20 --limit 2 --out results'
        """
        return Card.of(self.runs)

    def require(self, *requirements: Mapping[str, Any]) -> "Requirements":
        """Judge requirements, each on every model, dataset and goal.

        Args:
            requirements: mappings such as `{"withstand": "2/255", "share": 0.9}`,
                `{"accuracy": 0.5, "epsilon": "1/255"}` or `{"class": "person", "iou": 0.4, "epsilon": "1/255"}`.

        Example:
            >>> import segprox
            >>> found = segprox.evaluate("demo-standard", "demo", "fmn", limit=2, steps=20, progress=False)
            >>> found.require({"withstand": "1/255", "share": 0.9}).outcomes
            ['too few images']
        """
        return Requirements(self.runs, read_requirements([dict(entry) for entry in requirements]))

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Draw the share of images that each attack leaves unbroken against the size of the perturbation."""
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots()[1]
        for label, run in zip(attack_labels(self.runs), self.runs):
            x, y = unbroken_curve(run)
            axes.step(x * run.unit.factor, y, where="post", label=label)
        axes.set(xlabel=self.runs[0].unit.name, ylabel="share of images that are not broken", ylim=(-0.02, 1.02))
        axes.legend()
        return axes

    def write_report(
        self,
        folder: str | Path,
        *,
        require: Sequence[Mapping[str, Any]] | str | Path = (),
        critical: Sequence[str] = (),
        formats: Sequence[str] = ("svg", "png"),
    ) -> Path:
        """Write tables, figures and the page; returns the page.

        Args:
            folder: where to.
            require: requirements as `Results.require` takes them, or a YAML file of them; the page begins with them.
            critical: classes that come first, and are marked, wherever classes are shown.
            formats: of the figures, some of svg, png and pdf.
        """
        from segprox.report.write import write_report

        if isinstance(require, str | Path):
            wanted = load_requirements(Path(require))
        else:
            wanted = read_requirements([dict(entry) for entry in require]) if require else []
        return write_report(self.runs, Path(folder), wanted, critical, formats=formats).page.path

    def _group(self) -> Group:
        groups = group_runs(self.runs)
        if len(groups) != 1:
            titles = "; ".join(group.title for group in groups)
            raise SegproxError(
                f"this needs one model, dataset, goal and norm, but there are: {titles}; choose with only()"
            )
        return groups[0]


def load_results(*folders: str | Path) -> Results:
    """The results in these folders, each of one run or of many, as `segprox evaluate` writes them.

    Example:
        >>> import tempfile, segprox
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = segprox.evaluate("demo-standard", "demo", "fmn", limit=1, steps=3, out=folder, progress=False)
        ...     segprox.load_results(folder)
        Results(1 runs, 1 attacked images)
    """
    return Results(load_runs([Path(folder) for folder in folders]))


def _rounded(record: Record, unit: Unit) -> dict[str, Any]:
    """Whether the image is still broken when rounded as files hold it; floats are not rounded."""
    kind = "8bit" if unit.eight_bit else "rounded"
    score = record.rounded
    return {} if score is None else {f"broken_{kind}": score.success, f"linf_{kind}": score.linf}
