"""Figures of runs, for screens and for print."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Line
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from segprox.counts import Counts
from segprox.errors import SegproxError
from segprox.report.groups import Group
from segprox.report.labels import Label, Place, place_labels
from segprox.report.metrics import mean_iou, pixel_accuracy
from segprox.report.results import RunResults
from segprox.report.statistics import Curve, measure_curve, unbroken_curve

# Okabe and Ito's colours, told apart by everyone; without yellow, which is too pale for lines on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
INKS = {"#CC79A7": "#A34D7A", "#E69F00": "#946600", "#56B4E9": "#2177AC"}  # darker, where letters would be too pale
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))  # 28 with the colours
MARKERS = "osD^vPX*"
GREY = "#9A9A9A"
LINEAR = 2.0  # x 255: up to here norms are drawn to scale, above it logarithmically, as in the paper
TICKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 255)
HEIGHTS = (0.5, 0.62, 0.38, 0.74, 0.26, 0.86, 0.14, 0.93, 0.07)  # where a curve may be labelled
MOST_CLASSES, MOST_BARS = 40, 3
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#555555", "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelcolor": "black",
    "ytick.labelcolor": "black", "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.6,
    "axes.axisbelow": True, "lines.linewidth": 1.7, "legend.frameon": False, "savefig.facecolor": "white",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.hashsalt": "segprox", "pdf.fonttype": 42,
}  # fmt: skip
Styles = Mapping[str, dict[str, Any]]


def draw_figures(groups: Sequence[Group]) -> dict[str, Figure]:
    """All figures by name; those with nothing to show are left out."""
    shown = [group for group in groups if group.attacked]
    if not shown:
        return {}
    masked = [group for group in map(masking_variants, shown) if group.runs]
    with _style():
        figures = {
            "unbroken": draw_unbroken(shown),
            "accuracy": draw_measure(shown, pixel_accuracy, "pixel accuracy"),
            "miou": draw_measure(shown, mean_iou, "mean IoU"),
            "classes": draw_classes(shown),
            "queries": draw_queries(shown),
        }
        figures |= {"masking": draw_unbroken(masked)} if masked else {}
        for figure in figures.values():
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # keeps what was laid out: every format is the same, and quick to write
    return figures


def save_figure(figure: Figure, path: Path) -> None:
    """As SVG, PDF and PNG, each with its ending; the same figure gives the same files."""
    with _style():
        figure.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None})
        figure.savefig(path.with_name(f"{path.name}.pdf"), metadata={"CreationDate": None})
        figure.savefig(path.with_name(f"{path.name}.png"), dpi=160)


@contextmanager
def _style() -> Iterator[None]:
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # names in any script
        yield


def draw_unbroken(groups: Sequence[Group]) -> Figure:
    """The share of images that resist against the norm: a curve for each attack, a panel for each group."""
    return _draw_curves(groups, unbroken_curve, "images not broken", "perturbation, linf x 255")


def draw_measure(groups: Sequence[Group], measure: Callable[..., float], name: str) -> Figure:
    """Accuracy or mean IoU against epsilon; images that are not broken within it count as they were."""
    return _draw_curves(groups, lambda result: measure_curve(result, measure), name, "epsilon x 255")


def _draw_curves(groups: Sequence[Group], curve: Callable[[RunResults], Curve], y_label: str, x_label: str) -> Figure:
    styles, (figure, panels) = _styles(groups), _panels(groups)
    curves = [{label: curve(result) for label, result in group.attacked.items()} for group in groups]
    end = _axis_end([x for some in curves for found in some.values() for x in found.x * 255])
    for group, axes, some in zip(groups, panels, curves):
        _title(axes, group)
        _norm_axis(axes, "x", end)
        axes.set(ylim=(0, 1.0), xlabel=x_label, ylabel=y_label)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        for label, found in some.items():
            look = {key: styles[label][key] for key in ("color", "linestyle")}
            axes.plot(*_steps(found, end), **look, clip_on=False, solid_joinstyle="miter")
    _tidy(panels)
    figure.draw_without_rendering()  # settles the layout
    done = [_label_curves(axes, some, styles, end) for axes, some in zip(panels, curves)]
    _legend(figure, panels, styles, done)
    return figure


def _steps(curve: Curve, end: float) -> tuple[list[float], list[float]]:
    """The corners of a step function from above at 0 to the right end."""
    x, y = [0.0], [float(curve.y[0])]
    for position, value in zip(curve.x[1:] * 255, curve.y[1:]):
        x += [float(position)] * 2
        y += [y[-1], float(value)]
    return [*x, end], [*y, y[-1]]


def _label_curves(axes: Axes, curves: Mapping[str, Curve], styles: Styles, end: float) -> bool:
    lines = [Line(np.column_stack(_steps(curve, end))) for curve in curves.values()]
    labels = [Label(_text(label), _ink(styles[label]), _beside(curve, end)) for label, curve in curves.items()]
    return place_labels(axes, labels, lines)


def _beside(curve: Curve, end: float) -> list[Place]:
    """Right and left of where the curve falls, above and below where it is flat at the end."""
    top, bottom = float(curve.y[0]), float(curve.y[-1])
    places = []
    for height in (bottom + share * (top - bottom) for share in HEIGHTS if top > bottom):
        x = float(curve.x[int(np.argmax(curve.y <= height))]) * 255
        places += [Place(x, height, 5, 0), Place(x, height, -5, 0)]
    flat = [tick for tick in reversed(TICKS) if float(curve.x[-1]) * 255 < tick <= end]
    return [*places, *(Place(tick, bottom, -5, side) for tick in flat for side in (3, -3))]


def draw_queries(groups: Sequence[Group]) -> Figure:
    """What attacks cost and find: median queries and norms, with quartiles of the norm. Lower left is better."""
    styles, (figure, panels) = _styles(groups), _panels(groups)
    points = [{label: _cost(result) for label, result in group.attacked.items()} for group in groups]
    found = [point for some in points for point in some.values()]
    end = _axis_end([point.high for point in found])
    start = max(tick for tick in TICKS if tick <= min(point.low for point in found) / 1.5)
    left, right = min(point.queries for point in found) / 1.8, max(point.queries for point in found) * 1.8
    for group, axes, some in zip(groups, panels, points):
        _title(axes, group)
        axes.set_xscale("log")
        axes.set(xlim=(left, right), xlabel="forwards + backwards per image", ylabel="linf x 255")
        _norm_axis(axes, "y", end)
        axes.set_ylim(start, end * 1.3)  # room for a point at the end
        _plain_log_ticks(axes, left, right)
        for label, point in some.items():
            look = styles[label]
            axes.plot([point.queries] * 2, [point.low, point.high], color=look["color"], linewidth=1.2)
            axes.plot(point.queries, point.norm, look["marker"], color=look["color"], mec="white", ms=7.5, zorder=3)
    _tidy(panels)
    figure.draw_without_rendering()
    done = [_label_points(axes, some, styles) for axes, some in zip(panels, points)]
    _legend(figure, panels, styles, done, "marker")
    return figure


class _Cost(NamedTuple):
    queries: float
    low: float  # quartiles of the norm x 255
    norm: float
    high: float


def _cost(result: RunResults) -> _Cost:
    queries = np.median([record.forwards + record.backwards for record in result.records])
    low, norm, high = np.quantile(result.norms, [0.25, 0.5, 0.75]) * 255
    return _Cost(max(1.0, float(queries)), float(low), float(norm), float(high))


def _label_points(axes: Axes, points: Mapping[str, _Cost], styles: Styles) -> bool:
    around = ((7, 0), (-7, 0), (0, 7), (0, -7), (5, 6), (-5, 6), (5, -6), (-5, -6))
    labels = [
        Label(_text(label), _ink(styles[label]), [Place(point.queries, point.norm, *offset) for offset in around])
        for label, point in points.items()
    ]
    lines = [Line([(point.queries, point.low), (point.queries, point.high)]) for point in points.values()]
    return place_labels(axes, labels, lines)


def draw_classes(groups: Sequence[Group]) -> Figure:
    """IoU of each class before and after, sorted by before; of the attacks with the smallest medians if many."""
    styles = _styles(groups)
    chosen = [_strongest(group) for group in groups]
    shown = [_classes(group) for group in groups]
    tallest = max(len(classes) * (1 + len(some)) for classes, some in zip(shown, chosen))
    figure, panels = _panels(groups, height=1.1 + 0.085 * tallest + 0.06 * max(map(len, shown)))
    for group, axes, some, classes in zip(groups, panels, chosen, shown):
        _title(axes, group)
        first = next(iter(group.attacked.values()))
        bars = [("before", GREY, _ious(first, clean=True))]
        bars += [(label, styles[label]["color"], _ious(result)) for label, result in some.items()]
        _bars(axes, bars, classes)
        axes.set_yticks(range(len(classes)), [_text(first.classes[k], 18) for k in classes])
    _tidy(panels, share_y=False)
    used = {label: styles[label] for label in styles if any(label in some for some in chosen)}
    _legend(figure, panels, {"before the attack": {"color": GREY}, **used}, [False], "bar")
    return figure


def _strongest(group: Group) -> dict[str, RunResults]:
    ordered = sorted(group.attacked.items(), key=lambda item: float(np.median(item[1].norms)))[:MOST_BARS]
    return {label: result for label, result in group.attacked.items() if label in dict(ordered)}


def _classes(group: Group) -> list[int]:
    """Classes that occur, the best before the attack first; those with the most pixels if there are too many."""
    first = next(iter(group.attacked.values()))
    counts = _pooled(first, clean=True)
    there = [k for k in np.argsort(-(counts.tp + counts.fn), kind="stable") if counts.tp[k] + counts.fn[k] > 0]
    ious = counts.iou()
    return sorted((int(k) for k in there[:MOST_CLASSES]), key=lambda k: -ious[k])


def _pooled(result: RunResults, clean: bool = False) -> Counts:
    return Counts(*(values.sum(0) for values in result.counts(clean)))


def _ious(result: RunResults, clean: bool = False) -> Any:
    return np.nan_to_num(_pooled(result, clean).iou())


def _bars(axes: Axes, bars: Sequence[tuple[str, str, Any]], classes: Sequence[int]) -> None:
    thick = 0.84 / len(bars)
    for number, (_, colour, values) in enumerate(bars):
        middle = np.arange(len(classes)) + (number - (len(bars) - 1) / 2) * thick
        axes.barh(
            middle, [values[k] for k in classes], height=thick * 0.9, color=colour, edgecolor=colour, linewidth=0.8
        )
    axes.set(xlim=(0, 1), ylim=(len(classes) - 0.4, -0.6), xlabel="IoU")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def masking_variants(group: Group) -> Group:
    """The runs of a group that differ in how constraints are masked and in nothing else, named by it."""
    families: dict[str, dict[str, RunResults]] = {}
    for result in group.attacked.values():
        masking = _masking(result)
        if masking is not None:
            run = result.run
            rest = {key: value for key, value in run.attack.set.items() if key != "masking"}
            family = families.setdefault(str((run.attack.name, rest, run.settings.seed, run.settings.budget)), {})
            family.setdefault(f"{run.attack.name}, masking {masking}", result)
    several: dict[str, RunResults] = {}
    for family in families.values():
        several |= family if len(family) > 1 else {}
    return Group(*group.names, runs=several)


def _masking(result: RunResults) -> str | None:
    """None if its attack masks nothing, or is not known here."""
    try:
        value = getattr(result.run.attack.make(), "masking", None)
    except SegproxError:
        return None
    return None if value is None else str(value)


def _styles(groups: Sequence[Group]) -> Styles:
    """A colour and a dash for each attack, the same in all panels."""
    labels = dict.fromkeys(label for group in groups for label in group.attacked)
    return {
        label: {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        for i, label in enumerate(labels)
    }


def _ink(style: Mapping[str, Any]) -> str:
    colour: str = style["color"]
    return INKS.get(colour, colour)


def _panels(groups: Sequence[Group], height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A panel for each group, models side by side where they fit."""
    models = len({group.model for group in groups})
    columns = min(len(groups), models if 2 <= models <= 3 else 3)
    rows = ceil(len(groups) / columns)
    width = 5.4 if columns == 1 else 4.1 * columns
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in panels[len(groups) :]:
        axes.remove()
    return figure, panels[: len(groups)]


