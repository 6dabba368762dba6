"""Evaluations: segprox evaluate, run, audit, spec, runs, verify, transfer."""

from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segprox.cli import options
from segprox.cli.base import app, out
from segprox.cli.options import Log, execution_options, field_options, settings_options, takes
from segprox.errors import SegproxError

if TYPE_CHECKING:
    from segprox.run.execution import Execution
    from segprox.run.plan import Settings


@app.command()
@takes(fields=field_options, settings=settings_options, execution=execution_options)
def evaluate(
    model: options.ModelOption,
    out_dir: options.OutOption,
    fields: dict[str, Any],
    settings: "Settings",
    execution: "Execution",
    dataset: options.DatasetOption = "demo",
    attack: Annotated[list[str] | None, typer.Option(help="See: segprox list attacks; may be repeated.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="A class, majority, erase:CLASS, ... (segprox target); may be repeated.")
    ] = None,
    retry_errors: options.RetryOption = False,
    dry_run: options.DryOption = False,
    log: options.LogOption = Log.BAR,
) -> None:
    """Attack a model on a dataset and keep a record of every image. The same command again goes on where it stopped.

    Without --target every pixel is to become wrong; with it, what the target says. With --set epsilon=2/255,4/255 a
    fixed-epsilon attack has a run for each.
    """
    from segprox.cli.execute import run_evaluation
    from segprox.data import UNTARGETED
    from segprox.run.objects import make_evaluation

    with make_evaluation(
        model, dataset, attack or "palma", target or UNTARGETED, settings, out=out_dir, execution=execution,
        retry_errors=retry_errors, fields=fields,
    ) as evaluation:  # fmt: skip
        run_evaluation(evaluation, log, dry_run)


@app.command()
@takes(execution=execution_options)
def run(
    spec: Annotated[Path, typer.Argument(help="A YAML file; segprox spec example prints one.")],
    out_dir: options.OutOption,
    execution: "Execution",
    limit: options.LimitOption = None,
    until: options.UntilOption = None,
    max_queries: options.MaxQueriesOption = None,
    save: options.SaveOption = None,
    retry_errors: options.RetryOption = False,
    dry_run: options.DryOption = False,
    log: options.LogOption = Log.BAR,
) -> None:
    """Run a grid of models, datasets, attacks and goals. The same command again goes on where it stopped.

    Everything is checked before anything starts. Options here override the settings of the file.
    """
    import dataclasses

    from segprox.cli.execute import run_evaluation
    from segprox.naming import checked
    from segprox.run.evaluate import Evaluation
    from segprox.run.plan import Settings, Spec

    content = Spec.read(spec)
    changes = {"limit": limit, "until": until, "max_queries": max_queries, "save": tuple(save) if save else None}
    given = {name: value for name, value in changes.items() if value is not None}
    settings = checked(Settings, "an evaluation", **{**vars(content.settings), **given})
    runs = dataclasses.replace(content, settings=settings).runs()
    run_evaluation(Evaluation(runs, out_dir, execution, retry_errors), log, dry_run)


@app.command()
@takes(fields=field_options, settings=settings_options, execution=execution_options)
def audit(
    fields: dict[str, Any],
    settings: "Settings",
    execution: "Execution",
    model: options.ModelOption = "demo-robust",
    out_dir: options.OutOption = Path("segprox-audit"),
    dataset: options.DatasetOption = "demo",
    epsilon: Annotated[str, typer.Option(help="The largest perturbation, such as 8/255.")] = "8/255",
    minimal: Annotated[str, typer.Option(help="The attack that looks for the smallest perturbation.")] = "palma",
    fixed: Annotated[str, typer.Option(help="The attack that does the most damage within epsilon.")] = "anneal",
    target: Annotated[str | None, typer.Option(help="A class, majority, erase:CLASS, ... (segprox target).")] = None,
    retry_errors: options.RetryOption = False,
    dry_run: options.DryOption = False,
    log: options.LogOption = Log.BAR,
) -> None:
    """Attack each image twice, by attacks of two families, and say where one missed what the other found.

    An image that only one of them breaks within epsilon shows that the other is too weak there: a robustness claim that
    rests on that one would be wrong. --steps and --set go to the attacks that have the field. The records are kept as
    those of evaluate are: the same command again goes on where it stopped.
    """
    from segprox.cli.execute import run_evaluation, show_audit
    from segprox.data import UNTARGETED
    from segprox.run.audit import audit_entries
    from segprox.run.evaluate import Evaluation
    from segprox.run.plan import Run

    runs = [
        Run(model=model, dataset=dataset, attack=entry, goal=target or UNTARGETED, settings=settings)
        for entry in audit_entries(minimal, fixed, epsilon, fields)
    ]
    run_evaluation(Evaluation(runs, out_dir, execution, retry_errors), log, dry_run, show_audit)


@app.command("spec")
def print_spec(
    name: Annotated[str, typer.Argument(help="example, paper (its whole evaluation), beyond (and more), or a file.")],
    count: Annotated[
        bool, typer.Option("--count", help="Say how many runs, images and queries it has instead.")
    ] = False,
) -> None:
    """Print a spec to start from, as in: segprox spec paper > paper.yaml."""
    from segprox.cli.status import print_counts
    from segprox.run.plan import Spec
    from segprox.text import is_file, read_text

    shipped = resources.files("segprox.run") / "specs" / f"{name}.yaml"
    with resources.as_file(shipped) if shipped.is_file() else nullcontext(Path(name)) as file:
        if not is_file(file):
            raise SegproxError(f"there is no spec {name!r}; there are: example, paper, beyond, and files of yours")
        if count:
            print_counts(Spec.read(file).runs())
        else:
            print(read_text(file), end="")  # as it is: no wrapping, no colours


@app.command("runs")
def list_runs(folder: Annotated[Path, typer.Argument(help="What evaluate or run wrote to.")]) -> None:
    """List the runs in a folder: how far each is, and what it found."""
    from segprox.cli.status import Line, print_lines
    from segprox.report.results import load_run
    from segprox.run.store import stores

    lines = []
    for store in stores(folder):  # one at a time: a line is all that is kept of many records
        result = load_run(store)
        images, done = result.header.get("images", 0), len(result.records) + len(result.errors)
        wanted = min(result.run.settings.limit or images, images)
        lines.append(Line.of(result, max(wanted, done)))  # it may have been more once
    print_lines(lines)
    for store in stores(folder):
        if store.locked:
            out.print(f"{store.run.title}: being written to")


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="What evaluate or run wrote to.")],
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
) -> None:
    """Read the saved images again, ask the model again, and compare with the records."""
    import torch

    from segprox.cli.status import print_runs
    from segprox.report.units import Unit, is_eight_bit
    from segprox.run.store import stores
    from segprox.run.verify import verify_run

    torch.set_num_threads(1)
    rows, disagree = [], 0
    for store in stores(folder):
        for found in verify_run(store, device):
            disagree += found.images - found.agree
            unit = Unit("linf", is_eight_bit(store.header))
            percent = "" if unit.eight_bit else "%"
            norm = "-" if found.median_linf is None else f"{found.median_linf * unit.factor:.3f}{percent}"
            agree = f"{found.agree}/{found.images}"
            rows.append((store.run, (found.kind, norm, f"{found.broken}/{found.images}", agree)))
    if not rows:
        raise SegproxError(f"nothing is saved in {folder}: evaluate with --save float or --save png")
    unit_name = "linf x 255, or % of range" if any("%" in cells[1] for _, cells in rows) else "linf x 255"
    print_runs(rows, "saved as", unit_name, "broken", "agree")
    if disagree:
        out.print(f"{disagree} saved images are not what their records say.")
        raise typer.Exit(1)


@app.command()
def transfer(
    folder: Annotated[Path, typer.Argument(help="What evaluate or run wrote to, with --save float or --save png.")],
    model: Annotated[list[str], typer.Option(help="A model to score the saved images on; may be repeated.")],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="labels|prediction",
            show_default="labels where the classes are the same",
            help="Measure by the labels, or by each model's own prediction of the clean image.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
) -> None:
    """Score saved images on other models: a matrix of the model attacked and the model scored. report shows it too."""
    import torch

    from segprox.api import transfer as score
    from segprox.report.tables import to_screen

    torch.set_num_threads(1)
    out.print(*map(to_screen, score(folder, model, reference=reference, device=device).tables))  # type: ignore[arg-type]  # checked there
