"""Anything else: `python:package.module:factory` or `python:path/to/file.py:factory`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from segprox.errors import SegproxError, explained
from segprox.models.options import ModelOptions
from segprox.models.segmenter import Segmenter
from segprox.models.sources.base import Network, load_checkpoint


def build(identifier: str, options: ModelOptions) -> Network | Segmenter:
    """What the factory returns when it is called without arguments: a network, or a Segmenter that is used as it is."""
    place, colon, name = identifier.rpartition(":")
    if not colon or not place:
        raise SegproxError(f"python:{identifier} should be python:package.module:factory")
    options.refuse("num_classes", by=f"python:{identifier} is called without arguments")
    if options.random:
        raise SegproxError(f"python:{identifier} makes its own weights: checkpoint=random cannot be applied")
    factory = getattr(_module(place), name, None)
    if not callable(factory):
        raise SegproxError(f"{place} has no function {name!r} that could make a model")
    with explained(f"{name} of {place} cannot make a model"):
        made = factory()
    if not isinstance(made, nn.Module):
        raise SegproxError(f"{name} of {place} should return a torch.nn.Module but returned {type(made).__name__}")
    if options.checkpoint is not None:
        load_checkpoint(made.model if isinstance(made, Segmenter) else made, options, f"python:{identifier}")
    return made if isinstance(made, Segmenter) else Network(made)


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_of_file(Path(place))
    if str(Path.cwd()) not in sys.path:  # a module beside the user, as `python -m` would find it
        sys.path.insert(0, str(Path.cwd()))
    with explained(f"{place} cannot be imported"):
        return importlib.import_module(place)


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SegproxError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with explained(f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    return module
