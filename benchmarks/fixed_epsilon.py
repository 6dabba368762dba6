"""Fixed-epsilon attacks on trained networks: what is left of pixel accuracy and mean IoU within epsilon.

    python benchmarks/fixed_epsilon.py --realbench FOLDER --json FILE

Cases are crops of images that took no part in the development of `anneal`: of the test split of CamVid, of a fundus
photograph, and scenes 0 to 3 of the demo. Networks trained for other classes than the labels', and the one for the
photograph, are judged by their own clean predictions. Each network has three epsilons at which accuracy is neither gone
nor untouched. `anneal` and `sea` run at all of them, other attacks at the middle one, or at all with `--everywhere`.
Cells are means over images of pixel accuracy / mean IoU over the classes that occur, in percent. Every attack keeps the
point of least accuracy. `--json` keeps what was found; what is there already is not computed again.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from realbench import IGNORE, load_network, load_photograph, load_samples
from segprox import Problem, Segmenter, load_dataset, load_model, make_attack

EPSILONS = {  # x 255
    "espnet-camvid": (1.0, 2.0, 3.0),
    "espnetv2-1.0-cityscapes": (0.15, 0.25, 0.4),
    "efficientvit-b0-cityscapes": (0.2, 0.35, 0.5),
    "lwnet-vessels": (3.0, 4.0, 6.0),
    "demo-robust": (4.0, 6.0, 10.0),
}
IMAGES = {  # indices into a dataset, or corners of the photograph's crops
    "espnet-camvid": (2, 9, 15, 21),
    "espnetv2-1.0-cityscapes": (5, 18),
    "efficientvit-b0-cityscapes": (7, 12),
    "lwnet-vessels": ((30, 170), (420, 220)),
    "demo-robust": (0, 1, 2, 3),
}
ROWS, COLUMNS = slice(132, 228), slice(120, 280)  # of CamVid's 360 x 480
PHOTOGRAPH_CROP = 112
QUERIES = 300
NEW, RIVAL = "anneal@100", f"sea@{QUERIES // 3}"  # three members
ALWAYS = ["anneal@50", NEW, f"anneal@{QUERIES}", RIVAL]
OTHERS = [f"{name}@{QUERIES}" for name in ("apgd", "tsallis", "segpgd", "cospgd")]


class Case(NamedTuple):
    """An image of a network, and what an attack may change it by."""

    network: str
    image: int | tuple[int, int]
    epsilon: float  # x 255
    attack: str  # NAME@STEPS

    def __str__(self) -> str:
        return f"{self.network} {self.image} {self.epsilon:g} {self.attack}"


Left = tuple[float, float]  # pixel accuracy and mean IoU, in percent


def list_cases(networks: list[str], everywhere: bool) -> list[Case]:
    return [
        Case(network, image, epsilon, attack)
        for network in networks
        for i, epsilon in enumerate(EPSILONS[network])
        for attack in [*ALWAYS, *(OTHERS if everywhere or i == 1 else [])]
        for image in IMAGES[network]
    ]


def load(folder: Path, case: Case) -> tuple[Segmenter, Problem]:
    if case.network.startswith("demo"):
        assert isinstance(case.image, int)
        scene = load_dataset("demo")[case.image]
        return load_model(case.network), Problem.build(scene.image[None], scene.label[None])
    network = load_network(folder, case.network)
    if isinstance(case.image, tuple):
        y, x = case.image
        crop = load_photograph(folder)[None, :, y : y + PHOTOGRAPH_CROP, x : x + PHOTOGRAPH_CROP]
        return network, Problem.build(crop, own_prediction(network, crop))
    sample = list(load_samples(folder).values())[case.image]
    image, label = sample.image[None, :, ROWS, COLUMNS], sample.label[None, ROWS, COLUMNS]
    if "camvid" not in case.network:
        label = own_prediction(network, image)
    return network, Problem.build(image, label, ignore=IGNORE)


@torch.no_grad()
def own_prediction(network: Segmenter, images: Tensor) -> Tensor:
    return network(images).argmax(1)


def measure(folder: Path, case: Case) -> Left:
    torch.set_num_threads(1)
    network, problem = load(folder, case)
    name, _, steps = case.attack.partition("@")
    found = make_attack(name, steps=steps, epsilon=case.epsilon / 255).run(network, problem)
    predicted = own_prediction(network, found.images)[problem.mask]
    labels = problem.labels[problem.mask]
    ious = []
    for c in labels.unique():
        ours, theirs = predicted == c, labels == c
        ious.append((ours & theirs).sum().item() / (ours | theirs).sum().item())
    return 100 * (1 - found.apsr.item()), 100 * mean(ious)


def run(options: argparse.Namespace, cases: list[Case]) -> dict[Case, Left]:
    kept: dict[str, Left] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    order = [NEW, RIVAL, *ALWAYS, *OTHERS]  # what the summary needs comes first
    wanted = sorted((case for case in cases if str(case) not in kept), key=lambda case: order.index(case.attack))
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = {pool.submit(measure, options.realbench, case): case for case in wanted}
        for job in as_completed(jobs):
            kept[str(jobs[job])] = job.result()
            if options.json:
                options.json.write_text(json.dumps(kept))
    return {case: kept[str(case)] for case in cases}


def network_table(network: str, found: dict[Case, Left]) -> Table:
    table = Table(title=f"{network}, {len(IMAGES[network])} images: pixel accuracy / mean IoU left, %")
    epsilons = EPSILONS[network]
    for heading in ("attack", *(f"{epsilon:g}/255" for epsilon in epsilons)):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    for attack in [*ALWAYS, *OTHERS]:
        cells = []
        for epsilon in epsilons:
            cases = [Case(network, image, epsilon, attack) for image in IMAGES[network]]
            left = [found[case] for case in cases if case in found]
            cells.append(f"{mean(a for a, _ in left):.1f} / {mean(b for _, b in left):.1f}" if left else "")
        table.add_row(attack, *cells)
    return table


def summary(networks: list[str], found: dict[Case, Left], new: str) -> str:
    """`new` beside the rival: each image by its mean over the epsilons, then each epsilon by its mean over images."""
    gains = {
        case[:3]: (found[case._replace(attack=RIVAL)][0] - left[0], found[case._replace(attack=RIVAL)][1] - left[1])
        for case, left in found.items()
        if case.attack == new
    }
    images = [
        mean(gains[network, image, epsilon][0] for epsilon in EPSILONS[network])
        for network in networks
        for image in IMAGES[network]
    ]
    lines = [
        f"{new} leaves less accuracy than {RIVAL} (x 3) on {sum(gain > 0 for gain in images)} of {len(images)} images, "
        f"in {sum(gain[0] > 0 for gain in gains.values())} of {len(gains)} cases; in the mean "
        f"{mean(images):.2f} points less accuracy and {mean(gain[1] for gain in gains.values()):.2f} less mean IoU"
    ]
    for i, size in enumerate(("small", "middle", "large")):
        at = [gains[network, image, EPSILONS[network][i]][0] for network in networks for image in IMAGES[network]]
        lines.append(f"  {size} epsilons: {mean(at):.2f} points, worst image {min(at):.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with models and images")
    parser.add_argument("--networks", nargs="+", default=list(EPSILONS), choices=list(EPSILONS))
    parser.add_argument("--everywhere", action="store_true", help="all attacks at all epsilons")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, help="keep results here")
    options = parser.parse_args()
    found = run(options, list_cases(options.networks, options.everywhere))
    console = Console(width=120)
    for network in options.networks:
        console.print(network_table(network, found))
    for new in ALWAYS[:-1]:
        console.print(summary(options.networks, found, new), highlight=False)


if __name__ == "__main__":
    main()
