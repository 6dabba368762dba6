"""Pascal VOC 2012 and its augmented labels."""

from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.data.base import OPTIONS, VOID, colours
from segprox.data.files import SizeRule, read_coded
from segprox.data.listing import Entry, PictureDataset, PictureSource, first_folder, read_list

CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
MEANING = {**{k: k for k in range(len(CLASSES))}, VOID: VOID}
OFFICIAL, AUGMENTED = "SegmentationClass", "SegmentationClassAug"


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Voc(PictureSource):
    """Pascal VOC 2012, in `VOC2012`, in `VOCdevkit`, or in the folder that holds it."""

    layout: ClassVar[str] = "Pascal VOC 2012: ImageSets/Segmentation, JPEGImages, SegmentationClass"
    published: ClassVar[dict[str, int]] = {"train": 1464, "val": 1449, "trainval": 2913, "train_aug": 10582}

    split: Annotated[str, Field(description="a list in ImageSets/Segmentation: train, val, trainval, train_aug")] = (
        "val"
    )
    labels: Annotated[
        str,
        Field(description=f"the folder of labels; auto is {OFFICIAL}, and {AUGMENTED} for images that lack one there"),
    ] = "auto"
    size: SizeRule = "short-512"  # as in the paper

    def open(self) -> PictureDataset:
        """Find the files of the split."""
        places = [self.root, self.root / "VOC2012", self.root / "VOCdevkit" / "VOC2012"]
        home = first_folder(places, "ImageSets/Segmentation", "Pascal VOC")
        folders = [OFFICIAL, AUGMENTED] if self.labels == "auto" else [self.labels]
        entries = []
        for name in read_list(home / "ImageSets" / "Segmentation" / f"{self.split}.txt"):
            labels = [home / folder / f"{name}.png" for folder in folders]
            label = next((path for path in labels if path.is_file()), labels[0])
            entries.append(Entry(name, home / "JPEGImages" / f"{name}.jpg", label))
        return PictureDataset(
            self.choose(entries), CLASSES, colours(len(CLASSES)), partial(read_coded, meaning=MEANING), self.size
        )
