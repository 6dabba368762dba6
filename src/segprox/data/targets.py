"""What an attack may want to see: a label map per image, made from a few words."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from segprox.data.base import MOST_CLASSES, VOID, VOID_COLOUR, Colour, Dataset, Sample, colours
from segprox.data.files import Labels, colour_code, is_coloured, read_coded, read_colours, recode
from segprox.data.nearest import fill_nearest
from segprox.errors import SegproxError
from segprox.text import is_folder


@dataclass(frozen=True)
class Target:
    """The labels an attack wants to see: call it with a sample, get int64 `[H, W]`.

    Pixels that do not count in the sample's own labels need no care: `Problem` masks them.

    Example:
        >>> import segprox
        >>> scenes = segprox.load_dataset("demo")
        >>> target = make_target("erase:car", scenes)
        >>> target.name, (target(scenes[0]) == scenes.classes.index("car")).any().item()
        ('erase:car', False)
    """

    name: str
    labels: Callable[[Sample], Tensor]
    uses_labels: bool = False  # whether it is made from the sample's own labels

    def __call__(self, sample: Sample) -> Tensor:
        """The target of a sample."""
        return self.labels(sample)


def make_target(text: str, dataset: Dataset) -> Target:
    """The target of that name.

    Args:
        text: one of
            `road` or `3`: this class everywhere; `class:NAME` if a class has the name of something below;
            `majority`: at each pixel the label most frequent there over the dataset;
            `smooth`: the same without its small regions; `smooth:FILE.png`: a map of your own without them;
            `erase:CLASS`: the image's own labels, where those of CLASS become the nearest other label;
            `permute:SEED` or `permute:1,2,0`: the image's own labels, each class renamed;
            `png:FILE.png`: a map for all images; `png:FOLDER`: one per image, by name.
        dataset: where classes, colours and labels are from. `majority` and `smooth` read all of it, now.
    """
    kind, _, rest = text.partition(":")
    if text in ("majority", "smooth"):
        most = majority(dataset)
        return _fixed(text, smooth(most) if kind == "smooth" else most)
    if kind == "smooth":
        drawn = read_map(Path(rest), dataset)
        return _fixed(text, smooth(_filled(drawn, ~is_any(drawn, dataset.ignore), rest)))
    if kind == "png" and is_folder(folder := Path(rest)):
        return Target(text, lambda s: fitting(read_map(folder / f"{s.name}.png", dataset), s, f"target {text}"))
    if kind == "png":
        return _fixed(text, read_map(Path(rest), dataset))
    if kind == "erase":
        erased = class_index(rest, dataset.classes)
        return Target(text, lambda sample: erase(sample, erased, dataset.ignore), uses_labels=True)
    if kind == "permute":
        order = permutation(rest, len(dataset.classes))
        return Target(text, lambda sample: permute(sample.label, order), uses_labels=True)
    wanted = class_index(text.removeprefix("class:"), dataset.classes)
    return Target(text, lambda sample: torch.full_like(sample.label, wanted))


def class_index(name: str, classes: Sequence[str]) -> int:
    """The number of a class from its name or number; without classes, any number is one.

    Example:
        >>> class_index("sky", ["road", "sky"]), class_index("0", ["road", "sky"])
        (1, 0)
    """
    if name in classes:
        return list(classes).index(name)
    if name.isdecimal() and len(name) < 6 and int(name) < (len(classes) or MOST_CLASSES):
        return int(name)
    known = f"the classes are: {', '.join(classes)}" if classes else "the dataset has none, so give its number"
    raise SegproxError(f"there is no class {name!r}; {known}")


def majority(dataset: Dataset) -> Tensor:
    """The most frequent label at each pixel over a dataset, int64 `[H, W]`; of equals the first class.

    Pixels that never count get the label of the nearest pixel that does.
    """
    if not dataset.labelled:
        raise SegproxError("a majority target needs a dataset with labels, which a folder of images does not have")
    first = dataset[0]
    counts = torch.zeros(len(dataset.classes), *first.label.shape, dtype=torch.int32)
    for i in range(len(dataset)):
        name, _, label = dataset[i]
        if label.shape != first.label.shape:
            raise SegproxError(
                f"a majority needs labels of one size, but {first.name} has {_size(first.label)} pixels and {name} "
                f"{_size(label)}; give the dataset a size such as size=1024x512"
            )
        counted = ~is_any(label, dataset.ignore)
        seen = torch.where(counted, label, 0)
        if (more := int(seen.max()) + 1 - len(counts)) > 0:  # the dataset does not say what its classes are
            counts = functional.pad(counts, (0, 0, 0, 0, 0, more))
        counts.scatter_add_(0, seen[None], counted[None].int())
    most, label = counts.max(0)
    return _filled(label, most > 0, "the dataset")


def smooth(labels: Tensor, window: int | None = None, rounds: int = 4) -> Tensor:
    """Labels `[H, W]` without small regions and ragged outlines.

    Every pixel takes the most frequent label of a square window around it, its own if that is one of them; a few times
    over. Many more rounds would go on to eat thin regions and to bend outlines where they meet the border. No label may
    be void. The window's side is an odd number; left out, about a twentieth of the shorter side.
    """
    if window is None:
        window = min(labels.shape) // 40 * 2 + 1
    current = labels.int()
    for _ in range(rounds):
        score, winner = torch.full_like(current, -1), current
        for k in current.flatten().bincount().nonzero().flatten().tolist():
            mine = current == k
            votes = 2 * box_sum(mine, window) + mine  # half a vote more for what is there
            score, winner = torch.maximum(score, votes), torch.where(votes > score, k, winner)
        if torch.equal(winner, current):
            break
        current = winner
    return current.long()


def box_sum(mask: Tensor, window: int) -> Tensor:
    """How many pixels of `mask` (bool `[H, W]`) lie in the window around each pixel, int32; cut off at the border."""
    before, after = window // 2 + 1, window // 2
    padded = functional.pad(mask.int(), (before, after, before, after))
    down = padded.cumsum(0, dtype=torch.int32)
    across = (down[window:] - down[:-window]).cumsum(1, dtype=torch.int32)
    return across[:, window:] - across[:, :-window]


def erase(sample: Sample, erased: int, ignore: Sequence[int] = (VOID,)) -> Tensor:
    """The sample's labels, where those of one class become the nearest label that is another and counts."""
    label, gone = sample.label, sample.label == erased
    others = ~gone & ~is_any(label, ignore)
    if not gone.any():
        return label.clone()
    return torch.where(gone, _filled(label, others, f"image {sample.name} without class {erased}"), label)