def _title(axes: Axes, group: Group) -> None:
    images = _range(len(result.records) for result in group.attacked.values())
    failed = _range(len(result.failures) for result in group.attacked.values())
    note = f"{images} image{'' if images == '1' else 's'}" + ("" if failed == "0" else f", {failed} failed")
    axes.set_title(_text(group.model, 42), loc="left", fontweight="bold", pad=19)
    below = f"{_text(f'{group.dataset}, {group.goal}', 34)}: {note}"
    lifted = axes.transAxes + ScaledTranslation(0, 5 / 72, axes.figure.dpi_scale_trans)  # 5 points above the panel
    axes.text(0, 1, below, transform=lifted, va="bottom", color="#444444")


def _range(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    low, high = ordered[0], ordered[-1]
    return f"{low}" if low == high else f"{low} to {high}"


def _tidy(panels: Sequence[Axes], share_y: bool = True) -> None:
    """What all panels say is said at the left and at the bottom only."""
    for axes in panels:
        place = axes.get_subplotspec()
        assert place is not None
        if share_y and not place.is_first_col():
            axes.set_ylabel("")
        below = any(_row(other) == _row(axes) + 1 and _column(other) == _column(axes) for other in panels)
        if below:
            axes.set_xlabel("")


def _row(axes: Axes) -> int:
    place = axes.get_subplotspec()
    return place.rowspan.start if place else 0


def _column(axes: Axes) -> int:
    place = axes.get_subplotspec()
    return place.colspan.start if place else 0


def _legend(
    figure: Figure, panels: Sequence[Axes], styles: Styles, labelled: Sequence[bool], kind: str = "line"
) -> None:
    """One for the whole figure, unless everything is labelled where it is. Kinds: line, marker, bar."""
    if all(labelled):
        return
    for axes in panels:  # either all labels or the legend
        for text in [text for text in axes.texts if isinstance(text, Annotation)]:
            text.remove()
    handles = [_handle(style, kind) for style in styles.values()]
    names = [_text(label) for label in styles]
    columns = max(1, int(figure.get_figwidth() / (0.7 + 0.075 * max(map(len, names)))))
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), columns))


