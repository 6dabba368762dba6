"""A trained U-Net beside the ONNX file that it was exported to: logits, and the norms that PALMA finds.

    python benchmarks/exported.py [--folder SAVED] [--train 250] [--steps 200] [--images 2] [--controls 4] [--dynamo]

The U-Net of segmentation_models_pytorch has the encoder resnet18 and narrow decoders, and is trained on the embedded
street scenes, or read from the folder if this script has saved one there. Attacks are on 64 x 128 pixels of scenes that
it was not trained on.

PALMA is chaotic: a difference of the last digit takes it along another path. Controls are the network itself with
weights that differ by one part in a million: what their norms differ by is chance. In float64 the two models differ by
so little that their paths stay together, and norms must be the same.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
from torch import Tensor, nn
from torch.nn import functional

import segprox
from segprox.data.base import VOID
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD

BATCH, CROP, RATE = 8, (96, 160), 2e-3
ATTACKED = (slice(32, 96), slice(64, 192))  # rows and columns of a scene
CHANCE = 1e-6  # relative change of the weights of the control


def scenes(split: str, count: int) -> tuple[Tensor, Tensor]:
    """Images `[N, 3, H, W]` and labels `[N, H, W]`."""
    dataset = segprox.load_dataset(f"demo?split={split}")
    samples = [dataset[i] for i in range(count)]
    return torch.stack([sample.image for sample in samples]), torch.stack([sample.label for sample in samples])


def train(folder: Path, steps: int) -> None:
    """Train a small U-Net on crops of the embedded scenes and save it as smp does."""
    torch.manual_seed(0)
    decoder = (64, 48, 32, 16, 16)
    network = smp.Unet("resnet18", encoder_weights=None, decoder_channels=decoder, classes=8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    images, labels = scenes("train", 100)
    images = (images - mean) / std
    optimiser = torch.optim.AdamW(network.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(images), (BATCH,))
        top, left = (int(torch.randint(full - part + 1, ())) for full, part in zip(labels.shape[1:], CROP))
        window = (slice(top, top + CROP[0]), slice(left, left + CROP[1]))
        logits = network(images[chosen][..., *window])
        optimiser.zero_grad()
        functional.cross_entropy(logits, labels[chosen][:, *window], ignore_index=VOID).backward()
        optimiser.step()
        schedule.step()
    fold(network)
    network.eval().save_pretrained(str(folder))


@torch.no_grad()
def fold(network: nn.Module) -> None:
    """Move the factors of batch norms into the convolutions before them, as exporters do.

    What is left of a batch norm adds a bias, and the exporter has nothing to round.
    """
    convolution = None
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            convolution = layer
        elif isinstance(layer, nn.BatchNorm2d):
            assert convolution is not None  # of a U-Net with a ResNet
            factor = layer.weight / (layer.running_var + layer.eps).sqrt()
            convolution.weight.mul_(factor.view(-1, 1, 1, 1))
            layer.bias.sub_(layer.running_mean * factor)
            layer.weight.fill_(1)
            layer.running_mean.zero_()
            layer.running_var.fill_(1 - layer.eps)


def in_double(model: segprox.Segmenter) -> segprox.Segmenter:
    """The model in float64, with batch norms that still have a factor of 1."""
    model.double()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_var.fill_(1 - layer.eps)
    return model


def export(model: segprox.Segmenter, path: Path, images: Tensor, dynamo: bool) -> None:
    """Write the network, without its preprocessing, for images of any size."""
    if dynamo:
        sides = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
        torch.onnx.export(model.model, (images,), path, dynamic_shapes=(sides,), verbose=False)
    else:
        axes = {"image": {0: "batch", 2: "height", 3: "width"}}
        torch.onnx.export(
            model.model, (images,), path, input_names=["image"], dynamic_axes=axes, dynamo=False, opset_version=17
        )


def load_export(path: Path, model: segprox.Segmenter) -> segprox.Segmenter:
    """The exported network, fed as `model` is."""
    numbers = {name: ",".join(map(str, getattr(model, name).flatten().tolist())) for name in ("mean", "std")}
    start = time.perf_counter()
    query = f"mean={numbers['mean']}&std={numbers['std']}&multiple={model.multiple}"
    exported = segprox.load_model(f"onnx:{path}?{query}&device=cpu")
    print(f"loaded and compared with onnxruntime in {time.perf_counter() - start:.1f} s")
    return exported


def disturbed(name: str, seed: int) -> segprox.Segmenter:
    """The network with every weight changed by CHANCE of itself, up or down."""
    model = segprox.load_model(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.model.parameters():
            weight.mul_(1 + CHANCE * torch.randn(weight.shape, generator=generator).sign())
    return model


def compare(models: dict[str, segprox.Segmenter], images: Tensor, labels: Tensor, steps: int) -> None:
    """A line for each model, in comparison with the first."""
    first = next(iter(models.values()))
    expected = first(images)
    norm = None
    for name, model in models.items():
        gap = ((model(images) - expected).abs().max() / (expected.max() - expected.min())).item()
        result = segprox.attack(model, images, labels, "palma", steps=steps)
        norm = result.norm if norm is None else norm
        wrong = (first(result.images).argmax(1) != labels) & (labels != VOID)
        cells = (
            f"`{name}`",
            f"{gap:.1e}",
            ", ".join(f"{255 * value:.4f}" for value in result.norm.tolist()),
            ", ".join(f"{value:+.2%}" for value in (result.norm / norm - 1).tolist()),
            ", ".join(f"{rate:.4f}" for rate in result.apsr.tolist()),
            ", ".join(f"{rate:.4f}" for rate in (wrong.sum((1, 2)) / (labels != VOID).sum((1, 2))).tolist()),
            f"{result.seconds:.0f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the trained network is, or shall be saved")
    parser.add_argument("--train", type=int, default=250, help="steps of training")
    parser.add_argument("--steps", type=int, default=200, help="of PALMA")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--controls", type=int, default=4)
    parser.add_argument("--dynamo", action="store_true", help="by torch's newer exporter, which needs onnxscript")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch) / "unet"
        if not (folder / "config.json").is_file():
            start = time.perf_counter()
            train(folder, chosen.train)
            print(f"trained in {time.perf_counter() - start:.0f} s")
        name = f"smp:{folder}?device=cpu"
        model = segprox.load_model(name)
        controls = {f"smp: control {seed}": disturbed(name, seed) for seed in range(1, chosen.controls + 1)}
        images, labels = scenes("test", chosen.images)
        path = Path(scratch) / "network.onnx"
        export(model, path, images[:1], chosen.dynamo)
        exported = load_export(path, model)
    right = (model(images).argmax(1) == labels)[labels != VOID]
    print(f"pixel accuracy on whole scenes {right.float().mean().item():.1%}")
    images, labels = images[..., *ATTACKED], labels[:, *ATTACKED]
    print("| model | logits apart, of their range | linf x 255 | from the first | APSR | APSR by smp: | seconds |")
    print("|---|---|---|---|---|---|---|")
    compare({"smp:": model, "onnx:": exported, **controls}, images, labels, chosen.steps)
    double = {"smp: in float64": in_double(model), "onnx: in float64": in_double(exported)}
    compare(double, images.double(), labels, chosen.steps)


if __name__ == "__main__":
    main()
