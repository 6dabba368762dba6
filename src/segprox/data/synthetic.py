"""Procedural street scenes: enough like the real thing to be attacked, small enough to need no download."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from pydantic import Field
from pydantic.dataclasses import dataclass as options_class

from segprox.data.base import OPTIONS, VOID, Colour, DatasetSource, Sample

CLASSES = ("sky", "building", "tree", "road", "sidewalk", "car", "person", "pole")
PALETTE: tuple[Colour, ...] = (
    (120, 180, 235), (150, 110, 85), (70, 150, 60), (95, 90, 105),
    (220, 175, 150), (40, 70, 190), (215, 40, 60), (240, 205, 70),
)  # fmt: skip
SKY, BUILDING, TREE, ROAD, SIDEWALK, CAR, PERSON, POLE = range(8)
HEIGHT, WIDTH = 128, 256
# Strength of each class's rough texture and smooth patches: without them colour alone would tell the classes apart.
ROUGH = (0.004, 0.015, 0.04, 0.012, 0.015, 0.008, 0.02, 0.01)
PATCHY = (0.04, 0.05, 0.09, 0.03, 0.04, 0.03, 0.03, 0.02)
# Each material has a faint grain of its own: waves per pixel, along rows and columns. Like the fine detail of real
# photographs it is a telling but brittle cue, which plain training leans on and adversarial training does without.
GRAIN = ((0.0, 0.21), (0.33, 0.0), (0.25, 0.25), (0.0, 0.37), (0.15, 0.30), (0.37, 0.15), (0.25, -0.25), (0.15, -0.30))
GRAIN_STRENGTH = 0.02

Floats = NDArray[np.float32]
Split = Literal["train", "test"]


@dataclass
class StreetScenes:
    """Street scenes of 128 x 256 pixels with 8 classes; scene i of a split and seed is always the same.

    Example:
        >>> from segprox.data.synthetic import StreetScenes
        >>> scenes = StreetScenes(length=3)
        >>> name, image, label = scenes[2]
        >>> name, tuple(image.shape), tuple(label.shape)
        ('scene-0002', (3, 128, 256), (128, 256))
    """

    split: Split = "test"
    length: int = 100
    seed: int = 0
    classes: tuple[str, ...] = CLASSES
    palette: tuple[Colour, ...] = PALETTE
    ignore: tuple[int, ...] = (VOID,)
    labelled: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The scenes' names."""
        return tuple(f"scene-{index:04d}" for index in range(self.length))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        generator = np.random.default_rng([self.seed, int(self.split == "train"), index])
        image, label = _Scene(generator).render()
        return Sample(
            name=f"scene-{index:04d}",
            image=torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))),
            label=torch.from_numpy(label.astype(np.int64)),
        )


@options_class(frozen=True, kw_only=True, config=OPTIONS)
class Demo(DatasetSource):
    """The embedded street scenes by name."""

    layout: ClassVar[str] = "embedded street scenes of 256 x 128 pixels; no folder needed"

    split: Annotated[Split, Field(description="test, or train, which the embedded networks have seen")] = "test"
    length: Annotated[int, Field(ge=1, le=1_000_000, description="how many scenes")] = 100
    seed: Annotated[int, Field(ge=0, description="seed of the scenes")] = 0

    def open(self) -> StreetScenes:
        """The scenes."""
        return StreetScenes(self.split, self.length, self.seed)


