"""Figures of runs, for screens and for print."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.ticker import PercentFormatter

from segprox.counts import Counts
from segprox.errors import SegproxError
from segprox.report import panels as panel
from segprox.report.curves import Curve, anytime_curve, epsilon_curve, measure_curve, unbroken_curve
from segprox.report.groups import Group, by_norm
from segprox.report.labels import Label, LabelPosition, place_labels
from segprox.report.metrics import Measure, mean_iou, pixel_accuracy
from segprox.report.panels import GREY, NormAxis, Styles, ink, one_line, style, styles_of, text_width
from segprox.report.results import RunResults
from segprox.sizes import median_size

HEIGHTS = (0.5, 0.62, 0.38, 0.74, 0.26, 0.86, 0.14, 0.93, 0.07)  # where a curve may be labelled
START = 1.0  # queries: where the line of an attack begins that never breaks half of the images
MOST_CLASSES, MOST_BARS = 40, 3
DPI = 160  # of a PNG
FORMATS = ("svg", "png", "pdf")
USUAL_FORMATS = FORMATS[:2]  # drawing is most of what a report takes


def draw_figures(groups: Sequence[Group], critical: Sequence[str] = ()) -> Iterator[tuple[str, Figure]]:
    """All figures with their names, for each norm, one at a time: of many runs each takes much memory.

    Those with nothing to show are left out. Critical classes come first.
    """
    shown = [group for group in groups if group.attacked]
    for unit, some in by_norm(shown).items():
        for name, draw in _drawers(some, critical).items():
            with style():
                figure = draw()
            if figure is not None:
                yield f"{name}{unit.suffix}", figure


def _drawers(groups: Sequence[Group], critical: Sequence[str]) -> dict[str, Callable[[], Figure | None]]:
    """What draws the figures of groups that share a norm."""
    # Attacks that stay within epsilon do not look for the smallest perturbation.
    minimal = [chosen for group in groups if (chosen := group.of_family("minimal")).attacked]
    return {
        "unbroken": lambda: draw_unbroken(minimal),
        "accuracy": lambda: draw_measure(groups, pixel_accuracy, "pixel accuracy"),
        "miou": lambda: draw_measure(groups, mean_iou, "mean IoU"),
        "classes": lambda: draw_classes(groups, critical),
        "queries": lambda: draw_queries(minimal),
        "anytime": lambda: draw_anytime(minimal),
        "masking": lambda: draw_unbroken([group for group in map(masking_variants, minimal) if group.runs]),
    }


def save_figure(figure: Figure, path: Path, formats: Sequence[str] = FORMATS) -> None:
    """Write a figure in each format, with its ending; the same figure gives the same files."""
    canvases: dict[str, tuple[Any, dict[str, Any]]] = {
        "svg": (FigureCanvasSVG(figure).print_svg, {"metadata": {"Date": None}}),
        "png": (FigureCanvasAgg(figure).print_png, {}),
        "pdf": (FigureCanvasPdf(figure).print_pdf, {"metadata": {"CreationDate": None}}),
    }
    with style():  # not by savefig, which draws everything once more to look how large it is
        for name in formats:
            figure.dpi = DPI  # SVG and PDF have their own, and leave it behind
            write, options = canvases[name]
            write(path.with_name(f"{path.name}.{name}"), **options)


def draw_unbroken(groups: Sequence[Group]) -> Figure | None:
    """The share of images that resist against the norm: a curve for each attack, a panel for each group."""
    return _draw_shares(groups, unbroken_curve, "images not broken", "perturbation, {}") if groups else None


def draw_measure(groups: Sequence[Group], measure: Measure, name: str) -> Figure:
    """Accuracy or mean IoU against epsilon: steps where sizes were found, dots at the epsilons that were tried."""
    dots = [{label: epsilon_curve(runs, measure) for label, runs in group.by_epsilon.items()} for group in groups]
    return _draw_shares(groups, lambda result: measure_curve(result, measure), name, "epsilon, {}", dots)


def _draw_shares(
    groups: Sequence[Group],
    curve: Callable[[RunResults], Curve],
    y_label: str,
    x_label: str,
    dots: Sequence[Mapping[str, Curve]] = (),
) -> Figure:
    (figure, panels), unit = panel.make_panels(groups), groups[0].unit
    minimal = [group.of_family("minimal").attacked for group in groups]
    found = [{label: curve(run) for label, run in runs.items()} for runs in minimal]
    found = [own | dict(some) for own, some in zip(found, dots)] if dots else found
    curves = [{label: Curve(own.x * unit.factor, own.y) for label, own in some.items()} for some in found]
    styles = {label: look for label, look in styles_of(groups).items() if any(label in some for some in curves)}
    axis = NormAxis.fitting(unit, [x for some in curves for own in some.values() for x in own.x])
    corners = [
        {label: _steps(c, axis.end) if label in runs else (c.x.tolist(), c.y.tolist()) for label, c in some.items()}
        for runs, some in zip(minimal, curves)
    ]
    for group, axes, some, runs in zip(groups, panels, corners, minimal):
        panel.title(axes, group)
        axis.apply(axes, "x")
        axes.set(ylim=(0, 1.0), xlabel=x_label.format(unit.name), ylabel=y_label)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        _plot(axes, some, styles, dotted=some.keys() - runs.keys())
    places = [{label: _beside(found, axis) for label, found in some.items()} for some in curves]
    return _named(figure, panels, styles, places, corners)


Corners = tuple[list[float], list[float]]


def _steps(curve: Curve, end: float) -> Corners:
    """The corners of a step function from its first point to the right end."""
    x, y = [float(curve.x[0])], [float(curve.y[0])]
    for position, value in zip(curve.x[1:].tolist(), curve.y[1:].tolist()):
        x += [position] * 2
        y += [y[-1], value]
    return [*x, end], [*y, y[-1]]


def _plot(
    axes: Axes, corners: Mapping[str, Corners], styles: Styles, clip: bool = False, dotted: Collection[str] = ()
) -> None:
    for label, (x, y) in corners.items():
        look = {key: styles[label][key] for key in ("color", "linestyle")}
        marker = "o" if label in dotted else ""
        axes.plot(x, y, **look, marker=marker, markersize=4.5, clip_on=clip, solid_joinstyle="miter")


def _named(
    figure: Figure,
    panels: Sequence[Axes],
    styles: Styles,
    places: Sequence[Mapping[str, list[LabelPosition]]],
    corners: Sequence[Mapping[str, Corners]],
    kind: str = "line",
) -> Figure:
    """The figure with names beside its curves, if all of them find room in every panel, or else with a legend."""

    def beside(axes: Axes, spots: Mapping[str, list[LabelPosition]], lines: Mapping[str, Corners]) -> bool:
        labels = [Label(one_line(label), ink(styles[label]), some) for label, some in spots.items()]
        return place_labels(axes, labels, [Line(np.column_stack(line)) for line in lines.values()])

    panel.tidy(panels)
    panel.legend(figure, panels, styles, map(beside, panels, places, corners), kind)
    return figure


def _beside(curve: Curve, axis: NormAxis) -> list[LabelPosition]:
    """Right and left of where the curve falls, above and below where it is flat at the end."""
    top, bottom = float(curve.y[0]), float(curve.y[-1])
    places = []
    for height in (bottom + share * (top - bottom) for share in HEIGHTS if top > bottom):
        x = float(curve.x[int(np.argmax(curve.y <= height))])
        places += [LabelPosition(x, height, 5, 0), LabelPosition(x, height, -5, 0)]
    flat = [tick for tick in reversed(axis.ticks) if curve.x[-1] < tick]
    return [*places, *(LabelPosition(tick, bottom, -5, side) for tick in flat for side in (3, -3))]


def draw_anytime(groups: Sequence[Group]) -> Figure | None:
    """What attacks have after so many queries: medians over images, from when half of them are broken."""
    known = {group: _known(group) for group in groups}
    styles = {label: look for label, look in styles_of(groups).items() if any(label in some for some in known.values())}
    groups, curves = [group for group in groups if known[group]], [some for some in known.values() if some]
    if not groups:
        return None
    (figure, panels), unit = panel.make_panels(groups), groups[0].unit
    found = [curve for some in curves for curve in some.values()]
    axis = NormAxis.fitting(unit, [y for curve in found for y in curve.y])
    left = min((curve.x[0] for curve in found if curve.x[0] > START), default=START) / 1.3
    right, lowest = max(curve.x[-1] for curve in found) * 1.3, min(curve.y.min() for curve in found)
    corners = [{label: _steps(curve, float(curve.x[-1])) for label, curve in some.items()} for some in curves]
    for group, axes, some in zip(groups, panels, corners):
        panel.title(axes, group)
        axis.apply(axes, "y")
        panel.query_axis(axes, left, right)
        axes.set(
            xlabel="forwards + backwards per image",
            ylabel=f"median {unit.name}",
            ylim=(axis.below(lowest), axis.end * 1.05),
        )
        _plot(axes, some, styles, clip=True)
    places = [{label: _along(curve) for label, curve in some.items()} for some in curves]
    return _named(figure, panels, styles, places, corners)


def _known(group: Group) -> dict[str, Curve]:
    """Anytime curves where they were recorded; of what never breaks half of the images, a line at the top."""
    curves = {}
    for label, result in group.attacked.items():
        curve = anytime_curve(result)
        if curve is None or not isfinite(curve.y[-1]):
            continue
        x, y = curve.x, curve.y * result.unit.factor
        first = int(np.argmax(curve.y < result.unit.unbroken))  # before it there is nothing to see
        curves[label] = Curve(x[first:], y[first:]) if first else Curve(np.array([START, x[-1]]), y[[-1, -1]])
    return curves


def _along(curve: Curve) -> list[LabelPosition]:
    """Above and below the curve, from its end to its beginning, and beside its end."""
    ends = np.log(curve.x[[0, -1]])
    points = [(x, curve.at(x)) for x in np.exp(ends[0] + np.array(HEIGHTS) * (ends[1] - ends[0])).tolist()]
    return [
        *(LabelPosition(x, y, 0, side) for x, y in points for side in (4, -4)),
        LabelPosition(float(curve.x[-1]), curve.y[-1], 5, 0),
    ]


def draw_queries(groups: Sequence[Group]) -> Figure | None:
    """What attacks cost and find: median queries and norms, with quartiles of the norm. Lower left is better."""
    costs = [{label: _cost(result) for label, result in group.attacked.items()} for group in groups]
    points = [{label: cost for label, cost in some.items() if isfinite(cost.norm)} for some in costs]
    found = [point for some in points for point in some.values()]
    if not found:
        return None
    styles, (figure, panels), unit = styles_of(groups), panel.make_panels(groups), groups[0].unit
    axis = NormAxis.fitting(unit, [size for point in found for size in (point.low, point.norm, point.high)])
    start = axis.below(min(point.low for point in found))
    for group, axes, some in zip(groups, panels, points):
        panel.title(axes, group)
        axis.apply(axes, "y")
        axes.set(xlabel="forwards + backwards per image", ylabel=unit.name, ylim=(start, axis.end * 1.3))  # room above
        panel.query_axis(axes, min(point.queries for point in found) / 2.1, max(point.queries for point in found) * 2.1)
        for label, point in some.items():
            look = styles[label]
            spread = [point.low, min(point.high, axis.end * 1.3)]
            axes.plot([point.queries] * 2, spread, color=look["color"], linewidth=1.2)
            axes.plot(point.queries, point.norm, look["marker"], color=look["color"], mec="white", ms=7.5, zorder=3)
    places = [{label: _around(point) for label, point in some.items()} for some in points]
    spreads = [{label: ([p.queries] * 2, [p.low, p.high]) for label, p in some.items()} for some in points]
    return _named(figure, panels, styles, places, spreads, "marker")


class _Cost(NamedTuple):
    queries: float
    low: float  # quartiles of the norm
    norm: float
    high: float


def _cost(result: RunResults) -> _Cost:
    queries = np.median(result.columns["forwards"] + result.columns["backwards"])
    # Of infinite norms there is no mean, so quartiles are norms that occur; the median is that of the tables.
    low, high = np.quantile(result.norms, [0.25, 0.75], method="closest_observation")
    sizes = (low, median_size(result.norms), high)
    return _Cost(max(1.0, float(queries)), *(float(size) * result.unit.factor for size in sizes))


def _around(point: _Cost) -> list[LabelPosition]:
    offsets = ((7, 0), (-7, 0), (0, 7), (0, -7), (5, 6), (-5, 6), (5, -6), (-5, -6))
    return [LabelPosition(point.queries, point.norm, *offset) for offset in offsets]


def draw_classes(groups: Sequence[Group], critical: Sequence[str] = ()) -> Figure:
    """IoU of each class before and after, sorted by before; of the attacks with the smallest medians if many.

    Critical classes come first, with a star.
    """
    styles = styles_of(groups)
    chosen = [_strongest(group) for group in groups]
    shown = [_classes(group, critical) for group in groups]
    tallest = max(len(classes) * (1 + len(some)) for classes, some in zip(shown, chosen))
    firsts = [next(iter(group.attacked.values())) for group in groups]
    known = [[first.classes[k] for k in classes] for first, classes in zip(firsts, shown)]
    stars = [[one_line(f"{name} *" if name in critical else name, 18) for name in names] for names in known]
    longest = max((text_width(name) for name in {name for names in stars for name in names}), default=0)
    height = 1.1 + 0.085 * tallest + 0.06 * max(map(len, shown))
    figure, panels = panel.make_panels(groups, height, left=0.2 + longest)
    for group, axes, first, some, classes, names in zip(groups, panels, firsts, chosen, shown, stars):
        panel.title(axes, group)
        bars = [("before", GREY, _ious(first, clean=True))]
        bars += [(label, styles[label]["color"], _ious(result)) for label, result in some.items()]
        _bars(axes, bars, classes)
        axes.set_yticks(range(len(classes)), names)
    panel.tidy(panels, share_y=False)
    used = {label: styles[label] for label in styles if any(label in some for some in chosen)}
    panel.legend(figure, panels, {"before the attack": {"color": GREY}, **used}, [False], "bar")
    return figure


def _strongest(group: Group) -> dict[str, RunResults]:
    known = group.of_family("minimal").attacked or group.attacked
    ordered = sorted(known.items(), key=lambda item: median_size(item[1].norms))[:MOST_BARS]
    return {label: result for label, result in known.items() if label in dict(ordered)}


def _classes(group: Group, critical: Sequence[str]) -> list[int]:
    """Classes that occur, critical ones first, then the best before the attack; if too many, those with most pixels."""
    first = next(iter(group.attacked.values()))
    rank = {name: place for place, name in enumerate(critical)}
    counts = _pooled(first, clean=True)
    there = [k for k in np.argsort(-(counts.tp + counts.fn), kind="stable") if counts.tp[k] + counts.fn[k] > 0]
    ious = counts.iou()
    there.sort(key=lambda k: first.classes[k] not in rank)  # stable: critical classes are never too many
    return sorted(map(int, there[:MOST_CLASSES]), key=lambda k: (rank.get(first.classes[k], len(rank)), -ious[k]))


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
            how = (run.attack.name, rest, run.settings.seed, run.settings.max_queries, run.settings.sampling)
            family = families.setdefault(str(how), {})
            family.setdefault(f"{run.attack.name}, masking {masking}", result)
    several: dict[str, RunResults] = {}
    for family in families.values():
        several |= family if len(family) > 1 else {}
    return replace(group, runs=several)


def _masking(result: RunResults) -> str | None:
    """None if its attack masks nothing, or is not known here."""
    try:
        value = getattr(result.run.attack.make(), "masking", None)
    except SegproxError:
        return None
    return None if value is None else str(value)
