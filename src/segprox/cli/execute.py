"""Evaluations as they run: engines, progress, interruptions."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from segprox.cli.base import check_writable, out
from segprox.cli.options import Log
from segprox.cli.status import print_plan, print_statuses
from segprox.errors import SegproxError
from segprox.report.progress import Follower, JsonLines, follow, make_bar
from segprox.run.evaluate import Evaluation


def run_evaluation(evaluation: Evaluation, log: Log, dry_run: bool) -> None:
    """Do an evaluation, or say what it would be, and exit with 1 if an image could not be attacked."""
    evaluation.validate()
    if dry_run:
        print_plan(evaluation)
        return
    check_writable(evaluation.out)
    follower = make_bar(out) if log is Log.BAR else JsonLines() if log is Log.JSON else Follower()
    with _stoppable(follower):
        follow(evaluation, follower)
    statuses = evaluation.status()
    errors = sum(status.errors for status in statuses)
    if log is Log.BAR:
        print_statuses(statuses)
    facts = {"out": str(evaluation.out), "errors": errors}
    if errors:
        why = f"{evaluation.out}/*/records.jsonl says why, --retry-errors tries them again"
        message = f"{errors} images could not be attacked; {why}"
        follower.say(message, "finished", **facts)
        raise typer.Exit(1)
    follower.say(f"Results are in {evaluation.out.as_posix()}/", "finished", **facts)


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
        raise SegproxError(
            f"cannot write: {error.strerror or error}; every finished image is recorded, "
            "and the same command again goes on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