@dataclass
class _Scene:
    """A painter's canvas: later objects cover earlier ones, in the colour picture and in the label map alike."""

    random: np.random.Generator
    colours: Image.Image = field(init=False)
    labels: Image.Image = field(init=False)

    def render(self) -> tuple[Floats, NDArray[np.uint8]]:
        """The image `[H, W, 3]` in [0, 1] and the label map `[H, W]`."""
        self.colours = Image.new("RGB", (WIDTH, HEIGHT), self._colour((150, 180, 215), 40))
        self.labels = Image.new("L", (WIDTH, HEIGHT), SKY)
        horizon = int(self.random.uniform(0.40, 0.52) * HEIGHT)
        self._buildings(horizon)
        self._ground(horizon)
        self._trees(horizon)
        for _ in range(self.random.integers(2, 5)):
            self._pole(horizon)
        for depth in np.sort(self.random.uniform(0.12, 0.9, self.random.integers(2, 5))):
            self._car(horizon, depth)
        for depth in np.sort(self.random.uniform(0.15, 0.8, self.random.integers(2, 6))):
            self._person(horizon, depth)
        label = np.array(self.labels)
        return self._photograph(label), _with_void(label, self.random)

    # --- painting -------------------------------------------------------------------------------------------------
    def _colour(self, around: Colour, spread: float) -> Colour:
        shift = self.random.normal(0, spread / 2) + self.random.normal(0, spread / 4, 3)  # lightness, then hue
        r, g, b = np.clip(np.array(around) + shift, 5, 250).astype(int).tolist()
        return r, g, b

    def _polygon(self, kind: int, corners: Sequence[tuple[float, float]], colour: Colour) -> None:
        ImageDraw.Draw(self.colours).polygon(corners, fill=colour)
        ImageDraw.Draw(self.labels).polygon(corners, fill=kind)

    def _ellipse(self, kind: int, box: tuple[float, float, float, float], colour: Colour) -> None:
        ImageDraw.Draw(self.colours).ellipse(box, fill=colour)
        ImageDraw.Draw(self.labels).ellipse(box, fill=kind)

    def _box(self, kind: int, box: tuple[float, float, float, float], colour: Colour) -> None:
        left, top, right, bottom = box
        self._polygon(kind, [(left, top), (right, top), (right, bottom), (left, bottom)], colour)

    def _buildings(self, horizon: int) -> None:
        left = -float(self.random.integers(0, 20))
        while left < WIDTH:
            width = float(self.random.uniform(18, 60))
            if self.random.random() < 0.85:  # else a gap that shows the sky
                top = horizon - self.random.uniform(0.25, 1.05) * horizon
                self._box(BUILDING, (left, top, left + width, horizon + 6), self._colour((140, 120, 105), 60))
                self._windows(left, top, left + width, horizon)
            left += width

    def _windows(self, left: float, top: float, right: float, bottom: float) -> None:
        draw, colour = ImageDraw.Draw(self.colours), self._colour((80, 95, 115), 50)
        across, down = self.random.uniform(6, 11), self.random.uniform(7, 12)
        for x in np.arange(left + 3, right - 4, across):
            for y in np.arange(top + 4, bottom - 6, down):
                draw.rectangle((x, y, x + across / 2, y + down / 2), fill=colour)

    def _ground(self, horizon: int) -> None:
        self._box(SIDEWALK, (0, horizon, WIDTH, HEIGHT), self._colour((150, 138, 130), 35))
        vanishing = self.random.uniform(0.35, 0.65) * WIDTH
        near_left, near_right = self.random.uniform(-90, 30), WIDTH + self.random.uniform(-30, 90)
        far = self.random.uniform(5, 22)
        asphalt = [(vanishing - far, horizon), (vanishing + far, horizon), (near_right, HEIGHT), (near_left, HEIGHT)]
        self._polygon(ROAD, asphalt, self._colour((105, 102, 108), 35))
        middle, paint = (near_left + near_right) / 2, self._colour((205, 200, 185), 30)
        for near in np.arange(self.random.uniform(0.1, 0.25), 1, 0.22):  # dashes of the lane, in perspective
            a, b = near, near + 0.1
            xa, xb = vanishing + (middle - vanishing) * a, vanishing + (middle - vanishing) * b
            ya, yb = horizon + (HEIGHT - horizon) * a, horizon + (HEIGHT - horizon) * b
            corners = [(xa - 2 * a, ya), (xa + 2 * a, ya), (xb + 3 * b, yb), (xb - 3 * b, yb)]
            ImageDraw.Draw(self.colours).polygon(corners, fill=paint)

    def _trees(self, horizon: int) -> None:
        for _ in range(self.random.integers(1, 5)):
            x, base = self.random.uniform(0, WIDTH), horizon + self.random.uniform(0, 14)
            size = self.random.uniform(12, 30)
            self._box(TREE, (x - 2, base - size, x + 2, base), self._colour((85, 65, 45), 25))
            leaves = self._colour((85, 115, 60), 55)
            for _ in range(self.random.integers(4, 9)):
                cx, cy = x + self.random.normal(0, size / 3), base - size + self.random.normal(0, size / 4)
                rx, ry = self.random.uniform(0.25, 0.5, 2) * size
                self._ellipse(TREE, (cx - rx, cy - ry, cx + rx, cy + ry), leaves)

    def _pole(self, horizon: int) -> None:
        x, base = self.random.uniform(4, WIDTH - 4), horizon + self.random.uniform(4, 30)
        half, top = self.random.uniform(1.5, 2.6), base - self.random.uniform(40, 75)
        self._box(POLE, (x - half, top, x + half, base), self._colour((110, 110, 105), 60))

    def _car(self, horizon: int, depth: float) -> None:
        base = horizon + depth * (HEIGHT - horizon)
        size = 8 + 34 * depth
        x = WIDTH / 2 + self.random.normal(0, 30 + 60 * depth)
        half, height = size * self.random.uniform(0.75, 1.0), size * self.random.uniform(0.55, 0.7)
        shoulder, roof = base - 0.55 * height, base - height
        paint = self._colour((125, 115, 120), 130)
        near, far = 0.65 * half, 0.9 * half
        cabin = [(x - near, roof), (x + near, roof), (x + far, shoulder), (x - far, shoulder)]
        self._box(CAR, (x - half, shoulder, x + half, base - 0.1 * height), paint)
        self._polygon(CAR, cabin, paint)
        glass = [(cx, cy + 0.08 * height) for cx, cy in cabin[:2]] + [(cx, cy - 1) for cx, cy in cabin[2:]]
        self._polygon(CAR, glass, self._colour((60, 70, 80), 30))
        for side in (-0.65, 0.65):
            wheel, radius = x + side * half, 0.2 * height
            self._ellipse(CAR, (wheel - radius, base - 2 * radius, wheel + radius, base), (30, 30, 32))

    def _person(self, horizon: int, depth: float) -> None:
        base = horizon + depth * (HEIGHT - horizon) * 0.9
        height = 16 + 34 * depth
        x, half = self.random.uniform(6, WIDTH - 6), 0.14 * height
        self._box(PERSON, (x - half, base - 0.45 * height, x + half, base), self._colour((65, 65, 85), 60))
        self._box(PERSON, (x - 1.3 * half, base - 0.85 * height, x + 1.3 * half, base - 0.4 * height),
                  self._colour((140, 90, 90), 120))  # fmt: skip
        head, top = 0.11 * height, base - 0.85 * height
        face = (x - head, top - 1.6 * head, x + head, top + 0.4 * head)
        self._ellipse(PERSON, face, self._colour((170, 130, 110), 50))

    # --- taking the picture -----------------------------------------------------------------------------------------
    def _photograph(self, label: NDArray[np.uint8]) -> Floats:
        """Texture, light, shadow, blur and sensor noise on top of the flat colours."""
        picture = np.array(self.colours, dtype=np.float32) / 255
        rough = self.random.normal(0, 1, (HEIGHT, WIDTH, 1)).astype(np.float32)
        picture += np.array(ROUGH, dtype=np.float32)[label][..., None] * rough
        picture += np.array(PATCHY, dtype=np.float32)[label][..., None] * self._smooth(12)
        light = 1 + 0.15 * self._smooth(80) + 0.05 * self._smooth(30)
        picture *= self.random.uniform(0.7, 1.15) * light * self.random.uniform(0.92, 1.08, 3).astype(np.float32)
        eight_bit = Image.fromarray((picture.clip(0, 1) * 255).astype(np.uint8))
        blurred = eight_bit.filter(ImageFilter.GaussianBlur(self.random.uniform(0.3, 0.8)))
        noise = self.random.normal(0, self.random.uniform(0.004, 0.012), (HEIGHT, WIDTH, 3))
        grey_levels = np.rint((np.array(blurred) / 255 + self._grain(label) + noise).clip(0, 1) * 255)
        eight_bit_levels: Floats = (grey_levels / 255).astype(np.float32)  # as if read from a file
        return eight_bit_levels

    def _grain(self, label: NDArray[np.uint8]) -> Floats:
        """The grain of each pixel's material, `[H, W, 1]`."""
        rows, columns = np.mgrid[:HEIGHT, :WIDTH]
        along_rows, along_columns = np.array(GRAIN).T[:, label]
        phase = self.random.uniform(0, 1)
        waves = np.cos(2 * np.pi * (rows * along_rows + columns * along_columns + phase))
        grain: Floats = (GRAIN_STRENGTH * waves[..., None]).astype(np.float32)
        return grain

    def _smooth(self, scale: int) -> Floats:
        """Noise of unit size that varies over about `scale` pixels, `[H, W, 1]`."""
        rows, columns = HEIGHT // scale + 2, WIDTH // scale + 2
        coarse = Image.fromarray(self.random.normal(0, 1, (rows, columns)).astype(np.float32))
        smooth: Floats = np.array(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))[..., None]
        return smooth


def _with_void(label: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Mark outlines as void, like the borders of Pascal VOC, and the car's own bonnet, like that of Cityscapes."""
    edge = np.zeros(label.shape, dtype=bool)
    across, down = label[:, 1:] != label[:, :-1], label[1:] != label[:-1]
    edge[:, 1:] |= across
    edge[:, :-1] |= across
    edge[1:] |= down
    edge[:-1] |= down
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    rise = random.uniform(5, 12)
    bonnet = rows > HEIGHT - rise * (1 - ((columns - WIDTH / 2) / (0.45 * WIDTH)) ** 2)
    return np.where(edge | bonnet, VOID, label).astype(np.uint8)
