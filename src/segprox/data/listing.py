"""Which pictures make a dataset: finding them, choosing among them, and reading them one at a time."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from segprox.bands import EIGHT_BIT, Bands
from segprox.data.arrays import ARRAYS, DeclaredValues
from segprox.data.base import NODATA, OPTIONS, VOID, Colour, DatasetSource, Sample
from segprox.data.files import ImageLocation, Labels, SizeRule, read_image, to_labels, to_tensor
from segprox.errors import SegproxError
from segprox.text import from_home, is_file, is_folder, read_text

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


class Entry(NamedTuple):
    """A sample that has not been read."""

    name: str
    image: ImageLocation
    label: ImageLocation | None = None


@dataclass(frozen=True, eq=False)
class PictureDataset:
    """A dataset of pictures, read one at a time."""

    entries: tuple[Entry, ...]
    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    read_label: Callable[[ImageLocation], Labels] | None  # None: the pictures have no labels
    size: str = "native"
    ignore: tuple[int, ...] = (VOID,)
    declared: DeclaredValues | None = None  # None: 8-bit pictures

    @cached_property
    def bands(self) -> Bands:
        """What values mean; whether they are whole is seen in the first image that can be read."""
        if self.declared is None:
            return EIGHT_BIT
        return self.declared.bands(entry.image for entry in self.entries)

    @property
    def labelled(self) -> bool:
        """Whether there are true labels."""
        return self.read_label is not None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The samples' names."""
        return tuple(entry.name for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        entry = self.entries[index]
        image, stored_size, nodata = self._read(entry.image)
        label = torch.full(image.shape[1:], VOID)
        if self.read_label is not None and entry.label is not None:
            labels = self.read_label(entry.label)
            if labels.shape[::-1] != stored_size:
                raise SegproxError(
                    f"label {entry.label} is {labels.shape[1]} x {labels.shape[0]} pixels but its image {entry.image} "
                    f"is {stored_size[0]} x {stored_size[1]}; they must have the same size"
                )
            label = to_labels(labels, self.size)
        return Sample(entry.name, image, label if nodata is None else label.masked_fill_(nodata, NODATA))

    def _read(self, place: ImageLocation) -> tuple[Tensor, tuple[int, int], Tensor | None]:
        """An image, its width and height as it is stored, and which of its pixels hold no data, if that is declared."""
        if self.declared is not None:
            return self.declared.read(place, self.bands, self.size)
        picture = read_image(place)
        return to_tensor(picture, self.size), picture.size, None


def slice_of(text: str) -> slice:
    """A subset as text, read: a number or a slice."""
    if re.fullmatch(r"[1-9]\d*", text):
        return slice(int(text))
    if not re.fullmatch(r"(-?\d+)?:(-?\d+)?(:(-?\d+)?)?", text):
        raise ValueError("a subset is a number (the first so many) or a slice such as 0:50 or ::10")
    start, stop, step = (int(part) if part else None for part in [*text.split(":"), ""][:3])
    if step is not None and step < 1:
        raise ValueError("the step of a slice must be at least 1")
    return slice(start, stop, step)


def _check_subset(text: str) -> str:
    slice_of(text)
    return text


def _split_ids(value: Any) -> Any:
    """Names from text: joined by commas, or the lines of a file."""
    if not isinstance(value, str | Path):
        return value
    if Path(value).suffix == ".txt" or is_file(value):
        lines = (line.strip() for line in read_text(Path(value)).splitlines())
        return [plain_name(line) for line in lines if line]
    return [plain_name(part.strip()) for part in str(value).split(",") if part.strip()]


Subset = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    AfterValidator(_check_subset),
    Field(description="a number (the first so many images) or a slice such as 0:50 or ::10"),
]
Ids = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(_split_ids),
    Field(description="only these images: names joined by commas, or a .txt file with one per line"),
]


def _check_root(root: Path) -> Path:
    root = from_home(root)  # which leaves the home of nobody as it is
    if not is_folder(root):
        raise ValueError("there is no such folder")
    return root


Root = Annotated[Path, AfterValidator(_check_root), Field(description="the folder the dataset is in")]


@options_class(frozen=True, kw_only=True, config=OPTIONS)
class PictureSource(DatasetSource):
    """A source of pictures in a folder, with the options that all of them have."""

    root: Root
    size: SizeRule = "native"
    subset: Subset = ":"
    ids: Ids = None

    def choose(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        """The entries that the options leave; the order is that of `entries`, or of the ids."""
        if not entries:
            raise SegproxError(f"there are no images of this dataset in {self.root}; check its layout and split")
        by_name = {entry.name: entry for entry in entries}
        _refuse_repeats((entry.name for entry in entries), by_name)
        chosen = list(entries)
        if self.ids is not None:
            _refuse_repeats(self.ids, by_name)
            for name in self.ids:
                if name not in by_name:
                    raise SegproxError(
                        f"there is no image {name!r} in {self.root}; names are such as {entries[0].name!r}"
                    )
            chosen = [by_name[name] for name in self.ids]
        subset = tuple(chosen[slice_of(self.subset)])
        if not subset:
            raise SegproxError(f"subset {self.subset!r} leaves none of the {len(chosen)} images in {self.root}")
        for entry in subset:
            for what, place in (("image", entry.image), ("label", entry.label)):
                if isinstance(place, Path) and not place.is_file():
                    raise SegproxError(f"the {what} {place} is missing; add it, or leave {entry.name!r} out with ids")
        return subset


def _refuse_repeats(names: Iterable[str], by_name: dict[str, Entry]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            where = f", as in {by_name[name].image}" if name in by_name else ""
            raise SegproxError(f"the image name {name!r} occurs {count} times{where}; every name must be unique")


def plain_name(text: str) -> str:
    """A file's name without its folder and the ending of a picture."""
    path = Path(text)
    return path.stem if path.suffix.lower() in (*SUFFIXES, *ARRAYS) else path.name


def pictures_in(folder: Path, ending: str = "", suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The pictures in a folder whose name (without .png and the like) ends so, sorted by name."""
    if not folder.is_dir():
        raise SegproxError(f"there is no folder {folder}; check the dataset's root and split")
    found = (path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.stem.endswith(ending))
    # hidden files such as ._a.png, which some systems leave behind, are no pictures
    return sorted((path for path in found if not path.name.startswith(".")), key=lambda path: path.name)


def read_list(path: Path) -> list[str]:
    """The names in a list of a split: the first word of each line, which may be a path."""
    lines = [line.split() for line in read_text(path).splitlines()]
    return [plain_name(words[0]) for words in lines if words]


def first_folder(candidates: Sequence[Path], having: str, what: str) -> Path:
    """The first of some folders that has something in it."""
    for folder in candidates:
        if (folder / having).is_dir():
            return folder
    raise SegproxError(
        f"there is no {having} in {candidates[0]}, so it is not {what}; see docs/how-to/your-data.md for layouts"
    )
