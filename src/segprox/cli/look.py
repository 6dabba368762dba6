"""Commands that only look: check, target, list, attacks show."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from segprox.cli.base import app, out, plain_table, writing_to
from segprox.errors import SegproxError


@app.command()
def check(
    model: Annotated[str, typer.Option(help="See: segprox list models.")],
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "demo",
    limit: Annotated[int, typer.Option(min=1, help="How many images.")] = 4,
    samples: Annotated[
        int | None, typer.Option(min=1, help="The model answers at random, and evaluate will get this --samples.")
    ] = None,
) -> None:
    """Look for what would make robustness figures of a model meaningless: a table of green, amber and red.

    Looks at how the model is fed, what it returns, whether it repeats itself, and its gradients, which two short
    attacks compare with random search.
    The exit code is 1 if anything is red.
    """
    from segprox.bands import bands_of
    from segprox.data import load_dataset
    from segprox.models import load_model
    from segprox.report.terminal import check_table
    from segprox.run import check_model

    data = load_dataset(dataset)
    segmenter = load_model(model, bands=bands_of(data))
    images = [data[i] for i in range(min(limit, len(data)))]
    with out.status(f"checking {model}"):
        classes = len(data.classes) or None
        checks = check_model(segmenter, images, ignore=data.ignore, num_classes=classes, draws=samples)
    out.print(check_table(checks, f"{model} on {len(images)} image{'s' * (len(images) > 1)} of {dataset}"))
    red, amber = (sum(check.verdict == colour for check in checks) for colour in ("red", "amber"))
    if red:
        out.print(f"Not fit to be evaluated yet: red in {red} of {len(checks)} checks.")
        raise typer.Exit(1)
    out.print(f"Fit to be evaluated; first look at what is amber ({amber})." if amber else "Fit to be evaluated.")


@app.command()
def target(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A class, majority, smooth, erase:CLASS, permute:SEED, permute:1,2,0, or png:FILE; after a ? regions: "
            "only=CLASS, protect=CLASS or protect=rest.",
        ),
    ],
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.png", help="Where to write the class numbers.")],
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "demo",
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="The image to make it for; the first if left out.")
    ] = None,
) -> None:
    """Write the label map that an attack would aim at: class numbers with a palette, and in colours beside it."""
    from functools import partial

    from segprox.data import load_dataset, make_goal, open_split
    from segprox.data.targets import shares, write_map

    if out_file.suffix != ".png":
        raise SegproxError(f"--out must be a file that ends in .png but is {out_file}")
    data = load_dataset(dataset)
    if image is not None and image not in data.names:
        raise SegproxError(f"there is no image {image!r} in {dataset}; names are such as {data.names[0]!r}")
    sample = data[0 if image is None else list(data.names).index(image)]
    goal = make_goal(text, data, partial(open_split, dataset))
    aim = goal(sample)
    if aim.target is None:
        raise SegproxError(f"{text} is no target: there is no label map to write")
    labels = aim.target if aim.mask is None else aim.target.where(aim.mask, data.ignore[0])
    with writing_to(out_file.parent):
        out_file.parent.mkdir(parents=True, exist_ok=True)
        coloured = write_map(labels, data, out_file)
    out.print(Text.assemble((text, "bold"), f" for {sample.name}"))
    table = plain_table("class", numbers=["pixels"])
    for name, share in shares(labels, data.classes).items():
        table.add_row(name, f"{share:.1%}")
    out.print(table)
    if aim.mask is not None:
        protected = 0.0 if aim.protect is None else aim.protect.float().mean().item()
        out.print(f"attacked: {aim.mask.float().mean() - protected:.1%} of the pixels, protected: {protected:.1%}")
    out.print(f"Wrote {out_file.as_posix()} and {coloured.as_posix()}")


@app.command()
def memory(
    model: Annotated[str, typer.Option(help="See: segprox list models; ?checkpoint=random will do.")],
    size: Annotated[str, typer.Option(metavar="HEIGHTxWIDTH", help="Size of the images.")] = "1024x2048",
) -> None:
    """Say what an attack on images of a size would hold, plainly and leanly; nothing of that size is computed."""
    height, cross, width = size.partition("x")
    if not cross or not all(side.isdecimal() and len(side) < 6 and int(side) for side in (height, width)):
        raise SegproxError(f"--size must be HEIGHTxWIDTH, such as 1024x2048, but is {size!r}")
    table = _table_of_memory(model, int(height), int(width))
    out.print(Text.assemble((model, "bold"), f", one image of {height} x {width}, GiB"))
    out.print(table)
    out.print("Held is what a forward keeps for its backward; what a forward needs for itself comes on top.")
    out.print("evaluate and run are lean unless told otherwise; elsewhere add lean=true to a model's name.")


def _table_of_memory(name: str, height: int, width: int) -> Table:
    import torch

    from segprox.attacks import state_bytes
    from segprox.models import held_bytes, load_model, make_lean
    from segprox.models.lean.self_check import input_channels

    table = plain_table("gradient", numbers=("held", "share", "with logits and attack"))
    held: dict[str, int] = {}
    for kind in ("plain", "lean", "lean, recompute"):
        network = load_model(name, device="cpu")
        if kind != "plain":
            make_lean(network, recompute="recompute" in kind)
        with torch.no_grad():
            channels = input_channels(network)
            num_classes = network.logits(torch.rand(1, channels, 64, 64)).shape[1]
        network = network.to("meta")
        held[kind] = held_bytes(network, torch.rand(1, channels, height, width, device="meta"))
        in_all = held[kind] + state_bytes(height, width, num_classes)
        share = f"1/{held['plain'] / max(held[kind], 1):.1f}"
        table.add_row(kind, f"{held[kind] / 2**30:.2f}", share, f"{in_all / 2**30:.2f}")
    return table


class Listable(StrEnum):
    """What `segprox list` can list."""

    ATTACKS = "attacks"
    MODELS = "models"
    DATASETS = "datasets"


@app.command("list")
def list_(what: Annotated[Listable, typer.Argument(help="What to list.")]) -> None:
    """List the attacks, models or datasets that can be named in other commands."""
    {Listable.ATTACKS: _list_attacks, Listable.MODELS: _list_models, Listable.DATASETS: _list_datasets}[what]()


def _list_datasets() -> None:
    from segprox.data import DATASETS
    from segprox.data import describe as describe_options

    table = plain_table("dataset", "what is read", "options")
    for name, source in sorted(DATASETS.everything().items()):
        options = (f"{option}={default}".rstrip("=") for option, default in describe_options(source).items())
        table.add_row(name, source.layout, ", ".join(options))
    out.print(table)
    out.print("Name one as in voc:/data/VOCdevkit?split=val&subset=0:50")


def _list_models() -> None:
    from segprox.models import LEFT_OUT_MODELS, MODELS, PAPER_MODELS, SOURCES, ModelOptions, load_model
    from segprox.naming import describe_fields

    table = plain_table("model", "what it is", "install")
    for name in sorted(MODELS.everything()):
        count = sum(parameter.numel() for parameter in load_model(name).parameters())
        table.add_row(name, f"embedded, {count:,} parameters", "")
    for source in SOURCES.values():
        table.add_row(source.example, source.about, f"segprox[{source.extra}]" if source.extra else "")
    out.print(table)
    out.print("The paper's models: " + ", ".join(PAPER_MODELS))
    out.print("Those it left out for want of memory: " + ", ".join(LEFT_OUT_MODELS))
    out.print("Options go after a ?, joined by &, such as ?checkpoint=FILE&device=cuda:")
    options = plain_table("option", "default", "meaning")
    for row in describe_fields(ModelOptions()):
        options.add_row(*row)
    out.print(options)


def _list_attacks() -> None:
    from segprox.attacks import ATTACKS, make_attack, norms

    titles = {
        "minimal": "Minimal attacks: the smallest perturbation that succeeds",
        "fixed-epsilon": "Fixed-epsilon attacks: the most damage within epsilon",
    }
    for family, title in titles.items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("attack", "norms", "forwards", "backwards"):
            table.add_column(heading, justify="right" if heading.endswith("wards") else "left", no_wrap=True)
        table.add_column("what it does, and its paper", overflow="fold")
        for name, entry in ATTACKS.everything().items():
            attack = make_attack(name)
            if attack.family == family:
                cost = attack.cost()
                about = Text.assemble(entry.about, (f" ({entry.short_citation})", "dim"))
                table.add_row(name, norms(attack), str(cost.forwards), str(cost.backwards), about)
        out.print(table)
    out.print("Forwards and backwards: the most that an attack with its default fields asks of the model, per image.")
    out.print("bisect:NAME makes a minimal attack of a fixed-epsilon attack. Fields: segprox attacks show NAME")


attacks_app = typer.Typer(help="Look closer at an attack.", no_args_is_help=True)
app.add_typer(attacks_app, name="attacks")


@attacks_app.command("show")
def show_attack(name: Annotated[str, typer.Argument(help="See: segprox list attacks.")]) -> None:
    """Print an attack's fields with their symbols and defaults, its cost and where it comes from."""
    from segprox.attacks import describe, find_attack, make_attack

    entry, attack = find_attack(name), make_attack(name)
    cost = attack.cost()
    out.print(Text.assemble((name, "bold"), f": {entry.about}"))
    out.print(entry.citation, style="dim")
    out.print(f"{attack.family}; at most {cost.forwards} forwards and {cost.backwards} backwards per image")
    table = plain_table("field", "default", "meaning")
    for field in describe(attack):
        table.add_row(field.name, field.default, field.meaning)
    out.print(table)
    out.print(f"Set them with --set FIELD=VALUE, or in Python: segprox.make_attack({name!r}, FIELD=VALUE)")
