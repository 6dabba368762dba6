"""ADE20K as in the scene parsing challenge: 150 classes."""

import csv
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.data.base import OPTIONS, VOID, colours
from segprox.data.files import read_coded
from segprox.data.listing import Entry, PictureDataset, PictureSource, first_folder, pictures_in
from segprox.errors import SegproxError
from segprox.text import read_text

COUNT = 150
MEANING = {0: VOID, **{k + 1: k for k in range(COUNT)}}  # 0 is everything else


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Ade20k(PictureSource):
    """ADE20K, in `ADEChallengeData2016` or the folder that holds it."""

    layout: ClassVar[str] = "ADEChallengeData2016: images/SPLIT, annotations/SPLIT, objectInfo150.txt"
    published: ClassVar[dict[str, int]] = {"training": 20210, "validation": 2000}

    split: Annotated[str, Field(description="training or validation")] = "validation"

    def open(self) -> PictureDataset:
        """Find the images of the split."""
        home = first_folder([self.root, self.root / "ADEChallengeData2016"], "annotations", "ADE20K")
        labels = home / "annotations" / self.split
        images = pictures_in(home / "images" / self.split)
        entries = [Entry(image.stem, image, labels / f"{image.stem}.png") for image in images]
        read = partial(read_coded, meaning=MEANING)
        return PictureDataset(
            self.choose(entries), class_names(home / "objectInfo150.txt"), colours(COUNT), read, self.size
        )


def class_names(path: Path) -> tuple[str, ...]:
    """The classes' names: the first of the synonyms that the dataset's own table gives, or numbers without it."""
    if not path.is_file():
        return tuple(f"class {k + 1}" for k in range(COUNT))
    rows = list(csv.DictReader(read_text(path).splitlines(), delimiter="\t"))
    names = tuple((row.get("Name") or "").split(",")[0].strip() for row in rows)
    if len(names) != COUNT or not all(names):
        raise SegproxError(f"{path} must have {COUNT} rows with a column Name, separated by tabs; download it again")
    return names
