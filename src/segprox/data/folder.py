"""The plainest layout: a folder of images and one of labels."""

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.data.base import OPTIONS
from segprox.data.classes import FILE, OpenClassSource
from segprox.data.listing import Entry, PictureDataset, PictureSource, pictures_in
from segprox.errors import SegproxError


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Folder(OpenClassSource):
    """`images/NAME.jpg` and `labels/NAME.png`, or `images/SPLIT/...` and `labels/SPLIT/...`."""

    layout: ClassVar[str] = f"images and labels (PNGs of class numbers, same names), {FILE} if you like"

    split: Annotated[str, Field(description="a folder within images and labels")] = ""

    def open(self) -> PictureDataset:
        """Find the images."""
        labels = self.root / "labels" / self.split
        if not labels.is_dir():
            raise SegproxError(f"there is no folder {labels}; for images without labels say images:{self.root}")
        images = pictures_in(self.root / "images" / self.split)
        return self.pictures(self.choose([Entry(image.stem, image, labels / f"{image.stem}.png") for image in images]))


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Images(PictureSource):
    """A folder of images without labels: what the model sees in them takes their place."""

    layout: ClassVar[str] = "a folder of images without labels; the model's own predictions take their place"

    def open(self) -> PictureDataset:
        """Find the images."""
        entries = [Entry(image.stem, image) for image in pictures_in(self.root)]
        return PictureDataset(self.choose(entries), classes=(), palette=(), read_label=None, size=self.size)
