"""What an attack adds to the model's own forward and backward.

    python benchmarks/overhead.py --realbench FOLDER

Times iterations of ALMA prox, with the exact proximity operator and with the ternary search, and bare
`logits.sum().backward()` in turns, on one thread, and prints medians and their ratios.
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


def iterations(model: Segmenter, problem: Problem, steps: int, prox: str) -> list[float]:
    """Seconds of each iteration of the attack, between two calls of its callback."""
    marks: list[float] = []

    def mark(_: Progress) -> None:
        marks.append(time.perf_counter())

    make_attack("alma-prox", steps=steps, prox=prox).run(model, problem, mark)
    return [after - before for before, after in pairwise(marks)]


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
    bare(model, problem.images, 2)
    alone: list[float] = []
    attacked: dict[str, list[float]] = {"exact": [], "ternary": []}
    for _ in range(options.rounds):
        alone += bare(model, problem.images, options.steps)
        for prox, times in attacked.items():
            times += iterations(model, problem, options.steps, prox)
    print(f"bare forward + backward: median {median(alone) * 1e3:.1f} ms of {len(alone)}")
    for prox, times in attacked.items():
        ratio = median(times) / median(alone)
        print(f"attack iteration, {prox}: median {median(times) * 1e3:.1f} ms of {len(times)}, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
