"""Images as files: lossless floats, and 8-bit PNG."""

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save
from torch import Tensor


def to_bytes(image: Tensor) -> Tensor:
    """The nearest 8-bit image, uint8."""
    return image.mul(255).round_().clamp_(0, 255).to(torch.uint8)


def _encode_float(image: Tensor) -> bytes:
    return save({"image": image[0].float().cpu().contiguous()})


def _decode_float(content: bytes) -> Tensor:
    return load(content)["image"][None]


def _encode_png(image: Tensor) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(to_bytes(image)[0].permute(1, 2, 0).cpu().numpy()).save(stream, format="png")
    return stream.getvalue()


def _decode_png(content: bytes) -> Tensor:
    pixels = np.array(Image.open(io.BytesIO(content), formats=["PNG"]).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


ENCODERS: dict[str, Callable[[Tensor], bytes]] = {"float": _encode_float, "png": _encode_png}
DECODERS: dict[str, Callable[[bytes], Tensor]] = {"float": _decode_float, "png": _decode_png}
SUFFIXES = {"float": "safetensors", "png": "png"}
