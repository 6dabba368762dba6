"""segprox demo."""

from pathlib import Path
from typing import Annotated, Any

import typer

from segprox.cli.base import app, check_writable, out, writing_to
from segprox.cli.options import field_options, takes
from segprox.errors import SegproxError


@app.command()
@takes(fields=field_options)
def demo(
    fields: dict[str, Any],
    model: Annotated[
        str, typer.Option(help="demo-standard, or demo-robust (adversarially trained).")
    ] = "demo-standard",
    images: Annotated[int, typer.Option(min=1, help="How many street scenes to attack.")] = 4,
    attack: Annotated[str, typer.Option(help="See: segprox list attacks.")] = "palma",
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

    from segprox.data import UNTARGETED, load_dataset
    from segprox.report.page import write_page
    from segprox.report.progress import follow, make_bar
    from segprox.report.results import load_runs
    from segprox.report.terminal import record_table
    from segprox.run.evaluate import Evaluation
    from segprox.run.plan import AttackEntry, Run, Settings
    from segprox.run.record import Record

    torch.set_num_threads(1)  # scenes this small gain nothing from more, and the numbers are the same on every machine
    entry, scenes = AttackEntry(name=attack, set=fields), load_dataset("demo")
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
            aim = "every pixel wrong" if target is None else f"goal {target}"
            out.print(record_table(found, f"{attack} on {model}: {aim}"))
    if not all(record.found.success for record in found):
        out.print("Not every image was broken: more --steps, or another --attack, may do it.")
    with writing_to(out_dir):
        page = write_page(load_runs([out_dir / "runs" / run.folder]), out_dir / "index.html")
    out.print(f"Open {page.path.as_posix()} in a browser.")
