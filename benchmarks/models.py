"""Every model of the paper and one or more of each library: built offline, saved, loaded by name, and compared.

    python benchmarks/models.py [--only TEXT]

Weights are random, in each library's own checkpoint format. For each: parameters, output shape, the largest difference
of its logits to the library's own inference path (as a share of their range, at a size that is not a multiple of 32),
and seconds of one forward and backward at 512 x 256 on one thread.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import segprox
from segprox.models.sources import ddcat, mmseg
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD

ODD = (101, 150)
Built = tuple[str, Callable[[Tensor], Tensor]]  # a name to load, and the library's path from 8-bit images to logits


def normalised(image: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return ((image.float() / 255 - mean) / std)[None]


def enlarged(logits: Tensor) -> Tensor:
    return functional.interpolate(logits, size=ODD, mode="bilinear", align_corners=False)


def shaken(network: nn.Module) -> nn.Module:
    """Batch norm with statistics of its own, so that a forgotten one shows."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network.eval()


def mmseg_model(preset: str, folder: Path) -> Built:
    from mmseg.registry import MODELS
    from mmseg.structures import SegDataSample

    config = mmseg._read_config(mmseg.PRESETS[preset].config).model
    network: Any = shaken(MODELS.build(mmseg._for_inference(config)))
    torch.save({"meta": {"iter": 1}, "state_dict": network.state_dict()}, folder / "net.pth")
    network.test_cfg["mode"] = "whole"

    def path(image: Tensor) -> Tensor:
        sample = SegDataSample(metainfo={"img_shape": ODD, "ori_shape": ODD})
        found = network.test_step({"inputs": [image.flip(0)], "data_samples": [sample]})
        return found[0].seg_logits.data[None]

    return f"mmseg:{preset}?checkpoint={folder / 'net.pth'}", path


def ddcat_model(preset: str, folder: Path) -> Built:
    network = shaken(ddcat.DeepLabV3(ddcat.PRESETS[preset].classes))
    torch.save({"epoch": 1, "state_dict": network.state_dict()}, folder / "net.pth")
    return f"ddcat:{preset}?checkpoint={folder / 'net.pth'}", lambda image: network(normalised(image))


def hf_model(kind: str, folder: Path) -> Built:
    import transformers

    configs = {
        "SegFormer-B0": ("SegformerForSemanticSegmentation", transformers.SegformerConfig(num_labels=150)),
        "SegFormer-B3": (
            "SegformerForSemanticSegmentation",
            transformers.SegformerConfig(
                num_labels=150, depths=[3, 4, 18, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768
            ),
        ),
        "UPerNet ConvNeXt-T": (
            "UperNetForSemanticSegmentation",
            transformers.UperNetConfig(
                num_labels=150,
                backbone_config=transformers.ConvNextConfig(
                    depths=[3, 3, 9, 3],
                    hidden_sizes=[96, 192, 384, 768],
                    out_features=["stage1", "stage2", "stage3", "stage4"],
                ),
            ),
        ),
        "MobileNetV2": ("MobileNetV2ForSemanticSegmentation", transformers.MobileNetV2Config(num_labels=21)),
    }
    kind_of, config = configs[kind]
    network = shaken(getattr(transformers, kind_of)(config))
    network.save_pretrained(folder)
    return f"hf:{folder}", lambda image: enlarged(network(pixel_values=normalised(image)).logits)


def torchvision_model(name: str, folder: Path) -> Built:
    from torchvision.models import get_model

    network = shaken(get_model(name, weights=None, weights_backbone=None, num_classes=21))
    torch.save(network.state_dict(), folder / "net.pth")
    return f"torchvision:{name}?checkpoint={folder / 'net.pth'}", lambda image: network(normalised(image))["out"]


def smp_model(name: str, folder: Path) -> Built:
    import segmentation_models_pytorch as smp

    architecture, _, encoder = name.partition("/")
    network = shaken(smp.create_model(architecture, encoder_name=encoder, encoder_weights=None, classes=19))
    torch.save(network.state_dict(), folder / "net.pth")

    def path(image: Tensor) -> Tensor:
        height, width = ODD
        padded = functional.pad(normalised(image), (0, -width % 32, 0, -height % 32))
        return network(padded)[:, :, :height, :width]

    return f"smp:{name}?checkpoint={folder / 'net.pth'}&num_classes=19", path


def everything() -> Iterator[tuple[str, Callable[[str, Path], Built], str]]:
    yield from ((f"mmseg:{name}", mmseg_model, name) for name in mmseg.PRESETS)
    yield from ((f"ddcat:{name}", ddcat_model, name) for name in ddcat.PRESETS)
    for name in ("SegFormer-B0", "SegFormer-B3", "UPerNet ConvNeXt-T", "MobileNetV2"):
        yield f"hf: {name}", hf_model, name
    for name in ("deeplabv3_resnet50", "lraspp_mobilenet_v3_large"):
        yield f"torchvision:{name}", torchvision_model, name
    for name in ("Unet/resnet34", "UnetPlusPlus/resnet34", "DeepLabV3Plus/tu-mobilenetv3_large_100"):
        yield f"smp:{name}", smp_model, name


def measure(build: Callable[[str, Path], Built], name: str) -> list[str]:
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, *ODD), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        full_name, path = build(name, Path(folder))
        model = segprox.load_model(full_name)
        with torch.no_grad():
            theirs, ours = path(image), model(image[None].float() / 255)
    images = torch.rand(1, 3, 256, 512, requires_grad=True)
    start = time.perf_counter()
    model.logits(images).sum().backward()
    seconds = time.perf_counter() - start
    difference = ((ours - theirs).abs().max() / (theirs.max() - theirs.min())).item()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [f"{parameters / 1e6:.1f} M", str(list(ours.shape)), f"{difference:.1e}", f"{seconds:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table("model", "parameters", "output", "difference", "seconds")
    for label, build, name in everything():
        if options.only in label:
            table.add_row(label, *measure(build, name))
            print(label, "done", file=sys.stderr)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
