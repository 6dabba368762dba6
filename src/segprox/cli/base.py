"""What commands share: the application, the console, tables, and how files are written.

Nothing here or at the top of the commands' files imports torch: what a command needs it imports when it runs, so that
`--help` is quick.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from segprox.errors import SegproxError

app = typer.Typer(
    name="segprox",
    help="How robust is a semantic segmentation model? Find the smallest change of an image that makes it fail.",
    epilog="Start with: segprox demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()


def plain_table(*headings: str) -> Table:
    """A plain table whose first column is never broken."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=i == 0)
    return table


def assignments(texts: Sequence[str]) -> dict[str, object]:
    """What --set was given, by field."""
    pairs: dict[str, object] = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise SegproxError(f"--set takes FIELD=VALUE, such as step_size=0.01, but got {text!r}")
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
