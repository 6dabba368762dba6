"""Evaluations: segprox evaluate, run, spec, runs, verify."""

import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import StrEnum
from importlib import resources
from itertools import groupby
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from segprox.attacks import Callback
from segprox.attacks import Progress as Iteration
from segprox.cli.base import app, assignments, check_writable, out, plain_table, progress_bar
from segprox.data import published_length
from segprox.errors import SegproxError
from segprox.naming import checked
from segprox.report.units import Unit
from segprox.run.engines import Engine, Local, Processes, Ray
from segprox.run.evaluate import Evaluation, Event, Status, estimate, time_model, validate
from segprox.run.plan import UNTARGETED, AttackEntry, Grid, Run, Settings, Spec
from segprox.run.record import Failure, Record
from segprox.run.store import stores
from segprox.run.verify import verify_run
from segprox.run.worker import prepare


class EngineName(StrEnum):
    """Who does the work."""

    LOCAL = "local"
    RAY = "ray"


class Log(StrEnum):
    """How progress is told."""

    BAR = "bar"
    QUIET = "quiet"
    JSON = "json"


OutOption = Annotated[Path, typer.Option("--out", help="Folder for the results; the same one again resumes.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="How many images; all if left out.")]
SaveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--save", help="Keep float (safetensors, lossless), png (8-bit), preview (small pictures; the default); repeat."
    ),
]
BudgetOption = Annotated[
    int | None, typer.Option("--budget", min=1, help="Most forwards plus backwards per image, for any attack.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, ...; with --workers a list such as cuda:0,cuda:1.")]
PrecisionOption = Annotated[
    str | None, typer.Option(help="bfloat16 or float16 for gradients; successes are verified in float32.")
]
EngineOption = Annotated[EngineName, typer.Option(help="This machine, or a Ray cluster.")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Processes on this machine, or Ray actors.")]
AddressOption = Annotated[str | None, typer.Option(help="Of the Ray cluster, such as auto; a new one if left out.")]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Of each worker. More change the last digits of results.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Images of one size attacked together: for GPUs.")]
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Try images that failed before again.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long it may take, and stop.")]
LogOption = Annotated[Log, typer.Option("--log", help="A bar, nothing but the result, or a JSON object per line.")]
LeanOption = Annotated[
    bool, typer.Option("--lean/--no-lean", help="Hold only what the gradient of the image needs (see: segprox memory).")
]
CompileOption = Annotated[bool, typer.Option("--compile", help="torch.compile the model.")]
ChannelsLastOption = Annotated[bool, typer.Option("--channels-last", help="Memory format, faster on many GPUs.")]
DeterministicOption = Annotated[bool, typer.Option("--deterministic", help="Deterministic algorithms on GPUs.")]


@dataclasses.dataclass(frozen=True)
class Means:
    """How an evaluation is done; nothing of it changes what comes out."""

    engine: EngineName
    workers: int
    address: str | None
    threads: int
    devices: Sequence[str]
    log: Log


@app.command()
def evaluate(
    model: Annotated[str, typer.Option(help="See: segprox list models.")],
    out_dir: OutOption,
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "synthetic",
    attack: Annotated[list[str] | None, typer.Option(help="See: segprox list attacks; may be repeated.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="A class, majority, erase:CLASS, ... (segprox target); may be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations of every attack.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any other field of every attack.")
    ] = None,
    limit: LimitOption = None,
    threshold: Annotated[float, typer.Option(help="The share of pixels that makes a success.")] = 0.99,
    seed: Annotated[int, typer.Option(help="Of random starts.")] = 0,
    budget: BudgetOption = None,
    save: SaveOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    lean: LeanOption = True,
    compile_: CompileOption = False,
    channels_last: ChannelsLastOption = False,
    deterministic: DeterministicOption = False,
    engine: EngineOption = EngineName.LOCAL,
    workers: WorkersOption = 1,
    address: AddressOption = None,
    threads: ThreadsOption = 1,
    batch: BatchOption = 1,
    retry_failed: RetryOption = False,
    dry_run: DryOption = False,
    log: LogOption = Log.BAR,
) -> None:
    """Attack a model on a dataset and keep a record of every image. The same command again goes on where it stopped.

    Without --target every pixel is to become wrong; with it, what the target says.
    """
    fields: dict[str, Any] = assignments(set_ or [])
    if steps is not None:
        fields["steps"] = steps
    entries = tuple(AttackEntry(name=name, set=fields) for name in attack or ["palma"])
    devices = device.split(",") if device else []
    options: dict[str, Any] = {"device": devices[0]} if devices else {}
    options |= {"precision": precision} if precision else {}
    options |= {"compile": True} if compile_ else {}
    options |= {} if lean else {"lean": False}
    options |= {"channels_last": True} if channels_last else {}
    settings = checked(
        Settings, "an evaluation", limit=limit, threshold=threshold, seed=seed, budget=budget,
        save=tuple(save or ["preview"]), model_options=options,
    )  # fmt: skip
    grid = Grid(models=(model,), datasets=(dataset,), attacks=entries, goals=tuple(target or [UNTARGETED]))
    runs = Spec(grids=(grid,), settings=settings).runs()
    torch.use_deterministic_algorithms(deterministic)
    means = Means(engine, workers, address, threads, devices, log)
    _carry_out(Evaluation(runs, out_dir, batch, retry_failed), means, dry_run)


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="A YAML file; segprox spec example prints one.")],
    out_dir: OutOption,
    limit: LimitOption = None,
    budget: BudgetOption = None,
    save: SaveOption = None,
    device: DeviceOption = None,
    lean: LeanOption = True,
    engine: EngineOption = EngineName.LOCAL,
    workers: WorkersOption = 1,
    address: AddressOption = None,
    threads: ThreadsOption = 1,
    batch: BatchOption = 1,
    retry_failed: RetryOption = False,
    dry_run: DryOption = False,
    log: LogOption = Log.BAR,
) -> None:
    """Run a grid of models, datasets, attacks and goals. The same command again goes on where it stopped.

    Everything is checked before anything starts. Options here override the settings of the file.
    """
    content = Spec.read(spec)
    devices = device.split(",") if device else []
    changes: dict[str, Any] = {"limit": limit, "budget": budget, "save": tuple(save) if save else None}
    given = {name: value for name, value in changes.items() if value is not None}
    settings = checked(Settings, "an evaluation", **{**vars(content.settings), **given})
    options = settings.model_options | ({"device": devices[0]} if devices else {}) | ({} if lean else {"lean": False})
    settings = dataclasses.replace(settings, model_options=options)
    runs = dataclasses.replace(content, settings=settings).runs()
    means = Means(engine, workers, address, threads, devices, log)
    _carry_out(Evaluation(runs, out_dir, batch, retry_failed), means, dry_run)


