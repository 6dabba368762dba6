"""The paper's Table 1 on a real network: every attack of it, beside the authors' own results where there are any.

    python benchmarks/attacks.py --realbench FOLDER --model espnet-camvid

Untargeted on the first images of the reference results, then targeted to one class. Medians and means of linf x 255
count a failed attack as 255, as the paper does. Each worker uses one thread. With `--save FILE` every finished attack
is written down, and a second run with the same file goes on where the first ended.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import segprox
from realbench import IGNORE, load_network, load_samples, references
from segprox.attacks import PAPER_ATTACKS

TARGETED = ("pgd-ce-13x40", "fmn", "pdpgd", "alma-prox")


class Job(NamedTuple):
    """One attack on one image, towards a class or away from the labels."""

    attack: str
    image: str
    target: int | None

    def __str__(self) -> str:
        return f"{self.attack}/{self.image}/{'untargeted' if self.target is None else self.target}"


def run(folder: Path, model: str, job: Job) -> dict[str, float]:
    torch.set_num_threads(1)
    sample = load_samples(folder)[job.image]
    images, labels = sample.image[None], sample.label[None]
    found = segprox.attack(load_network(folder, model), images, labels, job.attack, target=job.target, ignore=IGNORE)
    return {
        "norm": 255 * (found.images - images).abs().max().item() if found.success else 255.0,
        "apsr": found.apsr.item(),
        "success": bool(found.success),
        "forwards": int(found.forwards),
        "backwards": int(found.backwards),
        "seconds": found.seconds,
    }


def run_all(jobs: list[Job], folder: Path, model: str, workers: int, save: Path | None) -> dict[str, dict[str, float]]:
    found = json.loads(save.read_text()) if save is not None and save.exists() else {}
    with ProcessPoolExecutor(workers) as pool:
        waiting = {pool.submit(run, folder, model, job): job for job in jobs if str(job) not in found}
        for future in as_completed(waiting):
            found[str(waiting[future])] = future.result()
            if save is not None:
                save.write_text(json.dumps(found, indent=1))
    return found


def table(title: str, jobs: list[Job], found: dict[str, dict[str, float]], known: dict[str, dict[str, float]]) -> Table:
    images = list(dict.fromkeys(job.image for job in jobs))
    result = Table(title=title, title_justify="left")
    for heading in ("attack", "median", "mean", "success", "forwards", "backwards", "seconds"):
        result.add_column(heading, justify="left" if heading == "attack" else "right")
    for image in images:
        result.add_column(image, justify="right")
        result.add_column("authors'", justify="right", style="dim")
    for attack in dict.fromkeys(job.attack for job in jobs):
        rows = {job.image: found[str(job)] for job in jobs if job.attack == attack}
        norms = [row["norm"] for row in rows.values()]
        average = [mean(row[key] for row in rows.values()) for key in ("forwards", "backwards", "seconds")]
        cells = [f"{median(norms):.2f}", f"{mean(norms):.2f}", f"{sum(row['success'] for row in rows.values()):.0f}"]
        cells += [f"{value:.0f}" for value in average]
        for image in images:
            row, reference = rows[image], known.get(f"{attack}/{image}")
            cells.append(f"{row['norm']:.2f}" if row["success"] else f"- ({row['apsr']:.1%})")
            cells.append("" if reference is None else f"{reference['linf255']:.2f}" if reference["success"] else "-")
        result.add_row(attack, *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with models, images and reference.json")
    parser.add_argument("--model", default="espnet-camvid")
    parser.add_argument("--images", type=int, default=2, help="how many images, untargeted")
    parser.add_argument("--target", default="road", help="a class of the model, for one image")
    parser.add_argument("--attacks", nargs="+", default=PAPER_ATTACKS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, help="keep finished attacks here")
    options = parser.parse_args()
    names = list(references(options.realbench, model=options.model))[: options.images]
    entries = [
        (attack, references(options.realbench, model=options.model, attack=attack, targeted=False, steps=500))
        for attack in options.attacks
    ]
    known = {f"{attack}/{image}": entry for attack, images in entries for image, entry in images.items()}
    target = list(load_network(options.realbench, options.model).model.classes).index(options.target)
    untargeted = [Job(attack, image, None) for attack in options.attacks for image in names]
    targeted = [Job(attack, names[0], target) for attack in TARGETED if attack in options.attacks]
    found = run_all(untargeted + targeted, options.realbench, options.model, options.workers, options.save)
    console = Console(width=150)
    console.print(table(f"{options.model}, untargeted: linf x 255", untargeted, found, known))  # type: ignore[arg-type]
    console.print(table(f"{options.model}, every pixel {options.target}: linf x 255", targeted, found, {}))


if __name__ == "__main__":
    main()
