"""Python code of the user: which it is, and a copy of it for machines that do not have it."""

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

LARGEST = 1_000_000  # bytes of a file that is still taken for a part of the code


def is_installed(path: Path) -> bool:
    """Whether a file or folder belongs to Python or to an installed package.

    Example:
        >>> import os
        >>> is_installed(Path(os.__file__)), is_installed(Path("network.py"))
        (True, False)
    """
    roots = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    return any(path.absolute().is_relative_to(root) for root in roots)


def ship(place: str, folder: Path) -> None:
    """Copy the code at a place into a folder, in which the same place then finds it.

    A place is the path of a Python file, relative to the current folder, or the name of a module of the user. An
    absolute path cannot be the same elsewhere, and what is installed here is to be installed there: neither is copied.
    """
    if place.endswith(".py"):
        source, target = Path(place), folder / place
        if not source.is_absolute() and ".." not in source.parts and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        return
    spec = importlib.util.find_spec(place.partition(".")[0])
    found = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    source = Path(found[0] if found else "")
    if not source.is_absolute() or is_installed(source):  # a built-in module has no path
        return
    if source.is_dir():
        shutil.copytree(source, folder / source.name, ignore=_not_code, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copy(source, folder)


def _not_code(folder: str, names: list[str]) -> list[str]:
    paths = {name: Path(folder, name) for name in names}
    return [name for name, path in paths.items() if name == "__pycache__" or path.stat().st_size > LARGEST]
