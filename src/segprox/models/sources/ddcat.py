"""DeepLabV3 ResNet-50 of DDC-AT (Xu, Zhao, Jia, ICCV 2021), the paper's robust model: `ddcat:voc`, `ddcat:cityscapes`.

The names of its layers are those of the published checkpoints.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segprox.errors import SegproxError
from segprox.models.options import ModelOptions
from segprox.models.sources.base import IMAGENET_MEAN, IMAGENET_STD, Network, load_checkpoint, published

URL = "https://github.com/dvlab-research/Robust-Semantic-Segmentation (its README links the weights)"
BLOCKS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)
DILATIONS = (1, 1, 2, 4)
RATES = (6, 12, 18)
FEATURES, HIDDEN = 2048, 256
# The branch for adversarial pixels and the mask that chose between both: the work itself drops them at inference.
TRAINING_ONLY = ["cls2.", "mask1.", "aux_cls1.", "aux."]


class Preset(NamedTuple):
    """What a dataset changes."""

    classes: int
    checkpoint: str


PRESETS = {
    "voc": Preset(21, "pretrain/voc2012/deeplabv3/ddcat/train_epoch_50.pth"),
    "cityscapes": Preset(19, "pretrain/cityscapes/deeplabv3/ddcat/train_epoch_400.pth"),
}


def _unit(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> list[nn.Module]:
    padding = dilation * (kernel // 2)
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=padding, dilation=dilation, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions; stride and dilation in the middle one."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, dilation, dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, inputs, H, W]` to `[B, 4 width, H / stride, W / stride]`."""
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return torch.relu_(self.bn3(self.conv3(x)) + skip)


class Aspp(nn.Module):
    """Parallel convolutions of several dilations, and the mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        dilated = [nn.Sequential(*_unit(FEATURES, HIDDEN, 3, rate)) for rate in RATES]
        pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), *_unit(FEATURES, HIDDEN))
        self.convs = nn.ModuleList([nn.Sequential(*_unit(FEATURES, HIDDEN)), *dilated, pooled])

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 2048, h, w]` to `[B, 5 * 256, h, w]`."""
        found = [conv(x) for conv in self.convs]
        return torch.cat([part.expand(-1, -1, *x.shape[2:]) for part in found], dim=1)


class DeepLabV3(nn.Module):
    """ResNet-50 of stride 8 with a stem of three convolutions, ASPP and one classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stem = [*_unit(3, 64, 3), *_unit(64, 64, 3), *_unit(64, 128, 3), nn.MaxPool2d(3, 2, 1)]
        stem[0] = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
        self.layer0 = nn.Sequential(*stem)
        inputs = 128
        for i, (blocks, width, dilation) in enumerate(zip(BLOCKS, WIDTHS, DILATIONS), start=1):
            layer = []
            for b in range(blocks):
                layer.append(Bottleneck(inputs, width, 2 if i == 2 and b == 0 else 1, dilation))
                inputs = 4 * width
            self.add_module(f"layer{i}", nn.Sequential(*layer))
        self.aspp = Aspp()
        hidden = _unit(HIDDEN * (len(RATES) + 2), HIDDEN)
        self.cls1 = nn.Sequential(*hidden, nn.Dropout2d(0.1), nn.Conv2d(HIDDEN, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[B, K, H, W]` of normalised images `[B, 3, H, W]`."""
        size = x.shape[2:]
        for i in range(5):
            x = self.get_submodule(f"layer{i}")(x)
        # The work upsamples with aligned corners, which suits its crops of 8 n + 1 pixels; kept for every size.
        return functional.interpolate(self.cls1(self.aspp(x)), size=tuple(size), mode="bilinear", align_corners=True)


def build(identifier: str, options: ModelOptions) -> Network:
    """The model for a dataset, with the published weights or others of that layout."""
    if identifier not in PRESETS:
        raise SegproxError(f"there is no ddcat:{identifier}; known are: {', '.join(f'ddcat:{n}' for n in PRESETS)}")
    preset = PRESETS[identifier]
    if options.checkpoint is None:
        options = dataclasses.replace(options, checkpoint=str(published(preset.checkpoint, URL)))
    module = DeepLabV3(options.num_classes or preset.classes)
    load_checkpoint(module, options, f"ddcat:{identifier}", optional=TRAINING_ONLY)
    return Network(module, {"mean": IMAGENET_MEAN, "std": IMAGENET_STD})
