"""What commands share: the application, the console, tables, and how files are written.

Nothing here or at the top of the commands' files imports torch: what a command needs it imports when it runs, so that
`--help` is quick.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as Stack
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from segprox.errors import SegproxError

app = typer.Typer(
    name="segprox",
    help="How robust is a semantic segmentation model? Find the smallest change of an image that makes it fail.",
    epilog="Start with: segprox demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class SafeConsole(Console):
    """Prints names as they are: no brackets are markup, no numbers coloured, no control characters left.

    A table that is too wide for the terminal is printed line by line, so that no number is cut.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """What is printed, piece by piece."""
        options = options or self.options
        if isinstance(renderable, Table) and self._cut(renderable, options.max_width):
            renderable = _unrolled(renderable)
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=CONTROL.sub("", segment.text))

    def _cut(self, table: Table, width: int) -> bool:
        """Whether a table needs more than a width, where only some of its columns may be wrapped.

        Bars, which are tables without headings, may be cut.
        """
        needed = 2 * len(table.columns)
        for column in table.columns:
            measured = [Measurement.get(self, WIDE, cell) for cell in (column.header, column.footer, *column.cells)]
            needed += max(each.maximum if column.no_wrap else each.minimum for each in measured)
        return table.show_header and needed > width


def _unrolled(table: Table) -> Stack:
    """Every row of a table as lines of heading and value."""
    parts: list[RenderableType] = [table.title] if table.title else []
    lines = [*zip(*(column.cells for column in table.columns))]
    footer = [tuple(column.footer for column in table.columns)] if table.show_footer else []
    for line in [*lines, *footer]:
        pairs = ((str(column.header), str(cell)) for column, cell in zip(table.columns, line))
        parts.append(Text("\n".join(f"{heading}: {cell}" for heading, cell in pairs if cell) + "\n"))
    return Stack(*parts)


CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # but for ends of lines
WIDE = Console(width=10_000).options  # in which nothing needs to be wrapped
out, err = SafeConsole(), SafeConsole(stderr=True, soft_wrap=True)


def plain_table(*texts: str, numbers: Sequence[str] = ()) -> Table:
    """A plain table of texts, of which the first is never broken, and of numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(texts):
        table.add_column(heading, overflow="fold", no_wrap=i == 0)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def assignments(texts: Sequence[str]) -> dict[str, object]:
    """What --set was given, by field."""
    pairs: dict[str, object] = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise SegproxError(f"--set takes FIELD=VALUE, such as step_size=0.01, but got {text!r}")
        if field.strip() in pairs:
            raise SegproxError(f"--set says {field.strip()} twice; leave one of them out")
        pairs[field.strip()] = value.strip()
    return pairs


def check_writable(folder: Path) -> None:
    """Find out before an attack, not after it, that nothing can be written."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Say which folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise SegproxError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None
