"""The command line: parsing and printing only."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import segprox
from segprox.attacks import ATTACKS, Attack, BudgetAttack, describe, find_attack, make_attack, norms
from segprox.data import DATASETS, Dataset, Sample, class_index, load_dataset, make_target, with_own_labels
from segprox.data import describe as describe_options
from segprox.data.targets import shares, write_map
from segprox.errors import SegproxError
from segprox.models import MODELS, PAPER_MODELS, SOURCES, ModelOptions, Segmenter, load_model
from segprox.naming import describe_fields
from segprox.problem import predictions
from segprox.report.picture import draw_outcome
from segprox.report.table import audit_table, check_table, outcome_table, write_csv
from segprox.run import Outcome, attack_sample, audit_sample, check_model

app = typer.Typer(
    name="segprox",
    help="How robust is a semantic segmentation model? Find the smallest change of an image that makes it fail.",
    epilog="Start with: segprox demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    try:
        app()
    except SegproxError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"segprox {segprox.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="demo-standard, or demo-robust (adversarially trained).")
    ] = "demo-standard",
    images: Annotated[int, typer.Option(min=1, help="How many street scenes to attack.")] = 4,
    attack: Annotated[str, typer.Option(help="See: segprox list attacks.")] = "alma-prox",
    steps: Annotated[int | None, typer.Option(help="Iterations; the attack's own default if left out.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any other hyper-parameter of the attack; may be repeated."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="Make every pixel this class, such as road, instead of just wrong."),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the pictures and results.csv.")] = Path(
        "segprox-demo"
    ),
) -> None:
    """Attack the embedded model on procedural street scenes: a table, and a picture per image.

    Nothing is downloaded. Try also: --target road, --attack fmn, or --model demo-robust
    """
    torch.set_num_threads(1)  # scenes this small gain nothing from more, and the numbers are the same on every machine
    options: dict[str, object] = _assignments(set_ or [])
    if steps is not None:
        options["steps"] = steps
    chosen = make_attack(attack, **options)
    segmenter, scenes = load_model(model), load_dataset("demo")
    goal = None if target is None else class_index(target, scenes.classes)
    if images > len(scenes):
        raise SegproxError(f"the demo has {len(scenes)} images but {images} were asked for")
    _check_writable(out_dir)
    outcomes: list[Outcome] = []
    try:
        for outcome in _attack_all(segmenter, scenes, images, chosen, goal):
            outcomes.append(outcome)
            with _writing_to(out_dir):
                draw_outcome(outcome, scenes.classes, scenes.palette, out_dir / f"{outcome.sample.name}.png")
    except KeyboardInterrupt:
        out.print(f"Interrupted: {len(outcomes)} of {images} images are done.")
        raise
    finally:  # whatever happened, what is done is not lost
        if outcomes:
            aim = "every pixel wrong" if target is None else f"every pixel {target}"
            out.print(outcome_table(outcomes, f"{attack} on {model}: {aim}"))
            with _writing_to(out_dir):
                write_csv(outcomes, out_dir / "results.csv")
    if not all(outcome.success for outcome in outcomes):
        out.print("Not every image was broken: more --steps, or another --attack, may do it.")
    out.print(f"Pictures and results.csv are in {out_dir.as_posix()}/", highlight=False)


@app.command()
def audit(
    model: Annotated[str, typer.Option(help="See: segprox list models.")] = "demo-robust",
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "demo",
    limit: Annotated[int, typer.Option(min=1, help="How many images.")] = 4,
    epsilon: Annotated[str, typer.Option(help="The budget, such as 8/255.")] = "8/255",
    minimal: Annotated[str, typer.Option(help="The attack that looks for the smallest perturbation.")] = "alma-prox",
    budget: Annotated[str, typer.Option(help="The attack that does the most damage within epsilon.")] = "sea",
    target: Annotated[str | None, typer.Option(metavar="CLASS", help="Make every pixel this class.")] = None,
) -> None:
    """Attack each image twice, by attacks of two families, and say where one missed what the other found.

    An image that only one of them breaks within epsilon shows that the other is too weak there: a robustness claim that
    rests on that one would be wrong.
    """
    torch.set_num_threads(1)
    first, second = make_attack(minimal), make_attack(budget, epsilon=epsilon)
    assert isinstance(second, BudgetAttack)  # others have no epsilon
    segmenter, data = load_model(model), load_dataset(dataset)
    goal = None if target is None else class_index(target, data.classes)
    count, findings = min(limit, len(data)), []
    with _progress_bar() as bar:
        task = bar.add_task("auditing", total=count * (first.cost().forwards + second.cost().forwards))
        for i in range(count):
            sample = _labelled(data, i, segmenter)
            bar.update(task, description=f"auditing {sample.name} ({i + 1}/{count})")
            finding = audit_sample(
                segmenter, sample, first, second, ignore=data.ignore, target=goal, callback=lambda _: bar.advance(task)
            )
            findings.append(finding)
            bar.update(task, completed=(i + 1) * (first.cost().forwards + second.cost().forwards))
    out.print(audit_table(findings, minimal, budget, first.norm))
    robust, weak = sum(f.robust for f in findings), sum(f.too_weak is not None for f in findings)
    out.print(f"{robust} of {count} images withstood both attacks. The attacks disagree on {weak}.", highlight=False)
    if weak:
        out.print("Where they disagree, believe the one that succeeded.")


@app.command()
def check(
    model: Annotated[str, typer.Option(help="See: segprox list models.")],
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "demo",
    limit: Annotated[int, typer.Option(min=1, help="How many images.")] = 4,
) -> None:
    """Look for what would make robustness figures of a model meaningless: a table of green, amber and red.

    Looks at how the model is fed, what it returns, whether it repeats itself, and its gradients. Nothing is attacked.
    The exit code is 1 if anything is red.
    """
    segmenter, data = load_model(model), load_dataset(dataset)
    samples = [data[i] for i in range(min(limit, len(data)))]
    with out.status(f"checking {model}"):
        checks = check_model(segmenter, samples, ignore=data.ignore, num_classes=len(data.classes))
    out.print(check_table(checks, f"{model} on {len(samples)} image{'s' * (len(samples) > 1)} of {dataset}"))
    red, amber = (sum(check.verdict == colour for check in checks) for colour in ("red", "amber"))
    if red:
        out.print(f"Not fit to be evaluated yet: red in {red} of {len(checks)} checks.", highlight=False)
        raise typer.Exit(1)
    out.print(
        f"Fit to be evaluated; first look at what is amber ({amber})." if amber else "Fit to be evaluated.",
        highlight=False,
    )


@app.command()
def target(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A class, majority, smooth, erase:CLASS, permute:SEED, permute:1,2,0, or png:FILE.",
        ),
    ],
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.png", help="Where to write the class numbers.")],
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "demo",
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="The image to make it for; the first if left out.")
    ] = None,
) -> None:
    """Write the label map that an attack would aim at: class numbers with a palette, and in colours beside it."""
    if out_file.suffix != ".png":
        raise SegproxError(f"--out must be a file that ends in .png but is {out_file}")
    data = load_dataset(dataset)
    if image is not None and image not in data.names:
        raise SegproxError(f"there is no image {image!r} in {dataset}; names are such as {data.names[0]!r}")
    sample = data[0 if image is None else list(data.names).index(image)]
    labels = make_target(text, data)(sample)
    with _writing_to(out_file.parent):
        out_file.parent.mkdir(parents=True, exist_ok=True)
        coloured = write_map(labels, data, out_file)
    out.print(f"[bold]{escape(text)}[/] for {escape(sample.name)}", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class")
    table.add_column("pixels", justify="right")
    for name, share in shares(labels, data.classes).items():
        table.add_row(name, f"{share:.1%}")
    out.print(table)
    out.print(f"Wrote {out_file.as_posix()} and {coloured.as_posix()}", highlight=False)


class Listable(StrEnum):
    """What `segprox list` can list."""

    ATTACKS = "attacks"
    MODELS = "models"
    DATASETS = "datasets"


@app.command("list")
def list_(what: Annotated[Listable, typer.Argument(help="What to list.")]) -> None:
    """List the attacks, models or datasets that can be named in other commands."""
    {Listable.ATTACKS: _list_attacks, Listable.MODELS: _list_models, Listable.DATASETS: _list_datasets}[what]()


def _table(*headings: str) -> Table:
    """A plain table whose first column is never broken."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=i == 0)
    return table


