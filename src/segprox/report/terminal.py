"""Records and checks as tables on the screen."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from segprox.report.units import LINF
from segprox.run import Check
from segprox.run.record import Record, Score
from segprox.sizes import median_size

MARKS = {"green": "+", "amber": "!", "red": "x"}  # beside word and colour, and in any encoding
COLOURS = {"green": "green", "amber": "yellow", "red": "bold red"}


def record_table(records: Sequence[Record], title: str) -> Table:
    """A line per image and the medians."""
    broken = sum(record.found.success for record in records)
    note = f"{len(records) - broken} not broken: counted as 255 in the median" if broken < len(records) else None
    # Narrow enough for a terminal of 80 columns.
    table = Table(title=title, caption=note, title_justify="left", caption_justify="left", show_footer=True)
    table.box, table.padding, table.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
    columns: dict[str, Sequence[float]] = {
        "clean acc.": [record.clean_accuracy for record in records],
        **_rates([record.found for record in records]),
        "linf x 255": [record.found.linf * 255 for record in records],
        "l2": [record.found.l2 for record in records],
        "forwards": [record.forwards for record in records],
        "seconds": [record.seconds for record in records],
    }
    if "protected" in columns:
        del columns["l2"], columns["seconds"]
    counted = [record.counted_size("linf") * LINF.factor for record in records]
    table.add_column("image", footer="median", no_wrap=True)
    for name, values in (columns | {"linf x 255": counted}).items():
        table.add_column(name, footer=_format(name, median_size(values)), justify="right", no_wrap=True)
    table.add_column("success", footer=f"{broken}/{len(records)}", justify="right")
    for i, record in enumerate(records):
        cells = [_format(name, values[i]) for name, values in columns.items()]
        table.add_row(record.image, *cells, "yes" if record.found.success else Text("no", style="red"))
    return table


def _rates(found: Sequence[Score]) -> dict[str, list[float]]:
    """The shares of pixels that are as the attack wants them: of attacked and protected ones, where there are such."""
    if any(score.protected is None for score in found):
        return {"APSR": [score.apsr for score in found]}
    return {name: [getattr(score, name) for score in found] for name in ("attacked", "protected")}


def check_table(checks: Sequence[Check], title: str) -> Table:
    """A line per check: verdict, name and finding."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("verdict", "check", "finding"):
        table.add_column(heading, no_wrap=heading != "finding", overflow="fold")
    for check in checks:
        verdict = Text(f"{MARKS[check.verdict]} {check.verdict}", style=COLOURS[check.verdict])
        table.add_row(verdict, check.name, Text(check.finding))  # as it is: brackets are not markup
    return table


def _format(name: str, value: float) -> str:
    if name in ("clean acc.", "APSR", "attacked", "protected"):
        return f"{value:.2%}"
    return f"{value:.0f}" if name == "forwards" else f"{value:.2f}"
