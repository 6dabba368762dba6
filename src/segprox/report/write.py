"""Tables and figures as files."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure

from segprox.report.figures import save_figure
from segprox.report.tables import WRITERS, Table, to_markdown


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder to write to, whose content is moved to `folder` once all of it is there; of less than that, nothing is.

    Files of the same names are replaced, others stay. What a process that was killed left aside, the next one removes.
    """
    aside = folder / ".unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        _move(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    if source.is_dir() and target.is_dir():
        for part in sorted(source.iterdir()):
            _move(part, target / part.name)
    else:
        source.replace(target)


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    """Each table in each format, and all of them in one Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for ending, render in WRITERS.items():
            (folder / f"{table.name}.{ending}").write_text(
                f"{render(table).rstrip()}\n", encoding="utf-8", newline="\n"
            )
    everything = "\n\n".join(to_markdown(table) for table in tables) + "\n"
    (folder / "all.md").write_text(everything, encoding="utf-8", newline="\n")


def write_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Each figure by its name, as SVG, PDF and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, folder / name)
