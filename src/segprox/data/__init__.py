"""Datasets by name."""

from collections.abc import Callable

from segprox.data.base import Dataset, Sample
from segprox.data.synthetic import StreetScenes
from segprox.errors import SegproxError

DATASETS: dict[str, Callable[[], Dataset]] = {"demo": StreetScenes}

__all__ = ["DATASETS", "Dataset", "Sample", "StreetScenes", "load_dataset"]


def load_dataset(name: str) -> Dataset:
    """The dataset of that name.

    Example:
        >>> import segprox
        >>> scenes = segprox.load_dataset("demo")
        >>> len(scenes), scenes.classes[:3]
        (100, ('sky', 'building', 'tree'))
    """
    if name not in DATASETS:
        raise SegproxError(f"there is no dataset {name!r}; known are: {', '.join(sorted(DATASETS))}")
    return DATASETS[name]()
