"""Labels beside what they name, where there is room for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.path import Path as Line
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox


class LabelPosition(NamedTuple):
    """Where a label may stand: at a point of the axes, moved by so many printer's points."""

    x: float
    y: float
    dx: float
    dy: float


@dataclass(frozen=True)
class Label:
    """What to write, and where it may stand, best first."""

    text: str
    colour: str
    places: Sequence[LabelPosition]


def place_labels(axes: Axes, labels: Sequence[Label], obstacles: Sequence[Line]) -> bool:
    """Write all labels so that they touch neither each other nor an obstacle, or none; whether it was possible.

    The layout of the axes must be final. Labels are placed in their order, each at the first of its places that is
    free; obstacles are lines in data coordinates.
    """
    lines = [line.transformed(axes.transData) for line in obstacles]
    written: list[Annotation] = []
    taken: list[Bbox] = []
    for label in labels:
        for place in label.places:
            text = _write(axes, label, place)
            box = text.get_window_extent().padded(5, 2)
            crossed = any(line.intersects_bbox(box, filled=False) for line in lines)
            if _inside(axes, box) and not crossed and not any(box.overlaps(other) for other in taken):
                written.append(text)
                taken.append(box)
                break
            text.remove()
        else:
            for text in written:
                text.remove()
            return False
    return True


def _write(axes: Axes, label: Label, place: LabelPosition) -> Annotation:
    across = "left" if place.dx > 0 else "right" if place.dx < 0 else "center"
    along = "bottom" if place.dy > 0 else "top" if place.dy < 0 else "center"
    text = axes.annotate(
        label.text, (place.x, place.y), (place.dx, place.dy), textcoords="offset points", ha=across, va=along,
        color=label.colour, fontsize="small",
    )  # fmt: skip
    text.set_in_layout(False)  # or the layout would change under the labels that stand already
    return text


def _inside(axes: Axes, box: Bbox) -> bool:
    frame = axes.get_window_extent()
    return bool(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
