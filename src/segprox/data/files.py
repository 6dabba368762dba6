"""Pictures in files: reading images and labels, and changing their size."""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import AfterValidator, Field
from torch import Tensor

from segprox.errors import SegproxError

Labels = NDArray[np.int32]  # [H, W]
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # Pillow knows more, some of which start other programs
MOST_PIXELS = 178_956_970  # of an image; more than Pillow agrees to decode
SIXTEEN_BIT = ("I", "I;16", "I;16B", "I;16L", "I;16N")
# What Pillow's decoders raise at damaged files, as found by damaging them.
UNREADABLE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip


class StoredImage(Protocol):
    """A picture that is no file of its own; its text says where it is."""

    def picture(self) -> Image.Image:
        """Decode it."""


ImageLocation = Path | StoredImage


def read_image(place: ImageLocation) -> Image.Image:
    """An 8-bit RGB picture of whatever kind of picture is there.

    EXIF orientation is left alone: labels are drawn on the pixels as they are stored, and a turned image would not lie
    under them.
    """
    picture = _loaded(place)
    if picture.mode in SIXTEEN_BIT:
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() >= 1 << 16:
            raise SegproxError(f"image {place} has values beyond 16 bits; convert it to 8-bit RGB")
        picture = Image.fromarray((values >> 8).astype(np.uint8))  # Pillow keeps the high byte of 16-bit colours too
    if picture.mode == "F":
        raise SegproxError(f"image {place} holds floating-point values of unknown range; convert it to 8-bit RGB")
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")  # Pillow's advice for palettes with transparent colours
    return picture.convert("RGB")


def read_index(place: ImageLocation) -> Labels:
    """A map of class numbers `[H, W]`, as it is stored: grey or palette, 8 or 16 bits."""
    picture = _loaded(place)
    if picture.mode not in ("1", "L", "P", *SIXTEEN_BIT):
        raise SegproxError(
            f"label {place} is a picture of mode {picture.mode}, not a map of class numbers; "
            "labels are grey or palette PNGs with one number per pixel"
        )
    index: Labels = np.array(picture).astype(np.int32)
    return index


def is_coloured(place: ImageLocation) -> bool:
    """Whether a picture has colours of its own, not a number per pixel."""
    return _loaded(place).mode in ("RGB", "RGBA")


def read_colours(place: ImageLocation) -> Labels:
    """A colour picture as numbers `[H, W]`, see `colour_code`."""
    red, green, blue = np.moveaxis(np.array(_loaded(place).convert("RGB")).astype(np.int32), 2, 0)
    codes: Labels = red << 16 | green << 8 | blue
    return codes


def colour_code(colour: tuple[int, int, int]) -> int:
    """A colour as a number, as people write it in hexadecimal."""
    red, green, blue = colour
    return red << 16 | green << 8 | blue


def recode(stored: Labels, meaning: Mapping[int, int], place: ImageLocation, *, coloured: bool = False) -> Labels:
    """Labels `[H, W]` from what a file says, by what each stored value means; one without a meaning is refused.

    The message names the `place` that the values are from, and shows them as colours if they are `coloured`.
    """
    known = np.array(sorted(meaning), dtype=np.int32)
    position = np.searchsorted(known, stored).clip(max=len(known) - 1)
    strange = known[position] != stored
    if strange.any():
        value = int(stored[strange][0])
        shown = f"the colour ({value >> 16}, {value >> 8 & 255}, {value & 255})" if coloured else f"the value {value}"
        allowed = "one of its classes' colours" if coloured else f"one of {_ranges(known.tolist())}"
        raise SegproxError(f"label {place} has {shown}, which is not {allowed}; correct the file or the options")
    labels: Labels = np.array([meaning[value] for value in known.tolist()], dtype=np.int32)[position]
    return labels


def read_coded(place: ImageLocation, meaning: Mapping[int, int]) -> Labels:
    """Labels `[H, W]` from a map of class numbers that mean something else, see `recode`."""
    return recode(read_index(place), meaning, place)


def check_size(rule: str) -> str:
    """Refuse a size rule that says nothing."""
    resized((1, 1), rule)
    return rule


SizeRule = Annotated[
    str,
    AfterValidator(check_size),
    Field(description="native, short-512 (the shorter side), long-512 (the longer side) or 1024x512 (width x height)"),
]


def resized(size: tuple[int, int], rule: str) -> tuple[int, int]:
    """The width and height that a rule makes of a width and height; a size that no memory holds is refused.

    Example:
        >>> resized((500, 375), "short-512"), resized((500, 375), "long-512"), resized((500, 375), "64x32")
        ((682, 512), (512, 384), (64, 32))
    """
    if rule == "native":
        return size
    if match := re.fullmatch(r"([1-9]\d{0,9})x([1-9]\d{0,9})", rule):
        width, height = int(match[1]), int(match[2])
    elif match := re.fullmatch(r"(short|long)-([1-9]\d{0,9})", rule):
        side, wanted = (min if match[1] == "short" else max)(size), int(match[2])
        # rounded down, as torchvision's Resize does
        width, height = (wanted if length == side else max(1, int(wanted * length / side)) for length in size)
    else:
        raise ValueError("a size is native, short-512, long-512 or 1024x512 (width x height)")
    if width * height > MOST_PIXELS:
        raise SegproxError(f"an image of {width} x {height} pixels is too large: at most {MOST_PIXELS:,} are read")
    return width, height


def to_tensor(picture: Image.Image, rule: str) -> Tensor:
    """A picture resized bilinearly, with antialiasing, as floats `[3, H, W]` in [0, 1]."""
    size = resized(picture.size, rule)
    if size != picture.size:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div(255).contiguous()


def to_labels(labels: Labels, rule: str) -> Tensor:
    """Labels resized to the nearest one, int64 `[H, W]`."""
    size = resized((labels.shape[1], labels.shape[0]), rule)
    if size != labels.shape[::-1]:
        labels = np.array(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
    return torch.from_numpy(labels).long()


def _loaded(place: ImageLocation) -> Image.Image:
    try:
        if not isinstance(place, Path):
            return place.picture()
        with Image.open(place, formats=FORMATS) as picture:
            picture.load()  # decode now, so that a broken file is found here
            return picture
    except SegproxError:  # a cell has said itself what is wrong
        raise
    except FileNotFoundError:
        raise SegproxError(f"there is no file {place}; check the folder's layout") from None
    except UNREADABLE as error:
        raise SegproxError(f"cannot read {place} as a picture ({error}); replace the file or leave it out") from None


def _ranges(values: list[int]) -> str:
    """Numbers for people: runs are written from to."""
    starts = [value for value in values if value - 1 not in values]
    ends = [value for value in values if value + 1 not in values]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends))