def _list_datasets() -> None:
    table = _table("dataset", "what is read", "options")
    for name, source in sorted(DATASETS.items()):
        options = (f"{option}={default}".rstrip("=") for option, default in describe_options(source).items())
        table.add_row(name, source.layout, ", ".join(options))
    out.print(table)
    out.print("Name one as in voc:/data/VOCdevkit?split=val&subset=0:50", highlight=False)


def _list_models() -> None:
    table = _table("model", "what it is", "install")
    for name in sorted(MODELS):
        count = sum(parameter.numel() for parameter in load_model(name).parameters())
        table.add_row(name, f"embedded, {count:,} parameters", "")
    for source in SOURCES.values():
        table.add_row(source.example, source.about, escape(f"segprox[{source.extra}]") if source.extra else "")
    out.print(table)
    out.print("The paper's models: " + ", ".join(PAPER_MODELS), highlight=False)
    out.print("Options go after a ?, joined by &, such as ?checkpoint=FILE&device=cuda:", highlight=False)
    options = _table("option", "default", "meaning")
    for row in describe_fields(ModelOptions()):
        options.add_row(*row)
    out.print(options)


def _list_attacks() -> None:
    titles = {
        "minimal": "Minimal attacks: the smallest perturbation that succeeds",
        "budget": "Budget attacks: the most damage within epsilon",
    }
    for family, title in titles.items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("attack", "norms", "forwards", "backwards"):
            table.add_column(heading, justify="right" if heading.endswith("wards") else "left", no_wrap=True)
        table.add_column("what it does, and its paper", overflow="fold")
        for name, entry in ATTACKS.items():
            attack = make_attack(name)
            if attack.family == family:
                cost = attack.cost()
                about = f"{entry.about} [dim]({entry.short_citation})[/]"
                table.add_row(name, norms(attack), str(cost.forwards), str(cost.backwards), about)
        out.print(table)
    out.print("Forwards and backwards: the most that an attack with its default fields asks of the model, per image.")
    out.print(
        "bisect:NAME makes a minimal attack of a budget attack. Fields: segprox attacks show NAME", highlight=False
    )


