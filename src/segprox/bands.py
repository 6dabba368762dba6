"""What the values of images mean: the range of each band, whether files hold whole numbers, which bands are drawn."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

from segprox.errors import SegproxError

Range = tuple[tuple[float, float], ...]  # lowest and highest value: one pair for all bands, or one for each

WHOLE = ("uint8", "uint16", "int16", "int32")  # kinds of whole numbers, the shortest first


@dataclass(frozen=True)
class Bands:
    """The meaning of a dataset's values; images are shares of the range, float `[C, H, W]` in [0, 1].

    Example:
        >>> bands = Bands(((0, 1.5),), whole=False)
        >>> bands.shares(np.full((6, 1, 1), 0.75)).flatten().tolist()
        [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
        >>> Bands().steps, bands.steps
        (255, None)
    """

    range: Range = ((0.0, 255.0),)
    whole: bool = True  # whether files hold whole numbers, to which a perturbed image must be rounded
    shown: tuple[int, ...] = ()  # the band that is drawn, or those drawn as red, green and blue, counted from 1
    declared: bool = False  # whether someone said so: then networks are fed values in this range

    @property
    def fed(self) -> Range | None:
        """The range of values that networks expect, unless they say it themselves; None: shares of the range."""
        return self.range if self.declared else None

    @property
    def eight_bit(self) -> bool:
        """Whether images are what nearly all are: pictures of 8 bits."""
        return self.whole and self.range == ((0.0, 255.0),)

    @property
    def steps(self) -> int | None:
        """How many steps files divide the range into; None for floats, and where bands differ."""
        widths = {high - low for low, high in self.range}
        return int(widths.pop()) if self.whole and len(widths) == 1 else None

    @cached_property
    def _low_and_width(self) -> tuple[Tensor, Tensor]:
        ends = torch.tensor(self.range, dtype=torch.float64)
        return ends[:, 0].view(-1, 1, 1), (ends[:, 1] - ends[:, 0]).view(-1, 1, 1)

    @property
    def dtype(self) -> np.dtype[Any]:
        """What a file holds: float32, or the shortest whole numbers that the range fits in."""
        if not self.whole:
            return np.dtype(np.float32)
        low, high = min(low for low, _ in self.range), max(high for _, high in self.range)
        fitting = (kind for kind in WHOLE if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
        return np.dtype(next(fitting, "int64"))

    def shares(self, values: NDArray[Any]) -> Tensor:
        """Values as a file has them, `[C, H, W]`, as shares of the range, float64."""
        low, width = self._low_and_width
        return (torch.from_numpy(values.astype(np.float64)) - low).div_(width)

    def stored(self, image: Tensor) -> NDArray[Any]:
        """What a file holds of an image `[C, H, W]` of shares: floats, or the nearest whole numbers in the range."""
        low, width = (part.to(image) for part in self._low_and_width)
        values = image * width + low
        if self.whole:
            values = values.round_().clamp_(low.ceil(), (low + width).floor())
        return values.cpu().numpy().astype(self.dtype)

    def rounded(self, images: Tensor) -> Tensor:
        """The nearest images `[B, C, H, W]` that files hold."""
        return torch.stack([self.shares(self.stored(image)) for image in images]).to(images)

    def check(self, values: NDArray[Any], place: object) -> None:
        """Refuse an image `[C, H, W]` whose values do not fit, saying which band and what to declare."""
        count = len(values)
        if len(self.range) not in (1, count):
            raise SegproxError(f"image {place} has {count} bands but range= declares {len(self.range)}; declare each")
        if max(self.shown, default=0) > count:
            raise SegproxError(f"image {place} has {count} bands, so bands= cannot name band {max(self.shown)}")
        if np.issubdtype(values.dtype, np.integer) != self.whole:
            kind = "whole numbers" if self.whole else "floats"
            raise SegproxError(f"image {place} holds {values.dtype} but others hold {kind}; keep them in folders apart")
        for band, (plane, (low, high)) in enumerate(zip(values, self.range * (count // len(self.range))), start=1):
            lowest, highest = plane.min(), plane.max()
            if not (lowest >= low and highest <= high):  # also true for NaN
                raise SegproxError(f"band {band} of image {place} {_misfit(plane, low, high)}")


EIGHT_BIT = Bands()


def bands_of(dataset: object) -> Bands:
    """What the values of a dataset mean; one that does not say it has pictures of 8 bits."""
    bands = getattr(dataset, "bands", None)
    return bands if isinstance(bands, Bands) else EIGHT_BIT


def choose_shown(image: Tensor, shown: tuple[int, ...] = ()) -> Tensor:
    """The bands of an image `[C, H, W]` that are drawn, `[3, H, W]`: those named, or the first ones.

    Example:
        >>> choose_shown(torch.arange(6.0).view(6, 1, 1), (4, 3, 2)).flatten()
        tensor([3., 2., 1.])
    """
    drawn = [band - 1 for band in shown] or ([0, 1, 2] if len(image) >= 3 else [0])
    return image[drawn * (3 // len(drawn))]


def _misfit(plane: NDArray[Any], low: float, high: float) -> str:
    missing = float(np.mean(~np.isfinite(plane)))
    if missing:
        return f"is NaN or infinite at {missing:.1%} of its pixels: declare nodata=nan if they hold no data"
    suggested = f"{min(low, float(plane.min())):g}:{max(high, float(plane.max())):g}"
    return (
        f"reaches from {plane.min():g} to {plane.max():g}, which is not within its declared range of {low:g} to "
        f"{high:g}: declare a wider one for the band, such as {suggested}, or nodata= if these pixels hold no data"
    )


def _pairs(value: Any) -> Any:
    """Reads "0,1.5", for all bands, and "0:1.5,0:1.27", for one after the other."""
    if isinstance(value, str):
        value = [part.split(":") for part in value.split(",")] if ":" in value else value.split(",")
    if isinstance(value, list | tuple) and len(value) == 2 and not any(isinstance(end, list | tuple) for end in value):
        return (tuple(value),)
    return value


def _check_range(value: Range) -> Range:
    for low, high in value:
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError("a range is its lowest and its highest value, such as 0,1.5 or 0:1.5,0:1.27 for two bands")
    return value


ValueRange = Annotated[Range, BeforeValidator(_pairs), AfterValidator(_check_range), Field(min_length=1)]
_RANGES: TypeAdapter[Range] = TypeAdapter(ValueRange)


def read_range(value: Any) -> Range:
    """A range from what people write.

    Example:
        >>> read_range((0, 1.5)), read_range("0:1.5,0:1.27")
        (((0.0, 1.5),), ((0.0, 1.5), (0.0, 1.27)))
    """
    try:
        return _RANGES.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SegproxError(f"range cannot be {value!r}: {reason}") from None
