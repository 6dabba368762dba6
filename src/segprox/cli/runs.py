"""Evaluations: segprox evaluate, run, spec, runs, verify."""

import dataclasses
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from segprox.cli.base import app, assignments, out
from segprox.cli.execute import EngineName, Log, Means, carry_out
from segprox.cli.status import print_counts, print_runs, print_statuses
from segprox.errors import SegproxError
from segprox.naming import checked
from segprox.run.evaluate import Evaluation, Status
from segprox.run.plan import UNTARGETED, AttackEntry, Grid, Settings, Spec
from segprox.run.store import stores
from segprox.run.verify import verify_run

OutOption = Annotated[Path, typer.Option("--out", help="Folder for the results; the same one again resumes.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="How many images; all if left out.")]
SaveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--save", help="Keep float (safetensors, lossless), png (8-bit), preview (small pictures; the default); repeat."
    ),
]
MaxQueriesOption = Annotated[
    int | None, typer.Option("--max-queries", min=1, help="Most forwards plus backwards per image, for any attack.")
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
RetryOption = Annotated[bool, typer.Option("--retry-errors", help="Try images again that could not be attacked.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long it may take, and stop.")]
LogOption = Annotated[Log, typer.Option("--log", help="A bar, nothing but the result, or a JSON object per line.")]
LeanOption = Annotated[
    bool, typer.Option("--lean/--no-lean", help="Hold only what the gradient of the image needs (see: segprox memory).")
]
CompileOption = Annotated[bool, typer.Option("--compile", help="torch.compile the model.")]
ChannelsLastOption = Annotated[bool, typer.Option("--channels-last", help="Memory format, faster on many GPUs.")]
DeterministicOption = Annotated[bool, typer.Option("--deterministic", help="Deterministic algorithms on GPUs.")]


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
    max_queries: MaxQueriesOption = None,
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
    retry_errors: RetryOption = False,
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
        Settings, "an evaluation", limit=limit, threshold=threshold, seed=seed, max_queries=max_queries,
        save=tuple(save or ["preview"]), model_options=options,
    )  # fmt: skip
    grid = Grid(models=(model,), datasets=(dataset,), attacks=entries, goals=tuple(target or [UNTARGETED]))
    runs = Spec(grids=(grid,), settings=settings).runs()
    torch.use_deterministic_algorithms(deterministic)
    means = Means(engine, workers, address, threads, devices, log)
    carry_out(Evaluation(runs, out_dir, batch, retry_errors), means, dry_run)


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="A YAML file; segprox spec example prints one.")],
    out_dir: OutOption,
    limit: LimitOption = None,
    max_queries: MaxQueriesOption = None,
    save: SaveOption = None,
    device: DeviceOption = None,
    lean: LeanOption = True,
    engine: EngineOption = EngineName.LOCAL,
    workers: WorkersOption = 1,
    address: AddressOption = None,
    threads: ThreadsOption = 1,
    batch: BatchOption = 1,
    retry_errors: RetryOption = False,
    dry_run: DryOption = False,
    log: LogOption = Log.BAR,
) -> None:
    """Run a grid of models, datasets, attacks and goals. The same command again goes on where it stopped.

    Everything is checked before anything starts. Options here override the settings of the file.
    """
    content = Spec.read(spec)
    devices = device.split(",") if device else []
    changes: dict[str, Any] = {"limit": limit, "max_queries": max_queries, "save": tuple(save) if save else None}
    given = {name: value for name, value in changes.items() if value is not None}
    settings = checked(Settings, "an evaluation", **{**vars(content.settings), **given})
    options = settings.model_options | ({"device": devices[0]} if devices else {}) | ({} if lean else {"lean": False})
    settings = dataclasses.replace(settings, model_options=options)
    runs = dataclasses.replace(content, settings=settings).runs()
    means = Means(engine, workers, address, threads, devices, log)
    carry_out(Evaluation(runs, out_dir, batch, retry_errors), means, dry_run)


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
            print_counts(Spec.read(file).runs())
        else:
            print(file.read_text(encoding="utf-8"), end="")  # as it is: no wrapping, no colours


@app.command("runs")
def list_runs(folder: Annotated[Path, typer.Argument(help="What evaluate or run wrote to.")]) -> None:
    """List the runs in a folder: how far each is, and what it found."""
    statuses = []
    for store in stores(folder):
        images, records = store.header["images"], store.latest()
        wanted = min(store.run.settings.limit or images, images)
        statuses.append(Status(store.run, store, max(wanted, len(records)), records))  # it may have been more once
    print_statuses(statuses)
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
    print_runs(rows, "saved as", "linf x 255", "broken", "agree")
    if disagree:
        out.print(f"{disagree} saved images are not what their records say.", highlight=False)
        raise typer.Exit(1)
