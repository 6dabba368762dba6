"""Cityscapes, from label pictures or from its polygons."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.data.base import OPTIONS, VOID, Colour
from segprox.data.files import ImageLocation, Labels, read_index, recode
from segprox.data.listing import Entry, PictureDataset, PictureSource, first_folder, pictures_in
from segprox.errors import SegproxError
from segprox.text import read_text

PALETTE_BY_CLASS: dict[str, Colour] = {
    "road": (128, 64, 128), "sidewalk": (244, 35, 232), "building": (70, 70, 70), "wall": (102, 102, 156),
    "fence": (190, 153, 153), "pole": (153, 153, 153), "traffic light": (250, 170, 30), "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35), "terrain": (152, 251, 152), "sky": (70, 130, 180), "person": (220, 20, 60),
    "rider": (255, 0, 0), "car": (0, 0, 142), "truck": (0, 0, 70), "bus": (0, 60, 100), "train": (0, 80, 100),
    "motorcycle": (0, 0, 230), "bicycle": (119, 11, 32),
}  # fmt: skip
CLASSES = tuple(PALETTE_BY_CLASS)
# By label id, from 0; those that are no class do not count.
LABEL_IDS = (
    "unlabeled", "ego vehicle", "rectification border", "out of roi", "static", "dynamic", "ground", "road", "sidewalk",
    "parking", "rail track", "building", "wall", "fence", "guard rail", "bridge", "tunnel", "pole", "polegroup",
    "traffic light", "traffic sign", "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus",
    "caravan", "trailer", "train", "motorcycle", "bicycle",
)  # fmt: skip
TRAIN_ID = {name: CLASSES.index(name) if name in CLASSES else VOID for name in LABEL_IDS}
LICENCE_PLATE = "license plate"  # label id -1: never drawn, the car stays
# A licence plate's -1 is 255 in eight bits.
FROM_LABEL_ID = {**{k: TRAIN_ID[name] for k, name in enumerate(LABEL_IDS)}, -1 & 255: VOID}
FROM_TRAIN_ID = {**{k: k for k in range(len(CLASSES))}, VOID: VOID}
ENDINGS = {"labelTrainIds": "labelTrainIds.png", "labelIds": "labelIds.png", "polygons": "polygons.json"}


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class Cityscapes(PictureSource):
    """Cityscapes with its 19 classes."""

    layout: ClassVar[str] = "Cityscapes: leftImg8bit/SPLIT/CITY, gtFine/SPLIT/CITY"
    published: ClassVar[dict[str, int]] = {"train": 2975, "val": 500, "test": 1525}

    split: Annotated[str, Field(description="train, val or test")] = "val"
    labels: Annotated[
        Literal["auto", "labelTrainIds", "labelIds", "polygons"],
        Field(description="the kind of label files; auto takes the first kind there is"),
    ] = "auto"

    def open(self) -> PictureDataset:
        """Find the images of all cities of the split."""
        folder = first_folder([self.root], "leftImg8bit", "Cityscapes") / "leftImg8bit" / self.split
        if not folder.is_dir():
            raise SegproxError(f"there is no folder {folder}; check the dataset's root and split")
        entries = []
        for city in sorted(path for path in folder.iterdir() if path.is_dir()):
            for image in pictures_in(city, "_leftImg8bit"):
                name = image.stem.removesuffix("_leftImg8bit")
                entries.append(Entry(name, image, self._label(city.name, name)))
        return PictureDataset(self.choose(entries), CLASSES, tuple(PALETTE_BY_CLASS.values()), read_label, self.size)

    def _label(self, city: str, name: str) -> Path:
        kinds = list(ENDINGS) if self.labels == "auto" else [self.labels]
        folder = self.root / "gtFine" / self.split / city
        files = [folder / f"{name}_gtFine_{ENDINGS[kind]}" for kind in kinds]
        return next((file for file in files if file.is_file()), files[0])


def read_label(place: ImageLocation) -> Labels:
    """Train ids `[H, W]` from any of the three kinds of files."""
    assert isinstance(place, Path)
    if place.suffix == ".json":
        return draw_polygons(place)
    return recode(read_index(place), FROM_TRAIN_ID if "TrainIds" in place.stem else FROM_LABEL_ID, place)


def draw_polygons(path: Path) -> Labels:
    """Train ids `[H, W]`: the objects of an annotation, later ones over earlier ones."""
    try:
        annotation: dict[str, Any] = json.loads(read_text(path))
        canvas = Image.new("L", (annotation["imgWidth"], annotation["imgHeight"]), VOID)
        pen = ImageDraw.Draw(canvas)
        for item in annotation["objects"]:
            if item.get("deleted") or item["label"] == LICENCE_PLATE:
                continue
            points = [(x, y) for x, y in item["polygon"]]
            pen.polygon(points, fill=_train_id(item["label"], path))
    except SegproxError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # of the JSON, or of what it holds
        raise SegproxError(f"label {path} is not a Cityscapes annotation ({error!r}); download it again") from None
    labels: Labels = np.array(canvas).astype(np.int32)
    return labels


def _train_id(label: str, path: Path) -> int:
    """Groups such as cargroup count as what they are groups of; polegroup is a label of its own."""
    for name in (label, label.removesuffix("group")):
        if name in TRAIN_ID:
            return TRAIN_ID[name]
    raise SegproxError(f"label {path} has an object {label!r}, which is no label of Cityscapes; correct the file")
