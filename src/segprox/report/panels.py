"""Panels of figures: colours, titles, legends and axes."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from segprox.report.groups import Group
from segprox.report.units import LINF, Unit

# Okabe and Ito's colours, told apart by everyone; without yellow, which is too pale for lines on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
INKS = {"#CC79A7": "#A34D7A", "#E69F00": "#946600", "#56B4E9": "#2177AC"}  # darker, where letters would be too pale
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))  # 28 with the colours
MARKERS = "osD^vPX*"
GREY = "#9A9A9A"
LEFT, RIGHT, TOP, BOTTOM = 0.78, 0.2, 0.52, 0.46  # inches around a panel, for its names and numbers
LINEAR = 2.0  # x 255: up to here norms are drawn to scale, above it logarithmically, as in the paper
TICKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 255)  # of linf
ROUND = tuple(factor * 10.0**power for power in range(-4, 9) for factor in (1, 2, 5))  # for everything else
STYLE: Any = {
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "#555555", "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelcolor": "black",
    "ytick.labelcolor": "black", "axes.grid": True, "grid.color": "#E4E4E4", "grid.linewidth": 0.6,
    "axes.axisbelow": True, "lines.linewidth": 1.7, "legend.frameon": False, "savefig.facecolor": "white",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.hashsalt": "segprox", "pdf.fonttype": 42,
}  # fmt: skip
Styles = Mapping[str, dict[str, Any]]


@contextmanager
def style() -> Iterator[None]:
    """How all figures look."""
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # names in any script
        yield


def styles_of(groups: Sequence[Group]) -> Styles:
    """A colour and a dash for each attack, the same in all panels."""
    labels = dict.fromkeys(
        label
        for group in groups
        for label in (*group.of_family("minimal").attacked, *group.by_epsilon, *group.attacked)
    )
    return {
        label: {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
        for i, label in enumerate(labels)
    }


def ink(style: Mapping[str, Any]) -> str:
    """The colour of letters."""
    colour: str = style["color"]
    return INKS.get(colour, colour)


def make_panels(groups: Sequence[Group], height: float = 2.9, left: float = LEFT) -> tuple[Figure, list[Axes]]:
    """A panel for each group, models side by side where they fit.

    Panels have margins in inches. A layout that looks for the best ones draws everything several times over.
    """
    models = len({group.model for group in groups})
    columns = min(len(groups), models if 2 <= models <= 3 else 3)
    rows = ceil(len(groups) / columns)
    width = (5.4 if columns == 1 else 4.1) + left - LEFT
    figure = Figure(figsize=(width * columns, height * rows))
    figure.subplots_adjust(
        left=left / width / columns, right=1 - RIGHT / width / columns, wspace=(left + RIGHT) / (width - left - RIGHT),
        bottom=BOTTOM / height / rows, top=1 - TOP / height / rows, hspace=(TOP + BOTTOM) / (height - TOP - BOTTOM),
    )  # fmt: skip
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in panels[len(groups) :]:
        axes.remove()
    for axes in panels[: len(groups)]:
        axes.xaxis.set_label_coords(0.5, 0, transform=_moved(axes, 0, -0.26))
        axes.yaxis.set_label_coords(0, 0.5, transform=_moved(axes, 0.2 - left, 0))
    return figure, panels[: len(groups)]


def _moved(axes: Axes, x: float, y: float) -> Transform:
    """The panel's own coordinates, from 0 to 1, moved by inches."""
    return axes.transAxes + ScaledTranslation(x, y, axes.figure.dpi_scale_trans)


def title(axes: Axes, group: Group) -> None:
    """Which group a panel shows, and how many images."""
    images = _range(len(result.records) for result in group.attacked.values())
    errors = _range(len(result.errors) for result in group.attacked.values())
    note = f"{images} image{'' if images == '1' else 's'}" + (
        "" if errors == "0" else f", {errors} error{'' if errors == '1' else 's'}"
    )
    axes.set_title(one_line(group.model, 42), loc="left", fontweight="bold", pad=19, y=1.0)
    below = f"{one_line(f'{group.dataset}, {group.goal}', 34)}: {note}"
    axes.text(0, 1, below, transform=_moved(axes, 0, 5 / 72), va="bottom", color="#444444")


