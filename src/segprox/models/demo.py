"""The embedded networks: a small U-Net trained on the procedural street scenes, once plainly and once adversarially."""

from importlib import resources
from itertools import pairwise

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from segprox.data.synthetic import CLASSES
from segprox.models.segmenter import Segmenter

WIDTHS = (16, 32, 48, 64)  # channels at strides 2, 4, 8 and 16
MEAN, STD = (0.45, 0.45, 0.45), (0.22, 0.22, 0.22)


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    # Reflection at the border: zeros there would tell the network where it is, and it would call the top sky unseen.
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False, padding_mode="reflect"),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class StreetNet(nn.Module):
    """Encoder to stride 16, decoder back to stride 2 with skips: logits `[B, K, H/2, W/2]`."""

    def __init__(self, num_classes: int = len(CLASSES)) -> None:
        super().__init__()
        self.stem = _conv(3, WIDTHS[0], stride=2)
        pairs = list(pairwise(WIDTHS))
        self.down = nn.ModuleList(nn.Sequential(_conv(a, b, stride=2), _conv(b, b)) for a, b in pairs)
        self.narrow = nn.ModuleList(_conv(b, a, kernel=1) for a, b in reversed(pairs))
        self.up = nn.ModuleList(_conv(a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(WIDTHS[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits at half the size of the normalised images `x` `[B, 3, H, W]`."""
        x = self.stem(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for narrow, up, skip in zip(self.narrow, self.up, reversed(skips)):
            coarse = functional.interpolate(narrow(x), size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = up(coarse + skip)
        logits: Tensor = self.head(x)
        return logits


def load_demo(kind: str) -> Segmenter:
    """The embedded network `standard` or `robust`."""
    network = StreetNet()
    weights = resources.files("segprox.models") / "weights" / f"demo-{kind}.safetensors"
    with resources.as_file(weights) as path:
        network.load_state_dict(load_file(path))
    return Segmenter(network.eval(), mean=MEAN, std=STD)
