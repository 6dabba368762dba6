"""Tables and figures as files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from segprox.report.figures import save_figure
from segprox.report.tables import WRITERS, Table, to_markdown


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