def permutation(text: str, count: int) -> list[int]:
    """What each class becomes: given in full as `1,2,0`, or drawn by a seed such that no class stays what it is."""
    if count == 0:
        raise SegproxError(
            "permute needs a dataset that says what its classes are; give a folder with labels classes=N"
        )
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise SegproxError(
            f"permute takes a seed or all classes in another order, such as 1,2,0, but got {text!r}"
        ) from None
    if "," in text:
        if sorted(numbers) != list(range(count)):
            raise SegproxError(f"permute:{text} must name each class from 0 to {count - 1} once")
        return numbers
    source, order = random.Random(numbers[0]), list(range(count))
    while count > 1 and any(k == become for k, become in enumerate(order)):  # one try in e, about, succeeds
        order = sorted(range(count), key=lambda _: source.random())  # random() alone is the same in every Python
    return order


def permute(label: Tensor, order: Sequence[int]) -> Tensor:
    """Labels `[H, W]` with every class renamed; values that are no class stay."""
    known = (label >= 0) & (label < len(order))
    return torch.where(known, torch.tensor(order)[torch.where(known, label, 0)], label)


def read_map(path: Path, dataset: Dataset) -> Tensor:
    """A label map `[H, W]` from a picture: class numbers, or the colours of the dataset's classes."""
    count, void = len(dataset.classes), dataset.ignore[0]
    if is_coloured(path):
        palette = _codes(dataset.palette or colours(VOID))
        labels: Labels = recode(read_colours(path), {colour_code(VOID_COLOUR): void, **palette}, path, coloured=True)
    else:
        labels = read_coded(path, {VOID: void, **{k: k for k in range(count or VOID)}})
    return torch.from_numpy(labels).long()


def write_map(labels: Tensor, dataset: Dataset, path: Path) -> Path:
    """Write class numbers `[H, W]` as a PNG with the dataset's palette, and in colours beside it.

    Returns:
        The path of the coloured one.
    """
    palette = dataset.palette or colours(VOID)
    if len(palette) > VOID:
        raise SegproxError(f"a PNG with a palette holds {VOID} classes and void, but the dataset has {len(palette)}")
    void = is_any(labels, dataset.ignore)
    picture = Image.fromarray(torch.where(void, VOID, labels).numpy().astype(np.uint8))
    picture.putpalette([part for colour in [*palette, *[VOID_COLOUR] * (256 - len(palette))] for part in colour])
    coloured = path.with_name(f"{path.stem}-colour.png")
    picture.save(path)
    picture.convert("RGB").save(coloured)
    return coloured


def shares(labels: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """The share of each class that occurs in a map, by its name, the largest first.

    Example:
        >>> shares(torch.tensor([[1, 1], [1, 255]]), ["road", "sky"])
        {'sky': 0.75, 'not counted': 0.25}
    """
    found: dict[str, float] = {}
    for value, count in zip(*np.unique(labels.numpy(), return_counts=True)):
        known = 0 <= value < len(classes)
        name = classes[value] if known else "not counted" if classes else f"class {value}"
        found[name] = found.get(name, 0.0) + int(count) / labels.numel()
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _codes(palette: Sequence[Colour]) -> dict[int, int]:
    codes = {colour_code(colour): k for k, colour in enumerate(palette)}
    if len(codes) < len(palette):
        raise SegproxError("two classes of the dataset have the same colour, so use a PNG of class numbers instead")
    return codes


def _fixed(text: str, labels: Tensor) -> Target:
    return Target(text, lambda sample: fitting(labels, sample, f"target {text}"))


def fitting(labels: Tensor, sample: Sample, what: str) -> Tensor:
    """The map `[H, W]`, which must have the size of the sample."""
    if labels.shape != sample.label.shape:
        raise SegproxError(
            f"{what} has {_size(labels)} pixels but image {sample.name} has {_size(sample.label)}; "
            "draw it at the image's size, or give the dataset that size"
        )
    return labels


def _filled(labels: Tensor, known: Tensor, what: str) -> Tensor:
    if not known.any():
        raise SegproxError(f"{what} has no pixel with a label, so there is nothing to fill the others from")
    return fill_nearest(labels, known)


def is_any(labels: Tensor, values: Sequence[int]) -> Tensor:
    """Where labels `[H, W]` are one of these, bool."""
    return torch.isin(labels, torch.tensor(values, dtype=labels.dtype))


def _size(labels: Tensor) -> str:
    return f"{labels.shape[1]} x {labels.shape[0]}"
