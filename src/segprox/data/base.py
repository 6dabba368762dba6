"""What a dataset is: a sequence of samples, with names and colours for its classes."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar, get_type_hints

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.errors import SegproxError

Colour = tuple[int, int, int]
MOST_CLASSES = 1 << 16  # labels have at most 16 bits
VOID = 255  # the label of pixels that do not count
NODATA = -2  # the label of pixels that hold no data: they do not count and are never changed
VOID_COLOUR: Colour = (224, 224, 192)  # as in Pascal VOC's own pictures
OPTIONS = ConfigDict(extra="forbid")  # of every source: a misspelt option must not pass unnoticed


class Sample(NamedTuple):
    """One labelled image.

    Example:
        >>> import segprox
        >>> name, image, label = segprox.load_dataset("demo")[7]
        >>> name, image.shape, label.dtype
        ('scene-0007', torch.Size([3, 128, 256]), torch.int64)
    """

    name: str  # unique within its dataset
    image: Tensor  # float [C, H, W] in [0, 1]: shares of the range that the dataset declares, 3 bands of 0..255 mostly
    label: Tensor  # int64 [H, W]: a class, or one of the dataset's ignore values


class Dataset(Protocol):
    """A sequence of samples; reading one of them reads nothing else.

    It may have `bands` as well, `Bands` that say what values mean if they are not those of 8-bit pictures.

    Example:
        >>> import segprox
        >>> scenes: segprox.Dataset = segprox.load_dataset("demo")
        >>> scenes.names[0], scenes.ignore, scenes.labelled
        ('scene-0000', (255,), True)
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty if the dataset leaves them to the model."""

    @property
    def palette(self) -> tuple[Colour, ...]:
        """A colour per class."""

    @property
    def ignore(self) -> tuple[int, ...]:
        """The label values of pixels that do not count."""

    @property
    def labelled(self) -> bool:
        """Whether there are true labels; if not, all are void and `with_own_labels` fills them."""

    @property
    def names(self) -> Sequence[str]:
        """The samples' names, without reading a sample."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


class DatasetSource(ABC):
    """Where datasets come from: a frozen dataclass whose fields are the options after the ? of a dataset's name."""

    layout: ClassVar[str]  # what is read, in a few words
    published: ClassVar[Mapping[str, int]] = {}  # how many images each split has, as its authors published it

    @abstractmethod
    def open(self) -> Dataset:
        """Find the files; none is read before its sample is asked for."""


DatasetMaker = TypeVar("DatasetMaker", bound=type[DatasetSource] | Callable[..., Dataset])


def source_of(function: Callable[..., Dataset]) -> type[DatasetSource]:
    """A source whose options are the parameters of a function that returns a dataset."""
    parameters = inspect.signature(function).parameters.values()
    hints = get_type_hints(function)
    options = [(p.name, hints.get(p.name, str), field() if p.default is p.empty else p.default) for p in parameters]

    def opened(self: DatasetSource) -> Dataset:
        return function(**{p.name: getattr(self, p.name) for p in parameters})

    about = (inspect.getdoc(function) or function.__name__).splitlines()[0]
    namespace = {"open": opened, "layout": about, "__module__": function.__module__}
    made = make_dataclass(
        function.__name__, options, bases=(DatasetSource,), namespace=namespace, kw_only=True, frozen=True
    )
    checked: type[DatasetSource] = dataclass(frozen=True, kw_only=True, config=OPTIONS)(made)  # type: ignore[assignment]  # a subclass of it
    return checked


def colours(count: int) -> tuple[Colour, ...]:
    """Distinct colours, the same on every machine: those of Pascal VOC, carried on.

    The bits of a class number are dealt to red, green and blue in turn, the lowest bits to the brightest.

    Example:
        >>> colours(4)
        ((0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0))
    """

    def channel(index: int, first: int) -> int:
        return sum((index >> (3 * bit + first) & 1) << (7 - bit) for bit in range(8))

    return tuple((channel(index, 0), channel(index, 1), channel(index, 2)) for index in range(count))


def with_own_labels(sample: Sample, prediction: Tensor) -> Sample:
    """The sample with the model's own clean prediction `[H, W]` for labels, where there are no true ones.

    Example:
        >>> import torch
        >>> sample = Sample("a", torch.rand(3, 4, 6), torch.full((4, 6), VOID))
        >>> with_own_labels(sample, torch.ones(4, 6)).label.unique()
        tensor([1])
    """
    if prediction.shape != sample.label.shape:
        raise SegproxError(
            f"the prediction of {sample.name} must have shape {list(sample.label.shape)}, like its image, "
            f"but has {list(prediction.shape)}"
        )
    return sample._replace(label=torch.where(sample.label == NODATA, NODATA, prediction.long()))
