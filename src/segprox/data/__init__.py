"""Datasets by name."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from segprox.data.ade20k import Ade20k
from segprox.data.base import Dataset, DatasetMaker, DatasetSource, Sample, source_of, with_own_labels
from segprox.data.camvid import CamVid
from segprox.data.cityscapes import Cityscapes
from segprox.data.folder import Folder, Images
from segprox.data.goals import UNTARGETED, Goal, make_goal
from segprox.data.hf import HfDataset
from segprox.data.listing import PictureSource, slice_of
from segprox.data.synthetic import Demo, StreetScenes
from segprox.data.targets import Target, class_index, make_target
from segprox.data.voc import Voc
from segprox.errors import SegproxError
from segprox.naming import Name, checked
from segprox.registry import Registry

DATASETS: Registry[type[DatasetSource]] = Registry(
    "dataset",
    {
        "ade20k": Ade20k, "camvid": CamVid, "cityscapes": Cityscapes, "demo": Demo, "folder": Folder,
        "hf-dataset": HfDataset, "images": Images, "voc": Voc,
    },
)  # fmt: skip

__all__ = [
    "DATASETS", "UNTARGETED", "Dataset", "DatasetSource", "Goal", "Sample", "StreetScenes", "Target", "class_index",
    "describe", "list_datasets", "load_dataset", "make_goal", "make_target", "open_split", "published_length",
    "register_dataset", "with_own_labels",
]  # fmt: skip


def load_dataset(name: str, **options: Any) -> Dataset:
    """The dataset of that name, `source:root?option=value&option=value`; files are found now and read when asked for.

    Args:
        name: a source, such as `demo` or `voc`, the folder it is in, and options.
        options: more options, which win over those in the name.

    Example:
        >>> import segprox
        >>> scenes = segprox.load_dataset("demo")
        >>> len(scenes), scenes.classes[:3]
        (100, ('sky', 'building', 'tree'))
        >>> len(segprox.load_dataset("demo?split=train&length=7", length=8))
        8
    """
    parsed = Name.parse(name)
    source = DATASETS.find(parsed.source)
    chosen: dict[str, Any] = {**parsed.options, **options}
    if parsed.identifier and not issubclass(source, PictureSource):
        raise SegproxError(f"{parsed.source} takes no folder but got {parsed.identifier!r}; leave it out")
    if parsed.identifier:
        chosen.setdefault("root", parsed.identifier)
    if issubclass(source, PictureSource) and "root" not in chosen:
        raise SegproxError(f"{parsed.source} needs the folder it is in, as in {parsed.source}:/path/to/folder")
    return checked(source, parsed.source, **chosen).open()


def open_split(name: str, split: str) -> Dataset:
    """Another split of the dataset of that name, whole.

    Example:
        >>> open_split("demo?length=5&seed=3", "train")[0].name
        'scene-0000'
    """
    source = DATASETS.find(Name.parse(name).source)
    whole = {option: default for option, default in describe(source).items() if option in ("subset", "ids")}
    return load_dataset(name, split=split, **{option: default or None for option, default in whole.items()})


def register_dataset(name: str) -> Callable[[DatasetMaker], DatasetMaker]:
    """A decorator that gives a dataset a name.

    Args:
        name: the name. What is decorated is a `DatasetSource`, or a function that returns a `Dataset`; its parameters,
            with types and defaults, are the options after the `?` of the dataset's name.

    Example:
        >>> import segprox
        >>> @segprox.register_dataset("first-scenes")
        ... def first_scenes(count: int = 2):
        ...     return segprox.load_dataset("demo", length=count)
        >>> len(segprox.load_dataset("first-scenes?count=3"))
        3
    """

    def decorate(made: DatasetMaker) -> DatasetMaker:
        DATASETS.register(name, made if isinstance(made, type) else source_of(made), made)
        return made

    return decorate


def list_datasets() -> list[str]:
    """The names of all datasets, as they begin; most go on with the folder they are in.

    Example:
        >>> import segprox
        >>> "voc" in segprox.list_datasets()
        True
    """
    return sorted(DATASETS.everything())


def published_length(name: str) -> int | None:
    """How many images the dataset of that name has where it is whole, without its files; None where that is unknown.

    Example:
        >>> published_length("cityscapes:not/there/yet?split=val&subset=::5")
        100
    """
    parsed = Name.parse(name)
    source = DATASETS.get(parsed.source)
    if source is Demo:
        return len(load_dataset(name))
    if source is None or "ids" in parsed.options:
        return None
    split = parsed.options.get("split", describe(source).get("split", ""))
    if split not in source.published:
        return None
    return len(range(source.published[split])[slice_of(parsed.options.get("subset", ":"))])


def describe(source: type[DatasetSource]) -> dict[str, str]:
    """The options of a source with their defaults, as text; the folder it is in is no option.

    Example:
        >>> describe(DATASETS["demo"])
        {'split': 'test', 'length': '100', 'seed': '0'}
    """
    known = fields(source)  # type: ignore[arg-type]  # sources are dataclasses
    return {field.name: "" if field.default is None else str(field.default) for field in known if field.name != "root"}
