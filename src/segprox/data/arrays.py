"""Images of any number of bands: NumPy arrays, TIFF and 16-bit PNG, with every value as it is stored."""

import math
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from segprox.bands import Bands, Range
from segprox.data.files import FORMATS, MOST_PIXELS, UNREADABLE, ImageLocation, resized
from segprox.errors import SegproxError
from segprox.optional import require

Array = NDArray[Any]  # [C, H, W]
ARRAYS, TIFFS = (".npy", ".npz"), (".tif", ".tiff")
PNG_DEPTH = 24  # the byte of a PNG that says how many bits a value has


def read_array(path: Path) -> Array:
    """All bands of an image, `[C, H, W]`, whole numbers or floats.

    Of an array of three axes the shortest of first and last is that of the bands.
    """
    try:
        values = _stored(path)
    except FileNotFoundError:
        raise SegproxError(f"there is no file {path}; check the folder's layout") from None
    except (*UNREADABLE, RuntimeError, zipfile.BadZipFile) as error:
        if isinstance(error, SegproxError):
            raise
        reason = " ".join(str(error).split())
        raise SegproxError(f"cannot read {path} as an image ({reason}); replace the file or leave it out") from None
    if values.dtype == np.bool_ or not (
        np.issubdtype(values.dtype, np.integer) or np.issubdtype(values.dtype, np.floating)
    ):
        raise SegproxError(f"image {path} holds {values.dtype}, not whole numbers or floats")
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise SegproxError(f"image {path} has the shape {list(values.shape)} but should have [bands, height, width]")
    if values.ndim == 2:
        return values[None]
    first, last = values.shape[0], values.shape[2]
    if first == last and path.suffix.lower() in ARRAYS:
        raise SegproxError(f"which axis of image {path} are its bands? Its shape is {list(values.shape)}")
    return values if first < last or path.suffix.lower() in TIFFS else np.ascontiguousarray(np.moveaxis(values, 2, 0))


def refuse_undeclared(path: Path) -> None:
    """Refuse a file that is no picture of 8 or 16 bits, saying what it holds."""
    if path.suffix.lower() in TIFFS:
        try:
            with Image.open(path, formats=FORMATS) as picture:
                if picture.mode != "F" and getattr(picture, "n_frames", 1) == 1:
                    return
        except UNREADABLE:
            pass  # more bands than a picture has
    elif path.suffix.lower() not in ARRAYS:
        return
    values = read_array(path)
    known = values[np.isfinite(values)]
    span = f"from {known.min():g} to {known.max():g}" if known.size else "that are all NaN or infinite"
    raise SegproxError(
        f"image {path} holds {len(values)} band{'s' * (len(values) > 1)} of {values.dtype} {span}: declare which "
        "values are possible, as in range=0,1.5 for all bands, or range=0:1.5,0:1.27 for one after the other"
    )


def resize_array(values: Array, rule: str) -> Array:
    """Bands `[C, H, W]` resized bilinearly, with antialiasing; whole numbers stay whole."""
    size = resized((values.shape[2], values.shape[1]), rule)
    if size == values.shape[:0:-1]:
        return values
    planes = [Image.fromarray(plane.astype(np.float32)).resize(size, Image.Resampling.BILINEAR) for plane in values]
    changed: Array = np.stack([np.asarray(plane) for plane in planes])
    return np.rint(changed).astype(values.dtype) if np.issubdtype(values.dtype, np.integer) else changed


def _stored(path: Path) -> Array:
    suffix = path.suffix.lower()
    if suffix in ARRAYS:
        return _numpy_array(path)
    if suffix in TIFFS:
        return _tiff(path)
    with path.open("rb") as file:
        head = file.read(PNG_DEPTH + 1)
    if suffix == ".png" and head[PNG_DEPTH:] == b"\x10":
        with Image.open(path, formats=FORMATS) as picture:
            if picture.mode.startswith("I"):  # grey; of colours Pillow keeps the high bytes only
                return np.asarray(picture).astype(np.uint16)
        return np.asarray(require("imagecodecs", "geo").png_decode(path.read_bytes()))
    with Image.open(path, formats=FORMATS) as picture:
        return np.asarray(picture.convert("RGB") if picture.mode == "P" else picture)


def _numpy_array(path: Path) -> Array:
    with path.open("rb") as file:
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        names = list(found.files)
        if len(names) > 1 and "image" not in names:
            raise SegproxError(f"{path} holds {', '.join(names)}: call the array of the image 'image'")
        array: Array = found["image" if "image" in names else names[0]]
        return array


def _tiff(path: Path) -> Array:
    """The bands of a TIFF: samples of a page, or pages of one size; smaller versions of it are passed over."""
    tifffile = require("tifffile", "geo")
    with tifffile.TiffFile(path) as file:
        series = [each for each in file.series if not each.keyframe.is_reduced]
        shapes = {each.shape for each in series}
        if len(shapes) != 1 or (len(series) > 1 and len(series[0].shape) != 2):
            raise SegproxError(f"{path} holds {len(series)} pictures of several sizes; keep one of them")
        first = series[0]
        if first.size > MOST_PIXELS * 16:
            raise SegproxError(f"{path} holds {first.size:,} values, which is more than is read")
        axes = first.axes.replace("S", "C")
        values = np.stack([each.asarray() for each in series]) if len(series) > 1 else first.asarray()
    if values.ndim == 3 and axes.endswith("C"):
        values = np.moveaxis(values, 2, 0)
    return np.ascontiguousarray(values)


@dataclass(frozen=True)
class DeclaredValues:
    """What someone says of the values in files; it is needed for all but 8-bit pictures."""

    range: Range
    shown: tuple[int, ...] = ()
    nodata: float | None = None

    def bands(self, places: Iterable[ImageLocation]) -> Bands:
        """What values mean in these files; the first that can be read tells whether they are whole numbers."""
        for place in places:
            with suppress(SegproxError):
                whole = np.issubdtype(_read(place).dtype, np.integer)
                return Bands(self.range, whole, self.shown, declared=True)
        return Bands(self.range, shown=self.shown, declared=True)

    def read(self, place: ImageLocation, bands: Bands, rule: str) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """An image `[C, H, W]` as shares of the range, its width and height as stored, and pixels without data."""
        values = _read(place)
        size, missing = (values.shape[2], values.shape[1]), None
        if self.nodata is not None:
            absent = np.isnan(values) if math.isnan(self.nodata) else values == self.nodata
            missing = torch.from_numpy(absent.any(0))
            # What the network sees there: the value itself where it is one, else the least.
            ends = np.array(bands.range)
            inside = (ends[:, 0] <= self.nodata) & (self.nodata <= ends[:, 1])
            filling = np.where(inside, self.nodata, ends[:, 0]).reshape(-1, 1, 1)
            values = np.where(absent, filling, values).astype(values.dtype)
        bands.check(values, place)
        return bands.shares(resize_array(values, rule)).float().clamp_(0, 1), size, missing


def _read(place: ImageLocation) -> Array:
    if not isinstance(place, Path):
        raise SegproxError(f"{place} is no file, so range= cannot be applied to it")
    return read_array(place)
