"""What an attack adds to the model's own forward and backward.

    python benchmarks/overhead.py --realbench FOLDER

Times iterations of ALMA prox, with the exact proximity operator and with the ternary search, on one thread, each beside
a bare `logits.sum().backward()` right after it, and prints medians: of both and of the ratios of such pairs, which do
not mind a machine that is now faster, now slower.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from realbench import IGNORE, load_network, load_samples
from segprox import Problem, Progress, Segmenter, make_attack


class Pair(NamedTuple):
    """Seconds of an iteration of the attack and of a bare forward and backward right after it."""

    attack: float
    bare: float


def bare(model: Segmenter, images: torch.Tensor) -> float:
    """Seconds of a bare forward and backward."""
    start = time.perf_counter()
    point = images.clone().requires_grad_()
    model.logits(point).sum().backward()
    return time.perf_counter() - start


def iterations(model: Segmenter, problem: Problem, steps: int, prox: str) -> list[Pair]:
    """The attack's iterations, each timed between two calls of its callback."""
    pairs: list[Pair] = []
    start: float | None = None

    def mark(_: Progress) -> None:
        nonlocal start
        end = time.perf_counter()
        alone = bare(model, problem.images)
        if start is not None:
            pairs.append(Pair(end - start, alone))
        start = time.perf_counter()

    make_attack("alma-prox", steps=steps, prox=prox).run(model, problem, mark)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with models and images")
    parser.add_argument("--model", default="espnet-camvid")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_network(options.realbench, options.model)
    sample = next(iter(load_samples(options.realbench).values()))
    problem = Problem.build(sample.image[None], sample.label[None], ignore=IGNORE)
    bare(model, problem.images)
    measured: dict[str, list[Pair]] = {"exact": [], "ternary": []}
    for _ in range(options.rounds):
        for prox, pairs in measured.items():
            pairs += iterations(model, problem, options.steps, prox)
    for prox, pairs in measured.items():
        attack, alone = (median(times) * 1e3 for times in zip(*pairs))
        ratio = median(pair.attack / pair.bare for pair in pairs)
        print(
            f"attack iteration, {prox}: median {attack:.1f} ms of {len(pairs)}; "
            f"bare forward + backward {alone:.1f} ms; median ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
