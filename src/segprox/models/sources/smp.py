"""Segmentation Models PyTorch: `smp:Unet/resnet34?checkpoint=FILE`, or what `save_pretrained` wrote: `smp:FOLDER`."""

from pathlib import Path
from typing import Any

from torch import nn

from segprox.errors import SegproxError, explained
from segprox.models.options import ModelOptions
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD, Network, load_checkpoint
from segprox.optional import require

STRIDE = 32  # its encoders refuse sides that are not multiples of this
TIMM = "tu-"  # before the names of encoders that come from timm


def build(identifier: str, options: ModelOptions) -> Network:
    """A saved model, or an architecture and an encoder with the weights of a file."""
    smp = require("segmentation_models_pytorch", "smp")
    what = f"smp:{identifier}"
    if (Path(identifier) / "config.json").is_file():
        options.refuse("checkpoint", "num_classes", by=f"{what} has its own weights")
        with explained(f"{what} cannot be loaded"):
            module = smp.from_pretrained(identifier)
        encoder = ""
    else:
        module, encoder = _from_parts(smp, identifier, options)
        load_checkpoint(module, options, what)
    return Network(module, _preprocessing(module, encoder))


def _from_parts(smp: Any, identifier: str, options: ModelOptions) -> tuple[nn.Module, str]:
    architecture, slash, encoder = identifier.partition("/")
    if not slash:
        raise SegproxError(
            f"smp:{identifier} is neither a folder that save_pretrained wrote nor ARCHITECTURE/ENCODER, such as "
            "smp:Unet/resnet34"
        )
    with explained(f"smp:{identifier} cannot be built"):
        module: nn.Module = smp.create_model(
            architecture, encoder_name=encoder, encoder_weights=None, classes=options.num_classes or 1
        )
    return module, encoder


def _preprocessing(module: nn.Module, encoder: str) -> dict[str, Any]:
    """ImageNet's normalisation, or the one that timm has for the encoder; logits instead of an activation."""
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if encoder.startswith(TIMM):
        timm = require("timm", "smp")
        settings = timm.models.get_pretrained_cfg(encoder.removeprefix(TIMM))
        if settings is not None:
            mean, std = tuple(settings.mean), tuple(settings.std)
    head: Any = module.get_submodule("segmentation_head")
    head[-1] = nn.Identity()
    channels = next(layer.out_channels for layer in head.modules() if isinstance(layer, nn.Conv2d))
    return {"mean": mean, "std": std, "multiple": STRIDE, "binary": channels == 1}
