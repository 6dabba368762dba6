"""Datasets that Hugging Face's `datasets` has saved to a disk."""

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.data.base import OPTIONS
from segprox.data.classes import OpenClassSource
from segprox.data.listing import Entry, PictureDataset
from segprox.errors import SegproxError

LABELS = ("label", "annotation", "semantic_segmentation")


@dataclasses.dataclass(frozen=True)
class RowImage:
    """A picture in a table."""

    table: Any  # of one column, so that no other is decoded
    row: int
    column: str
    root: Path

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column} of {self.root}"

    def picture(self) -> Image.Image:
        """Decode it."""
        value = self.table[self.row][self.column]
        if not isinstance(value, Image.Image):
            raise SegproxError(f"{self} holds no picture but {type(value).__name__}; choose another column")
        return value


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class HfDataset(OpenClassSource):
    """A folder written by `save_to_disk`; rows are named `row-000000` and so on."""

    layout: ClassVar[str] = "a Hugging Face dataset written by save_to_disk"

    split: Annotated[str, Field(description="which split, if there are several")] = ""
    image: Annotated[str, Field(description="the column of images")] = "image"
    label: Annotated[str, Field(description=f"the column of labels; auto is the first of {', '.join(LABELS)}")] = "auto"

    def open(self) -> PictureDataset:
        """Open the table."""
        table = self._split(_load(self.root))
        columns = list(table.column_names)
        label = next((name for name in LABELS if name in columns), "label") if self.label == "auto" else self.label
        for column in (self.image, label):
            if column not in columns:
                raise SegproxError(
                    f"there is no column {column!r} in {self.root}; its columns are: {', '.join(columns)}"
                )
        images, labels = table.select_columns([self.image]), table.select_columns([label])
        entries = [
            Entry(f"row-{i:06d}", RowImage(images, i, self.image, self.root), RowImage(labels, i, label, self.root))
            for i in range(len(table))
        ]
        return self.pictures(self.choose(entries))

    def _split(self, loaded: Any) -> Any:
        if not isinstance(loaded, dict):
            if self.split:
                raise SegproxError(f"{self.root} has no splits, so there is no split {self.split!r}; leave it out")
            return loaded
        split = self.split or (next(iter(loaded)) if len(loaded) == 1 else "")
        if split not in loaded:
            raise SegproxError(f"there is no split {split!r} in {self.root}; say split= one of: {', '.join(loaded)}")
        return loaded[split]


def _load(root: Path) -> Any:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise SegproxError("hf-dataset needs the package datasets: pip install 'segprox[datasets]'") from None
    try:
        return datasets.load_from_disk(str(root))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise SegproxError(f"{root} is not a dataset written by save_to_disk ({reason}); check the folder") from None
