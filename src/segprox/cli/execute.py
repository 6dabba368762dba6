"""Evaluations as they run: engines, progress, interruptions."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.progress import Progress

from segprox.attacks import Progress as Iteration
from segprox.cli.base import check_writable, out, progress_bar
from segprox.cli.options import Log
from segprox.cli.status import print_plan, print_statuses, summary
from segprox.errors import SegproxError
from segprox.report.audit import Audit
from segprox.report.evaluation import Results
from segprox.report.results import results_of
from segprox.report.tables import to_screen
from segprox.report.units import Unit
from segprox.run.engines import choose_engine
from segprox.run.evaluate import Evaluation, Status
from segprox.run.record import ImageError, Record


def show_statuses(statuses: Sequence[Status], log: Log) -> None:
    """What came out of an evaluation, for people."""
    if log is Log.BAR:
        print_statuses(statuses)


def show_audit(statuses: Sequence[Status], log: Log) -> None:
    """Whether the two attacks of an evaluation agree, image by image."""
    audit = Audit(Results(results_of(statuses)))
    if log is Log.JSON:
        for row in audit.rows():
            print(json.dumps({"event": "finding", **row}), flush=True)
    else:
        out.print(*map(to_screen, audit.tables), audit.sentence, sep="\n", highlight=False, markup=False)


def run_evaluation(
    evaluation: Evaluation, log: Log, dry_run: bool, show: Callable[[Sequence[Status], Log], None] = show_statuses
) -> None:
    """Do an evaluation and show what came out, or say what it would be; exit with 1 if an image was not attacked."""
    evaluation.validate()
    if dry_run:
        print_plan(evaluation)
        return
    check_writable(evaluation.out)
    with _stoppable(log):
        _follow(evaluation, log)
    statuses = evaluation.status()
    errors = sum(status.errors for status in statuses)
    show(statuses, log)
    facts = {"out": str(evaluation.out), "errors": errors}
    if errors:
        why = f"{evaluation.out}/*/records.jsonl says why, --retry-errors tries them again"
        message = f"{errors} images could not be attacked; {why}"
        _tell(log, message, "finished", **facts)
        raise typer.Exit(1)
    _tell(log, f"Results are in {evaluation.out.as_posix()}/", "finished", **facts)


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
        where = f": {error.filename}" if error.filename else ""
        raise SegproxError(
            f"the evaluation stopped: {error.strerror or error}{where}; every finished image is recorded, "
            "and the same command again goes on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _follow(evaluation: Evaluation, log: Log) -> None:
    """Do it, and tell how far it is: a bar for everything, one for the run of the last image."""
    statuses = evaluation.status()
    units = [Unit(norm) for norm in {status.run.attack.make().norm for status in statuses}]
    total, done = sum(status.total for status in statuses), sum(len(status.records) for status in statuses)
    if done and log is Log.BAR:
        out.print(f"{done} of {total} images are done already.", highlight=False)
    with progress_bar("images", disable=log is not Log.BAR) as bar:
        overall = bar.add_task("all runs", total=total, completed=done)
        current = bar.add_task("", total=None)

        def show(iteration: Iteration) -> None:
            norm, apsr = iteration.norm.min().item(), iteration.apsr.max().item()
            size = units[0].text(norm) if len(units) == 1 else f"norm {norm:.3g}"
            bar.update(current, description=f"step {iteration.iteration}: {size}, {apsr:.1%}")

        engine = choose_engine(evaluation.execution, show if log is Log.BAR else None)
        for status, record in evaluation.go(engine):
            bar.advance(overall)
            bar.update(current, description=status.run.attack.name, total=status.total, completed=len(status.records))
            _report(status, record, log, bar)


def _report(status: Status, record: Record | ImageError, log: Log, bar: Progress) -> None:
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
