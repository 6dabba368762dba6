"""Classes of datasets that have no fixed ones: from a small file, from options, or left to the model."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from segprox.data.base import MOST_CLASSES, OPTIONS, VOID, Colour, colours
from segprox.data.files import read_coded
from segprox.data.listing import Entry, PictureDataset, PictureSource
from segprox.errors import SegproxError
from segprox.naming import checked
from segprox.text import read_text, read_yaml

FILE = "classes.yaml"
Channel = Annotated[int, Field(ge=0, le=255)]
Stored = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]  # a value of a label in a file


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ClassFile:
    """What `classes.yaml` may say."""

    classes: tuple[str, ...] | dict[int, str] = ()
    palette: tuple[tuple[Channel, Channel, Channel], ...] | None = None
    ignore: tuple[Stored, ...] | None = None
    reduce_labels: bool = False


def _class_list(value: Any) -> Any:
    """Names joined by commas, or plain ones for a number of classes."""
    if isinstance(value, str) and not re.fullmatch(r"-?\d+", value):
        return tuple(part.strip() for part in value.split(","))
    if not isinstance(value, int | str):
        return value
    if not 1 <= int(value) <= MOST_CLASSES:
        raise ValueError(f"there are 1 to {MOST_CLASSES} classes")
    return plain_names(int(value))


def _number_list(value: Any) -> Any:
    if isinstance(value, int):
        return (value,)
    return tuple(value.split(",")) if isinstance(value, str) else value


def plain_names(count: int) -> tuple[str, ...]:
    """Names for classes that have none."""
    return tuple(f"class {k}" for k in range(count))


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class OpenClassSource(PictureSource):
    """A source whose classes are not known beforehand; options win over `classes.yaml`."""

    classes: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_class_list),
        Field(min_length=1, description="how many, or their names joined by commas"),
    ] = None
    ignore: Annotated[
        tuple[Stored, ...] | None,
        BeforeValidator(_number_list),
        Field(description="values of pixels that do not count, joined by commas; 255 unless said otherwise"),
    ] = None
    reduce_labels: Annotated[
        bool | None, Field(description="whether 0 is no class and the first class is 1, as in ADE20K")
    ] = None

    def pictures(self, entries: tuple[Entry, ...]) -> PictureDataset:
        """The dataset of these entries; without any word on classes these are left to the model, at most 255.

        The labels could tell, but only if all of them were read: some of them would tell something else.
        """
        said = _class_file(self.root / FILE)
        first = int(said.reduce_labels if self.reduce_labels is None else self.reduce_labels)
        ignore = said.ignore if self.ignore is None else self.ignore
        names = self.classes or _in_order(said.classes, first, self.root / FILE)
        names = names or plain_names(len(said.palette or ()))
        if said.palette is not None and len(said.palette) != len(names):
            raise SegproxError(
                f"palette of {self.root / FILE} has {len(said.palette)} colours for {len(names)} classes"
            )
        palette: tuple[Colour, ...] = said.palette or colours(len(names))
        count = len(names) or VOID
        void = VOID if count <= VOID else -1  # beyond, 255 is a class
        ignored = (void,) if ignore is None else ignore
        meaning = {**{k + first: k for k in range(count)}, **dict.fromkeys(ignored, void)}
        if first:
            meaning[0] = void
        return PictureDataset(entries, names, palette, partial(read_coded, meaning=meaning), self.size, (void,))


def _class_file(path: Path) -> ClassFile:
    if not path.is_file():
        return ClassFile()
    content = read_yaml(read_text(path), str(path))
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SegproxError(f"{path} must say what the classes are, as in classes: [road, sky]")
    return checked(ClassFile, str(path), **content)


def _in_order(said: tuple[str, ...] | dict[int, str], first: int, path: Path) -> tuple[str, ...]:
    """Names in the order of their numbers."""
    if isinstance(said, tuple):
        return said
    numbers = sorted(said)
    if numbers != list(range(first, first + len(numbers))):
        raise SegproxError(f"classes of {path} must be numbered from {first} without gaps, but are {numbers}")
    return tuple(said[number] for number in numbers)
