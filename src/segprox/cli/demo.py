"""segprox demo and segprox audit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from segprox.attacks import Attack, BudgetAttack, make_attack
from segprox.cli.base import app, assignments, check_writable, labelled, out, progress_bar, writing_to
from segprox.data import Dataset, class_index, load_dataset
from segprox.errors import SegproxError
from segprox.models import Segmenter, load_model
from segprox.report.picture import draw_outcome
from segprox.report.table import audit_table, outcome_table, write_csv
from segprox.run import Outcome, attack_sample, audit_sample


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
    options: dict[str, object] = assignments(set_ or [])
    if steps is not None:
        options["steps"] = steps
    chosen = make_attack(attack, **options)
    segmenter, scenes = load_model(model), load_dataset("demo")
    goal = None if target is None else class_index(target, scenes.classes)
    if images > len(scenes):
        raise SegproxError(f"the demo has {len(scenes)} images but {images} were asked for")
    check_writable(out_dir)
    outcomes: list[Outcome] = []
    try:
        for outcome in _attack_all(segmenter, scenes, images, chosen, goal):
            outcomes.append(outcome)
            with writing_to(out_dir):
                draw_outcome(outcome, scenes.classes, scenes.palette, out_dir / f"{outcome.sample.name}.png")
    except KeyboardInterrupt:
        out.print(f"Interrupted: {len(outcomes)} of {images} images are done.")
        raise
    finally:  # whatever happened, what is done is not lost
        if outcomes:
            aim = "every pixel wrong" if target is None else f"every pixel {target}"
            out.print(outcome_table(outcomes, f"{attack} on {model}: {aim}"))
            with writing_to(out_dir):
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
    with progress_bar() as bar:
        task = bar.add_task("auditing", total=count * (first.cost().forwards + second.cost().forwards))
        for i in range(count):
            sample = labelled(data, i, segmenter)
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


def _attack_all(model: Segmenter, data: Dataset, count: int, attack: Attack, target: int | None) -> Iterator[Outcome]:
    """Attack the first images of a dataset, one after the other, behind a progress bar."""
    with progress_bar() as bar:
        task = bar.add_task("attacking", total=count * attack.cost().forwards)
        for i in range(count):
            sample = labelled(data, i, model)
            bar.update(task, description=f"attacking {sample.name} ({i + 1}/{count})")
            yield attack_sample(
                model, sample, attack, ignore=data.ignore, target=target, callback=lambda _: bar.advance(task)
            )
            bar.update(task, completed=(i + 1) * attack.cost().forwards)  # an attack may need fewer
