"""What attacks would ask of an accelerator beside the model: operations launched and waits of the host, per iteration.

    python benchmarks/launches.py
    python benchmarks/launches.py --attacks palma,alma-prox --classes 19 --lines

Counted on the pretend device of the tests, so no accelerator is needed. An iteration is the difference between a long
and a short run, divided by the difference of their steps; launches within the model do not count. `--lines` lists the
lines that launch most and those that wait.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from segprox import Problem, Segmenter, list_attacks, make_attack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pretend import PretendDevice  # noqa: E402  # the tests' own, found by its folder

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


def counts(name: str, steps: int, num_classes: int, batch: int, size: int, lean: bool) -> tuple[Counter, Counter]:
    """Launches beside the model and waits of one run, each by operation and line."""
    torch.manual_seed(0)
    attack = make_attack(name, **sized(name, steps))
    with PretendDevice() as device:
        model = Segmenter(Linear(num_classes, device)).to("cuda")
        if lean:
            from segprox.models.lean import make_lean

            make_lean(model)
        images = torch.rand(batch, 3, size, size).to("cuda")
        labels = torch.zeros(batch, size, size, dtype=torch.long, device="cuda")
        targeted = attack.targeted_only
        problem = Problem.build(images, labels, target=num_classes - 1 if targeted else None)
        device.clear()
        attack.run(model, problem)
        launches = Counter({key: count for key, count in device.launches.items() if key[0] == "attack"})
        return launches, Counter(device.waits)


def sized(name: str, steps: int) -> dict[str, object]:
    """The fields that give an attack so many steps; bisections get one round, so that steps are what differs."""
    return {"rounds": 1, "attack.steps": steps} if name.startswith("bisect:") else {"steps": steps}


def per_iteration(long: Counter, short: Counter) -> float:
    return (sum(long.values()) - sum(short.values())) / (LONG - SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--classes", default="8,19,150")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--lean", action="store_true", help="with lean gradients")
    parser.add_argument("--lines", action="store_true", help="list the lines that launch and wait")
    options = parser.parse_args()
    names = options.attacks.split(",") if options.attacks else [str(name) for name in list_attacks()]
    cases = [(int(k), int(b)) for k in options.classes.split(",") for b in options.batches.split(",")]
    table = Table("attack", *(f"K={k} B={b}" for k, b in cases), title="launches (waits) per iteration")
    for name in names:
        cells = []
        for k, b in cases:
            (short, short_waits), (long, long_waits) = (
                counts(name, steps, k, b, options.size, options.lean) for steps in (SHORT, LONG)
            )
            waits = per_iteration(long_waits, short_waits)
            cells.append(f"{per_iteration(long, short):.0f} ({waits:.1f})" if waits else f"{per_iteration(long, short):.0f}")
            if options.lines:
                for kind, more, less in (("launch", long, short), ("wait", long_waits, short_waits)):
                    lines = Counter({key: more[key] - less[key] for key in more})
                    for key, count in lines.most_common():
                        if count:
                            print(f"{kind} {count / (LONG - SHORT):6.1f}  {' '.join(map(str, key[1:]))}")
        table.add_row(name, *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
