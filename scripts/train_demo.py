"""Train the embedded networks and write their weights into the package.

    python scripts/train_demo.py standard
    python scripts/train_demo.py robust

The robust one is trained on PGD examples only (Madry et al., 2018). With the same seed, number of threads and version
of torch the same weights come out; another combination gives others of the same quality.
"""

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from segprox.data.base import VOID
from segprox.data.synthetic import StreetScenes
from segprox.models.demo import MEAN, STD, StreetNet
from segprox.models.segmenter import Segmenter

WEIGHTS = Path(__file__).parents[1] / "src" / "segprox" / "models" / "weights"
BATCH, CROP, SCENES, PEAK_RATE = 8, (80, 160), 800, 4e-3
EPSILON, PGD_STEPS = 2 / 255, 3


def loss(segmenter: Segmenter, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(segmenter.logits(images), labels, ignore_index=VOID)


def pgd(segmenter: Segmenter, images: Tensor, labels: Tensor) -> Tensor:
    """Images within EPSILON (linf) that raise the loss."""
    noise = torch.empty_like(images).uniform_(-EPSILON, EPSILON)
    for _ in range(PGD_STEPS):
        noise.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(segmenter, (images + noise).clamp(0, 1), labels), noise)
        noise = (noise.detach() + 2 * EPSILON / PGD_STEPS * gradient.sign()).clamp_(-EPSILON, EPSILON)
    return (images + noise).clamp(0, 1)


def accuracy(segmenter: Segmenter, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        predicted = torch.cat([segmenter.logits(part).argmax(1) for part in images.split(BATCH)])
    return (predicted == labels)[labels != VOID].float().mean().item()


def stack(scenes: StreetScenes) -> tuple[Tensor, Tensor]:
    samples = [scenes[i] for i in range(len(scenes))]
    return torch.stack([s.image for s in samples]), torch.stack([s.label for s in samples])


def crop(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A random batch, cut out at a random place and mirrored half of the time."""
    chosen = torch.randint(len(images), (BATCH,))
    top, left = (int(torch.randint(full - part + 1, ())) for full, part in zip(labels.shape[1:], CROP))
    x, y = images[chosen], labels[chosen]
    x, y = x[:, :, top : top + CROP[0], left : left + CROP[1]], y[:, top : top + CROP[0], left : left + CROP[1]]
    return (x.flip(3), y.flip(2)) if torch.rand(()) < 0.5 else (x, y)


def train(robust: bool, steps: int) -> tuple[StreetNet, Segmenter]:
    network = StreetNet()
    segmenter = Segmenter(network, mean=MEAN, std=STD)
    segmenter.requires_grad_(True)
    images, labels = stack(StreetScenes(split="train", length=SCENES))
    test = stack(StreetScenes(split="test", length=40))
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_RATE, total_steps=steps)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        x, y = crop(images, labels)
        if robust:
            x = pgd(segmenter, x, y)
        network.train()
        optimiser.zero_grad()
        value = loss(segmenter, x, y)
        value.backward()
        optimiser.step()
        schedule.step()
        network.eval()
        if step % 250 == 0 or step == steps:
            attacked = accuracy(segmenter, pgd(segmenter, test[0][:BATCH], test[1][:BATCH]), test[1][:BATCH])
            minutes = (time.perf_counter() - start) / 60
            print(
                f"step {step}: loss {value.item():.3f}, unseen scenes: "
                f"pixel accuracy {accuracy(segmenter, *test):.4f}, under PGD {attacked:.4f} ({minutes:.1f} min)",
                flush=True,
            )
    return network, segmenter


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an embedded demo network.")
    parser.add_argument("kind", choices=("standard", "robust"))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    network, _ = train(options.kind == "robust", options.steps)
    save_file(network.state_dict(), options.out / f"demo-{options.kind}.safetensors")


if __name__ == "__main__":
    main()
