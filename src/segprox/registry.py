"""Things that are found by name, and how others add theirs: from a script, a file, or an installed package.

A registry is asked for a name. If it does not have it, plugins are imported, which register what they have:

- packages announce modules as entry points of the group `segprox.plugins`;
- the environment variable `SEGPROX_PLUGINS` (which `segprox --plugin` sets) names files and modules, joined by commas.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from segprox.errors import SegproxError, explained

T = TypeVar("T")
GROUP, VARIABLE = "segprox.plugins", "SEGPROX_PLUGINS"


class Registry(dict[str, T]):
    """A dictionary that knows what its entries are, and that plugins may add some.

    Args:
        what: an entry, for messages, such as `attack`.
        entries: those of the package itself.
    """

    def __init__(self, what: str, entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self.what = what
        self._origins: dict[str, object] = {}  # of entries that were registered

    def register(self, name: str, entry: T, definition: object) -> None:
        """Add an entry; a name that is taken is refused, unless the class or function that defines it is made again."""
        origin = _origin(definition)
        if name in self and self._origins.get(name) != origin:
            raise SegproxError(f"the name {name!r} is taken by another {self.what}: register yours under another one")
        self[name], self._origins[name] = entry, origin

    def find(self, name: str) -> T:
        """The entry of that name, which may come with a plugin."""
        if name not in self:
            load_plugins()
        if name not in self:
            raise SegproxError(f"there is no {self.what} {name!r}; known are: {', '.join(sorted(self))}")
        return self[name]

    def everything(self) -> dict[str, T]:
        """All entries, those of plugins included."""
        load_plugins()
        return dict(self)


def _origin(definition: object) -> tuple[object, object]:
    """The file and the name of a class or function: a file may be imported twice, a notebook's cell run again."""
    module = sys.modules.get(getattr(definition, "__module__", ""))
    return getattr(module, "__file__", None), getattr(definition, "__qualname__", definition)


def load_plugins() -> None:
    """Import all plugins, each once."""
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        _load_named(text.strip())
    _load_announced()


@cache
def _load_announced() -> None:
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.value
        with explained(f"the plugin {entry.name} of {package} cannot be loaded"):
            entry.load()


@cache
def _load_named(text: str) -> None:
    path = Path(text)
    with explained(f"the plugin {text} cannot be loaded"):
        if path.suffix != ".py":
            import_module(text)
            return
        name = f"segprox_plugin_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise SegproxError(f"there is no plugin {text}: name a Python file or a module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for their module
        spec.loader.exec_module(module)
