"""The plainest layout: a folder of images and one of labels."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from segprox.bands import ValueRange
from segprox.data.arrays import ARRAYS, DeclaredValues, refuse_undeclared
from segprox.data.base import NODATA, OPTIONS
from segprox.data.classes import FILE, OpenClassSource
from segprox.data.listing import Entry, PictureDataset, PictureSource, pictures_in
from segprox.errors import SegproxError

LABELS = (".png", ".tif", ".tiff")


def _read_bands(value: Any) -> Any:
    """Reads "4,3,2"."""
    value = str(value) if isinstance(value, int) else value
    return tuple(value.split(",")) if isinstance(value, str) else value


def _one_or_three(bands: tuple[int, ...]) -> tuple[int, ...]:
    if len(bands) not in (1, 3):
        raise ValueError("pictures show one band, or three as red, green and blue, such as 4,3,2")
    return bands


Band = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class BandOptions(PictureSource):
    """The options of images that are no 8-bit pictures."""

    range: Annotated[
        ValueRange | None,
        Field(
            description="the values that are possible, 0,1.5 for all bands or 0:1.5,0:1.27 for one after the other; "
            "needed for all but 8-bit pictures, of which every band is then kept"
        ),
    ] = None
    bands: Annotated[
        tuple[Band, ...] | None,
        BeforeValidator(_read_bands),
        AfterValidator(_one_or_three),
        Field(description="the bands that pictures show as red, green and blue, from 1; the first three if left out"),
    ] = None
    nodata: Annotated[
        float | None, Field(description="the value of pixels that hold no data (nan is one): never counted nor changed")
    ] = None

    def images_in(self, folder: Path) -> list[Path]:
        """The images in a folder: pictures, or where there are none NumPy arrays."""
        self.declared()  # which refuses what does not go together
        images = pictures_in(folder) or pictures_in(folder, suffixes=ARRAYS)
        if images and self.range is None:
            refuse_undeclared(images[0])
        return images

    def declared(self) -> DeclaredValues | None:
        """What the options say of values."""
        if self.range is None:
            given = [name for name in ("bands", "nodata") if getattr(self, name) is not None]
            if given:
                raise SegproxError(f"{' and '.join(given)} can only be given beside range=, such as range=0,1.5")
            return None
        if self.nodata is not None and self.size != "native":
            raise SegproxError(f"size={self.size} would mix pixels with and without data: leave out size or nodata")
        return DeclaredValues(self.range, self.bands or (), self.nodata)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Folder(BandOptions, OpenClassSource):
    """`images/NAME.jpg` and `labels/NAME.png`, or `images/SPLIT/...` and `labels/SPLIT/...`."""

    layout: ClassVar[str] = f"images and labels (PNGs of class numbers, same names), {FILE} if you like"

    split: Annotated[str, Field(description="a folder within images and labels")] = ""

    def open(self) -> PictureDataset:
        """Find the images."""
        labels = self.root / "labels" / self.split
        if not labels.is_dir():
            raise SegproxError(f"there is no folder {labels}; for images without labels say images:{self.root}")
        images = self.images_in(self.root / "images" / self.split)
        return self.pictures(self.choose([Entry(image.stem, image, _label(labels, image.stem)) for image in images]))

    def pictures(self, entries: tuple[Entry, ...]) -> PictureDataset:
        """The dataset of these entries, with what is declared of their values."""
        return with_values(super().pictures(entries), self.declared())


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Images(BandOptions):
    """A folder of images without labels: what the model sees in them takes their place."""

    layout: ClassVar[str] = "a folder of images without labels; the model's own predictions take their place"

    def open(self) -> PictureDataset:
        """Find the images."""
        entries = [Entry(image.stem, image) for image in self.images_in(self.root)]
        found = PictureDataset(self.choose(entries), classes=(), palette=(), read_label=None, size=self.size)
        return with_values(found, self.declared())


def with_values(dataset: PictureDataset, declared: DeclaredValues | None) -> PictureDataset:
    """The dataset with what is declared of its values; pixels without data have a label of their own."""
    without_data = () if declared is None or declared.nodata is None else (NODATA,)
    return replace(dataset, declared=declared, ignore=(*dataset.ignore, *without_data))


def _label(folder: Path, name: str) -> Path:
    """The file of a label: a PNG, or a TIFF if there is one."""
    files = [folder / f"{name}{suffix}" for suffix in LABELS]
    return next((file for file in files[1:] if file.is_file() and not files[0].is_file()), files[0])