def _handle(style: Mapping[str, Any], kind: str) -> Line2D:
    if kind == "marker":
        return Line2D([], [], color=style["color"], marker=style["marker"], linestyle="")
    return Line2D(
        [],
        [],
        color=style["color"],
        linestyle=style["linestyle"] if kind == "line" else "-",
        linewidth=1.7 if kind == "line" else 6,
    )


def _axis_end(values: Sequence[float]) -> float:
    """The first tick above everything that was found."""
    largest = max((value for value in values if isfinite(value)), default=0.0)
    return float(next((tick for tick in TICKS if tick >= max(4.0, largest * 1.02)), TICKS[-1]))


def _norm_axis(axes: Axes, which: str, end: float) -> None:
    """Linear up to 2/255 and logarithmic above, with a faint line where it changes."""
    scale, limits, axis, line = (
        (axes.set_xscale, axes.set_xlim, axes.xaxis, axes.axvline)
        if which == "x"
        else (axes.set_yscale, axes.set_ylim, axes.yaxis, axes.axhline)
    )
    scale("symlog", base=2, linthresh=LINEAR, linscale=1.2)
    limits(0, end)
    ticks = [tick for tick in TICKS if tick <= end]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    line(LINEAR, color="#BBBBBB", linewidth=0.9, linestyle=(0, (1, 3)), zorder=0.5)


def _plain_log_ticks(axes: Axes, low: float, high: float) -> None:
    steps = [factor * 10**power for power in range(8) for factor in (1, 2, 5)]
    inside = [step for step in steps if low <= step <= high]
    axes.xaxis.set_major_locator(FixedLocator(inside if len(inside) < 7 else [s for s in inside if str(s)[0] == "1"]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _text(name: str, most: int = 40) -> str:
    """A name on one line, not too long, and never hidden, as names that begin with an underscore would be."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    cut = plain if len(plain) <= most else f"{plain[: most - 1]}…"
    return f" {cut}" if cut.startswith("_") else cut
