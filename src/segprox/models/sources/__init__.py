"""Where models come from: one module per library, imported when one of its models is asked for."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from torch import nn

from segprox.models.options import ModelOptions
from segprox.models.segmenter import Segmenter
from segprox.models.sources.base import Network
from segprox.registry import Registry


class ModelSource(NamedTuple):
    """A library of models."""

    example: str
    about: str
    extra: str | None = None  # what to install
    builder: Callable[[str, ModelOptions], Network | Segmenter | nn.Module] | None = None  # of sources of others

    def build(self, identifier: str, options: ModelOptions) -> Network | Segmenter | nn.Module:
        """The model of that identifier."""
        if self.builder is not None:
            return self.builder(identifier, options)
        source = self.example.partition(":")[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of each other, and of what only training needs
            made: Network | Segmenter = import_module(f"segprox.models.sources.{source}").build(identifier, options)
        return made


SOURCES = Registry(
    "source of models",
    {
        "hf": ModelSource(
            "hf:openmmlab/upernet-convnext-tiny", "Hugging Face transformers: an id on the hub, or a folder", "hf"
        ),
        "mmseg": ModelSource(
            "mmseg:segformer-mit-b0-cityscapes", "MMSegmentation: a model of the paper, or a config", "mmseg"
        ),
        "ddcat": ModelSource("ddcat:voc", "DeepLabV3 ResNet-50 DDC-AT, the paper's robust model: voc or cityscapes"),
        "torchvision": ModelSource(
            "torchvision:deeplabv3_resnet50", "torchvision's segmentation models", "torchvision"
        ),
        "smp": ModelSource(
            "smp:Unet/resnet34", "Segmentation Models PyTorch: ARCHITECTURE/ENCODER, or a folder", "smp"
        ),
        "python": ModelSource(
            "python:package.module:factory", "a function of yours that returns a network or a Segmenter"
        ),
    },
)