@app.command("spec")
def print_spec(
    name: Annotated[str, typer.Argument(help="paper: its whole evaluation; example: a small one; or a file of yours.")],
    count: Annotated[
        bool, typer.Option("--count", help="Say how many runs, images and queries it has instead.")
    ] = False,
) -> None:
    """Print a spec to start from, as in: segprox spec paper > paper.yaml."""
    shipped = resources.files("segprox.run") / "specs" / f"{name}.yaml"
    with resources.as_file(shipped) if shipped.is_file() else nullcontext(Path(name)) as file:
        if not file.is_file():
            raise SegproxError(f"there is no spec {name!r}; there are: example, paper, and files of yours")
        if count:
            _print_counts(Spec.read(file).runs())
        else:
            print(file.read_text(encoding="utf-8"), end="")  # as it is: no wrapping, no colours


def _print_counts(runs: Sequence[Run]) -> None:
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


def _carry_out(evaluation: Evaluation, means: Means, dry_run: bool) -> None:
    torch.set_num_threads(means.threads)
    validate(evaluation.runs)
    if dry_run:
        _print_plan(evaluation)
        return
    check_writable(evaluation.out)
    with _stoppable(means.log):
        _follow(evaluation, means)
    statuses = evaluation.status()
    failed = sum(status.failed for status in statuses)
    if means.log is Log.BAR:
        _print_statuses(statuses)
    facts = {"out": str(evaluation.out), "failed": failed}
    if failed:
        message = f"{failed} images failed; {evaluation.out}/*/records.jsonl says why, --retry-failed tries them again"
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
        if isinstance(record, Failure):
            bar.console.print(f"{record.image} failed: {record.reason}", highlight=False, markup=False, style="red")
        if len(status.records) == status.total:
            bar.console.print(f"{status.run.title}: {_summary(status)}", highlight=False, markup=False)


