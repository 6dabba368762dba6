"""segprox demo and segprox audit."""

from pathlib import Path
from typing import Annotated

import typer

from segprox.cli.base import app, assignments, check_writable, out, writing_to
from segprox.errors import SegproxError


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="demo-standard, or demo-robust (adversarially trained).")
    ] = "demo-standard",
    images: Annotated[int, typer.Option(min=1, help="How many street scenes to attack.")] = 4,
    attack: Annotated[str, typer.Option(help="See: segprox list attacks.")] = "palma",
    steps: Annotated[int | None, typer.Option(help="Iterations; the attack's own default if left out.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Any other hyper-parameter of the attack; may be repeated."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="Make every pixel this class, such as road, instead of just wrong."),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the records and the page.")] = Path("segprox-demo"),
) -> None:
    """Attack the embedded model on procedural street scenes: a table, and a page to open in a browser.

    Nothing is downloaded. Try also: --target road, --attack fmn, or --model demo-robust
    """
    import torch

    from segprox.data import load_dataset
    from segprox.report.page import write_page
    from segprox.report.progress import follow, make_bar
    from segprox.report.results import load_runs
    from segprox.report.terminal import record_table
    from segprox.run.evaluate import Evaluation
    from segprox.run.plan import UNTARGETED, AttackEntry, Run, Settings
    from segprox.run.record import Record

    torch.set_num_threads(1)  # scenes this small gain nothing from more, and the numbers are the same on every machine
    options: dict[str, object] = assignments(set_ or [])
    if steps is not None:
        options["steps"] = steps
    entry, scenes = AttackEntry(name=attack, set=options), load_dataset("demo")
    if images > len(scenes):
        raise SegproxError(f"the demo has {len(scenes)} images but {images} were asked for")
    run = Run(model=model, dataset="demo", attack=entry, goal=target or UNTARGETED, settings=Settings(limit=images))
    evaluation = Evaluation([run], out_dir / "runs")
    evaluation.validate()
    check_writable(out_dir)
    try:
        with writing_to(out_dir):
            follow(evaluation, make_bar(out))
    except KeyboardInterrupt:
        out.print(f"Interrupted: {len(evaluation.status()[0].records)} of {images} images are done.")
        raise
    finally:  # whatever happened, what is done is not lost
        found = [record for record in evaluation.status()[0].records.values() if isinstance(record, Record)]
        if found:
            aim = "every pixel wrong" if target is None else f"every pixel {target}"
            out.print(record_table(found, f"{attack} on {model}: {aim}"))
    if not all(record.found.success for record in found):
        out.print("Not every image was broken: more --steps, or another --attack, may do it.")
    with writing_to(out_dir):
        page = write_page(load_runs([out_dir / "runs" / run.folder]), out_dir / "index.html")
    out.print(f"Open {page.path.as_posix()} in a browser.", highlight=False)


@app.command()
def audit(
    model: Annotated[str, typer.Option(help="See: segprox list models.")] = "demo-robust",
    dataset: Annotated[str, typer.Option(help="See: segprox list datasets.")] = "demo",
    limit: Annotated[int, typer.Option(min=1, help="How many images.")] = 4,
    epsilon: Annotated[str, typer.Option(help="The largest perturbation, such as 8/255.")] = "8/255",
    minimal: Annotated[str, typer.Option(help="The attack that looks for the smallest perturbation.")] = "palma",
    fixed: Annotated[str, typer.Option(help="The attack that does the most damage within epsilon.")] = "anneal",
    target: Annotated[str | None, typer.Option(metavar="CLASS", help="Make every pixel this class.")] = None,
) -> None:
    """Attack each image twice, by attacks of two families, and say where one missed what the other found.

    An image that only one of them breaks within epsilon shows that the other is too weak there: a robustness claim that
    rests on that one would be wrong.
    """
    import torch

    from segprox.attacks import FixedEpsilonAttack, make_attack
    from segprox.data import class_index, load_dataset
    from segprox.models import load_model
    from segprox.report.progress import progress_bar
    from segprox.report.terminal import audit_table
    from segprox.run import audit_sample
    from segprox.run.worker import label_sample

    torch.set_num_threads(1)
    first, second = make_attack(minimal), make_attack(fixed, epsilon=epsilon)
    assert isinstance(second, FixedEpsilonAttack)  # others have no epsilon
    segmenter, data = load_model(model), load_dataset(dataset)
    goal = None if target is None else class_index(target, data.classes)
    count, findings = min(limit, len(data)), []
    with progress_bar(out) as bar:
        task = bar.add_task("auditing", total=count * (first.cost().forwards + second.cost().forwards))
        for i in range(count):
            sample, _ = label_sample(segmenter, data[i], data.labelled)
            bar.update(task, description=f"auditing {sample.name} ({i + 1}/{count})")
            finding = audit_sample(
                segmenter, sample, first, second, ignore=data.ignore, target=goal, callback=lambda _: bar.advance(task)
            )
            findings.append(finding)
            bar.update(task, completed=(i + 1) * (first.cost().forwards + second.cost().forwards))
    out.print(audit_table(findings, minimal, fixed, first.norm))
    robust, weak = sum(f.robust for f in findings), sum(f.too_weak is not None for f in findings)
    out.print(f"{robust} of {count} images withstood both attacks. The attacks disagree on {weak}.", highlight=False)
    if weak:
        out.print("Where they disagree, believe the one that succeeded.")