def _range(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    low, high = ordered[0], ordered[-1]
    return f"{low}" if low == high else f"{low} to {high}"


def tidy(panels: Sequence[Axes], share_y: bool = True) -> None:
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


def legend(
    figure: Figure, panels: Sequence[Axes], styles: Styles, labelled: Iterable[bool], kind: str = "line"
) -> None:
    """One for the whole figure, unless everything is labelled where it is. Kinds: line, marker, bar."""
    if all(labelled):  # which labels no more panels once one has no room
        return
    for axes in panels:  # either all labels or the legend
        for text in [text for text in axes.texts if isinstance(text, Annotation)]:
            text.remove()
    handles = [_handle(style, kind) for style in styles.values()]
    names = [one_line(label) for label in styles]
    columns = min(len(names), max(1, int(figure.get_figwidth() / (0.7 + 0.075 * max(map(len, names))))))
    before, room, now = figure.get_figheight(), 0.15 + 0.2 * ceil(len(names) / columns), figure.subplotpars
    figure.set_figheight(after := before + room)
    figure.subplots_adjust(bottom=(now.bottom * before + room) / after, top=1 - (1 - now.top) * before / after)
    figure.legend(handles, names, loc="lower center", ncols=columns)


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


@dataclass(frozen=True)
class NormAxis:
    """Where sizes are drawn: to scale up to `linear`, and logarithmically above, as in the paper."""

    linear: float
    ticks: tuple[float, ...]  # from 0 to the end, in the unit's numbers
    base: int

    @classmethod
    def fitting(cls, unit: Unit, sizes: Sequence[float]) -> "NormAxis":
        """For all of these; it ends at the first tick above them."""
        known = [size for size in sizes if isfinite(size)]
        most = max(known, default=0.0) * 1.02
        if unit == LINF:
            end = next((tick for tick in TICKS if tick >= max(4.0, most)), TICKS[-1])
            return cls(LINEAR, tuple(tick for tick in TICKS if tick <= end), 2)
        least = min((size for size in known if size > 0), default=1.0)
        low = next((step for step in reversed(ROUND) if step <= least), ROUND[0])
        high = next((step for step in ROUND if step >= max(most, 2.5 * low)), ROUND[-1])
        inside = [step for step in ROUND if low <= step <= high]
        return cls(low, (0, *(inside if len(inside) < 10 else [*inside[:-1:3], high])), 10)

    @property
    def end(self) -> float:
        """Where it ends."""
        return self.ticks[-1]

    def below(self, size: float) -> float:
        """A tick with some room up to this size."""
        return max(tick for tick in self.ticks if tick <= size / 1.5)

    def apply(self, axes: Axes, which: Literal["x", "y"]) -> None:
        """Draw it, with a faint line where the scale changes."""
        scale, limits, axis, line = (
            (axes.set_xscale, axes.set_xlim, axes.xaxis, axes.axvline)
            if which == "x"
            else (axes.set_yscale, axes.set_ylim, axes.yaxis, axes.axhline)
        )
        scale("symlog", base=self.base, linthresh=self.linear, linscale=1.2 if self.base == 2 else 0.3)
        limits(0, self.end)
        _fixed_ticks(axis, self.ticks)
        line(self.linear, color="#BBBBBB", linewidth=0.9, linestyle=(0, (1, 3)), zorder=0.5)


def query_axis(axes: Axes, low: float, high: float) -> None:
    """Numbers of queries, logarithmic."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    inside = [step for step in ROUND if low <= step <= high]
    _fixed_ticks(axes.xaxis, inside if len(inside) < 7 else [step for step in inside if f"{step:g}"[0] == "1"])


def _fixed_ticks(axis: Axis, ticks: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.12g}".replace(",", " ") if value >= 10_000 else f"{value:g}")


def text_width(text: str) -> float:
    """Inches that a text is wide where nothing is said about its size."""
    return float(TextPath((0, 0), text, size=STYLE["font.size"]).get_extents().width) / 72 if text.strip() else 0.0


def one_line(name: str, most: int = 40) -> str:
    """A name on one line, not too long, and never hidden, as names that begin with an underscore would be."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    cut = plain if len(plain) <= most else f"{plain[: most - 1]}…"
    return f" {cut}" if cut.startswith("_") else cut
