"""Small pictures of an attack on one image, for people to look at later: a zip of six files."""

import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from segprox.bands import EIGHT_BIT, Bands, choose_shown
from segprox.data.base import VOID_COLOUR, Colour, colours

LONGEST = 512  # side of a picture, in pixels
QUALITY = 88
OUTERMOST = (2, 98)  # percentiles of a band between which it is drawn, if it is not of 8 bits
Part = Literal["image", "adversarial", "perturbation", "label", "clean", "prediction"]
FILES: dict[Part, str] = {
    "image": "image.webp",
    "adversarial": "adversarial.webp",
    "perturbation": "perturbation.webp",  # grey is zero, black and white are minus and plus its linf norm
    "label": "label.png",
    "clean": "clean.png",
    "prediction": "prediction.png",
}


def encode_preview(
    image: Tensor,
    adversarial: Tensor,
    maps: dict[Part, Tensor],
    palette: Sequence[Colour],
    num_classes: int,
    bands: Bands = EIGHT_BIT,
) -> bytes:
    """Pack an image and its perturbed one, `[C, H, W]` in [0, 1], with the maps of classes `[H, W]` in colours.

    The maps are `label`, `clean` and `prediction`; what is no class in them is drawn as void. Of other images than
    8-bit pictures, the values that the image has are stretched to the whole range: many use a small part of it.
    """
    difference = adversarial - image
    scale = difference.abs().max().clamp(min=1e-12)
    pictures = {"image": image, "adversarial": adversarial, "perturbation": 0.5 + 0.5 * difference / scale}
    pictures = {part: choose_shown(values, bands.shown) for part, values in pictures.items()}
    if not bands.eight_bit:
        seen = _stretch(pictures["image"])
        pictures |= {part: seen(pictures[part]) for part in ("image", "adversarial")}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:  # its parts are compressed already
        for part, file in FILES.items():
            drawn = _picture(pictures[part]) if part in pictures else _map(maps[part], palette, num_classes)
            content = io.BytesIO()
            if file.endswith("webp"):
                drawn.save(content, format="webp", quality=QUALITY)
            else:
                drawn.save(content, format="png", optimize=True)
            # A fixed date: the same attack gives the same bytes.
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), content.getvalue())
    return stream.getvalue()


def decode_preview(content: bytes) -> dict[Part, bytes]:
    """The files of a preview: WebP and PNG pictures."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > len(content):  # previews are stored as they are
            raise ValueError("the preview holds more than its own bytes")
        return {part: archive.read(file) for part, file in FILES.items()}


def _size(height: int, width: int) -> tuple[int, int]:
    share = min(1.0, LONGEST / max(height, width))
    return max(1, round(width * share)), max(1, round(height * share))


def _stretch(image: Tensor) -> Callable[[Tensor], Tensor]:
    """What brings the values of an image `[3, H, W]`, but for the outermost, to [0, 1], band by band."""
    flat = np.percentile(image.flatten(1).cpu().double().numpy(), OUTERMOST, axis=1)
    low, high = (torch.from_numpy(ends).to(image).view(-1, 1, 1) for ends in flat)
    return lambda values: (values - low) / (high - low).clamp(min=1e-6)


def _picture(values: Tensor) -> Image.Image:
    pixels = values.mul(255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels)
    return picture.resize(_size(*pixels.shape[:2]), Image.Resampling.BILINEAR)


def _map(labels: Tensor, palette: Sequence[Colour], num_classes: int) -> Image.Image:
    """A picture with the palette of the classes; more than 255 of them share the last colours."""
    known = (labels >= 0) & (labels < num_classes)
    index = torch.where(known, labels.clamp(max=254), 255).to(torch.uint8).cpu().numpy()
    drawn = Image.fromarray(index)
    shown = [*palette, *colours(256)[len(palette) :]][:255]
    drawn.putpalette([value for colour in [*shown, VOID_COLOUR] for value in colour])
    return drawn.resize(_size(*index.shape), Image.Resampling.NEAREST)
