"""Reports: segprox report, compare, card, require."""

from pathlib import Path
from typing import Annotated

import typer

from segprox.cli.base import app, check_writable, out, writing_to
from segprox.errors import SegproxError

RunsArgument = Annotated[list[Path], typer.Argument(help="What evaluate or run wrote to: runs, or folders of them.")]


@app.command()
def report(
    folders: RunsArgument,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for tables, figures and the page.")],
    require: Annotated[
        Path | None,
        typer.Option(help="A YAML file of requirements, as segprox require takes it: the page begins with them."),
    ] = None,
    critical: Annotated[
        str | None,
        typer.Option(metavar="CLASS,...", help="Classes that come first and are marked, such as person,rider."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="paper", help="Also show runs of the paper's models beside its numbers.")
    ] = None,
    figures: Annotated[
        str, typer.Option(metavar="FORMAT,...", help="Formats of the figures: svg, png, pdf.")
    ] = "svg,png",
) -> None:
    """Make tables, figures and a page to open in a browser of finished runs. No model is needed."""
    from segprox.report.requirements import load_requirements
    from segprox.report.results import load_runs
    from segprox.report.tables import to_screen
    from segprox.report.write import write_report

    results = load_runs(folders)
    wanted = [] if require is None else load_requirements(require)
    if not any(result.records or result.errors for result in results):
        raise SegproxError(f"the runs in {', '.join(map(str, folders))} have no records yet")
    with writing_to(out_dir):
        classes = [name.strip() for name in critical.split(",")] if critical else []
        formats = [name.strip() for name in figures.split(",")]
        tables, page = write_report(results, out_dir, wanted, classes, against, formats)
    for table in tables:
        if table.name.startswith(("norms-", "against-")):
            out.print(to_screen(table))
    out.print(
        f"Tables (Markdown, LaTeX, CSV) and figures ({', '.join(map(str.upper, formats))}) are in {out_dir.as_posix()}/"
    )
    beside = f", with {page.beside / 1e6:.0f} MB of pictures beside it" if page.beside else ""
    out.print(f"Open {page.path.as_posix()} ({page.bytes / 1e6:.1f} MB{beside}).")


@app.command()
def compare(
    folders: RunsArgument,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the table, if it is to be kept.")] = None,
) -> None:
    """Compare runs image by image, each with the first: two attacks, two models, or the same before and after.

    Folders of several runs are compared run by run: those of the same dataset and goal, and of the same model and
    attack, or at least attack.
    """
    from segprox.report.compare import compare_tables, match_runs
    from segprox.report.results import load_runs
    from segprox.report.tables import to_screen
    from segprox.report.write import write_tables, written_aside

    if len(folders) < 2:
        raise SegproxError("compare needs two runs or more, but got one folder")
    first, *others = (load_runs([folder]) for folder in folders)
    tables = compare_tables([pair for other in others for pair in match_runs(first, other)])
    out.print(*map(to_screen, tables))
    if out_dir is not None:
        check_writable(out_dir)
        with writing_to(out_dir), written_aside(out_dir) as aside:
            write_tables(tables, aside)


@app.command()
def card(
    folders: RunsArgument,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for card.md and card.json.")],
) -> None:
    """Write a section of a model card, with numbers, intervals, versions and the commands that repeat them.

    card.md begins with the metadata that the Hugging Face Hub reads (model-index); card.json has it and all numbers.
    """
    from segprox.report.card import Card
    from segprox.report.results import load_runs

    made = Card.of(load_runs(folders))
    check_writable(out_dir)
    with writing_to(out_dir):
        path = made.write(out_dir)
    out.print(f"The card is {path.as_posix()}, its data {path.with_suffix('.json').as_posix()}.")


@app.command("require")
def require_(
    folders: RunsArgument,
    file: Annotated[Path | None, typer.Option(help="A YAML file: a list of requirements.")] = None,
    withstand: Annotated[str | None, typer.Option(metavar="SIZE", help="A size such as 2/255, with --share.")] = None,
    share: Annotated[
        float | None, typer.Option(help="The share of images that must withstand that size.", show_default="0.9")
    ] = None,
    accuracy: Annotated[float | None, typer.Option(help="The least pixel accuracy at --epsilon.")] = None,
    class_: Annotated[str | None, typer.Option("--class", metavar="NAME", help="A class, with --iou.")] = None,
    iou: Annotated[float | None, typer.Option(help="The least IoU of that class at --epsilon.")] = None,
    epsilon: Annotated[str | None, typer.Option(help="The size for --accuracy and --iou, such as 1/255.")] = None,
) -> None:
    """Stop a build: say whether finished runs meet requirements, each with its 95 % interval.

    The exit code is 0 if all pass, 3 if one fails, and 4 if there are too few images to tell.
    """
    from segprox.report.evaluation import Requirements
    from segprox.report.requirements import load_requirements, read_requirements
    from segprox.report.results import load_runs
    from segprox.report.tables import to_screen

    if (accuracy is not None or iou is not None) and epsilon is None:
        raise SegproxError("--accuracy and --iou need --epsilon, such as --epsilon 1/255")
    if epsilon is not None and accuracy is None and iou is None:
        raise SegproxError("--epsilon goes with --accuracy and --iou; the size for --withstand is its own value")
    if share is not None and withstand is None:
        raise SegproxError("--share goes with --withstand, as in --withstand 2/255 --share 0.9")
    if (class_ is None) != (iou is None):
        raise SegproxError("--class and --iou go together, as in --class person --iou 0.4 --epsilon 1/255")
    given: list[dict[str, object]] = (
        [{"withstand": withstand, "share": 0.9 if share is None else share}] if withstand is not None else []
    )
    given += [{"accuracy": accuracy, "epsilon": epsilon}] if accuracy is not None else []
    given += [{"class": class_, "iou": iou, "epsilon": epsilon}] if iou is not None else []
    wanted = load_requirements(file) if file is not None else []
    wanted += read_requirements(given, "the options") if given else []
    if not wanted:
        raise SegproxError("nothing is required: say --withstand 2/255, --accuracy 0.5 --epsilon 1/255, or --file FILE")
    judged = Requirements(load_runs(folders), wanted)
    for table in judged.tables:
        out.print(to_screen(table))
    if "fail" in judged.outcomes:
        out.print("The requirements are not met.")
        raise typer.Exit(3)
    if not judged.met:
        out.print("There are too few images to tell: evaluate more, with a higher --limit.")
        raise typer.Exit(4)
    out.print("All requirements are met.")
