"""What an attack adds to the model's own forward and backward.

    python benchmarks/overhead.py --realbench FOLDER

Times iterations of ALMA prox and bare `logits.sum().backward()` in turns, on one thread, and prints medians and their
ratio.
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from realbench import IGNORE, load_network, load_samples
from segprox import Problem, Progress, Segmenter, make_attack


def bare(model: Segmenter, images: torch.Tensor, repeats: int) -> list[float]:
    """Seconds of each bare forward and backward."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        point = images.clone().requires_grad_()
        model.logits(point).sum().backward()
        times.append(time.perf_counter() - start)
    return times


def iterations(model: Segmenter, problem: Problem, steps: int, options: dict[str, str]) -> list[float]:
    """Seconds of each iteration of the attack, between two calls of its callback."""
    marks: list[float] = []

    def mark(_: Progress) -> None:
        marks.append(time.perf_counter())

    make_attack("alma-prox", steps=steps, **options).run(model, problem, mark)
    return [after - before for before, after in pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--realbench", type=Path, required=True, help="folder with models and images")
    parser.add_argument("--model", default="espnet-camvid")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", nargs="*", default=[], help="field=value of the attack")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_network(options.realbench, options.model)
    sample = next(iter(load_samples(options.realbench).values()))
    problem = Problem.build(sample.image[None], sample.label[None], ignore=IGNORE)
    fields = dict(assignment.split("=", 1) for assignment in options.set)
    bare(model, problem.images, 2)
    alone: list[float] = []
    attacked: list[float] = []
    for _ in range(options.rounds):
        alone += bare(model, problem.images, options.steps)
        attacked += iterations(model, problem, options.steps, fields)
    print(f"bare forward + backward: median {median(alone) * 1e3:.1f} ms of {len(alone)}")
    print(f"attack iteration:        median {median(attacked) * 1e3:.1f} ms of {len(attacked)}")
    print(f"ratio: {median(attacked) / median(alone):.3f}")


if __name__ == "__main__":
    main()
