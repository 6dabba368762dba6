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

    @property
    def name(self) -> str:
        """What the names of its models begin with."""
        return self.example.partition(":")[0]

    def build(self, identifier: str, options: ModelOptions) -> Network | Segmenter | nn.Module:
        """The model of that identifier."""
        if self.builder is not None:
            return self.builder(identifier, options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of each other, and of what only training needs
            made: Network | Segmenter = import_module(f"segprox.models.sources.{self.name}").build(identifier, options)
        return made


_OWN = (
    ModelSource("hf:openmmlab/upernet-convnext-tiny", "Hugging Face transformers: an id on the hub, or a folder", "hf"),
    ModelSource("mmseg:segformer-mit-b0-cityscapes", "MMSegmentation: a model of the paper, or a config", "mmseg"),
    ModelSource("ddcat:voc", "DeepLabV3 ResNet-50 DDC-AT, the paper's robust model: voc or cityscapes"),
    ModelSource("torchvision:deeplabv3_resnet50", "torchvision's segmentation models", "torchvision"),
    ModelSource("smp:Unet/resnet34", "Segmentation Models PyTorch: ARCHITECTURE/ENCODER, or a folder", "smp"),
    ModelSource("onnx:network.onnx", "ONNX: a network that was exported, as a file", "onnx"),
    ModelSource("python:package.module:factory", "a function of yours that returns a network or a Segmenter"),
)
SOURCES = Registry("source of models", {source.name: source for source in _OWN})
