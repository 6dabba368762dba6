"""Images as files: lossless floats, and what a dataset's own files would hold, as PNG or as a NumPy array."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save
from torch import Tensor

from segprox.bands import EIGHT_BIT, Bands

SUFFIXES = {"float": "safetensors", "png": "png", "npy": "npy"}


def file_kinds(kept: Sequence[str], channels: int, bands: Bands = EIGHT_BIT) -> list[str]:
    """The formats in which images are written: float, and for png, where no PNG holds all bands as they are, npy.

    Example:
        >>> file_kinds(["png", "preview", "float"], 3), file_kinds(["png"], 6)
        (['float', 'png'], ['npy'])
    """
    as_png = (bands.dtype == np.uint8 and channels in (1, 3)) or (bands.dtype == np.uint16 and channels == 1)
    kinds = {"float": "float", "png": "png" if as_png else "npy"}
    return [kind for name, kind in kinds.items() if name in kept]


def encode(kind: str, image: Tensor, bands: Bands = EIGHT_BIT) -> bytes:
    """An image `[C, H, W]` as the content of a file: shares of the range (float), or values as a dataset has them."""
    if kind == "float":
        return save({"image": image.float().cpu().contiguous()})
    stream, values = io.BytesIO(), bands.stored(image)
    if kind == "npy":
        np.save(stream, values, allow_pickle=False)
    else:
        Image.fromarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0)).save(stream, format="png")
    return stream.getvalue()


def decode(kind: str, content: bytes, bands: Bands = EIGHT_BIT) -> Tensor:
    """The image `[C, H, W]` in a file, as shares of the range."""
    if kind == "float":
        return load(content)["image"]
    if kind == "npy":
        values = np.load(io.BytesIO(content), allow_pickle=False)
    else:
        values = np.array(Image.open(io.BytesIO(content), formats=["PNG"]))
        values = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    return bands.shares(values).to(torch.float32).clamp_(0, 1)
