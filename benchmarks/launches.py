"""What attacks would ask of an accelerator beside the model: operations launched and waits of the host, per iteration.

    python benchmarks/launches.py
    python benchmarks/launches.py --attacks palma,alma-prox --classes 19 --lines

Counted on the pretend device of the tests, so no accelerator is needed. An iteration is the difference between a long
and a short run, divided by the difference of their forwards; launches within the model do not count. `--lines` lists
the lines that launch most and those that wait.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from segprox import Attack, Problem, Segmenter, list_attacks, make_attack
from segprox.attacks.registry import find_attack
from segprox.models.lean import make_lean

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pretend import PretendDevice  # the tests' own, found by its folder

SHORT, LONG = 24, 36


class Linear(nn.Module):
    """A network of one operation, which nothing breaks within a few steps; it counts its launches as the model's."""

    def __init__(self, num_classes: int, device: PretendDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, 3, 1, 1) * 1e-3)
        self.bias = nn.Parameter(torch.linspace(3, -3, num_classes))
        self.pretend = device

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, K, H, W]`."""
        with self.pretend.within("model"):
            return nn.functional.conv2d(images, self.weight, self.bias)


class Counts(NamedTuple):
    """Of one run: launches beside the model and waits, each by operation and line, and forwards."""

    launches: Counter[tuple[str, ...]]
    waits: Counter[tuple[str, ...]]
    forwards: int

    def minus(self, other: "Counts") -> "Counts":
        """What this run asked for and a shorter one did not."""
        return Counts(self.launches - other.launches, self.waits - other.waits, self.forwards - other.forwards)

    def launched(self) -> float:
        """Launches per forward."""
        return self.launches.total() / self.forwards

    def waited(self) -> float:
        """Waits per forward."""
        return self.waits.total() / self.forwards


def count(attack: Attack, num_classes: int, batch: int, size: int, lean: bool, compiled: bool) -> Counts:
    """What a run of the attack asks for."""
    torch.manual_seed(0)
    with PretendDevice() as device:
        network = Linear(num_classes, device)
        model = Segmenter(network).to("cuda")
        model.fused = compiled
        if lean:
            make_lean(model)
        images = torch.rand(batch, 3, size, size).to("cuda")
        labels = torch.zeros(batch, size, size, dtype=torch.long, device="cuda")
        problem = Problem.build(images, labels, target=num_classes - 1 if attack.targeted_only else None)
        device.clear()
        forwards = int(attack.run(model, problem).forwards.max())
        launches = {key[1:]: n for key, n in device.launches.items() if key[0] == "attack"}
        backward = {key: n for key, n in launches.items() if "convolution_backward" in key}
        return Counts(Counter(launches) - Counter(backward), Counter(device.waits), forwards)


def per_iteration(name: str, *case: Any) -> Counts:
    """The difference of a long and a short run."""
    rounds = {"rounds": 2} if find_attack(name).bisected else {}  # all of them are alike
    long, short = (count(make_attack(name, steps=steps, **rounds), *case) for steps in (LONG, SHORT))
    return long.minus(short)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--classes", default="8,19,150")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--size", type=int, default=16, help="height and width of the images")
    parser.add_argument("--compile", action="store_true", help="with small pieces of attacks compiled, each one launch")
    parser.add_argument("--lean", action="store_true", help="with lean gradients")
    parser.add_argument("--lines", action="store_true", help="list the lines that launch and wait")
    options = parser.parse_args()
    names = options.attacks.split(",") if options.attacks else [str(name) for name in list_attacks()]
    cases = [(int(k), int(b)) for k in options.classes.split(",") for b in options.batches.split(",")]
    table = Table("attack", *(f"K={k} B={b}" for k, b in cases), title="launches (waits) per iteration")
    for name in names:
        cells = []
        for k, b in cases:
            counts = per_iteration(name, k, b, options.size, options.lean, options.compile)
            cells.append(f"{counts.launched():.0f}" + (f" ({counts.waited():.1f})" if counts.waits else ""))
            if options.lines:
                for kind, lines in (("launch", counts.launches), ("wait", counts.waits)):
                    for key, n in lines.most_common():
                        print(f"{kind} {n / counts.forwards:6.1f}  {' '.join(key)}")
        table.add_row(name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
