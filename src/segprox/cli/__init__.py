"""The command line: parsing and printing only."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import segprox
from segprox.cli import demo, look, report, runs  # noqa: F401  # which register their commands
from segprox.cli.base import app, out
from segprox.errors import SegproxError


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    try:
        app()
    except SegproxError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"segprox {segprox.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass
