"""CamVid, as SegNet's tutorial has it or as it was published."""

from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from segprox.data.base import OPTIONS, VOID, Colour
from segprox.data.files import ImageLocation, Labels, colour_code, read_coded, read_colours, recode
from segprox.data.listing import Entry, PictureDataset, PictureSource, pictures_in, read_list
from segprox.errors import SegproxError

# The published colours, grouped into the eleven classes that are commonly evaluated; the first of each is the class's.
GROUPS: dict[str, dict[str, Colour]] = {
    "sky": {"Sky": (128, 128, 128)},
    "building": {
        "Building": (128, 0, 0), "Archway": (192, 0, 128), "Bridge": (0, 128, 64), "Tunnel": (64, 0, 64),
        "Wall": (64, 192, 0),
    },
    "pole": {"Column_Pole": (192, 192, 128), "TrafficCone": (0, 0, 64)},
    "road": {"Road": (128, 64, 128), "LaneMkgsDriv": (128, 0, 192), "LaneMkgsNonDriv": (192, 0, 64)},
    "pavement": {"Sidewalk": (0, 0, 192), "ParkingBlock": (64, 192, 128), "RoadShoulder": (128, 128, 192)},
    "tree": {"Tree": (128, 128, 0), "VegetationMisc": (192, 192, 0)},
    "sign": {"SignSymbol": (192, 128, 128), "Misc_Text": (128, 128, 64), "TrafficLight": (0, 64, 64)},
    "fence": {"Fence": (64, 64, 128)},
    "car": {
        "Car": (64, 0, 128), "OtherMoving": (128, 64, 64), "SUVPickupTruck": (64, 128, 192), "Train": (192, 64, 128),
        "Truck_Bus": (192, 128, 192),
    },
    "pedestrian": {
        "Pedestrian": (64, 64, 0), "Animal": (64, 128, 64), "CartLuggagePram": (64, 0, 192), "Child": (192, 128, 64),
    },
    "bicyclist": {"Bicyclist": (0, 128, 192), "MotorcycleScooter": (192, 0, 192)},
}  # fmt: skip
CLASSES = tuple(GROUPS)
PALETTE = tuple(next(iter(group.values())) for group in GROUPS.values())
FROM_INDEX = {**{k: k for k in range(len(CLASSES))}, len(CLASSES): VOID}
FROM_COLOUR = {
    **{colour_code(colour): k for k, group in enumerate(GROUPS.values()) for colour in group.values()},
    colour_code((0, 0, 0)): VOID,
}
STILLS, LABELLED = "701_StillsRaw_full", "LabeledApproved_full"


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class CamVid(PictureSource):
    """CamVid with the eleven classes that are commonly evaluated."""

    layout: ClassVar[str] = f"CamVid: SPLIT and SPLITannot (SegNet's tutorial), or {STILLS} and {LABELLED}"

    split: Annotated[
        str | None,
        Field(description="train, val or test (the default), or a list SPLIT.txt in the root of the original layout"),
    ] = None

    def open(self) -> PictureDataset:
        """Find out which layout it is, and the files."""
        if (self.root / STILLS).is_dir():
            return PictureDataset(self.choose(self._published()), CLASSES, PALETTE, read_colour_label, self.size)
        split = self.split or "test"
        labels = self.root / f"{split}annot"
        if not labels.is_dir():
            raise SegproxError(
                f"there is neither {labels} nor {self.root / STILLS}; check the root and split of CamVid"
            )
        entries = [Entry(image.stem, image, labels / f"{image.stem}.png") for image in pictures_in(self.root / split)]
        return PictureDataset(
            self.choose(entries), CLASSES, PALETTE, partial(read_coded, meaning=FROM_INDEX), self.size
        )

    def _published(self) -> list[Entry]:
        images = {image.stem: image for image in pictures_in(self.root / STILLS)}
        names = list(images)
        if self.split is not None:
            names = read_list(self.root / f"{self.split}.txt")
        # a listed image that is not there keeps its path, so that reading it says what is missing
        return [
            Entry(name, images.get(name, self.root / STILLS / f"{name}.png"), self.root / LABELLED / f"{name}_L.png")
            for name in names
        ]


def read_colour_label(place: ImageLocation) -> Labels:
    """Labels `[H, W]` from the published colours."""
    return recode(read_colours(place), FROM_COLOUR, place, coloured=True)
