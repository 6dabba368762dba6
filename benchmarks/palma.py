"""What each part of PALMA is worth, at which scales it works, and what it finds in 8 bits.

    python benchmarks/palma.py                    # some minutes, on the embedded networks
    python benchmarks/palma.py --realbench FOLDER # with crops of validation images on real networks as well

Ablation: one field changed at a time; the geometric mean over images of the norm over the default's, "-" where an image
fails. Scales: the same defaults on networks that give way at a fraction of 1/255 and beyond 16/255, beside APGD at the
norm that PALMA found and at 1.2 times that: where APGD succeeds, so must PALMA.
"""

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from cases import Nervous, Stubborn
from realbench import IGNORE, load_network, load_samples
from segprox import Problem, Segmenter, load_dataset, load_model, make_attack
from segprox.result import AttackResult

SCENES = range(4, 8)  # of the embedded dataset: others are for comparisons
CROP = slice(100, 292), slice(120, 376)
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "constraint: DLR+": {"constraint": "dlr+"},
    "no multipliers": {"smoothing": 1.0},
    "quick multipliers": {"smoothing": 0.8},
    "nothing discarded": {"masking": "none"},
    "discarded share grows": {"masking": "decay"},
    "soft constraints": {"temperature": 0.3},
    "hard constraints": {"temperature": 0.01},
    "no momentum": {"momentum": 0.0},
    "more momentum": {"momentum": 0.95},
    "shorter steps": {"step_size": 0.5},
    "slow radius": {"rate": 0.05},
    "quick radius": {"rate": 0.3},
    "first radius 1.5": {"radius": 1.5},
    "first radius 6": {"radius": 6.0},
    "endless first sweep": {"sweep": 10_000},
    "shorter sweeps": {"sweep": 25},
    "patience 15": {"patience": 15},
}


class Case(NamedTuple):
    """A problem of a network."""

    name: str
    model: Segmenter
    problem: Problem


def embedded(model: str) -> list[Case]:
    scenes = load_dataset("demo")
    problems = [Problem.build(scenes[i].image[None], scenes[i].label[None]) for i in SCENES]
    return [Case(model, load_model(model), problem) for problem in problems]


def real(folder: Path) -> Iterator[Case]:
    samples = list(load_samples(folder, "val").values())
    cases = [("espnet-camvid", 0, None), ("espnet-camvid", 4, None), ("espnet-camvid", 0, 3)]
    for name, index, target in [*cases, ("espnetv2-1.5-cityscapes", 6, None)]:
        model, sample = load_network(folder, name), samples[index]
        image, label = sample.image[:, *CROP][None], sample.label[CROP][None]
        if name != "espnet-camvid":
            with torch.no_grad():
                label = model(image).argmax(1)
        kind = name if target is None else f"{name}, target"
        yield Case(kind, model, Problem.build(image, label, target=target, ignore=IGNORE))


def linf(found: AttackResult) -> float:
    return 255 * found.norm.item() if found.success.all() else math.nan


def ablation(cases: list[Case], steps: int) -> Table:
    networks = list(dict.fromkeys(case.name for case in cases))
    table = Table(title=f"norm over the default's, {steps} steps", title_justify="left")
    for heading in ("", *networks):
        table.add_column(heading, justify="left" if not heading else "right")
    default: dict[int, float] = {}
    for name, fields in VARIANTS.items():
        attack = make_attack("palma", steps=steps, **fields)
        found = {k: linf(attack.run(case.model, case.problem)) for k, case in enumerate(cases)}
        default = default or found
        cells = []
        for network in networks:
            some = [k for k, case in enumerate(cases) if case.name == network]
            ratio = math.exp(sum(math.log(found[k] / default[k]) for k in some) / len(some))
            norm = math.exp(sum(math.log(found[k]) for k in some) / len(some))
            cells.append("-" if math.isnan(ratio) else f"{ratio:.3f}" if fields else f"1 ({norm:.2f}/255)")
        table.add_row(name, *cells)
        print(name, cells, flush=True)
    return table


def scales(steps: int) -> Table:
    scenes = load_dataset("demo")
    table = Table(title=f"scales, {steps} steps: linf x 255", title_justify="left")
    for heading in ("network", "scene", f"palma@{steps}", "alma-prox@500", "apgd at that norm", "apgd at 1.2 times it"):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    networks = {
        "demo-standard, nervous": ("demo-standard", partial(Nervous, gain=20.0)),
        "demo-robust": ("demo-robust", None),
        "demo-robust, stubborn": ("demo-robust", partial(Stubborn, weight=1.0)),
    }
    for name, (base, change) in networks.items():
        for i in range(3):
            scene, network = scenes[i], load_model(base)
            model = network if change is None else Segmenter(change(network, scene.image))
            problem = Problem.build(scene.image[None], scene.label[None])
            norm = linf(make_attack("palma", steps=steps).run(model, problem))
            other = linf(make_attack("alma-prox").run(model, problem))
            cells = []
            for factor in (1.0, 1.2):
                fixed = make_attack("apgd", epsilon=min(1.0, factor * norm / 255))
                found = fixed.run(model, problem)
                cells.append(f"{found.apsr.item():.2%}{' broken' if found.success else ''}")
            table.add_row(name, scene.name, f"{norm:.3f}", f"{other:.3f}", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, help="folder with real networks and images")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", choices=["ablation", "scales"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=140)
    if options.only != "scales":
        cases = [*embedded("demo-standard"), *embedded("demo-robust")]
        console.print(ablation([*cases, *(real(options.realbench) if options.realbench else ())], options.steps))
    if options.only != "ablation":
        console.print(scales(options.steps))


if __name__ == "__main__":
    main()
