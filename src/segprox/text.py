"""Files that people name, and the text and YAML that they write."""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from segprox.errors import SegproxError, told

MOST_ENTRIES, MOST_DEPTH = 100_000, 30  # of a YAML file; the whole evaluation of the paper has a few hundred


def is_file(path: Path | str) -> bool:
    """Whether there is such a file; False for a name that no file can have, at which `Path` raises."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path | str) -> bool:
    """The same of a folder."""
    return os.path.isdir(path)  # noqa: PTH112


def from_home(path: Path | str) -> Path:
    """The path with `~` replaced; the home of nobody is left as it is, at which `Path` raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SegproxError(f"cannot read {path}: it is not text in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise SegproxError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def read_yaml(text: str, name: str) -> Any:
    r"""What a YAML text says; one that says something twice, or that aliases make huge or endless, is refused.

    Args:
        text: the text.
        name: where it is from, for messages.

    Example:
        >>> read_yaml("grids: &all [1, 2]\nagain: *all", "x")
        {'grids': [1, 2], 'again': [1, 2]}
        >>> read_yaml("seed: 1\nseed: 2", "x")
        Traceback (most recent call last):
        segprox.errors.SegproxError: x is not YAML: it says 'seed' twice, in line 2
    """
    try:
        content = yaml.load(text, _Loader)  # a safe one
    except RecursionError:
        raise SegproxError(f"{name} is nested too deeply: more than {MOST_DEPTH} levels") from None
    except yaml.YAMLError as error:
        raise SegproxError(f"{name} is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # a date or a number that there is not
        raise SegproxError(f"{name} is not YAML: {told(error)}") from None
    _check_extent(content, name)
    return content


def _check_extent(content: Any, name: str) -> None:
    """Count with aliases followed, as whoever reads the content will."""
    left, seen = [(content, 0)], 0
    while left:
        value, depth = left.pop()
        seen += 1
        value = list(value.values()) if isinstance(value, dict) else value
        within = value if isinstance(value, list | tuple) else []
        if depth > MOST_DEPTH:
            raise SegproxError(f"{name} is nested too deeply: more than {MOST_DEPTH} levels")
        if seen + len(left) + len(within) > MOST_ENTRIES:
            raise SegproxError(f"{name} is too large: more than {MOST_ENTRIES:,} entries")
        left += [(part, depth + 1) for part in within]


class _Loader(yaml.SafeLoader):
    """Reads plain data only; the last of two values for one key would win unnoticed."""

    depth = 0  # of the node that is being read

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > MOST_DEPTH:  # before all of it is read, which takes a minute for thousands of brackets
            raise RecursionError
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            said = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if said in seen:
                raise yaml.YAMLError(f"it says {key.value!r} twice, in line {key.start_mark.line + 1}")
            seen.add(said)
        return super().construct_mapping(node, deep)
