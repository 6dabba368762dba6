"""The command line: parsing and printing only."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import segprox
from segprox.cli import demo, look, report, runs  # noqa: F401  # which register their commands
from segprox.cli.base import app, out
from segprox.errors import SegproxError
from segprox.registry import VARIABLE, load_plugins


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
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="A Python file or module that registers attacks, objectives, datasets or models; may be repeated."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    if plugin:  # in the environment, so that worker processes load them as well
        os.environ[VARIABLE] = ",".join([*filter(None, [os.environ.get(VARIABLE)]), *map(_absolute, plugin)])
        load_plugins()


def _absolute(plugin: str) -> str:
    return str(Path(plugin).absolute()) if plugin.endswith(".py") else plugin
