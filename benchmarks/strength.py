"""ALMA prox on a real network, by default and with the paper's values, beside the authors' implementation.

    python benchmarks/strength.py --realbench FOLDER

One line per image: linf x 255 of each variant ("-" and the APSR where it fails), then medians over the images that the
reference breaks. Results are the same whatever `--workers` is; with two or more, each uses one thread.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from realbench import IGNORE, load_network, load_samples, references
from segprox import make_attack
from segprox.run import Outcome, attack_sample

PAPER = {"step_size": 1e-3, "penalty": 0.01}  # the paper's values
NUDGED = PAPER | {"step_size": 1.001e-3}  # so close to them that what changes is chance
VARIANTS: dict[str, dict[str, object]] = {
    "default": {},
    "default, ternary": {"prox": "ternary"},
    "paper": PAPER,
    "paper, ternary": PAPER | {"prox": "ternary"},
    "paper, nudged": NUDGED,
    "paper, ternary, nudged": NUDGED | {"prox": "ternary"},
    "paper, authors' derivative": PAPER | {"derivative": "authors"},
    "paper, mu of d": PAPER | {"multiplier_of": "unscaled"},
}


def attack(folder: Path, model: str, image: str, variant: str, steps: int) -> Outcome:
    torch.set_num_threads(1)
    sample = load_samples(folder)[image]
    return attack_sample(
        load_network(folder, model), sample, make_attack("alma-prox", steps=steps, **VARIANTS[variant]), ignore=IGNORE
    )


def cell(outcome: Outcome) -> str:
    return f"{outcome.linf * 255:.3f}" if outcome.success else f"- ({outcome.apsr:.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with models, images and reference.json")
    parser.add_argument("--model", default="espnet-camvid")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--variants", nargs="+", default=["default", "paper"], choices=list(VARIANTS))
    parser.add_argument("--images", nargs="+", help="only these")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    known = references(options.realbench, model=options.model, attack="alma-prox", steps=options.steps, targeted=False)
    known = {image: entry for image, entry in known.items() if not options.images or image in options.images}
    console = Console()
    table = Table(title=f"alma-prox on {options.model}, {options.steps} steps, untargeted: linf x 255")
    for heading in ("image", "reference", *options.variants, "seconds"):
        table.add_column(heading, justify="left" if heading == "image" else "right")
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = {
            (image, variant): pool.submit(attack, options.realbench, options.model, image, variant, options.steps)
            for image in known
            for variant in options.variants
        }
        found = {key: job.result() for key, job in jobs.items()}
    for image, entry in known.items():
        outcomes = [found[image, variant] for variant in options.variants]
        reference = f"{entry['linf255']:.3f}" if entry["success"] else f"- ({entry['apsr']:.2%})"
        table.add_row(image, reference, *map(cell, outcomes), f"{outcomes[0].seconds:.0f}")
    console.print(table)
    broken = {image: float(str(entry["linf255"])) for image, entry in known.items() if entry["success"]}
    if not broken:
        return
    for variant in options.variants:
        outcomes = [found[image, variant] for image in known]
        ratios = [found[image, variant].linf * 255 / norm for image, norm in broken.items()]
        console.print(
            f"{variant}: {sum(o.success for o in outcomes)} of {len(outcomes)} broken; over the {len(ratios)} that the "
            f"reference breaks, median ratio to it {median(ratios):.3f}, ratio of medians "
            f"{median(found[i, variant].linf * 255 for i in broken) / median(broken.values()):.3f}",
            highlight=False,
        )


if __name__ == "__main__":
    main()
