"""A random defence, attacked with one draw as if it were none, and on the average of several: who is really broken?

    python benchmarks/random_models.py [--limit 4] [--steps 60] [--sigma 8] [--only naive|1|4|16]

`demo-standard` with Gaussian noise in front of it. Each result is judged by 200 draws that no attack has seen.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import segprox
from segprox.draws import Sampling, scoring_draws
from segprox.problem import Problem

JUDGES = Sampling(1, score_draws=200)


class Noisy(nn.Module):
    """A network behind noise."""

    def __init__(self, network: nn.Module, sigma: float) -> None:
        super().__init__()
        self.network, self.sigma = network, sigma

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the images with other noise every time."""
        return self.network(images + self.sigma * torch.randn_like(images))


def noisy_demo(sigma: float = 8 / 255) -> segprox.Segmenter:
    """`demo-standard` with noise added to the image, in front of its normalisation."""
    demo = segprox.load_model("demo-standard")
    return segprox.Segmenter(Noisy(demo.model, sigma / demo.std.mean().item()), mean=demo.mean.flatten().tolist(),
                             std=demo.std.flatten().tolist())  # fmt: skip


def main() -> None:
    """Print a line for each way to attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sigma", type=float, default=8.0, help="in 255ths")
    parser.add_argument("--only", choices=["naive", "1", "4", "16"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, data = noisy_demo(given.sigma / 255), segprox.load_dataset("demo")
    print("samples | says broken | really broken | share of 200 draws, each image | median linf x 255 | queries | s")
    for samples in (None, 1, 4, 16):
        if given.only not in (None, str(samples or "naive")):
            continue
        torch.manual_seed(0)  # for the naive run, which nothing else makes repeatable
        start, found, shares = time.perf_counter(), [], []
        for scene in (data[i] for i in range(given.limit)):
            images, labels = scene.image[None], scene.label[None]
            result = segprox.attack(model, images, labels, steps=given.steps, samples=samples)
            judged = Problem.build(images, labels, seed=12345)  # other draws than the attack's own
            draws = scoring_draws(model, result.images, judged.seeds()[0], JUDGES)
            shares.append(torch.cat([judged.succeeded(judged.apsr(z)) for z in draws]).double().mean().item())
            found.append(result)
        norms = [255 * result.norm.item() for result in found]
        queries = [int(result.forwards + result.backwards) for result in found]
        says, really = sum(bool(result.success) for result in found), sum(share >= 0.5 for share in shares)
        each = " ".join(f"{share:.0%}" for share in shares), " ".join(f"{norm:.2f}" for norm in norms)
        cells = (
            samples or "naive", f"{says} of {len(found)}", f"{really} of {len(found)}", each[0],
            f"{statistics.median(norms):.2f} ({each[1]})", f"{statistics.median(queries):.0f}",
            f"{time.perf_counter() - start:.0f}",
        )  # fmt: skip
        print(*cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
