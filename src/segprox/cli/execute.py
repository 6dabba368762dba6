"""Evaluations as they run: engines, progress, interruptions."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import typer

from segprox.cli.base import check_writable, out
from segprox.cli.options import Log
from segprox.cli.status import print_plan, print_statuses
from segprox.errors import SegproxError
from segprox.report.audit import Audit
from segprox.report.evaluation import Results
from segprox.report.progress import Follower, JsonLines, follow, make_bar
from segprox.report.results import results_of
from segprox.report.tables import to_screen
from segprox.run.evaluate import Evaluation, Status


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
        out.print(*map(to_screen, audit.tables), audit.sentence, sep="\n")


def run_evaluation(
    evaluation: Evaluation, log: Log, dry_run: bool, show: Callable[[Sequence[Status], Log], None] = show_statuses
) -> None:
    """Do an evaluation and show what came out, or say what it would be; exit with 1 if an image was not attacked."""
    evaluation.validate()
    if dry_run:
        print_plan(evaluation)
        return
    check_writable(evaluation.out)
    follower = make_bar(out) if log is Log.BAR else JsonLines() if log is Log.JSON else Follower()
    for sentence in evaluation.red_checks():
        follower.say(f"Warning: {sentence}", "warning", text=sentence)
    with _stoppable(follower):
        follow(evaluation, follower)
    statuses = evaluation.status()
    errors = sum(status.errors for status in statuses)
    show(statuses, log)
    why = f"{evaluation.out}/*/records.jsonl says why, --retry-errors tries them again"
    failed, fine = f"{errors} images could not be attacked; {why}", f"Results are in {evaluation.out.as_posix()}/"
    follower.say(failed if errors else fine, "finished", out=str(evaluation.out), errors=errors)
    if errors:
        raise typer.Exit(1)


@contextmanager
def _stoppable(follower: Follower) -> Iterator[None]:
    """SIGTERM ends like Ctrl-C: what is known is on the disk already."""

    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        follower.say("Interrupted: every finished image is recorded. The same command again goes on.", "interrupted")
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise SegproxError(
            f"the evaluation stopped: {error.strerror or error}{where}; every finished image is recorded, "
            "and the same command again goes on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
