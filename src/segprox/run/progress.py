"""A bar for evaluations in Python, in a terminal or a notebook."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from segprox.run.engines import Engine
from segprox.run.evaluate import Evaluation


def follow(evaluation: Evaluation, engine: Engine, show: bool) -> None:
    """Do what is missing, and show how far it is."""
    statuses = evaluation.status()
    total, done = sum(status.total for status in statuses), sum(len(status.records) for status in statuses)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, disable=not show) as bar:
        task = bar.add_task("evaluating", total=total, completed=done)
        for status, _ in evaluation.go(engine):
            done += 1
            bar.update(task, completed=min(done, total), description=f"{status.run.attack.name} on {status.run.model}")
