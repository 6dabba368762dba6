"""Reports as files: tables, figures and the page."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from segprox.errors import SegproxError
from segprox.report.contents import report_tables
from segprox.report.figures import FORMATS, USUAL_FORMATS, draw_figures, save_figure
from segprox.report.groups import group_runs
from segprox.report.page import PageInfo, write_page
from segprox.report.published import against as beside
from segprox.report.requirements import Requirement, judge_all, requirement_table
from segprox.report.results import RunResults
from segprox.report.tables import WRITERS, Table, to_markdown
from segprox.report.transfer import transfer_tables


class Report(NamedTuple):
    """What was written."""

    tables: list[Table]
    page: PageInfo


def write_report(
    results: Sequence[RunResults],
    folder: Path,
    require: Sequence[Requirement] = (),
    critical: Sequence[str] = (),
    against: str | None = None,
    formats: Sequence[str] = USUAL_FORMATS,
) -> Report:
    """Write tables, figures and the page of runs, as `Results.write_report` does.

    With `against`, the runs are shown beside published numbers: see `segprox.report.published`.
    """
    for name in formats:
        if name not in FORMATS:
            raise SegproxError(f"figures cannot be written as {name!r}; the formats are: {', '.join(FORMATS)}")
    known = {name for result in results for name in result.classes}
    for name in critical:
        if name not in known:
            raise SegproxError(f"there is no class {name!r} in these runs; the classes are: {', '.join(sorted(known))}")
    groups = group_runs(results)
    judged, tables = judge_all(require, groups), report_tables(groups, critical)
    tables += transfer_tables(results)
    tables += [] if against is None else beside(results, against)
    with written_aside(folder) as aside:
        write_tables([*([requirement_table(judged)] if judged else []), *tables], aside / "tables")
        write_figures(draw_figures(groups, critical), aside / "figures", formats)
        page = write_page(results, aside / "index.html", judged=judged, critical=critical)
    return Report(tables, replace(page, path=folder / page.path.name))


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


def write_figures(figures: Iterable[tuple[str, Figure]], folder: Path, formats: Sequence[str] = USUAL_FORMATS) -> None:
    """Each figure by its name, in each format."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures:
        save_figure(figure, folder / name, formats)
