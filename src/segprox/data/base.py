"""What a dataset is: a sequence of samples, with names and colours for its classes."""

from typing import NamedTuple, Protocol

from torch import Tensor

Colour = tuple[int, int, int]


class Sample(NamedTuple):
    """One labelled image.

    Example:
        >>> import segprox
        >>> name, image, label = segprox.load_dataset("demo")[7]
        >>> name, image.shape, label.dtype
        ('scene-0007', torch.Size([3, 128, 256]), torch.int64)
    """

    name: str  # unique within its dataset
    image: Tensor  # float [3, H, W] in [0, 1]
    label: Tensor  # int64 [H, W]: a class, or one of the dataset's ignore values


class Dataset(Protocol):
    """A sequence of samples."""

    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    ignore: tuple[int, ...]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
