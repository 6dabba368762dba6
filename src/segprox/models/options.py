"""What can be asked of any model that is loaded by name."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from segprox.bands import ValueRange
from segprox.data.base import MOST_CLASSES
from segprox.devices import best_device
from segprox.errors import SegproxError
from segprox.models.segmenter import OutputKind
from segprox.models.windows import MOST_SCALE
from segprox.text import from_home

Precision = Literal["float32", "float64", "bfloat16", "float16"]
# How images are fed and logits are read: keyword arguments of `Segmenter`. What is made as one has its own of these,
PREPROCESSING = ("multiple", "resize", "mean", "std", "bgr", "scale_255", "range", "binary", "output")
USE = ("window", "stride", "tta")  # and can be used in these ways all the same.
WHOLE = "whole"  # in place of a window: none, whatever the model's source says
MOST_SIDE = 1 << 16  # no picture is wider


def _entries(value: Any) -> Any:
    """Reads "0.5,0.5,0.5"."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def _path_text(value: Any) -> Any:
    """Reads a path as its text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _height_width(value: Any) -> Any:
    """Reads "512x1024"."""
    return tuple(value.split("x")) if isinstance(value, str) else value


def _sides(value: Any) -> Any:
    """Reads "768" and "512x768"; `whole` is left as it is."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return (value, value)
    return value if value == WHOLE else _height_width(value)


Numbers = Annotated[tuple[float, ...], BeforeValidator(_entries)]
Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]
HeightWidth = Annotated[tuple[Side, Side], BeforeValidator(_height_width)]
Scale = Annotated[float, Field(gt=0, le=MOST_SCALE)]
Augmentations = Annotated[tuple[Scale | Literal["flip"], ...], BeforeValidator(_entries)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ModelOptions:
    """Options of a model's name; None leaves a choice to the model's source."""

    name: Annotated[str | None, Field(min_length=1, description="a short title for tables, figures and pages")] = None
    checkpoint: Annotated[
        str | None, Field(description="file of weights, or `random` for untrained ones"), BeforeValidator(_path_text)
    ] = None
    num_classes: Annotated[int | None, Field(ge=1, le=MOST_CLASSES, description="number of classes")] = None
    device: Annotated[
        str, Field(description="cpu, cuda, cuda:1, mps; auto: the first of cuda, mps, cpu that there is")
    ] = "auto"
    precision: Annotated[
        Precision, Field(description="precision of the network; successes are verified in float32 whatever it is")
    ] = "float32"
    channels_last: Annotated[bool, Field(description="memory format of weights and images")] = False
    compile: Annotated[bool, Field(description="torch.compile the network and small pieces of attacks")] = False
    lean: Annotated[
        bool | Literal["auto", "recompute"],
        Field(
            description="hold only what the image's gradient needs; auto: if that is much less; recompute: even less, "
            "by computing blocks again in the backward; not with compile"
        ),
    ] = False
    fold: Annotated[bool, Field(description="multiply batch norms into the convolutions before them")] = False
    multiple: Annotated[int | None, Field(ge=1, le=MOST_SIDE, description="pad images to multiples of this")] = None
    resize: Annotated[HeightWidth | None, Field(description="the only size the network takes, as 512x1024")] = None
    window: Annotated[
        tuple[Side, Side] | Literal["whole"] | None,
        Field(description="use the network by windows, as 1024x1024; whole: by none, whatever its source says"),
        BeforeValidator(_sides),
    ] = None
    stride: Annotated[
        tuple[Side, Side] | None,
        Field(description="the step from window to window, as 768 or 768x512"),
        BeforeValidator(_sides),
    ] = None
    tta: Annotated[
        Augmentations | None, Field(description="use the network at these scales and mirrored, as 0.75,1,1.25,flip")
    ] = None
    mean: Annotated[Numbers | None, Field(description="normalisation, per channel")] = None
    std: Annotated[Numbers | None, Field(description="normalisation, per channel")] = None
    bgr: Annotated[bool | None, Field(description="the network expects blue first")] = None
    scale_255: Annotated[bool | None, Field(description="the network expects 0..255")] = None
    range: Annotated[
        ValueRange | None,
        Field(description="the network expects values in this range: 0,1.5, or 0:1.5,0:1.27 for two bands"),
    ] = None
    binary: Annotated[bool | None, Field(description="one channel: the logit of class 1")] = None
    output: Annotated[OutputKind | None, Field(description="what the network returns")] = None

    @property
    def random(self) -> bool:
        """Whether untrained weights were asked for."""
        return self.checkpoint == "random"

    @property
    def checkpoint_file(self) -> Path | None:
        """The file of weights that was asked for."""
        return None if self.checkpoint is None or self.random else from_home(self.checkpoint)

    def preprocessing(self) -> dict[str, Any]:
        """What was asked for of how the network is fed and read: keyword arguments of `Segmenter`."""
        asked = {name: getattr(self, name) for name in (*PREPROCESSING, *USE) if getattr(self, name) is not None}
        if "window" in asked:  # a source's own stride belongs to its own window
            asked = {"stride": None, **asked, "window": None if self.window == WHOLE else self.window}
        return asked

    def refuse(self, *names: str, by: str) -> None:
        """Refuse options that cannot be applied: ignoring them would give figures of another model than was meant.

        The sentence begins with `by`: who cannot apply them, and why.
        """
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise SegproxError(f"{by}, so leave out {', '.join(given)}")

    def torch_device(self) -> torch.device:
        """The device, `auto` resolved."""
        if self.device != "auto":
            return torch.device(self.device)
        return best_device()

    def check_device(self) -> None:
        """Refuse a device that cannot be used."""
        try:
            torch.empty(0, device=self.torch_device())
        except (RuntimeError, AssertionError, ImportError) as error:
            raise SegproxError(f"device {self.device!r} cannot be used: {str(error).splitlines()[0]}") from None
        if self.torch_device().type == "meta":
            raise SegproxError("device 'meta' cannot be used: it computes nothing")
