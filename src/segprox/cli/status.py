"""Tables of runs: what is planned, how far they are, what they found."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from typing import NamedTuple

from segprox.cli.base import out, plain_table
from segprox.data import published_length
from segprox.errors import told
from segprox.report.findings import until_sentence
from segprox.report.progress import found_text
from segprox.report.results import RunResults, results_of
from segprox.run.evaluate import Evaluation, Status, estimate, most_queries, time_model
from segprox.run.plan import Run
from segprox.run.worker import prepare


class Line(NamedTuple):
    """How far a run is and what it found."""

    run: Run
    done: str
    errors: int = 0
    size: str = "-"
    broken: str = "0 of 0"
    reached: str = ""  # on the images that are not broken
    until: str | None = None

    @classmethod
    def of(cls, result: RunResults, total: int) -> "Line":
        """Of a run of which so many images are wanted."""
        errors = len(result.errors)
        done = f"{len(result.records) + errors}/{total}"
        return cls(result.run, done, errors, *found_text(result), until=until_sentence(result))


def print_statuses(statuses: Sequence[Status]) -> None:
    """How far runs are and what they found."""
    print_lines([
        Line.of(results_of([status])[0], status.total) if status.records else Line(status.run, f"0/{status.total}")
        for status in statuses
    ])  # fmt: skip


def print_lines(lines: Sequence[Line]) -> None:
    """A table of runs, and below it what does not fit into one."""
    rows = [(line.run, (line.done, str(line.errors), line.size, line.broken)) for line in lines]
    print_runs(rows, "images", "errors", "median, or left", "broken")
    for line in lines:
        if line.reached:  # an image that is not broken need not be unharmed
            out.print(f"{line.run.title}: {line.reached}")
    for line in lines:
        if line.until is not None:
            out.print(f"{line.run.attack}, {line.run.goal}: {line.until}.")
    out.print(
        "A median is the smallest size that breaks at least half of the images: linf in 255ths (of images that are not "
        "of 8 bits, in % of their range), or the norm that is named; an image that was not broken counts as the whole "
        "range, or as infinite. APSR: the share of pixels that are as "
        "the attack wants.",
        style="dim",
    )


def print_runs(rows: Sequence[tuple[Run, Sequence[str]]], *headings: str) -> None:
    """A table for each model and dataset, a line for each attack and goal."""
    for place, some in groupby(rows, key=lambda row: f"{row[0].model_title} on {row[0].dataset}"):
        out.print(place, style="bold", soft_wrap=True)
        table = plain_table("attack", "goal", numbers=headings)
        table.columns[0].no_wrap, table.columns[1].no_wrap = False, True  # long fields of attacks go on below
        for run, cells in some:
            table.add_row(str(run.attack), run.goal, *cells)
        out.print(table)


def print_plan(evaluation: Evaluation) -> None:
    """What is left to do, and how long it may take."""
    statuses = evaluation.status()
    timed: dict[str, tuple[float, float] | None] = {}
    for status in statuses:
        name = f"{status.run.model} {status.run.dataset}"
        if name not in timed:
            try:
                timed[name] = time_model(prepare(status.run, evaluation.execution))
            except Exception as error:  # whatever a file or a network may raise: it will be recorded in its turn
                timed[name] = None
                out.print(f"{name} could not be timed by its first image: {told(error)}", style="red")
    estimates = [estimate(status, timed, evaluation.retry_errors) for status in statuses]
    rows = []
    for found in estimates:
        longest = "unknown" if found.seconds is None else str(timedelta(seconds=round(found.seconds)))
        rows.append((found.run, (str(found.images), f"{found.forwards:,}", f"{found.backwards:,}", longest)))
    print_runs(rows, "left", "forwards", "backwards", "at most")
    whole = timedelta(seconds=round(sum(found.seconds or 0.0 for found in estimates)))
    images, queries = sum(e.images for e in estimates), sum(e.forwards + e.backwards for e in estimates)
    out.print(
        f"{len(estimates)} runs, {images} images, {queries:,} forwards and backwards: at most {whole} with one worker, "
        "by one timed image per model and dataset. Nothing was attacked."
    )


def print_counts(runs: Sequence[Run]) -> None:
    """Numbers that need neither models nor data: of the datasets as published."""
    table = plain_table("dataset", numbers=("images", "runs", "attacked", "queries"))
    table.columns[0].no_wrap = False  # a long path goes on below
    attacked = queries = 0
    for dataset in dict.fromkeys(run.dataset for run in runs):
        some = [run for run in runs if run.dataset == dataset]
        images = published_length(dataset)
        if images is None:
            table.add_row(dataset, "?", f"{len(some):,}", "?", "?")
            continue
        images = min(images, some[0].settings.limit or images)
        cost = sum(sum(most_queries(run)) for run in some)
        table.add_row(dataset, *(f"{n:,}" for n in (images, len(some), images * len(some), images * cost)))
        attacked, queries = attacked + images * len(some), queries + images * cost
    out.print(table)
    out.print(f"{len(runs)} runs in all, {attacked:,} images to attack, {queries:,} queries (forwards and backwards).")