def _summary(status: Status) -> str:
    middle, broken = _found(status)
    return f"median {middle}, {broken} broken" + (f", {status.failed} failed" if status.failed else "")


def _found(status: Status) -> tuple[str, str]:
    """The median size, and how many of the attacked images are broken."""
    records = [record for record in status.records.values() if isinstance(record, Record)]
    broken = f"{sum(record.found.success for record in records)} of {len(records)}"
    if not records:
        return "-", broken
    unit = Unit.of(status.store)
    return unit.text(median(map(unit.counted, records))), broken


def _print_statuses(statuses: Sequence[Status]) -> None:
    rows = [
        (status.run, (f"{len(status.records)}/{status.total}", str(status.failed), *_found(status)))
        for status in statuses
    ]
    _print_runs(rows, "images", "failed", "median", "broken")
    out.print(
        "Medians are of linf in 255ths, or of the norm that is named; an image that was not broken counts as 255/255, "
        "or as infinite.",
        highlight=False,
        style="dim",
    )


def _print_runs(rows: Sequence[tuple[Run, Sequence[str]]], *headings: str) -> None:
    """A table for each model and dataset, a line for each attack and goal."""
    for place, some in groupby(rows, key=lambda row: f"{row[0].model} on {row[0].dataset}"):
        out.print(place, highlight=False, markup=False, style="bold", soft_wrap=True)
        table = plain_table("attack")
        table.add_column("goal", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for run, cells in some:
            table.add_row(str(run.attack), run.goal, *cells)
        out.print(table)


def _print_plan(evaluation: Evaluation) -> None:
    statuses = evaluation.status()
    timed: dict[str, tuple[float, float]] = {}
    for status in statuses:
        name = f"{status.run.model} {status.run.dataset}"
        if name not in timed:
            with suppress(SegproxError):  # an image that cannot be read tells nothing
                timed[name] = time_model(prepare(status.run))
    estimates = [estimate(status, timed, evaluation.retry_failed) for status in statuses]
    rows = []
    for found in estimates:
        longest = "unknown" if found.seconds is None else str(timedelta(seconds=round(found.seconds)))
        rows.append((found.run, (str(found.images), f"{found.forwards:,}", f"{found.backwards:,}", longest)))
    _print_runs(rows, "left", "forwards", "backwards", "at most")
    whole = timedelta(seconds=round(sum(found.seconds or 0.0 for found in estimates)))
    images, queries = sum(e.images for e in estimates), sum(e.forwards + e.backwards for e in estimates)
    out.print(
        f"{len(estimates)} runs, {images} images, {queries:,} forwards and backwards: at most {whole} with one worker, "
        "by one timed image per model and dataset. Nothing was attacked.",
        highlight=False,
    )


@app.command("runs")
def list_runs(folder: Annotated[Path, typer.Argument(help="What evaluate or run wrote to.")]) -> None:
    """List the runs in a folder: how far each is, and what it found."""
    statuses = []
    for store in stores(folder):
        images, records = store.header["images"], store.latest()
        wanted = min(store.run.settings.limit or images, images)
        statuses.append(Status(store.run, store, max(wanted, len(records)), records))  # it may have been more once
    _print_statuses(statuses)
    for status in statuses:
        if status.store.locked:
            out.print(f"{status.run.title}: being written to", highlight=False)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="What evaluate or run wrote to.")],
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
) -> None:
    """Read the saved images again, ask the model again, and compare with the records."""
    torch.set_num_threads(1)
    rows, disagree = [], 0
    for store in stores(folder):
        for found in verify_run(store, device):
            disagree += found.images - found.agree
            norm = "-" if found.median_linf is None else f"{found.median_linf * 255:.3f}"
            agree = f"{found.agree}/{found.images}"
            rows.append((store.run, (found.kind, norm, f"{found.broken}/{found.images}", agree)))
    if not rows:
        raise SegproxError(f"nothing is saved in {folder}: evaluate with --save float or --save png")
    _print_runs(rows, "saved as", "linf x 255", "broken", "agree")
    if disagree:
        out.print(f"{disagree} saved images are not what their records say.", highlight=False)
        raise typer.Exit(1)
