"""Tables of runs: what is planned, how far they are, what they found."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from segprox.cli.base import out, plain_table
from segprox.data import published_length
from segprox.errors import told
from segprox.report.findings import until_sentence
from segprox.report.progress import found_text
from segprox.report.results import results_of
from segprox.run.evaluate import Evaluation, Status, estimate, time_model
from segprox.run.plan import Run
from segprox.run.worker import prepare


def print_statuses(statuses: Sequence[Status]) -> None:
    """How far runs are and what they found."""
    found = [found_text(status) for status in statuses]
    rows = [
        (status.run, (f"{len(status.records)}/{status.total}", str(status.errors), size, broken))
        for status, (size, broken, _) in zip(statuses, found)
    ]
    print_runs(rows, "images", "errors", "median, or left", "broken")
    for status, (_, _, reached) in zip(statuses, found):
        if reached:  # an image that is not broken need not be unharmed
            out.print(f"{status.run.title}: {reached}", highlight=False, markup=False)
    for result in results_of([status for status in statuses if status.records]):
        if (sentence := until_sentence(result)) is not None:
            out.print(f"{result.run.attack}, {result.run.goal}: {sentence}.", highlight=False, markup=False)
    out.print(
        "A median is the smallest size that breaks at least half of the images: linf in 255ths, or the norm that is "
        "named; an image that was not broken counts as 255/255, or as infinite. APSR: the share of pixels that are as "
        "the attack wants.",
        highlight=False,
        style="dim",
    )


def print_runs(rows: Sequence[tuple[Run, Sequence[str]]], *headings: str) -> None:
    """A table for each model and dataset, a line for each attack and goal."""
    for place, some in groupby(rows, key=lambda row: f"{row[0].model_title} on {row[0].dataset}"):
        out.print(place, highlight=False, markup=False, style="bold", soft_wrap=True)
        table = plain_table("attack")
        table.columns[0].no_wrap = False  # long fields go on below: numbers and headings are never cut
        table.add_column("goal", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
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
                out.print(f"{name} could not be timed by its first image: {told(error)}", highlight=False, style="red")
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
        "by one timed image per model and dataset. Nothing was attacked.",
        highlight=False,
    )


def print_counts(runs: Sequence[Run]) -> None:
    """Numbers that need neither models nor data: of the datasets as published."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("dataset", overflow="fold")
    for heading in ("images", "runs", "attacked", "queries"):
        table.add_column(heading, justify="right", no_wrap=True)
    attacked = queries = 0
    for dataset in dict.fromkeys(run.dataset for run in runs):
        some = [run for run in runs if run.dataset == dataset]
        images = published_length(dataset)
        if images is None:
            table.add_row(dataset, "?", f"{len(some):,}", "?", "?")
            continue
        images = min(images, some[0].settings.limit or images)
        cost = sum(sum(run.attack.make().cost()) for run in some)
        table.add_row(dataset, *(f"{n:,}" for n in (images, len(some), images * len(some), images * cost)))
        attacked, queries = attacked + images * len(some), queries + images * cost
    out.print(table)
    out.print(
        f"{len(runs)} runs in all, {attacked:,} images to attack, {queries:,} queries (forwards and backwards).",
        highlight=False,
    )
