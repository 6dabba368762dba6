"""Access to a folder of real networks and labelled images, given by its path.

The folder holds `models.py` with `load(name)`, `data.py` with `load(split)`, and `reference.json` with what other
implementations reach image by image.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

from torch import Tensor

from segprox import Sample, Segmenter

IGNORE = (255,)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"realbench_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_network(folder: Path, name: str) -> Segmenter:
    """A pretrained network; it takes images in [0, 1] and normalises inside."""
    return Segmenter(_module(folder / "models.py").load(name))


def load_samples(folder: Path, split: str = "test") -> dict[str, Sample]:
    """The labelled images of a split, by name."""
    return {item[0]: Sample(*item) for item in _module(folder / "data.py").load(split)}


def load_photograph(folder: Path) -> Tensor:
    """The fundus photograph for `lwnet-vessels`, `[3, H, W]` in [0, 1]; it has no labels."""
    photograph: Tensor = _module(folder / "data.py").retina()
    return photograph


def references(folder: Path, **wanted: object) -> dict[str, dict[str, object]]:
    """The entries of `reference.json` with these values, by image."""
    entries = json.loads((folder / "reference.json").read_text())["results"]
    return {entry["image"]: entry for entry in entries if all(entry[key] == value for key, value in wanted.items())}
