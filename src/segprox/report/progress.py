"""How an evaluation is followed while it runs: a bar in a terminal or a notebook, lines of JSON, or nothing."""

import json
import time
from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from segprox.attacks import Callback
from segprox.attacks import Progress as Iteration
from segprox.report.results import RunResults, results_of
from segprox.report.statistics import summarise
from segprox.report.units import Unit
from segprox.run.engines import choose_engine
from segprox.run.evaluate import Evaluation, Status
from segprox.run.record import ImageError, Record

REDRAWN = 0.2  # seconds between two pictures of a notebook's bar


class Follower:
    """Follows an evaluation without a word; its subclasses tell what they see."""

    callback: Callback | None = None  # sees the iterations of attacks in this process

    def start(self, statuses: Sequence[Status]) -> None:
        """See how far the runs are before anything is done."""
        self.statuses = {status.run.folder: status for status in statuses}

    def image(self, status: Status, record: Record | ImageError) -> None:
        """See what became of an image."""
        self.statuses[status.run.folder] = status

    def say(self, message: str, event: str, **facts: Any) -> None:
        """Tell something about the evaluation as a whole."""

    def stop(self) -> None:
        """See that it is over, whether it was interrupted or not."""

    @property
    def done(self) -> int:
        """Images that are done with."""
        return sum(len(status.records) for status in self.statuses.values())

    @property
    def total(self) -> int:
        """Images that are done with in the end, or fewer, if a run stops when it has enough."""
        return self.done + sum(status.left for status in self.statuses.values())


def follow(evaluation: Evaluation, follower: Follower) -> None:
    """Do what is missing of an evaluation."""
    follower.start(evaluation.status())
    try:
        for status, record in evaluation.go(choose_engine(evaluation.execution, follower.callback)):
            follower.image(status, record)
    finally:
        follower.stop()


class JsonLines(Follower):
    """An object per line, for log files and other programs."""

    def image(self, status: Status, record: Record | ImageError) -> None:
        """Print what became of an image."""
        facts: dict[str, Any] = {"run": status.run.folder, "image": record.image, "status": record.status}
        if isinstance(record, Record):
            facts |= {"linf": record.found.linf, "apsr": record.found.apsr, "success": record.found.success}
        else:
            facts["reason"] = record.reason
        self.say("", "image", **facts, time=time.time())

    def say(self, message: str, event: str, **facts: Any) -> None:
        """Print the event and its facts."""
        print(json.dumps({"event": event, **facts}), flush=True)


class Bar(Follower):
    """What bars in terminals and notebooks have in common: what they say of images and iterations."""

    def start(self, statuses: Sequence[Status]) -> None:
        """Say what is done already."""
        super().start(statuses)
        self.callback = self.iteration
        self.units = {Unit.of_run(status.run) for status in statuses}
        if self.done:
            self.print(f"{self.done} of {self.total} images are done already.")
        self.draw("")

    def iteration(self, iteration: Iteration) -> None:
        """Show the best point so far of the image that is attacked."""
        norm, apsr = iteration.norm.min().item(), iteration.apsr.max().item()
        size = next(iter(self.units)).text(norm) if len(self.units) == 1 else f"norm {norm:.3g}"
        self.draw(f"step {iteration.iteration}: {size}, {apsr:.1%}")

    def image(self, status: Status, record: Record | ImageError) -> None:
        """Count an image, and say what was found when it is the last of its run."""
        super().image(status, record)
        if isinstance(record, ImageError):
            self.print(f"{record.image} could not be attacked: {record.reason}", style="red")
        if not status.left:
            self.print(f"{status.run.title}: {summary(status)}")
        self.draw(status.run.attack.name, status)

    def say(self, message: str, event: str, **facts: Any) -> None:
        """Print the message."""
        self.print(message)

    def print(self, line: str, style: str | None = None) -> None:
        """Write a line that stays."""
        raise NotImplementedError

    def draw(self, now: str, status: Status | None = None) -> None:
        """Show how far it is, what is being done now and, after an image, how far its run is."""
        raise NotImplementedError