attacks_app = typer.Typer(help="Look closer at an attack.", no_args_is_help=True)
app.add_typer(attacks_app, name="attacks")


@attacks_app.command("show")
def show_attack(name: Annotated[str, typer.Argument(help="See: segprox list attacks.")]) -> None:
    """Print an attack's fields with their symbols and defaults, its cost and where it comes from."""
    entry, attack = find_attack(name), make_attack(name)
    cost = attack.cost()
    out.print(f"[bold]{name}[/]: {entry.about}", highlight=False)
    out.print(f"{entry.citation}", highlight=False, style="dim")
    out.print(f"{attack.family}; at most {cost.forwards} forwards and {cost.backwards} backwards per image")
    table = _table("field", "default", "meaning")
    for field in describe(attack):
        table.add_row(field.name, field.default, field.meaning)
    out.print(table)
    out.print(
        f"Set them with --set FIELD=VALUE, or in Python: segprox.make_attack({name!r}, FIELD=VALUE)", highlight=False
    )


class _Rate(ProgressColumn):
    """Steps per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("- steps/s" if speed is None else f"{speed:.1f} steps/s", style="progress.data.speed")


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), _Rate(),
        TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=out,
    )  # fmt: skip


def _attack_all(model: Segmenter, data: Dataset, count: int, attack: Attack, target: int | None) -> Iterator[Outcome]:
    """Attack the first images of a dataset, one after the other, behind a progress bar."""
    with _progress_bar() as bar:
        task = bar.add_task("attacking", total=count * attack.cost().forwards)
        for i in range(count):
            sample = _labelled(data, i, model)
            bar.update(task, description=f"attacking {sample.name} ({i + 1}/{count})")
            yield attack_sample(
                model, sample, attack, ignore=data.ignore, target=target, callback=lambda _: bar.advance(task)
            )
            bar.update(task, completed=(i + 1) * attack.cost().forwards)  # an attack may need fewer


def _labelled(data: Dataset, index: int, model: Segmenter) -> Sample:
    """A sample with its true labels or, where there are none, with what the model sees in it."""
    sample = data[index]
    if data.labelled:
        return sample
    with torch.no_grad():
        return with_own_labels(sample, predictions(model(sample.image[None].to(model.device)))[0].cpu())


def _assignments(texts: Sequence[str]) -> dict[str, object]:
    pairs: dict[str, object] = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise SegproxError(f"--set takes FIELD=VALUE, such as step_size=0.01, but got {text!r}")
        pairs[field.strip()] = value.strip()
    return pairs


def _check_writable(folder: Path) -> None:
    """Find out before an attack, not after it, that nothing can be written."""
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SegproxError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None
