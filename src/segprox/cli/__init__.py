"""The command line: parsing and printing only."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text

import segprox
from segprox.cli import demo, look, report, runs  # noqa: F401  # which register their commands
from segprox.cli.base import app, err, out
from segprox.errors import SegproxError
from segprox.registry import VARIABLE, load_plugins


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals that cannot show every letter
    try:
        app()
    except SegproxError as error:
        _refuse(str(error))
    except OSError as error:  # of files that the user named, wherever they are looked at
        _refuse(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))


def _refuse(sentence: str) -> NoReturn:
    err.print(Text.assemble(("error:", "bold red"), " ", " ".join(sentence.splitlines())))
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"segprox {segprox.__version__}")
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
        absolute = [str(Path(text).absolute()) if text.endswith(".py") else text for text in plugin]
        os.environ[VARIABLE] = ",".join([*filter(None, [os.environ.get(VARIABLE)]), *absolute])
        load_plugins()