class TerminalBar(Bar):
    """A bar for all runs, one for the run of the last image; only lines and the last picture in a file or a pipe."""

    def __init__(self, console: Console) -> None:
        self.bar = progress_bar(console, "images")
        self.overall = self.bar.add_task("all runs", total=None)
        self.current = self.bar.add_task("", total=None, visible=False)

    def start(self, statuses: Sequence[Status]) -> None:
        """Show the bars."""
        super().start(statuses)
        self.bar.reset(self.overall, completed=self.done, total=self.total)  # what was done before took no time
        self.bar.start()

    def stop(self) -> None:
        """Leave them as they are."""
        self.bar.stop()

    def print(self, line: str, style: str | None = None) -> None:
        """Write above the bars."""
        self.bar.console.print(line, highlight=False, markup=False, style=style)

    def draw(self, now: str, status: Status | None = None) -> None:
        """Move the bars."""
        self.bar.update(self.overall, completed=self.done, total=self.total)
        self.bar.update(self.current, description=now, visible=bool(now))
        if status is not None:
            self.bar.update(self.current, completed=len(status.records), total=len(status.records) + status.left)


class NotebookBar(Bar):
    """One picture in the output of a cell, drawn again as images are attacked."""

    def __init__(self) -> None:
        ipython = import_module("IPython.display")  # there is one wherever this runs
        self.lines, self.drawn, self.make_picture = list[str](), 0.0, ipython.HTML
        self.handle = ipython.display(ipython.HTML(""), display_id=True)

    def stop(self) -> None:
        """Leave the lines, without the bar."""
        self.handle.update(self.make_picture("".join(self.lines)))

    def print(self, line: str, style: str | None = None) -> None:
        """Write below the bar."""
        self.lines.append(f'<div style="font-size:smaller;color:{style or "inherit"}">{escape(line)}</div>')

    def draw(self, now: str, status: Status | None = None) -> None:
        """Draw the bar, unless it has just been drawn."""
        if status is None and time.monotonic() - self.drawn < REDRAWN:
            return
        self.drawn = time.monotonic()
        bar = f'<progress value="{self.done}" max="{self.total}" style="width:16em"></progress>'
        shown = f"<div>{bar} {self.done}/{self.total} images <small>{escape(now)}</small></div>"
        self.handle.update(self.make_picture(shown + "".join(self.lines)))


def make_bar(console: Console | None = None) -> Bar:
    """The bar that fits where this runs."""
    console = console or Console()
    return NotebookBar() if console.is_jupyter else TerminalBar(console)


class _Rate(ProgressColumn):
    """Units per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        shown = "-" if speed is None else f"{speed:.1f}" if speed >= 0.1 else f"{speed:.3f}"
        return Text(f"{shown} {self.unit}/s", style="progress.data.speed")


def progress_bar(console: Console, unit: str = "steps") -> Progress:
    """A bar with rate and time to go."""
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Rate(unit),
        TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console,
    )  # fmt: skip


def summary(status: Status) -> str:
    """A run in a line."""
    found, broken, reached = found_text(*results_of([status])) if status.done else ("-", "0 of 0", "")
    errors = f"{status.errors} errors" if status.errors else ""
    fixed = status.records and status.store.header.get("family") == "fixed-epsilon"
    median = found if fixed else f"median {found}"
    return ", ".join(filter(None, [median, f"{broken} broken", reached, errors]))


def found_text(result: RunResults) -> tuple[str, str, str]:
    """The median size, or what is left within epsilon; how many images are broken; what was reached on the others."""
    if not result.records:
        return "-", "0 of 0", ""
    found, unit, epsilon = summarise(result), result.unit, result.epsilon
    broken = f"{found.broken} of {found.images}"
    if epsilon is not None:  # such an attack does not look for the smallest size
        return f"{found.attacked_accuracy:.1%} right at {unit.text(epsilon)}", broken, ""
    others = found.images - found.broken
    reached = f"APSR {found.reached_apsr:.1%} at {unit.text(found.reached_size)} on the {others} not broken"
    return unit.text(found.median), broken, reached if others else ""
