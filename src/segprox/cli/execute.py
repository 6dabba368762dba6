"""Evaluations as they run: engines, progress, interruptions."""

import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Any

import torch
import typer
from rich.progress import Progress

from segprox.attacks import Callback
from segprox.attacks import Progress as Iteration
from segprox.cli.base import check_writable, out, progress_bar
from segprox.cli.status import print_plan, print_statuses, summary
from segprox.errors import SegproxError
from segprox.report.units import Unit
from segprox.run.engines import Engine, Local, Processes, Ray
from segprox.run.evaluate import Evaluation, Event, validate
from segprox.run.record import ImageError, Record


class EngineName(StrEnum):
    """Who does the work."""

    LOCAL = "local"
    RAY = "ray"


class Log(StrEnum):
    """How progress is told."""

    BAR = "bar"
    QUIET = "quiet"
    JSON = "json"


@dataclasses.dataclass(frozen=True)
class Means:
    """How an evaluation is done; nothing of it changes what comes out."""

    engine: EngineName
    workers: int
    address: str | None
    threads: int
    devices: Sequence[str]
    log: Log


def carry_out(evaluation: Evaluation, means: Means, dry_run: bool) -> None:
    """Do an evaluation, or say what it would be, and exit with 1 if an image could not be attacked."""
    torch.set_num_threads(means.threads)
    validate(evaluation.runs)
    if dry_run:
        print_plan(evaluation)
        return
    check_writable(evaluation.out)
    with _stoppable(means.log):
        _follow(evaluation, means)
    statuses = evaluation.status()
    errors = sum(status.errors for status in statuses)
    if means.log is Log.BAR:
        print_statuses(statuses)
    facts = {"out": str(evaluation.out), "errors": errors}
    if errors:
        why = f"{evaluation.out}/*/records.jsonl says why, --retry-errors tries them again"
        message = f"{errors} images could not be attacked; {why}"
        _tell(means.log, message, "finished", **facts)
        raise typer.Exit(1)
    _tell(means.log, f"Results are in {evaluation.out.as_posix()}/", "finished", **facts)


def _tell(log: Log, message: str, event: str, **facts: Any) -> None:
    if log is Log.JSON:
        print(json.dumps({"event": event, **facts}), flush=True)
    elif log is Log.BAR:
        out.print(message, highlight=False)


@contextmanager
def _stoppable(log: Log) -> Iterator[None]:
    """SIGTERM ends like Ctrl-C: what is known is on the disk already."""

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        _tell(log, "Interrupted: every finished image is recorded. The same command again goes on.", "interrupted")
        raise
    except OSError as error:
        raise SegproxError(
            f"cannot write: {error.strerror or error}; every finished image is recorded, "
            "and the same command again goes on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _engine(means: Means, show: Callback | None) -> Engine:
    if means.engine is EngineName.RAY:
        return Ray(means.workers, means.address, 1.0 if torch.cuda.is_available() else 0.0, means.threads)
    if means.workers > 1:
        return Processes(means.workers, means.devices, means.threads)
    return Local(means.threads, show)


def _follow(evaluation: Evaluation, means: Means) -> None:
    """Do it, and tell how far it is: a bar for everything, one for the run of the last image."""
    statuses = evaluation.status()
    units = [Unit(norm) for norm in {status.run.attack.make().norm for status in statuses}]
    total, done = sum(status.total for status in statuses), sum(len(status.records) for status in statuses)
    if done and means.log is Log.BAR:
        out.print(f"{done} of {total} images are done already.", highlight=False)
    with progress_bar("images", disable=means.log is not Log.BAR) as bar:
        overall = bar.add_task("all runs", total=total, completed=done)
        current = bar.add_task("", total=None)

        def show(iteration: Iteration) -> None:
            norm, apsr = iteration.norm.min().item(), iteration.apsr.max().item()
            size = units[0].text(norm) if len(units) == 1 else f"norm {norm:.3g}"
            bar.update(current, description=f"step {iteration.iteration}: {size}, {apsr:.1%}")

        for event in evaluation.go(_engine(means, show if means.log is Log.BAR else None)):
            status = event.status
            bar.advance(overall)
            bar.update(current, description=status.run.attack.name, total=status.total, completed=len(status.records))
            _report(event, means.log, bar)


def _report(event: Event, log: Log, bar: Progress) -> None:
    status, record = event
    if log is Log.JSON:
        facts: dict[str, Any] = {
            "event": "image",
            "run": status.run.folder,
            "image": record.image,
            "status": record.status,
        }
        if isinstance(record, Record):
            facts |= {"linf": record.found.linf, "apsr": record.found.apsr, "success": record.found.success}
        else:
            facts |= {"reason": record.reason}
        print(json.dumps({**facts, "time": time.time()}), flush=True)
    elif log is Log.BAR:
        if isinstance(record, ImageError):
            bar.console.print(
                f"{record.image} could not be attacked: {record.reason}", highlight=False, markup=False, style="red"
            )
        if len(status.records) == status.total:
            bar.console.print(f"{status.run.title}: {summary(status)}", highlight=False, markup=False)
